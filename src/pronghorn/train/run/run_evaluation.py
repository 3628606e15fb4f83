"""A trained run, evaluated: held-out loss, what its answers score, beside the base model's, and tasks of the harness."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pronghorn.data.encode.tokens import padding_id
from pronghorn.data.prepare import prepare
from pronghorn.errors import CommandError
from pronghorn.evaluation.harness import require_harness, run_tasks
from pronghorn.evaluation.held_out import HeldOut, Judged
from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import without_adapters
from pronghorn.model.load import DTYPES, load_model, resolve_precision
from pronghorn.recipe_parts import METRICS, Eval
from pronghorn.report.answers import write_answers
from pronghorn.train.objectives import objective_of
from pronghorn.train.run.evaluate import evaluate
from pronghorn.train.run.reward_evaluation import evaluate_rewards
from pronghorn.train.run.trained_run import TrainedRun
from pronghorn.train.setup.preference_data import reference_store, shares_prompts
from pronghorn.train.source import source_of

Report = Callable[[str, int, int], None]
HARNESS_BATCH = 8


@dataclass(frozen=True)
class EvaluationRequest:
    """What the command line asks for; `spec`: keys of eval: that differ from the run's recipe."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    metric_file: Path | None = None
    base: bool = False
    answers: Path | None = None  # where to write them
    reward_file: Path | None = None
    episode_file: Path | None = None

    @property
    def of_metrics(self) -> list[str]:
        """The options that are given and are about metrics of greedy answers."""
        given = [name for name in self.spec if name != "samples"]
        given += [name for name in ("metric_file", "base", "answers") if getattr(self, name)]
        return [f"--{name.replace('_', '-')}" for name in given]

    def require_no_answers(self) -> None:
        """Called for a request without a metric."""
        if self.base or self.answers:
            raise CommandError(
                what="--base and --answers need a metric",
                why="without a metric, no answers are generated",
                fix=f"add --metrics with any of {','.join(METRICS)}, or --metric-file FILE",
            )


def evaluate_run(
    run: Path, which: str, *, data: str | None, report: Report, asked: EvaluationRequest | None = None
) -> dict[str, Any]:
    """`data`: another file than the run's held-out rows."""
    asked = asked or EvaluationRequest()
    own = OwnMetric(asked.metric_file) if asked.metric_file is not None else None
    trained = TrainedRun(run, which)
    recipe = trained.recipe
    if recipe.objective.kind.reads == "prompts":
        files = {"reward_file": asked.reward_file, "episode_file": asked.episode_file}
        samples = asked.spec.get("samples")
        return evaluate_rewards(trained, data=data, report=report, refused=asked.of_metrics, samples=samples, **files)
    spec = spec_of(recipe.eval, asked.spec)
    tokenizer = trained.tokenizer()
    if data:
        wanted, capacity = recipe.objective.kind.reads, recipe.train.capacity
        table = prepare((data,), recipe.data, tokenizer, progress=report, wanted=wanted, capacity=capacity).tokens
        table, pad_id = table.sharing(shares_prompts(recipe)[0]), padding_id(tokenizer)
    else:
        source = source_of(recipe, tokenizer, report=report, stage=lambda _: nullcontext())
        if source.held_out is None:
            raise CommandError(what="the run has no held-out data", where=str(run), fix="pass some: --data FILE")
        if isinstance(recipe.data.eval, float) and trained.data != source.keys["data"]:
            raise CommandError(
                what="the rows that the run held out cannot be found again",
                where=str(run),
                why="the data changed since the run",
                fix="restore the files of data.train, or pass rows that were not trained on: --data FILE",
            )
        table, pad_id = source.held_out, source.pad_id
    measured, capture = bool(spec.metrics) or own is not None, recipe.train.graph != "off"
    if measured:
        trained.require_answers()
    else:
        asked.require_no_answers()
    held_out = HeldOut.of(table, tokenizer, spec, own) if measured else None
    model, _, device = trained.load()
    trained.give_layers(model)  # the run's own arithmetic, so its own figures
    objective = objective_of(recipe, reference_store(recipe, lambda text: None, writes=False), pad_id)
    objective.trained, objective.progress = recipe.method == "full", report
    result = evaluate(
        model,
        table,
        capacity=recipe.train.capacity,
        device=device,
        pad_id=pad_id,
        autocast=nullcontext,
        progress=report,
        objective=objective,
    )
    figures = {
        "checkpoint": str(trained.path),
        "loss": result.loss,
        **({"figures": result.figures} if result.figures else {"perplexity": result.perplexity}),
        "tokens": result.tokens,
        "documents": len(table),
        **result.figures,
    }
    if held_out is None:
        return figures
    judged = _judged(held_out, model, report, capture)
    base = None
    if asked.base and recipe.method != "full":
        with without_adapters(model):
            base = _judged(held_out, model, report, capture)
    elif asked.base:
        del model
        gc.collect()
        untrained = load_model(recipe.model, DTYPES[resolve_precision(recipe.precision, device)], device)
        trained.give_layers(untrained)
        base = _judged(held_out, untrained, report, capture)
    if asked.answers is not None:
        write_answers(asked.answers, held_out.table(judged, base, trained.step))
    figures |= {"metrics": judged.metrics, "samples": len(judged.rows), "cut": judged.cut}
    return figures | ({} if base is None else {"base_metrics": base.metrics})


def _judged(held_out: HeldOut, model: HFModel, report: Report, capture: bool) -> Judged:
    judged = held_out.judge(held_out.ask(model, report, capture=capture))
    if judged.unscored:  # here, where nothing is lost by it, a metric that fails is an error
        raise CommandError(
            what=judged.unscored, where=str(held_out.own.path if held_out.own else ""), fix="fix the metric, or the pattern"
        )
    return judged


def spec_of(recipe: Eval, changes: Mapping[str, Any]) -> Eval:
    """The recipe's, with what the command line says in its place. Nothing is trained, so nothing has to be the best."""
    values = {**recipe.model_dump(), **changes, "best": "loss", "stop": None, "generations": 0}
    if values["regex"] is not None and "metrics" in changes and "regex" not in values["metrics"] and "regex" not in changes:
        values["regex"] = None  # of the recipe's metrics, which are not asked for
    try:
        spec = Eval.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        fix = f"use any of {', '.join(METRICS)}" if first["loc"][:1] == ("metrics",) else "fix the value"
        raise CommandError(
            what=f"--{str(first['loc'][0]).replace('_', '-')}: invalid value {first['input']!r}",
            why=str(first.get("ctx", {}).get("error", "")),
            fix=fix,
        ) from error
    if problems := spec.misfits:
        what, _, fix = problems[0].partition("; ")
        raise CommandError(what=what, fix=fix)
    return spec


def evaluate_tasks(
    run: Path, which: str, tasks: list[str], *, own: Path | None, limit: int | None, chat: bool
) -> dict[str, Any]:
    """On the model's own layers: the harness asks for logits of padded rows."""
    table = require_harness(tasks, own)
    trained = TrainedRun(run, which)
    trained.require_answers()
    model, tokenizer, _ = trained.load()
    found = run_tasks(model, tokenizer, tasks, table, limit=limit, chat=chat, batch_size=HARNESS_BATCH)
    return {"checkpoint": str(trained.path), "tasks": found}
