"""The command line: one verb a function, heavy imports inside, so that `--help` answers in a blink.

Exit codes: 0 done, 1 our bug, 2 bad recipe, data or command, 3 environment fault, 4 health stop or an export that says
something else than the trained model, 129/130/143 signal.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn import __version__
from pronghorn.cli import (
    auditing,
    evaluating,
    exporting,
    forking,
    launching,
    planning,
    profiling,
    queueing,
    run_script,
    serving,
    starting,
    studio,
    sweeping,
)
from pronghorn.cli.chat import chat_options, converse, require_chat, require_letters
from pronghorn.cli.new import new, new_options
from pronghorn.cli.output import (
    STARTING,
    coloured,
    displaying,
    forget_output,
    ignore_ctrl_c,
    make_printable,
    say,
    show,
    show_error,
)
from pronghorn.cli.words import Parser, require_recipe, require_verb, unknown_words
from pronghorn.errors import CommandError, EndedElsewhere, EnvironmentFault, Interrupted, PronghornError, counted
from pronghorn.process import importing, offline_without_hub, set_defaults, started_as
from pronghorn.program import command

if TYPE_CHECKING:
    from pronghorn.recipe import Recipe

Verb = Callable[[argparse.Namespace], None]
STARTED = (STARTING, 1, 1)  # the end of that progress
OVERRIDES = "any recipe key: train.lr=1e-4 output=runs/second"


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code; only our own bugs leave a traceback."""
    set_defaults()
    if words is None:
        make_printable()
    arguments = argparse.Namespace(json="--json" in (sys.argv[1:] if words is None else words))
    try:
        arguments = _parse(words)
        arguments.verb(arguments)
        sys.stdout.flush()
    except PronghornError as error:
        if isinstance(error, Interrupted):
            ignore_ctrl_c(words)
        if not (isinstance(error, EndedElsewhere) and error.told):
            show_error(error, as_json=getattr(arguments, "json", False))
        starting.leave_exit_code(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        ignore_ctrl_c(words)
        if os.environ.get("RANK", "0") == "0":  # one of several ranks says so
            print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `pronghorn data show ... | head`
        forget_output()
        return 0
    except PermissionError as error:  # of a file that nobody looked at before
        fix = "change its permissions or choose another place, then run the same command again"
        denied = EnvironmentFault.of(error, "permission denied", error.filename or "", fix)
        show_error(denied, as_json=getattr(arguments, "json", False))
        return denied.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        forget_output()
        fix = "free some space, then run the same command again"
        fault = EnvironmentFault.of(error, "no space left on the disk", error.filename or "standard output", fix)
        show_error(fault, as_json=False)
        return fault.exit_code
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    """argparse (3.11) takes key=value words only right after the recipe; people also write them after an option."""
    parser = build_parser()
    ours, of_script = run_script.split(sys.argv[1:] if words is None else words)
    if ours[:1] == ["help"]:
        ours = [*ours[1:], "--help"]
    if ours[:1] == ["version"]:
        ours = ["--version"]
    if not ours:
        return argparse.Namespace(verb=lambda _: parser.print_help(), json=False)
    verbs = _verbs(parser)
    require_verb(ours, verbs, {group: _verbs(verbs[group]) for group in ("data", "queue")})
    arguments, left = parser.parse_known_args(ours)
    arguments.words, arguments.own_process, arguments.given = of_script, words is None, ours
    takes_keys = hasattr(arguments, "overrides")
    if takes_keys:
        arguments.overrides = arguments.overrides + [word for word in left if "=" in word and not word.startswith("-")]
        left = [word for word in left if word.startswith("-") or "=" not in word]
    if left:
        raise unknown_words(left, arguments.parser, takes_keys)
    return arguments


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(choices)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pronghorn",
        description="Fine-tunes language models. No telemetry.",
        epilog=f"start with:\n  {command('demo')}\n  {command('new', 'my.yaml')}",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # which breaks no command
    )
    parser.add_argument("-V", "--version", action="version", version=f"pronghorn {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, function: Verb, text: str, group: Any = verbs) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
        one.set_defaults(verb=function, parser=one)
        one.add_argument("--json", action="store_true", help="machine-readable output: one JSON object per line")
        return one

    def with_recipe(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
        one.add_argument("recipe", help="the recipe's YAML file")
        one.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES)
        return one

    one = verb("demo", demo, "train a small model on one task and measure it before and after; takes minutes on a CPU")
    one.add_argument("--output", help="folder of the demo's run (default: runs/demo)")
    kind = one.add_mutually_exclusive_group()
    kind.add_argument("--preference", action="store_true", help="train on pairs of replies with DPO instead")
    kind.add_argument("--rl", action="store_true", help="train on the model's own answers to sums with GRPO instead")
    new_options(verb("new", new, "write a recipe with all keys, or convert an Axolotl or LLaMA-Factory config"))
    starting.own_rewards(with_recipe(verb("check", check, "validate recipe, model and data without training")))
    planning.options(with_recipe(verb("plan", plan, "predict memory, speed, hours and cost of a run; needs no GPU")))

    data = verbs.add_parser("data", help="inspect the data: show, stats, audit", description="inspect the data")
    data_verbs = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one = with_recipe(verb("show", data_show, "show one row token by token, and which tokens carry loss", data_verbs))
    one.add_argument("--row", type=int, default=1, metavar="N", help="row number, from 1 (default: %(default)s)")
    with_recipe(verb("stats", data_stats, "show lengths, dropped rows with reasons, duplicates and packing", data_verbs))
    auditing.options(with_recipe(verb("audit", data_audit, auditing.TEXT, data_verbs)))

    one = with_recipe(verb("train", train, "train; resumes automatically from the last checkpoint in the output folder"))
    one.add_argument("--fresh", action="store_true", help="start over; the old folder is renamed, not deleted")
    one.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="resume with a changed value of this key: train.lr=1e-5 --allow-change train.lr",
    )
    starting.options(one)
    starting.own_files(one)
    forking.options(verb("fork", forking.fork, forking.TEXT))
    profiling.options(with_recipe(verb("profile", profile, profiling.TEXT)))
    sweeping.options(with_recipe(verb("sweep", sweep, sweeping.TEXT)))
    launching.options(with_recipe(verb("launch", launch, launching.TEXT)))

    queueing.options(verbs, verb, _parse)

    def with_run(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
        one.add_argument("run", help="a run's output folder")
        one.add_argument("--checkpoint", default="best", help="best, last or a step number (default: %(default)s)")
        return one

    starting.own_rewards(evaluating.options(with_run(verb("eval", evaluate, evaluating.TEXT))))
    chat_options(with_run(verb("chat", chat, "chat with the trained model")))
    serving.options(verb("serve", serve, serving.TEXT))
    exporting.options(with_run(verb("export", export, exporting.TEXT)))

    one = verb("verify", verify, "compare the fast layers with the transformers layers: loss and every trained gradient")
    one.add_argument("model", help="Hub name or local folder")
    one.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="precision to compute in (default: %(default)s)"
    )
    one.add_argument(
        "--method", choices=("lora", "full"), default="lora", help="train adapters or all weights (default: %(default)s)"
    )

    studio.options(verb("studio", studio.studio, studio.TEXT))
    run_script.options(verb("run", run_script.run_script, run_script.TEXT))
    _runs_options(verb("runs", runs, "list runs, or compare several"))
    return parser


