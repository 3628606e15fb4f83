"""`pronghorn data audit`: training rows that are copies, junk, leaks or contradictions, and what they cost.

On a CPU, without the model. What takes long is kept beside the cached table (copies.py). The rows are those that a run of the
recipe would train on, before `data.select`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pronghorn.data.audit.leaked import HeldPrompts
from pronghorn.data.audit.reasons import REASONS, SCORED, Hit, Known, Reason
from pronghorn.data.audit.scores import RowScores, Scoring
from pronghorn.data.encode.cached_rows import Progress, no_stage, silent
from pronghorn.data.preference.pair_choices import first_rows, unit_of
from pronghorn.data.prepare import findings
from pronghorn.data.read.clean import BATCH, last_answer, said
from pronghorn.data.read.copies import Longs, Side, compared_text, families
from pronghorn.data.read.formats import Example
from pronghorn.data.read.selection import LeftOut, keys_of, selection_text
from pronghorn.data.read.splitting import Apart, apart, read_both
from pronghorn.errors import counted
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe_parts import Parts

EXAMPLES = 3  # of each reason
MOST_TEXT = 3000  # characters of one


@dataclass(frozen=True, slots=True)
class Speed:
    """What a plan foretells of the run."""

    gpu: str
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Audit:
    facts: dict[str, Any]  # plain values: audit.json, and all that the page shows
    select: str  # the content of select.json
    scores: str = ""  # the content of scores.jsonl; nothing without scores

    def table(self) -> RenderableType:
        """For people."""
        facts, grid = self.facts, Table(box=None, pad_edge=False, header_style="bold")
        grid.add_column("what")
        timed = facts["speed"] is not None
        for name in ("rows", "tokens", *["GPU seconds"] * timed, "left out"):
            grid.add_column(name, justify="right")
        grid.add_column("for example", style="dim")

        def row(what: str, of: dict[str, Any], left_out: str, example: str = "") -> None:
            seconds = [f"{of['seconds']:,.2f}"] if timed else []
            grid.add_row(what, f"{of['rows']:,}", f"{of['tokens']:,}", *seconds, left_out, example)

        for one in facts["reasons"]:
            first = one["examples"][0]["row"] if one["examples"] else ""
            row(one["title"], one, f"{one['left_out']:,}" if one["leaves_out"] else "never", first)
        row("all that select.json names", facts["left_out"], f"{facts['left_out']['rows']:,}")
        head = f"{counted(facts['rows'], facts['unit'])} to train on, {facts['tokens']:,} tokens per epoch"
        head += f", {facts['held_out']:,} held out" if facts["held_out"] else ""
        remarks = [Text(f"! {remark}", style="yellow") for remark in facts["remarks"]]
        return Group(Text(head, style="bold"), Text(), grid, Text(), *remarks)


def collect(
    recipe: Parts,
    tokenizer: Tokenizer,
    *,
    speed: Speed | None = None,
    scoring: Scoring | None = None,
    leave_out: Mapping[str, float] = MappingProxyType({}),
    progress: Progress = silent,
) -> Audit:
    """`tokenizer` may be a `TokenizerFiles`, which is not even loaded when the rows are in the cache. `leave_out`: by reason,
    the share of rows that select.json names beside those that it always does."""
    prepared, other = read_both(recipe, tokenizer, progress, no_stage)
    if other is not None:  # what both have is a reason, by containment
        sides = Apart(prepared.tokens, other.tokens, other.remarks)
    else:
        sides = apart(
            prepared, None, recipe.data.model_copy(update={"leaks": "warn", "select": None}), recipe.train.seed, progress
        )
    side, trained = Side.of(prepared.tokens), Side.of(sides.train)
    held = None if sides.held is None else Side.of(sides.held)
    pairs = side.table.pairs is not None
    known = Known(
        side, np.isin(side.numbers, trained.numbers), held, findings(prepared.rows, near=False, progress=progress),
        None if pairs else families(side, prepared.rows.path, progress), *_read(trained, held, progress),
        None if scoring is None else scoring(sides.train, sides.held).at(trained.first), leave_out,
    )  # fmt: skip
    scored = [replace(one, leaves_out=one.name in leave_out) for one in SCORED if one.looks(known)]
    hits = [(reason, reason.find(known)) for reason in (*REASONS, *scored)]
    leaves: dict[int, str] = {}
    for reason, found in hits:
        for unit in found if reason.leaves_out else ():
            leaves.setdefault(unit, reason.name)
    keys = dict(zip(first_rows(prepared.rows.table).tolist(), keys_of(prepared.rows, progress), strict=True))
    rows = [LeftOut(keys[int(side.numbers[unit])], leaves[unit], side.where(unit)) for unit in sorted(leaves)]
    price = _Price(recipe, side, trained, speed)
    text = selection_text(rows, known.scores.seconds if known.scores else 0.0)
    ways = Counter(leaves.values())
    facts = {
        "rows": len(trained), "unit": unit_of(trained.table), "held_out": len(held) if held is not None else 0,
        **price.of(known.trained.nonzero()[0]), "speed": None if speed is None else
        {"gpu": speed.gpu, "tokens_per_second": round(speed.tokens_per_second, 1)},
        "reasons": [_facts(reason, found, ways[reason.name], known, price) for reason, found in hits],
        "left_out": price.of(sorted(leaves)), "select": {"sha256": hashlib.sha256(text.encode()).hexdigest()},
        "scores": None if known.scores is None else
        {"source": known.scores.source, "rows": known.scores.known, "seconds": round(known.scores.seconds, 3)},
        "remarks": _remarks(recipe, held, speed, [*prepared.remarks, *sides.remarks], known.scores),
    }  # fmt: skip
    return Audit(facts, text, "" if known.scores is None else _score_lines(known.scores, trained))


def _score_lines(scores: RowScores, trained: Side) -> str:
    """A line for each row, from the highest loss to the lowest."""
    lines = []
    for unit in np.argsort(-np.nan_to_num(scores.loss_R, nan=-1.0), kind="stable").tolist():
        if np.isfinite(scores.loss_R[unit]):
            alike = {} if scores.alike_R is None else {"alike": round(float(scores.alike_R[unit]), 4)}
            values = {"loss": scores.loss_R, "first": scores.first_R, "last": scores.last_R}
            figures = {name: round(float(value[unit]), 4) for name, value in values.items()}
            lines.append(json.dumps({"row": trained.where(unit), **figures, "times": int(scores.times_R[unit]), **alike}))
    return "".join(f"{line}\n" for line in lines)


class _Price:
    """What rows take of a run: tokens of an epoch, however often their source repeats them, and seconds of the whole run."""

    def __init__(self, recipe: Parts, side: Side, trained: Side, speed: Speed | None) -> None:
        own = np.searchsorted(side.numbers, trained.units)
        self._tokens = np.bincount(own, weights=trained.table.lengths, minlength=len(side)).astype(np.int64)
        steps, epoch = recipe.train.steps, max(1, int(self._tokens.sum()))
        recipe = recipe.sized(epoch * recipe.train.epochs, 1)
        row_tokens = epoch / max(1, len(first_rows(trained.table)))
        epochs = recipe.train.epochs if steps is None else steps * recipe.step_tokens(row_tokens) / epoch
        self._seconds = None if speed is None else epochs / speed.tokens_per_second

    def of(self, units: Longs | Sequence[int]) -> dict[str, Any]:
        tokens = int(self._tokens[np.asarray(units, np.int64)].sum())
        seconds = None if self._seconds is None else round(tokens * self._seconds, 3)
        return {"rows": len(units), "tokens": tokens, "seconds": seconds}


def _read(trained: Side, held: Side | None, progress: Progress) -> tuple[HeldPrompts | None, list[tuple[bytes, bytes]]]:
    """What only the texts of all rows tell, in one pass."""
    prompts, questions = None, []
    if held is not None:
        prompts = HeldPrompts([_compared(example, _question(example)[0]) for batch in held.examples() for example in batch])
    for number, batch in enumerate(trained.examples()):
        progress("comparing prompts", number * BATCH, len(trained))
        split = [_question(example) for example in batch]
        if prompts is not None:
            prompts.add([(compared_text(one), _compared(one, ask)) for one, (ask, _) in zip(batch, split, strict=True)])
        for example, (ask, answer) in zip(batch, split, strict=True):
            counts = trained.table.pairs is None and example.kind != "text"
            questions.append((_digest(_told(ask)), _digest(answer.lower())) if counts else (b"", b""))
    progress("comparing prompts", len(trained), len(trained))
    return prompts, questions


def _question(example: Example) -> tuple[Example, str]:
    """The example without its last answer, and that answer."""
    if example.kind == "completion":
        return Example("completion", "", prompt=example.prompt), example.completion
    last = last_answer(example) if example.kind == "chat" else None
    if last is None or last >= len(example.messages):
        return example, ""
    return Example("chat", "", messages=example.messages[:last], tools=example.tools), said(example.messages[last])


def _compared(example: Example, ask: Example) -> str:
    """The prompt; all of a chat that has nothing before its answer."""
    return compared_text(ask).strip() or compared_text(example)


def _told(example: Example) -> str:
    """All of a row, as people read it: who says what."""
    if example.kind != "chat":
        return "\n".join(part for part in (example.prompt, example.completion, example.text) if part)
    tools = [f"tools: {json.dumps(example.tools, ensure_ascii=False, default=str)}"] if example.tools else []
    return "\n\n".join([*tools, *(f"{message['role']}: {said(message)}" for message in example.messages)])


def _digest(text: str) -> bytes:
    text = " ".join(text.split())
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() if text else b""


def _facts(reason: Reason, found: dict[int, Hit], left_out: int, known: Known, price: _Price) -> dict[str, Any]:
    notes = Counter(hit.note for hit in found.values())
    return {
        "name": reason.name, "title": reason.title, "why": reason.why, "risk": reason.risk, "leaves_out": reason.leaves_out,
        **price.of(list(found)), "left_out": left_out,
        "notes": dict(notes.most_common(EXAMPLES)) if reason.name == "junk" else {},
        "examples": [_example(unit, found[unit], known) for unit in _spread(sorted(found))],
    }  # fmt: skip


def _spread(units: Sequence[int]) -> list[int]:
    """A few of them, from everywhere."""
    return [units[i * len(units) // EXAMPLES] for i in range(EXAMPLES)] if len(units) > EXAMPLES else list(units)


def _example(unit: int, hit: Hit, known: Known) -> dict[str, Any]:
    other = known.held if hit.in_held else known.side
    text, found = _shown(known.side, unit), {"row": known.side.where(unit), "note": hit.note}
    if hit.beside is None or other is None:
        return {**found, "text": text}
    beside = {"beside": other.where(hit.beside), "beside_text": _shown(other, hit.beside), "beside_held_out": hit.in_held}
    return {**found, "text": text, **beside}


def _shown(side: Side, unit: int) -> str:
    text = _told(Example.from_json(side.table.example_json(int(side.first[unit])), ""))
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"


def _remarks(recipe: Parts, held: Side | None, speed: Speed | None, told: Sequence[str], scores: RowScores | None) -> list[str]:
    own = [] if scores is None else [f"losses of {counted(scores.known, 'row')}: {scores.source}"]
    if held is None:
        own.append("leaks are not looked for: the recipe holds out no rows (data.eval)")
    if recipe.data.select is not None:
        own.append("data.select has no effect here: all rows are looked at")
    if speed is None:
        own.append("GPU seconds are unknown: name a GPU with --gpu")
    return [*own, *told]
