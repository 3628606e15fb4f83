"""Sections of report.html about the data, the evaluations, the answers, memory and cost. Each is nothing where there is nothing
to show. Values of the log are looked at before they are used: a damaged log still gives a page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from pronghorn.report import number_format
from pronghorn.report.account import Account
from pronghorn.report.answers import AnswerRow, mean_scores
from pronghorn.report.ranks import ranks_line
from pronghorn.report.run_log import as_number
from pronghorn.report.run_stats import RunStats

FIRST_ANSWERS = 6  # shown at once, the others on request
MOST_ANSWERS, MOST_EVALUATIONS, MOST_SOURCES, MOST_TEXT = 30, 40, 50, 3000  # keeps the page below 2 MB whatever the run says


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows if value)
    return f'<dl class="facts">{shown}</dl>'


def _number(value: object) -> float:
    return as_number(value) if not isinstance(value, bool) else math.nan


def _shown_as(form: Callable[[float], str], otherwise: str = "") -> Callable[[Any], str]:
    """A function that shows a value of the log which is a finite number, and `otherwise` for any other."""

    def shown(value: object) -> str:
        number = _number(value)
        return form(number) if math.isfinite(number) else otherwise

    return shown


_count = _shown_as("{:,.0f}".format)
_score = _shown_as("{:.4g}".format, number_format.MISSING)
_gb = _shown_as(lambda number: f"{number / 1e9:,.2f} GB")
_seconds = _shown_as(number_format.duration)


# ---- data ----------------------------------------------------------------------------------------------------------------


def data_section(start: dict[str, Any]) -> str:
    """`start`: the last start event."""
    data = start.get("data") or {}
    if not data:
        return ""
    tokens, loss = _number(data.get("tokens")), _number(data.get("loss_tokens"))
    share = f"{number_format.percent(loss / tokens)} carry loss" if tokens > 0 and math.isfinite(loss) else ""
    dropped = data.get("dropped") if isinstance(data.get("dropped"), dict) else {}
    held_out = start.get("eval_documents") or 0
    efficiency = _number(data.get("efficiency"))
    lengths = data.get("lengths") if isinstance(data.get("lengths"), dict) else {}
    unused = data.get("unused_columns")
    chosen = data["select"] if isinstance(data.get("select"), dict) else {}
    left_out = chosen["left_out"] if isinstance(chosen.get("left_out"), dict) else {}
    rows = [
        ("rows read", _count(data.get("read"))), ("format", str(data.get("format") or "")),
        *((f"dropped: {why}", _count(number)) for why, number in (dropped or {}).items()),
        *((f"left out: {why}", _count(number)) for why, number in left_out.items()),
        ("selection", " · SHA-256 ".join(str(part) for part in (chosen.get("file"), chosen.get("sha256")) if part)),
        ("truncated", _count(data.get("truncated")) if data.get("truncated") else ""),
        ("pieces of split rows", _count(data.get("split_into")) if data.get("split_into") else ""),
        ("trained on", f"{_count(data.get('documents'))} documents"),
        ("held out", f"{held_out:,} documents" if held_out else "none"),
        ("tokens", f"{_count(tokens)}, {share}" if share else _count(tokens)),
        ("packing", f"{number_format.percent(efficiency)} full" if math.isfinite(efficiency) else ""),
        ("columns not used", ", ".join(str(name) for name in unused)[:MOST_TEXT] if isinstance(unused, list) else ""),
    ]  # fmt: skip
    right = _histogram(lengths or {})
    return f'<h2>Data</h2><div class="card"><div class="grid2">{pairs(rows)}{right}</div>{_sources(data.get("sources"))}</div>'


def _histogram(lengths: dict[str, Any]) -> str:
    bins = [one for one in lengths.get("bins") or [] if isinstance(one, list) and len(one) == 3] \
        if isinstance(lengths.get("bins"), list) else []  # fmt: skip
    rows = [_number(one[2]) for one in bins]
    if not rows or not all(number >= 0 for number in rows) or max(rows) <= 0:
        return ""
    bars = []
    for (low, high, _), number in zip(bins, rows, strict=True):
        label = f"{_count(low)} or more" if high is None else f"{_count(low)} to {_count(_number(high) - 1)}"
        height = max(1.5 if number else 0.0, 100 * number / max(rows))
        bars.append(f'<div title="{escape(label)} tokens: {number:,.0f} rows"><i style="height:{height:.1f}%"></i>'
                    f"<b>{_count(low)}{'+' if high is None else ''}</b></div>")  # fmt: skip
    told = [f"{name} {_count(lengths.get(key))}" for name, key in
            (("shortest", "shortest"), ("median", "median"), ("mean", "mean"), ("95 % below", "p95"), ("longest", "longest"))
            if _count(lengths.get(key))]  # fmt: skip
    return (f'<div><h4>documents by length, in tokens</h4><div class="hist">{"".join(bars)}</div>'
            f'<p class="note">{" · ".join(told)}</p></div>')  # fmt: skip


def _sources(sources: object) -> str:
    found = [one for one in sources if isinstance(one, dict)] if isinstance(sources, list) else []
    if not found:
        return ""
    rows = "".join(
        f'<tr><td class="path">{escape(str(one.get("name", ""))[:MOST_TEXT])}</td><td>{escape(str(one.get("format", "")))}</td>'
        f'<td class="n">{_count(one.get("rows"))}{_weight(one.get("weight"))}</td></tr>'
        for one in found[:MOST_SOURCES]
    )
    more = f'<p class="note">and {len(found) - MOST_SOURCES:,} more</p>' if len(found) > MOST_SOURCES else ""
    return f'<table class="spaced"><tr><th>source</th><th>format</th><th class="n">rows read</th></tr>{rows}</table>{more}'


def _weight(weight: object) -> str:
    """How often each row comes in an epoch, where that is not once."""
    times = _number(weight)
    return f" × {times:g}" if math.isfinite(times) and times != 1 else ""


# ---- evaluations and answers ---------------------------------------------------------------------------------------------


def evaluations_section(evals: Sequence[dict[str, Any]], best_step: int | None) -> str:
    if not evals:
        return ""
    names = list(dict.fromkeys(str(name) for e in evals for name in _metrics(e)))
    losses = [name for name in ("loss", "perplexity") if any(math.isfinite(as_number(e.get(name))) for e in evals)]
    head = "".join(f'<th class="n">{escape(name)}</th>' for name in ("step", *losses, *names, "time"))
    rows = []
    for e in evals[-MOST_EVALUATIONS:]:
        best = e.get("step") == best_step
        cells = [
            f"{e.get('step', 0):,}",
            *(number_format.figure(as_number(e.get(name))) for name in losses),
            *(_score(_metrics(e).get(name)) for name in names),
            number_format.duration(as_number(e.get("seconds"))),
        ]
        shown = "".join(f'<td class="n">{escape(text)}</td>' for text in cells)
        rows.append(f"<tr{' class=best' if best else ''}>{shown}<th>{'best' if best else ''}</th></tr>")
    left_out = len(evals) - MOST_EVALUATIONS
    note = f'<p class="note">The last {MOST_EVALUATIONS} of {len(evals):,}.</p>' if left_out > 0 else ""
    return (f'<h2>Evaluations</h2><div class="card wide"><table class="evals"><tr>{head}<th></th></tr>{"".join(rows)}</table>'
            f"{note}</div>")  # fmt: skip


def _metrics(evaluation: dict[str, Any]) -> dict[str, Any]:
    found = evaluation.get("metrics")
    return found if isinstance(found, dict) else {}


def answers_section(answers: Sequence[AnswerRow]) -> str:
    """Held-out rows: what was expected, what the model said before training and what it says now. Wrong answers come first,
    and none of those that the page has room for is hidden."""
    if not answers:
        return ""
    steps = {one.step for one in answers if one.step is not None}
    before, now = "before training", f"after step {steps.pop():,}" if len(steps) == 1 else "after training"
    compared = any(one.base is not None for one in answers)
    rows = []
    ordered = sorted(answers, key=lambda one: _is_right(one.answer, one.expected, one.scores))
    for one in ordered[:MOST_ANSWERS]:
        cells = [_cell("prompt", one.prompt), _cell("expected", one.expected)]
        if compared:
            said = number_format.MISSING if one.base is None else one.base
            cells.append(_cell(before, said, _mark(one.base or "", one.expected, one.base_scores)))
        cells.append(_cell(now, one.answer, _mark(one.answer, one.expected, one.scores)))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    wrong = sum(not _is_right(one.answer, one.expected, one.scores) for one in ordered)
    told = f"{wrong:,} of {len(answers):,} wrong, listed first" if wrong else f"all {len(answers):,} right"
    head = "".join(f"<th>{escape(label)}</th>" for label in ("prompt", "expected", *[before] * compared, now))
    table = f'<table class="answers"><thead><tr>{head}</tr></thead><tbody>{{}}</tbody></table>'
    first = max(wrong, FIRST_ANSWERS)
    shown, others = table.format("".join(rows[:first])), rows[first:]
    if others:
        of = f", {MOST_ANSWERS} of {len(answers):,} in all; every one is in answers.jsonl" * (len(answers) > MOST_ANSWERS)
        shown += f"<details><summary>{len(others)} more{of}</summary>{table.format(''.join(others))}</details>"
    return f'<h2>Answers</h2><div class="card"><p class="note">{told}</p>{shown}</div>'


def worst_rows_section(kept: Sequence[dict[str, Any]]) -> str:
    """Training rows with the highest mean loss, each time they were trained on."""
    found = next((e.get("worst") for e in reversed(kept) if e["event"] == "rows"), None)
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    if not rows:
        return ""
    cells = []
    for row in rows[:MOST_ANSWERS]:
        losses = row.get("losses")
        losses = losses if isinstance(losses, list) else []
        told = ", ".join(number_format.figure(as_number(loss)) for loss in losses[-MOST_EVALUATIONS:])
        cells.append(f"<tr>{_cell('row', str(row.get('row')))}{_cell('loss', told)}{_cell('text', str(row.get('text')))}</tr>")
    head = "<thead><tr><th>row</th><th>loss of each epoch</th><th>its end</th></tr></thead>"
    note = '<p class="note">Wrong or odd rows are often among them. rows.jsonl has the loss of each row.</p>'
    return (
        f'<h2>Hardest training rows</h2><div class="card">{note}<table class="answers">{head}'
        f"<tbody>{''.join(cells)}</tbody></table></div>"
    )


def score_tiles(answers: Sequence[AnswerRow]) -> list[tuple[str, str, str]]:
    """What the answers score: name, value, and the base model's."""
    tiles = []
    for name, (before, after) in mean_scores(answers).items():
        whole = all(one.scores.get(name) in (0.0, 1.0) for one in answers)
        value = _of(after, len(answers)) if whole else f"{after:.4g}"
        was = "" if before is None else f"before training: {_of(before, len(answers)) if whole else f'{before:.4g}'}"
        tiles.append((name, value, was))
    return tiles