def _runs_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("folders", nargs="*", help="runs to compare; without any, list all runs under --root")
    one.add_argument("--root", default="runs", help="folder to search (default: %(default)s)")


def demo(arguments: argparse.Namespace) -> None:
    with importing():
        if arguments.preference:
            from pronghorn.demo.preference import run_preference_demo as run_demo
        elif arguments.rl:
            from pronghorn.demo.rl import run_rl_demo as run_demo
        else:
            from pronghorn.demo.run import run_demo
    default = "runs/demo" + ("-preference" if arguments.preference else "-rl" if arguments.rl else "")
    run_demo(Path(arguments.output or default), as_json=arguments.json)


def check(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    with displaying(arguments) as display:
        with importing():
            from pronghorn.export.ahead import not_possible
            from pronghorn.train.setup.check import check_run
        display.progress(*STARTED)
        facts = check_run(recipe, report=display.progress, exports=not_possible, **starting.own_code(arguments))
    say(arguments, facts.as_dict(), facts.table())


def plan(arguments: argparse.Namespace) -> None:
    planning.plan(arguments, _recipe(arguments))


def data_show(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    with displaying(arguments) as display:
        from pronghorn.data.encode.tokens import load_tokenizer
        from pronghorn.data.prepare import prepare
        from pronghorn.data.show import as_dict, as_text, count_of

        display.progress(*STARTED)
        tokenizer, spec = load_tokenizer(recipe.model, recipe.data), recipe.data
        wanted, size = recipe.objective.kind.reads, recipe.train.capacity
        table = prepare(
            spec.train, spec, tokenizer, progress=display.progress, wanted=wanted, capacity=size, answer=recipe.answer_tokens
        ).tokens
    count = count_of(table)
    if not 1 <= arguments.row <= count:
        raise CommandError(
            what=f"row {arguments.row} does not exist",
            why=f"the data has {counted(count, 'row')}",
            fix=f"choose --row from 1 to {count}",
        )
    row = (tokenizer, table, arguments.row - 1)
    say(arguments, as_dict(*row), as_text(*row, coloured=coloured()))


def data_stats(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    with displaying(arguments) as display:
        from pronghorn.data.encode.tokens import TokenizerFiles
        from pronghorn.data.stats import collect

        display.progress(*STARTED)
        tokenizer = TokenizerFiles(recipe.model, recipe.data)  # read only if the rows are not cached
        size, seed, wanted = recipe.train.capacity, recipe.train.seed, recipe.objective.kind.reads
        stats = collect(
            recipe.data, size, seed, tokenizer, progress=display.progress, wanted=wanted, answer=recipe.answer_tokens
        )
    say(arguments, stats.as_dict(), stats.table())


def data_audit(arguments: argparse.Namespace) -> None:
    auditing.audit(arguments, _recipe(arguments))


def train(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    from pronghorn.report.stages import Stages

    stages, (rank, ranks) = Stages(), started_as()
    if starting.launched(arguments, ranks, recipe):
        return
    with displaying(arguments, stages, quiet=rank > 0) as display:
        with stages("imports"), _importing(recipe.model):
            from pronghorn.train.dist.ranks import join
            from pronghorn.train.loop import train as run
        display.progress(*STARTED)
        with join() if ranks > 1 else nullcontext() as world:
            result = run(
                recipe,
                display=display,
                stages=stages,
                fresh=arguments.fresh,
                allow=arguments.allow_change,
                metric_file=arguments.metric_file,
                world=world,
                **starting.own_code(arguments),
            )
    if not arguments.json and rank == 0:
        chats = result.checkpoint is not None and any(result.checkpoint.glob("*chat_template*"))
        _show_summary(result.folder, answers=recipe.objective.kind.answers, chats=chats)


def profile(arguments: argparse.Namespace) -> None:
    profiling.profile(arguments, _recipe(arguments), _importing)


def sweep(arguments: argparse.Namespace) -> None:
    require_recipe(arguments.recipe, arguments.parser)
    sweeping.sweep(arguments, _look_for_hub)


def launch(arguments: argparse.Namespace) -> None:
    require_recipe(arguments.recipe, arguments.parser)
    launching.launch(arguments)


def _show_summary(folder: Path, *, answers: bool = True, chats: bool = True) -> None:
    """`answers`: whether the model gives some, and not scores. `chats`: whether it has a chat template."""
    from pronghorn.report.gpu_log import GpuLog
    from pronghorn.report.run_log import read_log
    from pronghorn.report.summary import summary

    show(summary(read_log(folder), GpuLog.of(folder)))
    print(f"report:     {folder / 'report.html'}")
    if answers:
        print(f"chat:       {command('chat', str(folder))}" if chats else f"serve:      {command('serve', str(folder))}")
    print(f"export:     {command('export', str(folder), '--to', 'merged')}")


def evaluate(arguments: argparse.Namespace) -> None:
    evaluating.require_one_kind(arguments)
    require_letters(arguments.system or "")
    base = _base_of(Path(arguments.run))
    with displaying(arguments) as display:
        with _importing(base):
            from pronghorn.train.run.run_evaluation import EvaluationRequest, evaluate_run, evaluate_tasks
        display.progress(*STARTED)
        run, which = Path(arguments.run), arguments.checkpoint
        if arguments.lm_eval:
            figures = evaluate_tasks(
                run,
                which,
                evaluating.names(arguments.lm_eval),
                own=arguments.lm_eval_path,
                limit=arguments.limit,
                chat=arguments.lm_eval_chat,
            )
        else:
            spec, own = evaluating.spec(arguments), starting.own_code(arguments)
            asked = EvaluationRequest(spec, arguments.metric_file, arguments.base, arguments.answers, **own)
            figures = evaluate_run(run, which, data=arguments.data, report=display.progress, asked=asked)
    say(arguments, figures, evaluating.text(figures))


def chat(arguments: argparse.Namespace) -> None:
    require_chat(arguments)
    base = _base_of(Path(arguments.run))
    with displaying(arguments, label="loading the model"):
        with _importing(base):
            from pronghorn.train.run.trained_run import Chat
        talk = Chat(
            Path(arguments.run),
            arguments.checkpoint,
            max_tokens=arguments.max_tokens,
            system=arguments.system,
            temperature=arguments.temperature,
            base=arguments.base,
        )
    if arguments.prompt is None:
        converse(talk)
        return
    found = talk.answers(arguments.prompt)
    told = found["model"] if len(found) == 1 else "\n".join(f"{name}: {answer}" for name, answer in found.items())
    say(arguments, {"answer": found.pop("model"), **found}, told)


def serve(arguments: argparse.Namespace) -> None:
    serving.serve(arguments, _base_of, _importing)


def export(arguments: argparse.Namespace) -> None:
    exporting.export(arguments, _base_of, _importing)


def verify(arguments: argparse.Namespace) -> None:
    _look_for_hub(arguments.model)
    with displaying(arguments, label="loading and comparing"):
        with _importing(arguments.model):
            from pronghorn.model.load import DTYPES, load_model, pick_device
            from pronghorn.model.lora import add_adapter
            from pronghorn.model.verify import verify as compare_layers
            from pronghorn.recipe_parts import Lora
        model = load_model(arguments.model, DTYPES[arguments.precision], pick_device())
        if arguments.method == "lora":
            model = add_adapter(model, Lora(), seed=0)
        verdict = compare_layers(model)
    say(arguments, verdict.as_dict(), verdict.table())


def runs(arguments: argparse.Namespace) -> None:
    from pronghorn.report.runs import compare, comparison_table, list_runs, runs_table

    if arguments.folders:
        comparison = compare([Path(folder) for folder in arguments.folders])
        say(arguments, comparison, comparison_table(comparison))
        return
    found = list_runs(Path(arguments.root))
    nothing = f"no runs under {arguments.root}"
    say(arguments, {"runs": [run.as_dict() for run in found]}, runs_table(found) if found else nothing)


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from pronghorn.recipe_file import load_recipe

    require_recipe(arguments.recipe, arguments.parser)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    _look_for_hub(recipe.model)
    return recipe


def _look_for_hub(model: str) -> None:
    if told := offline_without_hub(model):
        print(told, file=sys.stderr)


def _base_of(run: Path) -> str:
    """The base model of a run, looked for on the hub where it has a name there; nothing, where the run does not say."""
    from pronghorn.report.run_log import base_model

    base = base_model(run)
    if base and not Path(base).is_dir():
        _look_for_hub(base)
    return base


@contextmanager
def _importing(model: str) -> Iterator[None]:
    """What loads a model, whose weights begin to come from the disk."""
    from pronghorn.model.read_ahead import read_ahead

    read_ahead(model)
    with importing():
        yield
