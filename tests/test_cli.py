"""The command line as people and machines use it: quick help, JSON lines, no colours in pipes, exit codes, every verb."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import get_session

from pronghorn import cli
from pronghorn.cli import build_parser, main
from pronghorn.errors import EnvironmentFault, HealthStop, Interrupted, RecipeError
from pronghorn.recipe_file import EXAMPLE, load_recipe, parse_recipe
from samples import chat_rows, write_rows
from tables import table

VERBS = ["demo", "new", "check", "data", "data show", "data stats", "train", "eval", "chat", "export", "runs"]
HEAVY = {"torch", "transformers", "peft", "numpy", "pyarrow", "rich", "pydantic", "datasets", "safetensors"}
ESCAPE = "\x1b"


def write_recipe(folder: Path, model: Path, output: str = "run", lr: float = 1e-2) -> Path:
    train = write_rows(folder / "train.jsonl", chat_rows(30))
    held_out = write_rows(folder / "eval.jsonl", chat_rows(4, seed=1))
    recipe = folder / f"{output}.yaml"
    recipe.write_text(
        f"model: {model}\nprecision: fp32\nlora: {{r: 4}}\n"
        f"data: {{train: {train}, eval: {held_out}, max_length: 128, workers: 0}}\n"
        f"train: {{epochs: 1, batch_tokens: 512, capacity: 256, lr: {lr}}}\n"
        f"eval: {{every: 2, generations: 1, max_new_tokens: 3}}\ncheckpoint: {{every: 2}}\noutput: {folder / 'runs' / output}\n"
    )
    return recipe


class Place:
    """A folder with two trained runs and what their training printed."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.recipe = write_recipe(folder, model)
        self.run, self.runs = folder / "runs" / "run", folder / "runs"


@pytest.fixture(scope="module")
def place(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PRONGHORN_CACHE", str(folder / "cache"))
        place = Place(folder, one_layer_model)
        assert main(["train", str(place.recipe), "--json"]) == 0
        assert main(["train", str(write_recipe(folder, one_layer_model, "slow", lr=1e-4)), "--json"]) == 0
        yield place


def lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """What a command prints with --json: every line one object, nothing else."""
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    printed = capsys.readouterr().out
    assert ESCAPE not in printed
    return printed


def in_a_process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pronghorn.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        timeout=120,
    )


# Help -------------------------------------------------------------------------------------------------------------------


