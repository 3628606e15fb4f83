"""Does the exported model say what the trained one says? Held-out rows, scored by both, token by token.

Both read the same tokens. `best`: the likeliest token at each place; `log_probs`: of the token that is there. From these come
the share of places with the same likeliest token (greedy agreement), the largest and the mean difference of a log-probability,
and the perplexity of the trained model (before) and of the export (after). Of a reward model a row has one number, its score,
in place of log-probabilities, and nothing else is compared.

Two questions are asked apart. Is it the same model? There is a truth for that, and nothing is forgiven but the rounding of
arithmetic: the trained model itself is scored three times more with every module's output off by up to bf16's rounding, at
random, and what that changes, times 4, is what an export may differ by in bf16 (an eighth of it in fp16). How much does the
format lose? That is told, and fails only where it is gross: a quarter of the perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pronghorn.data.prepare import prepare
from pronghorn.errors import PronghornError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.model.heads import head_in
from pronghorn.recipe import Recipe
from pronghorn.train.run.trained_run import Trained
from pronghorn.train.source import source_of

Report = Callable[[str, int, int], None]
ROWS, LONGEST = 8, 192  # rows, and tokens of a row, that are compared
PLAIN = (  # where the run's own data is gone
    "The quick brown fox jumps over the lazy dog.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "def add(a, b):\n    return a + b\n",
    "Once upon a time there was a small village by the sea.",
)


@dataclass(frozen=True)
class Difference:
    """How two models' scores of the same rows differ."""

    tokens: int
    agreement: float  # greedy
    largest: float  # of a log-probability
    mean: float
    before: float  # perplexity of the first
    after: float


@dataclass(frozen=True)
class Tolerance:
    """What an export may differ by. NaN is beyond any."""

    largest: float = math.inf
    mean: float = math.inf
    perplexity: float = math.inf  # relative
    agreement: float = 0.0  # at least

    def exceeded(self, found: Difference) -> list[str]:
        """In words; empty: it is not."""
        apart = abs(found.after / found.before - 1)
        told = {
            f"a log-probability differs by {found.largest:.3g} (tolerance {self.largest:.2g})": found.largest <= self.largest,
            f"log-probabilities differ by {found.mean:.3g} on average (tolerance {self.mean:.2g})": found.mean <= self.mean,
            f"the perplexity differs by {apart:.2%} (tolerance {self.perplexity:.1%})": apart <= self.perplexity,
            f"greedy agreement is {found.agreement:.1%} (at least {self.agreement:.0%} is needed)": (
                found.agreement >= self.agreement
            ),
        }
        return [text for text, within in told.items() if not within]


# Of float32 on both sides, where only sums are in another order.
EXACT = Tolerance(largest=2e-3, perplexity=1e-3, agreement=0.98)
GROSS = Tolerance(perplexity=0.25)
MARGIN, DRAWS = 4.0, 3  # times the noise; how often it is drawn


def rounding_of(dtype: torch.dtype) -> float:
    """The largest relative error of a rounded number: 2^-8 in bf16, 2^-11 in fp16."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Row:
    """Tokens `start` and after are scored; each is predicted by all before it, so `start` is 1 at least."""

    ids: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Scores:
    """Scores of one row: a number for each scored token; a reward model has one, and no `best`."""

    best: tuple[int, ...]
    log_probs: tuple[float, ...]


def difference(expected: Sequence[Scores], found: Sequence[Scores]) -> Difference:
    before = [p for one in expected for p in one.log_probs]
    after = [p for one in found for p in one.log_probs]
    best = [(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one.best, other.best, strict=True)]
    apart = [(abs(a - b) if math.isfinite(a - b) else math.inf) for a, b in zip(before, after, strict=True)]
    agreement, perplexities = 1.0, [1.0, 1.0]
    if best:
        agreement = sum(a == b for a, b in best) / len(best)
        perplexities = [math.exp(min(700.0, -sum(each) / len(each))) for each in (before, after)]
    return Difference(len(before), agreement, max(apart), sum(apart) / len(apart), *perplexities)


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
    beyond_the_format: float = math.nan  # the largest difference that is not the format's own rounding

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
    noise: tuple[tuple[Scores, ...], ...] = ()  # the same with bf16's rounding in it, some times

    def tolerance(self, dtype: torch.dtype) -> Tolerance:
        """The difference allowed to the same model computed in `dtype`."""
        apart = [difference(self.scores, one) for one in self.noise]
        scale = MARGIN * rounding_of(dtype) / rounding_of(torch.bfloat16)
        mean = sum(one.mean for one in apart) / len(apart)
        return Tolerance(
            largest=max(EXACT.largest, scale * max(one.largest for one in apart)), mean=max(EXACT.largest, scale * mean)
        )

    def verdict(
        self,
        found: Sequence[Scores],
        tolerance: Tolerance,
        loaded_with: str,
        *,
        wrong: Sequence[str] = (),
        beyond: Difference | None = None,
    ) -> Verdict:
        """`found`: of the exported model, row by row. `wrong`: what else was found, in words. `beyond`: what is not the
        format's rounding."""
        seen = difference(self.scores, found)
        wrong = [*wrong, *tolerance.exceeded(seen)]
        if not any(one.best for one in self.scores):
            told = f"largest score difference {seen.largest:.2g} ({loaded_with}, {seen.tokens} rows)"
            return Verdict(not wrong, "; ".join([*wrong, told]), loaded_with, len(self.rows))
        said = (
            f"greedy agreement {seen.agreement:.1%}, largest log-prob difference {seen.largest:.2g} (mean {seen.mean:.2g}"
            + (f"; {beyond.largest:.2g} not explained by quantization" if beyond else "")
            + f"), perplexity {seen.before:.4g} -> {seen.after:.4g} ({loaded_with}, {seen.tokens} tokens)"
        )
        figures = (seen.tokens, seen.agreement, seen.largest, seen.mean, seen.before, seen.after)
        more = beyond.largest if beyond else math.nan
        return Verdict(not wrong, "; ".join([*wrong, said]), loaded_with, len(self.rows), *figures, more)


