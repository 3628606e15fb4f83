"""A decoder layer with experts against a loop over them, as the number of experts grows: milliseconds and a picture.

    python -m benchmarks.moe_layer [--out benchmarks/results]

Qwen3-30B-A3B's layer (2,048 wide, experts of 768, 8 of them a token) with 8, 32 and 128 experts, 8,192 tokens in documents of
256, LoRA on attention. Forward and backward of one layer:

    loop      transformers' layer with its loop over the experts (`experts_implementation="eager"`)
    grouped   the same with its grouped product ("grouped_mm")
    ours      our layer, called one operation after another
    graph     our layer, replayed as a CUDA graph, as a training step runs it

The same weights and inputs; the layers' outputs and gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.bench.picture import STYLE
from benchmarks.record import record, write
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora

EXPERTS = (8, 32, 128)
DOCUMENT, WARM_UP, REPEATS = 256, 5, 20
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LABELS = {"loop": "loop over experts", "grouped": "transformers, grouped", "ours": "ours", "graph": "ours, as a graph"}


class Case:
    def __init__(self, experts: int, tokens: int, width: int = 2048, expert_width: int = 768, per_token: int = 8) -> None:
        heads = max(4, width // 64)
        config = Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=width,
            intermediate_size=width,
            moe_intermediate_size=expert_width,
            num_experts=experts,
            num_experts_per_tok=per_token,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=4,
            head_dim=width // heads * (2 if width > 256 else 1),
            norm_topk_prob=True,
        )
        torch.manual_seed(0)
        with DEVICE:
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
        self.base, self.model = base, add_adapter(base, Lora(r=16), seed=1).train()
        assert not install(self.model)
        engine = engine_of(self.model)
        assert engine is not None
        self.engine, self.layer = engine, base.model.layers[0]
        like = base.model.embed_tokens.weight
        self.h = torch.randn(tokens, width, device=DEVICE, dtype=like.dtype).requires_grad_()
        self.dh = torch.randn_like(self.h) * 1e-2
        positions = torch.arange(DOCUMENT, device=DEVICE).repeat(tokens // DOCUMENT)
        bounds = torch.arange(0, tokens + 1, DOCUMENT, dtype=torch.int32, device=DEVICE)
        pack = PackedDocuments(cu_seqlens=bounds, positions_T=positions, longest=DOCUMENT, typical=DOCUMENT)
        self.documents = Documents.of(pack, engine.positions)
        self.rotary = base.model.rotary_emb(self.h, positions[None, :DOCUMENT])
        self.parameters = [p for p in self.layer.parameters() if p.requires_grad]

    def ours(self) -> None:
        self.engine.prepare(self.h.dtype)
        self.engine.layers[0](self.h, self.documents).backward(self.dh)

    def own(self, implementation: str) -> Callable[[], None]:
        def run() -> None:
            rows = self.h.view(-1, DOCUMENT, self.h.shape[1])
            out = self.layer(rows, attention_mask=None, position_embeddings=self.rotary)
            out = out[0] if isinstance(out, tuple) else out
            out.reshape(self.h.shape).backward(self.dh)

        def chosen() -> None:
            self.base.set_experts_implementation(implementation)
            run()

        return chosen

    def clear(self) -> None:
        for tensor in (self.h, *self.parameters):
            tensor.grad = None

    def gradients(self, work: Callable[[], None]) -> list[torch.Tensor]:
        self.clear()
        work()
        found = [tensor.grad.clone() for tensor in (self.h, *self.parameters) if tensor.grad is not None]
        self.clear()
        return found

    def graph(self) -> Callable[[], None]:
        """Gradients have a place for good, as in the training step."""
        for tensor in (self.h, *self.parameters):
            tensor.grad = torch.zeros_like(tensor)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.ours()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.ours()
        return graph.replay


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest distance of a gradient from its counterpart, relative."""
    pairs = [(a.float(), b.float()) for a, b in zip(one, other, strict=True)]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-20)) for a, b in pairs)


def milliseconds(work: Callable[[], None], clear: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS if CUDA else 2):
        clear()
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if CUDA:
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[WARM_UP if CUDA else 1 :])


def measure(experts: int, tokens: int, **sizes: int) -> dict[str, Any]:
    case = Case(experts, tokens, **sizes)
    works = {"loop": case.own("eager"), "grouped": case.own("grouped_mm"), "ours": case.ours}
    truth = case.gradients(works["loop"])
    row: dict[str, Any] = {"experts": experts, "tokens": tokens, "apart": apart(case.gradients(case.ours), truth)}
    if not row["apart"] < (5e-2 if CUDA else 1e-4):
        raise RuntimeError(f"{experts} experts: our gradients are {row['apart']:.2g} away from transformers'")
    row["ms"] = {name: milliseconds(work, case.clear) for name, work in works.items()}
    if CUDA:
        replay = case.graph()
        row["ms"]["graph"] = milliseconds(replay, lambda: None)
    return row


def draw(rows: list[dict[str, Any]], where: str) -> str:
    """Bars: how many times faster than the loop."""
    width, left, bar, gap, y = 960, 210, 19, 6, 88
    best = max(row["ms"]["loop"] / ms for row in rows for ms in row["ms"].values())
    title = "A layer with experts, times faster than a loop over them"
    parts = [
        f'<text class="ink title" x="24" y="32">{title}</text>',
        f'<text class="soft" x="24" y="51">{escape(where)}</text>',
    ]
    for row in rows:
        head = f"{row['experts']} experts, {row['tokens']:,} tokens: loop {row['ms']['loop']:.2f} ms"
        parts.append(f'<text class="ink bold" x="24" y="{y}">{escape(head)}</text>')
        y += 12
        for name, ms in row["ms"].items():
            speed = row["ms"]["loop"] / ms
            length = max(1.0, (width - left - 190) * speed / best)
            kind = "ours" if name in ("ours", "graph") else "peer"
            parts.append(
                f'<text class="soft" x="{left - 10}" y="{y + bar - 5}" text-anchor="end">{escape(LABELS[name])}</text>'
                f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="{bar}" rx="3"/>'
                f'<text class="ink" x="{left + length + 8:.1f}" y="{y + bar - 5}">{speed:.1f}x  ({ms:.2f} ms)</text>'
            )
            y += bar + gap
        y += 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" height="{y}" role="img">'
        f'<style>{STYLE}</style><rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{y - 1}" rx="12"/>'
        f"{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    rows = []
    for experts in EXPERTS:
        rows.append(measure(experts, options.tokens))
        print(rows[-1], flush=True)
    result = record(
        "Milliseconds of one decoder layer with experts, forward and backward",
        f"python -m benchmarks.moe_layer --tokens {options.tokens}",
        rows,
    )
    write(options.out / "moe-layer.json", result)
    here = result["machine"]
    where = f"{here['hardware']}, torch {here['versions']['torch']}, {here['date'][:10]}"
    (options.out / "moe-layer.svg").write_text(draw(rows, where), encoding="utf-8")


if __name__ == "__main__":
    main()
