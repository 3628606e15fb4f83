"""Does the exported model say what the trained one says? Held-out rows, scored by both, token by token.

Both read the same tokens. `best`: the likeliest token at each place; `log_probs`: of the token that is there. From these come
the share of places with the same likeliest token (greedy agreement), the largest difference of a log-probability, and the
perplexity of the trained model (before) and of the export (after). Of a reward model a row has one number, its score, in place
of log-probabilities, and nothing else is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pronghorn.data.prepare import prepare
from pronghorn.errors import DataError, EnvironmentFault, PronghornError, RecipeError
from pronghorn.recipe import Recipe
from pronghorn.train.setup import prepare_data
from pronghorn.train.trained_run import Trained

Report = Callable[[str, int, int], None]
ROWS, LONGEST = 8, 192  # rows, and tokens of a row, that are compared
PLAIN = (  # where the run's own data is gone
    "The quick brown fox jumps over the lazy dog.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a small village by the sea.",
)


@dataclass(frozen=True)
class Tolerance:
    """What an export may differ by. NaN is beyond any."""

    log_prob: float  # the largest difference
    perplexity: float  # relative
    agreement: float  # at least
    mean: float = math.inf  # the mean difference


# Seen, over all families of docs/export.md: float32 1e-4, bf16 and fp16 0.06 in a random model.
# A random model has no likeliest token to speak of, so that few of them agree after rounding; those of a trained one do.
EXACT, HALF, EIGHT_BITS = Tolerance(2e-3, 1e-3, 0.98), Tolerance(0.5, 0.02, 0.8), Tolerance(2.0, 0.05, 0.5, mean=0.3)


def tolerance_of(recipe: Recipe, dtype: torch.dtype) -> Tolerance:
    """Of a file with the trained weights in `dtype`."""
    if recipe.fp8:
        return EIGHT_BITS  # the trained model rounds activations, too
    return EXACT if dtype == torch.float32 and recipe.precision in ("fp32", "auto") and not torch.cuda.is_available() else HALF


@dataclass(frozen=True)
class Row:
    """Tokens `start` and after are scored; each is predicted by all before it, so `start` is 1 at least."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Scores:
    """Of one row, a number for each scored token; of a reward model one, and no `best`."""

    best: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    passed: bool | None  # None: not checked
    sentence: str
    with_: str = ""  # what loaded it
    rows: int = 0
    tokens: int = 0
    greedy_agreement: float = math.nan
    largest_log_prob_difference: float = math.nan
    mean_log_prob_difference: float = math.nan
    perplexity_before: float = math.nan
    perplexity_after: float = math.nan

    @classmethod
    def skipped(cls, why: str) -> Verdict:
        return cls(None, f"not checked: {why}")

    def as_dict(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self).items() if str(value) not in ("nan", "")}
        return {"loaded_with" if key == "with_" else key: value for key, value in known.items()}


@dataclass(frozen=True)
class Reference:
    """Held-out rows, and what the trained model makes of them."""

    rows: tuple[Row, ...]
    scores: tuple[Scores, ...]

    def verdict(self, found: Sequence[Scores], tolerance: Tolerance, loaded_with: str) -> Verdict:
        """`found`: of the exported model, row by row."""
        before = [p for one in self.scores for p in one.log_probs]
        after = [p for one in found for p in one.log_probs]
        best = [
            (a, b) for one, other in zip(self.scores, found, strict=True) for a, b in zip(one.best, other.best, strict=True)
        ]
        apart_by = [(abs(a - b) if math.isfinite(a - b) else math.inf) for a, b in zip(before, after, strict=True)]
        largest, mean = max(apart_by), sum(apart_by) / len(apart_by)
        if not best:
            told = f"largest difference of a score {largest:.2g} ({loaded_with}, {len(before)} rows)"
            return Verdict(largest <= tolerance.log_prob, told, loaded_with, len(self.rows))
        agreement = sum(a == b for a, b in best) / len(best)
        perplexities = [math.exp(min(700.0, -sum(each) / len(each))) for each in (before, after)]
        apart = abs(perplexities[1] / perplexities[0] - 1)
        wrong = []
        if not largest <= tolerance.log_prob:
            wrong.append(f"a log-probability differs by {largest:.3g} (tolerance {tolerance.log_prob:g})")
        if not mean <= tolerance.mean:
            wrong.append(f"log-probabilities differ by {mean:.3g} on average (tolerance {tolerance.mean:g})")
        if not apart <= tolerance.perplexity:
            wrong.append(f"the perplexity differs by {apart:.2%} (tolerance {tolerance.perplexity:.1%})")
        if not agreement >= tolerance.agreement:
            wrong.append(f"{agreement:.1%} of the likeliest tokens agree (at least {tolerance.agreement:.0%})")
        said = (
            f"greedy agreement {agreement:.1%}, largest log-prob difference {largest:.2g} (mean {mean:.2g}), "
            f"perplexity {perplexities[0]:.4g} -> {perplexities[1]:.4g} ({loaded_with}, {len(before)} tokens)"
        )
        return Verdict(
            not wrong,
            "; ".join([*wrong, said]),
            loaded_with,
            len(self.rows),
            len(before),
            agreement,
            largest,
            mean,
            perplexities[0],
            perplexities[1],
        )


@torch.no_grad()
def score(model: Any, rows: Sequence[Row], report: Report = lambda *_: None, label: str = "checking") -> tuple[Scores, ...]:
    """By a model with transformers' forward."""
    device, found = next(model.parameters()).device, []
    for number, row in enumerate(rows):
        report(label, number, len(rows))
        ids = torch.tensor(row.ids, device=device)
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0]
        if logits.ndim == 1:  # a classifier's
            found.append(Scores((), (float(logits[0]),)))
            continue
        wide = logits[row.start - 1 : -1].float().log_softmax(-1)
        chosen = wide.gather(1, ids[row.start :, None])[:, 0]
        found.append(Scores(tuple(wide.argmax(-1).tolist()), tuple(chosen.tolist())))
    report(label, len(rows), len(rows))
    return tuple(found)


def reference_of(trained: Trained, report: Report) -> Reference:
    """Loads the trained model, and lets go of it."""
    model, tokenizer, _ = trained.load()
    rows = tuple(held_out_rows(trained.recipe, tokenizer, report))
    return Reference(rows, score(model, rows, report, "scoring the trained model"))


def held_out_rows(recipe: Recipe, tokenizer: Any, report: Report) -> list[Row]:
    """The run's held-out rows, else rows that it was trained on, else (the data is gone) some sentences."""
    try:
        if isinstance(recipe.data.eval, str):
            wanted = recipe.objective.rows
            table = prepare((recipe.data.eval,), recipe.data, tokenizer, progress=report, wanted=wanted).tokens
        else:
            prepared = prepare_data(recipe, tokenizer, report=report, stage=lambda _: nullcontext())
            table = prepared.train if prepared.evaluation is None else prepared.evaluation
        rows = [_row(table.ids(i).tolist(), table.loss(i).tolist()) for i in range(min(ROWS, len(table)))]
    except (DataError, EnvironmentFault, RecipeError, PronghornError):
        rows = [_row(tokenizer(text)["input_ids"], []) for text in PLAIN]
    return [row for row in rows if len(row.ids) > row.start]


def _row(ids: list[int], loss: list[bool]) -> Row:
    first = max(1, loss.index(True)) if any(loss) else 1
    begin = max(0, first - LONGEST // 2)  # of a long prompt its end
    ids = ids[begin : begin + LONGEST]
    return Row(tuple(int(i) for i in ids), first - begin if first > begin else 1)
