"""`pronghorn data stats`: how long the rows are, what is dropped and why, what could be, and how well they pack.

Everything slow behind it is cached by `prepare.py`; a second call needs neither tokenizer nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pronghorn.data.encode.cached_rows import Rows, tokenized_rows
from pronghorn.data.preference.pair_choices import first_rows
from pronghorn.data.preference.pair_stats import PairStats, pair_stats
from pronghorn.data.prepare import Counts, choose, findings
from pronghorn.errors import counted
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe_objective import Rows as Wanted
from pronghorn.recipe_parts import Data

BINS = 12  # of the histogram; what lies beyond the 99th percentile shares the last one
BAR = 40  # characters of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True, slots=True)
class Bin:
    low: int  # tokens, from
    high: int | None  # up to, not included; None: no upper end
    rows: int


@dataclass(frozen=True, slots=True)
class Droppable:
    """Rows that could be dropped, and one of them to look at."""

    rows: int
    example: str = ""


@dataclass(frozen=True, slots=True)
class Lengths:
    smallest: int
    median: int
    mean: float
    p95: int
    largest: int
    longest_row: str
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class Packing:
    capacity: int
    packs: int
    efficiency: float  # share of all slots that hold a real token


@dataclass(frozen=True, slots=True)
class Stats:
    counts: Counts
    max_length: int
    loss_share: float
    lengths: Lengths  # of all rows that could be tokenized, before any is dropped
    exact_duplicates: Droppable
    near_duplicates: Droppable | None  # beyond the exact ones; None: preference data, whose answers are alike
    junk: dict[str, Droppable]
    packing: Packing
    bad_rows_file: str
    remarks: tuple[str, ...]
    pairs: PairStats | None = None  # of preference data

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def table(self) -> RenderableType:
        """For people."""
        remarks = [Text(f"! {remark}", style="yellow") for remark in self.remarks]
        lengths = (Text("tokens per row", style="bold"), _histogram(self.lengths, self.max_length))
        pairs = () if self.pairs is None else (self.pairs.text(), Text())
        packing = _packing_line(self.packing)
        return Group(_headline(self), Text(), *lengths, Text(), *pairs, _fates(self), Text(), packing, *remarks)


def collect(
    spec: Data,
    capacity: int,
    seed: int,
    tokenizer: Tokenizer,
    *,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    wanted: Wanted = "documents",
    answer: int = 0,
) -> Stats:
    """`tokenizer` may be a `TokenizerFiles`, which is not even loaded when the rows are in the cache."""
    from pronghorn.data.pack.packing import pack
    from pronghorn.data.preference.pair_packing import groups_of

    rows = tokenized_rows(spec.train, spec, tokenizer, progress=progress, wanted=wanted)
    found = findings(rows, near=True, progress=progress)
    chosen = choose(rows, spec, found, strict=False, capacity=capacity, answer=answer)
    counts, pairs = chosen.counts, pair_stats(chosen.tokens)
    packs = pack(groups_of(chosen.tokens.sharing(wanted == "pairs")), capacity, seed=seed, epoch=0)
    return Stats(
        counts=counts, max_length=spec.max_length - answer,
        loss_share=counts.loss_tokens / counts.tokens if counts.tokens else 0.0,
        lengths=_lengths(rows), exact_duplicates=_found(rows, list(found.exact)),
        near_duplicates=None if found.near is None else _found(rows, [i for i in found.near if i not in found.exact]),
        junk={why: _found(rows, [i for i, reason in found.junk.items() if reason == why])
              for why in sorted(set(found.junk.values()))},
        packing=Packing(capacity, len(packs), packs.efficiency(capacity)),
        bad_rows_file=str(rows.bad_rows_file or ""), pairs=pairs,
        remarks=(*chosen.remarks, *(pairs.remarks if pairs else ())),
    )  # fmt: skip


def _found(rows: Rows, numbers: list[int]) -> Droppable:
    """How many rows have these numbers, and the first of them; in preference data, groups."""
    first = np.isin(first_rows(rows.table), numbers).sum()
    return Droppable(int(first), rows.table.where(numbers[0]) if numbers else "")


def _lengths(rows: Rows) -> Lengths:
    lengths = rows.table.lengths
    low, median, p95, high = (int(x) for x in np.quantile(lengths, [0, 0.5, 0.95, 1], method="nearest"))
    longest = rows.table.where(int(lengths.argmax()))
    return Lengths(low, median, float(lengths.mean()), p95, high, longest, length_bins(lengths))


def length_bins(lengths: np.ndarray[Any, np.dtype[np.int32]]) -> tuple[Bin, ...]:
    """Even steps of a round width up to the 99th percentile, and one open bin beyond: a tail must not flatten the rest."""
    reach = float(np.quantile(lengths, 0.99)) / BINS
    ten = 10.0 ** np.floor(np.log10(max(reach, 1.0)))
    width = int(max(1, next(step * ten for step in (1, 2, 5, 10) if step * ten >= reach)))
    inner = np.bincount(np.minimum(lengths // width, BINS), minlength=BINS + 1)
    bins = [Bin(i * width, (i + 1) * width, int(count)) for i, count in enumerate(inner[:BINS])]
    bins.append(Bin(BINS * width, None, int(inner[BINS])))
    while len(bins) > 1 and not bins[-1].rows:
        bins.pop()
    return tuple(bins)


# For people -----------------------------------------------------------------------------------------------------------


def _headline(stats: Stats) -> Text:
    counts = stats.counts
    text = Text()
    kind = "document" if stats.pairs is None else "pair" if stats.pairs.comparisons else "answer"
    text.append(counted(counts.kept, kind), style="bold")
    rows = counted(counts.read, "row")
    text.append(f" of {rows} ({counts.format}), {counts.tokens:,} tokens, {stats.loss_share:.1%} carry loss")
    for source in counts.sources if len(counts.sources) > 1 else ():
        text.append(f"\n  {source}", style="dim")
    return text


def _histogram(lengths: Lengths, max_length: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    grid.add_column(justify="right", style="dim")
    grid.add_column()
    most = max(one.rows for one in lengths.bins)
    for one in lengths.bins:
        label = f"{one.low:,} or more" if one.high is None else f"{one.low:,} to {one.high - 1:,}"
        beyond = one.low >= max_length
        grid.add_row(label, f"{one.rows:,}", Text(_bar(one.rows / most), style="red" if beyond else "green"))
    summary = (
        f"shortest {lengths.smallest:,} · median {lengths.median:,} · mean {lengths.mean:,.0f} · 95 % below {lengths.p95:,}"
        f" · longest {lengths.largest:,} ({lengths.longest_row})"
    )
    return Group(grid, Text(summary, style="dim"))


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    if share and not eighths:
        eighths = 1  # something is never nothing
    return EIGHTHS[8] * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def _fates(stats: Stats) -> RenderableType:
    counts = stats.counts
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("what")
    grid.add_column("found", justify="right")
    grid.add_column("dropped", justify="right")
    grid.add_column("for example", style="dim")

    def row(what: str, found: int | str, dropped: int | str, example: str = "") -> None:
        cells = (f"{value:,}" if isinstance(value, int) else value for value in (found, dropped))
        grid.add_row(what, *cells, example)

    row("bad rows", counts.bad, counts.bad, stats.bad_rows_file)
    row("exact duplicates", stats.exact_duplicates.rows, counts.exact_duplicates, stats.exact_duplicates.example)
    near = stats.near_duplicates
    row("near duplicates", near.rows if near else "?", counts.near_duplicates, near.example if near else "")
    for why, found in stats.junk.items() or {"junk": Droppable(0)}.items():
        row(f"junk: {why}" if found.rows else why, found.rows, "" if len(stats.junk) > 1 else counts.junk, found.example)
    if len(stats.junk) > 1:
        row("junk, total", sum(found.rows for found in stats.junk.values()), counts.junk)
    what_else = f", {counts.truncated:,} truncated" if counts.truncated else ""
    what_else += f", split into {counts.split_into:,}" if counts.split_into else ""
    row(f"longer than {stats.max_length:,}{what_else}", counts.too_long, counts.dropped_long)
    row("without loss", counts.no_loss, counts.no_loss)
    return grid


def _packing_line(packing: Packing) -> Text:
    packs = counted(packing.packs, "pack")
    return Text.assemble((f"{packing.efficiency:.2%}", "bold"), f" of {packs} of {packing.capacity:,} tokens are real tokens")