def _of(mean: float, rows: int) -> str:
    return f"{round(mean * rows):,} of {rows:,}"


def _is_right(answer: str, expected: str, scores: dict[str, float]) -> bool:
    """By the first score, if there is one; else by whether the answer is the expected one."""
    value = next(iter(scores.values()), None)
    return answer.strip() == expected.strip() if value is None else value >= 1.0


def _mark(answer: str, expected: str, scores: dict[str, float]) -> str:
    right = _is_right(answer, expected, scores)
    return '<span class="mark ok" title="right">✓</span>' if right else '<span class="mark ko" title="not right">✗</span>'


def _cell(label: str, text: str, sign: str = "") -> str:
    short = text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"
    return f'<td data-label="{escape(label)}">{sign}<div class="said">{escape(short)}</div></td>'


# ---- memory and cost -----------------------------------------------------------------------------------------------------


def memory_section(kept: Sequence[dict[str, Any]]) -> str:
    """The plan that held last, what was measured under it, and the process's own peak."""
    last = next((i for i in range(len(kept) - 1, -1, -1) if kept[i]["event"] == "plan"), None)
    plan_event: dict[str, Any] = {} if last is None else kept[last]
    plan: dict[str, Any] = plan_event["plan"] if isinstance(plan_event.get("plan"), dict) else {}
    later = kept if last is None else kept[last:]
    measured: dict[str, Any] = next((e for e in reversed(later) if e["event"] == "measured"), {})
    end: dict[str, Any] = next((e for e in reversed(later) if e["event"] == "end"), {})
    rows = [
        ("tensors on the GPU, peak", _gb(plan.get("peak_bytes")), _gb(measured.get("peak_bytes"))),
        ("GPU total, with driver and fragmentation", _gb(plan.get("device_bytes")), _gb(measured.get("device_bytes"))),
        ("budget for tensors", _gb(plan.get("budget")), ""),
        ("activations in host RAM, pinned", _gb(plan.get("host_bytes")) if plan.get("host_bytes") else "",
         _gb(plan_event.get("pinned_bytes")) if plan_event.get("pinned_bytes") else ""),
        ("RAM of the process, peak", "", _gb(end.get("host_peak_bytes"))),
        ("time per step", _seconds(plan_event.get("step_seconds")), _seconds(measured.get("step_seconds"))),
    ]  # fmt: skip
    shown = "".join(
        f'<tr><td>{name}</td><td class="n">{before or number_format.MISSING}</td>'
        f'<td class="n">{after or number_format.MISSING}</td></tr>'
        for name, before, after in rows
        if before or after
    )
    lines = [str(line) for event in (plan_event, measured) for line in event.get("text") or []]
    text = escape("\n".join(lines)[: 4 * MOST_TEXT])
    details = f'<details class="wide"><summary>the plan, layer by layer</summary><pre>{text}</pre></details>' if text else ""
    if not shown and not details:
        return ""
    table = f'<table><tr><th></th><th class="n">predicted</th><th class="n">measured</th></tr>{shown}</table>' if shown else ""
    return f'<h2>Memory</h2><div class="card">{table}{details}</div>'


def cost_section(run: RunStats, kept: Sequence[dict[str, Any]]) -> str:
    if not sum(run.stages.values()):
        return ""
    rows = [("wall-clock", number_format.duration(run.seconds)),
            ("GPU hours", f"{run.gpu_hours:,.2f}" if run.gpus else ""),
            ("outside training", f"{number_format.percent(run.wasted_share)} of the time: loading, evaluation, checkpoints"),
            ("tokens per hour", number_format.count(run.tokens / run.seconds * 3600) if run.seconds > 0 else "")]  # fmt: skip
    rows.append(("ranks", ranks_line(kept)))
    if run.money is not None and run.price is not None:
        rows.append(("price", f"about {run.money:,.2f} USD at {run.price:,.2f} USD per hour ({run.price_note})"))
    elif run.gpus:
        rows.append(("price", "unknown for this GPU"))
    return f'<h2>Cost</h2><div class="card">{pairs(rows)}</div>'


def account_section(books: Account | None) -> str:
    return f'<h2>Account</h2><div class="card">{pairs(books.lines())}</div>' if books else ""