def test_help_answers_in_a_blink_and_imports_nothing_heavy() -> None:
    """In a blink of this machine: 0.3 s where two million turns of a loop take 0.15 s (measured: 0.1 s)."""
    program = (
        "import sys, time; began = time.process_time()\n"
        "for _ in range(2_000_000): pass\n"
        "turns = time.process_time() - began; began = time.process_time()\n"
        "from pronghorn.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print((time.process_time() - began) / turns); print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *said, blinks, modules = done.stdout.splitlines()
    for verb in ("demo", "new", "check", "data", "train", "eval", "chat", "export", "runs"):
        assert any(line.split()[:1] == [verb] for line in said), verb
    assert float(blinks) < 2
    assert not HEAVY & set(modules.split())


@table("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([*verb.split(), "--help"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert f"usage: pronghorn {verb}" in told
    assert len(told.splitlines()) > 4


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from pronghorn import __version__

    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"pronghorn {__version__}\n"


# Words ------------------------------------------------------------------------------------------------------------------


def test_overrides_stand_before_or_after_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cli, "check", lambda arguments: seen.append((arguments.recipe, arguments.overrides, arguments.json)))
    for words in (
        ["r.yaml", "a=1", "b=2", "--json"],
        ["r.yaml", "a=1", "--json", "b=2"],
        ["--json", "r.yaml", "a=1", "b=2"],
        ["r.yaml", "--json", "a=1", "b=2"],
    ):
        assert main(["check", *words]) == 0
    assert seen == [("r.yaml", ["a=1", "b=2"], True)] * 4


@table(
    "words",
    [["train"], ["export", "run"], ["data"], ["chat", "run", "--max-tokens", "many"], ["new", "f", "--method", "magic"]],
)
def test_a_command_that_makes_no_sense_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "usage: pronghorn" in capsys.readouterr().err


@table(
    ("words", "what", "fix"),
    [
        ("tran r.yaml", "unknown command `tran`", "did you mean `pronghorn train`?"),
        ("finetune r.yaml", "unknown command `finetune`", "`pronghorn train`"),
        ("validate r.yaml", "unknown command `validate`", "`pronghorn check`"),
        ("merge run", "unknown command `merge`", "`pronghorn export --to merged`"),
        ("xyzzy", "unknown command `xyzzy`", "one of: demo, new, check"),
        ("my.yaml", "my.yaml is a file", "`pronghorn train my.yaml`"),
        ("data shwo r.yaml", "unknown command `data shwo`", "`pronghorn data show`"),
        ("data r.yaml", "r.yaml is a file", "`pronghorn data show r.yaml`"),
        ("train r.yaml --frsh", "train has no option --frsh", "did you mean `--fresh`?"),
        ("train r.yaml --dry-run", "train has no option --dry-run", "`pronghorn check RECIPE`"),
        ("train r.yaml --resume", "train has no option --resume", "remove it"),
        ("train --config r.yaml", "train has no option --config", "pronghorn train RECIPE"),
        ("train r.yaml --learning-rate 1e-4", "train has no option --learning-rate", "train.lr=1e-4"),
        ("train r.yaml --fresh --lr=1", "train has no option --lr", "train.lr=1"),
        ("check r.yaml --rank=8", "check has no option --rank", "lora.r=8"),
        ("data show r.yaml --rwo 3", "data show has no option --rwo", "did you mean `--row`?"),
        ("train r.yaml --fresh again", "train does not accept `again`", "pronghorn train --help"),
        ("eval run train.lr=1", "eval does not accept `train.lr=1`", "pronghorn eval --help"),
        ("export run --to zip", "--to zip is not supported", "use one or several of adapter, merged"),
        ("chat run --temperature 9", "--temperature 9 is out of range", "0 to 5"),
        ("chat run --temperature -1", "--temperature -1 is out of range", "0 to 5"),
        ("new f --from a.yaml --model m", "--model cannot be used with --from", "remove --model"),
    ],
)
def test_what_was_meant_is_told(words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[0]) == ("", err.splitlines()[0])
    assert what in err.splitlines()[0]
    assert fix in err.partition("fix: ")[2]
    assert main([*words.split(), "--json"]) == 2
    assert what in json.loads(capsys.readouterr().out)["what"]


def test_without_a_verb_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert "usage: pronghorn" in told
    assert "resumes automatically" in told
    with pytest.raises(SystemExit) as left:  # as --help does
        main(["help", "train"])
    assert left.value.code == 0
    assert "usage: pronghorn train" in capsys.readouterr().out


def test_every_verb_that_is_meant_is_one() -> None:
    from pronghorn.cli.words import VERBS as MEANT

    for meant in MEANT.values():
        verb = meant.split()[0]
        assert verb in cli._verbs(build_parser()), meant
    assert not set(MEANT) & set(cli._verbs(build_parser()))


@table(
    ("error", "code"),
    [
        (RecipeError("a key", fix="do this"), 2),
        (EnvironmentFault("disk", fix="do this"), 3),
        (HealthStop("nan", fix="do this"), 4),
        (Interrupted("stopped", signal_number=15, fix="do this"), 143),
        (KeyboardInterrupt(), 130),
    ],
)
@table("as_json", [False, True])
def test_exit_codes(
    error: BaseException, code: int, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "runs", fail)
    assert main(["runs", *(["--json"] if as_json else [])]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    if as_json and code != 130:
        told = json.loads(out)
        assert (told["exit_code"], told["fix"], err) == (code, "do this", "")
    else:
        assert out == ""
        assert err.strip()


@pytest.mark.parametrize("as_json", [False, True], ids=["people", "machines"])
def test_a_right_that_is_missing_is_no_bug_of_ours(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> None:
        raise PermissionError(13, "Permission denied", "model/tokenizer.json")

    monkeypatch.setattr(cli, "runs", fail)
    assert main(["runs", *(["--json"] if as_json else [])]) == 3
    told = "".join(capsys.readouterr())
    assert "model/tokenizer.json" in told
    assert "change its permissions" in told


def test_ctrl_c_before_the_words_are_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_parser", interrupted)
    assert main(["runs"]) == 130
    assert capsys.readouterr().err == "stopped\n"


def test_only_the_recipe_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("the following arguments are required: recipe")


def test_commands_to_copy_have_their_names_quoted(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "my first.yaml")]) == 0
    assert f"pronghorn check '{tmp_path}/my first.yaml'" in capsys.readouterr().out
    run = place.run.rename(tmp_path / "my run")
    cli._show_summary(run)
    run.rename(place.run)
    assert f"pronghorn chat '{tmp_path}/my run'\n" in capsys.readouterr().out


def test_a_second_ctrl_c_leaves_no_traceback_of_the_end_and_a_caller_s_handler_stays() -> None:
    code = """if True:
        import signal
        from pronghorn import cli
        def stop(_):
            raise KeyboardInterrupt
        cli.runs = stop
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests run in the background have it ignored
        print(cli.main(["runs"]), signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        print(cli.main(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
    """
    ended = subprocess.run([sys.executable, "-c", code, "runs"], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.splitlines() == ["130 True", "130 True"]


def test_something_is_shown_before_the_seconds_of_heavy_imports(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: m\ndata: {train: a.jsonl}\n")
    code = """if True:
        import sys
        from pronghorn import cli
        from pronghorn.report import display
        class Shown(Exception):
            pass
        class Recorder:
            def progress(self, label, done, total):
                raise Shown(label)
            def close(self):
                pass
        display.make_display = lambda json, stages=None: Recorder()
        for words in sys.argv[2:]:
            try:
                cli.main([word.replace("RECIPE", sys.argv[1]) for word in words.split()])
            except Shown:
                print(words, not {"torch", "transformers"} & set(sys.modules))
    """
    verbs = [
        "train RECIPE",
        "check RECIPE",
        "data show RECIPE",
        "data stats RECIPE",
        "eval r",
        "chat r",
        "export r --to merged",
        "verify m",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", code, str(recipe), *verbs], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.splitlines() == [f"{verb} True" for verb in verbs]


def test_an_output_that_cannot_show_every_letter_is_no_error(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["pronghorn", "data", "show", str(place.recipe)])
    assert main() == 0
    assert capsys.readouterr().err == ""
    said = shown.getvalue().decode("ascii")
    assert "?40 + " not in said  # digits stay digits
    assert "<|im_end|>?" in said


@pytest.mark.parametrize("words", ["runs --root RUNS", "runs --root RUNS --json", "new -"])
def test_a_full_disk_under_the_output_is_an_environment_fault(place: Place, words: str) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full here")
    with full.open("w") as nowhere:
        command = [sys.executable, "-m", "pronghorn.cli", *words.replace("RUNS", str(place.runs)).split()]
        ended = subprocess.run(command, stdout=nowhere, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert ended.returncode == 3
    assert ended.stderr.startswith("standard output: no space left on the disk")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("words", "most"), [
    (["export", "RUN", "--to", "merged", "--target"], 5_000), (["export", "RUN", "--to", "adapter", "--target"], 5_000),
    (["new"], 100),
], ids=["merged", "adapter", "new"])  # fmt: skip
def test_what_finds_no_room_on_the_disk_leaves_nothing_behind(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], most: int
) -> None:
    """No file may grow beyond `most` bytes, which fails where a full disk would."""
    command = [*(str(place.run) if word == "RUN" else word for word in words), str(tmp_path / "target")]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        code = main(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3
    told = capsys.readouterr().err
    assert "File too large" in told
    assert "fix: free some disk space" in told
    assert list(tmp_path.iterdir()) == []
    assert main(command) == 0


def test_without_a_standard_output_a_command_still_works(place: Place) -> None:
    ended = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m pronghorn.cli runs --root {place.runs} >&-"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "runs", lambda arguments: arguments.no_such_thing)
    with pytest.raises(AttributeError):
        main(["runs"])


def test_every_verb_takes_json() -> None:
    parser = build_parser()
    for words in (
        "demo",
        "new f",
        "check r",
        "data show r",
        "data stats r",
        "train r",
        "eval r",
        "chat r",
        "export r --to merged",
        "runs",
    ):
        assert parser.parse_args([*words.split(), "--json"]).json is True


# new --------------------------------------------------------------------------------------------------------------------


def test_new_writes_a_recipe_that_loads_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "my.yaml"
    assert "pronghorn check" in shown(capsys, "new", str(file))
    assert load_recipe(file).train.lr == 2e-4
    file.write_text("mine")
    assert main(["new", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["new", str(tmp_path / "no" / "folder.yaml")]) == 2
    assert shown(capsys, "new", "-") == EXAMPLE
    filled = shown(capsys, "new", "-", "--model", "./m y", "--data", "a.jsonl", "--data", "1: b.jsonl", "--method", "qlora")
    recipe, default = parse_recipe(filled), parse_recipe(EXAMPLE)
    assert (recipe.model, recipe.data.train, recipe.method) == ("./m y", ("a.jsonl", "1: b.jsonl"), "qlora")
    data = recipe.data.model_copy(update={"train": default.data.train})
    assert recipe.model_copy(update={"model": default.model, "method": "lora", "data": data}) == default
    assert len(filled.splitlines()) == len(EXAMPLE.splitlines())
    assert lines(capsys, "new", str(tmp_path / "other.yaml")) == [{"written": str(tmp_path / "other.yaml")}]


# The verbs, for machines ------------------------------------------------------------------------------------------------


def test_train_prints_its_log_and_goes_on_where_it_stood(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    recipe, output = str(place.recipe), f"output={tmp_path / 'run'}"
    events = lines(capsys, "train", recipe, output)
    assert [e["event"] for e in events][:1] + [e["event"] for e in events][-1:] == ["start", "end"]
    assert events == [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    again = lines(capsys, "train", recipe, output)
    assert not [e for e in again if e["event"] == "step"]
    fresh = lines(capsys, "train", recipe, output, "--fresh")
    losses = [[e["loss"] for e in some if e["event"] == "step"] for some in (events, fresh)]
    assert losses[0] == losses[1] != []


def test_check_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (facts,) = lines(capsys, "check", str(place.recipe), "train.epochs=2")
    (once,) = lines(capsys, "check", str(place.recipe))
    assert facts["steps"] == 2 * once["steps"] > 0
    assert (facts["documents"], facts["eval_documents"]) == (30, 4)


def test_one_is_never_counted_as_many(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of one row, one pack, one step and one held-out row."""
    recipe = write_recipe(tmp_path, tiny_model)
    train, held_out = (write_rows(tmp_path / f"{name}.jsonl", chat_rows(1)) for name in ("one", "held"))
    own = [f"data.train={train}", f"data.eval={held_out}", "train.batch_tokens=256", "eval.every=1"]
    for verb in ("check", "data stats", "data show", "train"):
        assert main([*verb.split(), str(recipe), *own]) == 0
    assert main(["eval", str(tmp_path / "runs" / "run")]) == 0
    assert main(["data", "show", str(recipe), *own, "--row", "2"]) == 2
    printed = "".join(capsys.readouterr())
    assert re.findall(r"\b1 [a-z-]+\b", printed).count("1 step") >= 2
    assert not re.findall(r"(?<![.,\d])1 [a-z-]+s\b(?<!has)", printed)
    assert "1 row\n" in printed


def test_data_stats_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (stats,) = lines(capsys, "data", "stats", str(place.recipe))
    assert (stats["counts"]["read"], stats["counts"]["kept"], stats["counts"]["format"]) == (30, 30, "messages")
    assert 0.5 < stats["packing"]["efficiency"] <= 1


def test_data_show_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = lines(capsys, "data", "show", str(place.recipe), "--row", "4")
    answer = chat_rows(30)[3]["messages"][1]["content"]
    assert row["where"].endswith("train.jsonl:4")
    assert row["trained_on"] == [f"{answer}<|im_end|>"]
    assert sum(token["loss"] for token in row["tokens"]) == row["loss_tokens"]


@pytest.mark.parametrize("row", ["31", "0"])
def test_a_row_that_is_not_there(place: Place, capsys: pytest.CaptureFixture[str], row: str) -> None:
    assert main(["data", "show", str(place.recipe), f"--row={row}"]) == 2
    assert "choose --row from 1 to 30" in capsys.readouterr().err


def test_eval_for_machines(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (figures,) = lines(capsys, "eval", str(place.run))
    (other,) = lines(capsys, "eval", str(place.run), "--data", str(place.folder / "train.jsonl"))
    assert (figures["documents"], other["documents"]) == (4, 30)
    assert figures["perplexity"] == pytest.approx(torch.tensor(figures["loss"]).exp().item(), rel=1e-4)


def test_chat_answers_one_prompt(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    (answer,) = lines(capsys, "chat", str(place.run), "--prompt", "add 1 and 2", "--max-tokens", "8")
    assert set(answer) == {"answer"}
    said = shown(capsys, "chat", str(place.run), "--prompt", "add 1 and 2", "--max-tokens", "8")
    assert said.strip("\n") == answer["answer"]


@table(("words", "said"), [
    (["--prompt", "a", "--max-tokens", "0"], "--max-tokens 0"), (["--prompt", "a", "--max-tokens", "-5"], "--max-tokens -5"),
    (["--json"], "--json needs --prompt"), (["--prompt", "a\udcff"], "not UTF-8 text"),
    (["--prompt", "a", "--system", "\udcfe"], "not UTF-8 text"),
])  # fmt: skip
def test_what_chat_cannot_do(place: Place, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["chat", str(place.run), *words]) == 2
    out, err = capsys.readouterr()
    assert said in out + err


def test_chat_ends_with_an_empty_line_or_the_end_of_input(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["hello", "there", ""], ["hello", "there"]):
        heard = iter(words)

        def listen(prompt: str, heard: Iterator[str] = heard) -> str:
            try:
                return next(heard)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", listen)
        assert shown(capsys, "chat", str(place.run), "--max-tokens", "3").count("model: ") == 2
    heard = iter(["hello", "/help", "/temperature 0.7", "/temperature hot", "again", "/new", "hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(heard))
    said = shown(capsys, "chat", str(place.run), "--max-tokens", "3")
    assert said.count("model: ") == 3
    for word in ("start a new conversation", "temperature 0.7", "use a number from 0 to 5", "new conversation"):
        assert word in said, word
    monkeypatch.setattr("builtins.input", lambda _: "bytes of another alphabet \udcff")
    assert main(["chat", str(place.run), "--max-tokens", "3"]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["adapter", "merged"])
def test_what_is_exported_has_the_logits_of_what_was_trained(
    place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path, to: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from pronghorn.train.trained_run import TrainedRun

    target = tmp_path / "out"
    (said,) = lines(capsys, "export", str(place.run), "--to", to, "--target", str(target))
    assert (said["written"], said["target"], said["check"]["passed"]) == (str(target), to, True)
    assert said["check"]["largest_log_prob_difference"] < 1e-4
    ids = torch.arange(3, 80)[None]
    ours, _, _ = TrainedRun(place.run, "best").load()
    base = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)
    with torch.no_grad():
        untrained = base(ids).logits
        merged = to == "merged"
        stock = AutoModelForCausalLM.from_pretrained(target) if merged else PeftModel.from_pretrained(base, str(target))
        expected, found = ours(ids).logits, stock.eval()(ids).logits
    assert (found - expected).abs().max() < 1e-4
    assert (untrained - expected).abs().max() > 1e-3
    assert main(["export", str(place.run), "--to", to, "--target", str(target)]) == 2
    assert "never overwrites" in capsys.readouterr().err


def test_runs_are_listed_and_compared(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (listed,) = lines(capsys, "runs", "--root", str(place.runs))
    assert {run["name"]: run["state"] for run in listed["runs"]} == {"run": "done", "slow": "done"}
    (both,) = lines(capsys, "runs", str(place.run), str(place.runs / "slow"))
    assert both["differences"] == {"train.lr": [0.01, 0.0001]}
    assert "train.lr" in shown(capsys, "runs", str(place.run), str(place.runs / "slow"))
    assert shown(capsys, "runs", "--root", str(tmp_path)) == f"no runs under {tmp_path}\n"
    assert main(["runs", str(place.run)]) == 2
    assert main(["runs", "--root", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("verb", [["eval"], ["chat", "--prompt", "x"], ["export", "--to", "adapter"]], ids=lambda v: v[0])
def test_a_folder_without_a_run_is_told(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb[0], str(tmp_path), *verb[1:]]) == 2
    assert "no checkpoint found" in capsys.readouterr().err


# For people -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("no_color", ["", "1"], ids=["a pipe", "NO_COLOR"])
def test_no_escape_codes_without_a_terminal(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    """`shown` looks for them."""
    monkeypatch.setenv("NO_COLOR", no_color)
    assert "«" in shown(capsys, "data", "show", str(place.recipe))
    assert "30 documents" in shown(capsys, "data", "stats", str(place.recipe))
    assert "memory" in shown(capsys, "check", str(place.recipe))
    assert "done" in shown(capsys, "runs", "--root", str(place.runs))
    assert "pronghorn chat" in shown(capsys, "train", str(place.recipe))
    assert "perplexity" in shown(capsys, "eval", str(place.run))


def on_a_terminal(*words: str, **environment: str) -> bytes:
    """What a command writes to a real terminal."""
    ours, its = os.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "pronghorn.cli", *words],
            stdout=its,
            stderr=its,
            stdin=its,
            env={**os.environ, "TERM": "xterm-256color", **environment},
        )
        os.close(its)
        said = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            said += part
        assert child.wait(60) == 0
    finally:
        os.close(ours)
    return said


def test_colours_on_a_terminal_unless_no_color(place: Place) -> None:
    words = ("runs", "--root", str(place.runs))
    assert b"\x1b[32m" in on_a_terminal(*words)  # green: done
    plain = on_a_terminal(*words, NO_COLOR="1")
    assert b"done" in plain
    assert b"\x1b[32m" not in plain


def test_the_command_as_a_process(place: Place, tmp_path: Path) -> None:
    """Exit code, streams and JSON as a script sees them, with the network forbidden."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("modl: x\n")
    done = in_a_process("check", str(bad), HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean `model`?" in done.stderr
    assert ESCAPE not in done.stderr
    assert "Traceback" not in done.stderr
    told = in_a_process("check", str(bad), "--json", HF_HUB_OFFLINE="1")
    assert (told.returncode, json.loads(told.stdout)["exit_code"], told.stderr) == (2, 2, "")


@pytest.mark.parametrize("words", ["", "--json"], ids=["people", "machines"])
def test_a_reader_that_leaves_is_no_error(place: Place, words: str) -> None:
    command = f"{sys.executable} -m pronghorn.cli runs {words} --root {place.runs} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_sent_anywhere(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files, online mode: a whole train, eval, chat and export never even looks up a host."""
    tried: list[Any] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            tried.append(address)
            raise OSError("no network")
        return real(self, address)

    def look_up(*address: Any, **_: Any) -> Any:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in list(os.environ):
        if name.startswith(("HF_", "TRANSFORMERS_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    run = str(tmp_path / "run")
    for words in (
        ["train", str(place.recipe), f"output={run}"],
        ["eval", run],
        ["export", run, "--to", "adapter"],
        ["chat", run, "--prompt", "hi", "--max-tokens", "3"],
        ["export", run, "--to", "merged"],
    ):
        assert main([*words, "--json"]) == 0, words
    assert tried == []
    with suppress(Exception):  # the watch works, and this is online mode
        get_session().get("https://huggingface.co")
    assert tried