@torch.no_grad()
def score(model: HFModel, rows: Sequence[Row], report: Report = lambda *_: None, label: str = "checking") -> tuple[Scores, ...]:
    """By a model with transformers' forward."""
    device, found, generates = next(model.parameters()).device, [], head_in(model.config).generates
    for number, row in enumerate(rows):
        report(label, number, len(rows))
        ids = torch.tensor(row.ids, device=device)
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0]
        if not generates:
            found.append(Scores((), tuple(logits.float().flatten().tolist())))
            continue
        wide = logits[row.start - 1 : -1].float().log_softmax(-1)
        chosen = wide.gather(1, ids[row.start :, None])[:, 0]
        found.append(Scores(tuple(wide.argmax(-1).tolist()), tuple(chosen.tolist())))
    report(label, len(rows), len(rows))
    return tuple(found)


def reference_of(trained: Trained, report: Report) -> Reference:
    """Loads the trained model, and lets go of it."""
    report("loading the trained model", 0, 0)
    model, tokenizer, _ = trained.load()
    report("loading the trained model", 1, 1)
    rows = tuple(held_out_rows(trained.recipe, tokenizer, report))
    scores = score(model, rows, report, "scoring the trained model")
    with rounding_like_bf16(model):
        noise = tuple(score(model, rows, report, "scoring with 16-bit noise") for _ in range(DRAWS))
    return Reference(rows, scores, noise)


@contextmanager
def rounding_like_bf16(model: torch.nn.Module) -> Iterator[None]:
    """Every module's output is off by up to bf16's rounding, at random (the same at each call of this function): in a model of
    any dtype, and without a second one in memory."""
    chances: dict[torch.device, torch.Generator] = {}

    def changed(value: object) -> Any:
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(changed(one) for one in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        chance = chances.setdefault(value.device, torch.Generator(value.device).manual_seed(0))
        error = torch.rand(value.shape, generator=chance, device=value.device).mul_(2).sub_(1)
        return (value.float() * (1 + rounding_of(torch.bfloat16) * error)).to(value.dtype)

    same = (torch.nn.Dropout, torch.nn.Identity)
    modules = [module for module in model.modules() if module is not model and not isinstance(module, same)]
    hooks = [module.register_forward_hook(lambda _, __, out: changed(out)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def held_out_rows(recipe: Recipe, tokenizer: Tokenizer, report: Report) -> list[Row]:
    """The run's held-out rows, else rows that it was trained on, else (the data is gone) some sentences."""
    try:
        wanted = recipe.objective.kind.reads
        if isinstance(recipe.data.eval, str) or wanted == "prompts":  # whose source asks for rewards, and knows no rows
            names = (recipe.data.eval,) if isinstance(recipe.data.eval, str) else recipe.data.train
            table = prepare(names, recipe.data, tokenizer, progress=report, wanted=wanted).tokens
        else:
            table = source_of(recipe, tokenizer, report=report, stage=lambda _: nullcontext()).known[-1]
        rows = [_row(table.ids(i).tolist(), table.loss(i).tolist()) for i in range(min(ROWS, len(table)))]
    except PronghornError:
        rows = [_row(tokenizer(text)["input_ids"], []) for text in PLAIN]
    return [row for row in rows if len(row.ids) > row.start]


def _row(ids: list[int], loss: list[bool]) -> Row:
    first = max(1, loss.index(True)) if any(loss) else 1
    begin = max(0, first - LONGEST // 2)  # of a long prompt its end
    ids = ids[begin : begin + LONGEST]
    return Row(tuple(int(i) for i in ids), first - begin if first > begin else 1)
