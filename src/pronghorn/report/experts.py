"""How evenly a mixture's experts were used: tokens per expert and layer, out of the run's log.

An event "experts" holds what was counted since the one before: {"step", "counts": {layer: [tokens of each expert]}}. Every
token goes to all of its experts, whatever the balance: none is ever dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pronghorn.errors import counted
from pronghorn.report import number_format

MOST_LAYERS = 128  # shown: keeps the page small
MOST_EXPERTS = 256


@dataclass(frozen=True, slots=True)
class LayerLoad:
    layer: int
    counts: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The busiest expert's tokens over the mean: 1 is even, the number of experts is all to one."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 1.0

    @property
    def unused(self) -> int:
        return sum(count == 0 for count in self.counts)


def expert_load(kept: Sequence[dict[str, Any]]) -> list[LayerLoad]:
    """Expert load of the whole run, layer by layer; empty for a model without experts. `kept`: as `history` gives it."""
    sums: dict[int, list[int]] = {}
    for event in kept:
        if event["event"] != "experts":
            continue
        for layer, counts in (event.get("counts") or {}).items():
            before = sums.get(int(layer)) or [0] * len(counts)
            sums[int(layer)] = [a + int(b) for a, b in zip(before, counts, strict=True)]
    return [LayerLoad(layer, tuple(counts)) for layer, counts in sorted(sums.items())]


def experts_line(kept: Sequence[dict[str, Any]]) -> str:
    """For the summary; empty where there are no experts."""
    layers = expert_load(kept)
    if not layers:
        return ""
    worst = max(layers, key=lambda load: load.imbalance)
    mean = sum(load.imbalance for load in layers) / len(layers)
    return (
        f"busiest expert: {mean:.2f} times the mean load over {counted(len(layers), 'layer')}, at most "
        f"{worst.imbalance:.2f} in layer {worst.layer}; 0 tokens dropped"
    )


def experts_section(kept: Sequence[dict[str, Any]]) -> str:
    """For report.html; nothing where there are no experts."""
    layers = expert_load(kept)
    if not layers:
        return ""
    rows = []
    for load in layers[:MOST_LAYERS]:
        total, most = sum(load.counts), max(load.counts) or 1
        cells = "".join(
            f'<i style="flex:1;height:14px;background:var(--s-step);opacity:{0.06 + 0.94 * count / most:.3f}" '
            f'title="expert {number}: {count:,} tokens, {number_format.percent(count / total if total else 0.0)}"></i>'
            for number, count in enumerate(load.counts[:MOST_EXPERTS])
        )
        rows.append(
            f'<tr><td class="n">{load.layer}</td><td style="width:60%"><div style="display:flex;gap:1px">{cells}</div></td>'
            f'<td class="n">{number_format.count(total)}</td><td class="n">{load.imbalance:.2f}</td>'
            f'<td class="n">{load.unused}</td></tr>'
        )
    head = "".join(f'<th class="n">{escape(word)}</th>' if word else "<th>experts, from first to last</th>"
                   for word in ("layer", "", "tokens × experts per token", "busiest / mean", "unused"))  # fmt: skip
    worst = max(layers, key=lambda load: load.imbalance)
    note = (
        f"Dropped tokens: 0. Most uneven: layer {worst.layer}, whose busiest expert has {worst.imbalance:.2f} times the "
        "mean load. In the last layer, only tokens with a loss pass through the experts, unless the load-balancing loss "
        "is on."
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<h2>Experts</h2><div class="card wide">{table}<p class="note">{note}</p></div>'
