"""Answers that share their prompt attend as if each stood behind a prompt of its own: outputs and gradients in float64 against
the unshared computation, and each kernel against the definition."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from kernel_parts import Judge

import pronghorn.kernels.attention.attention as attention_module
from pronghorn.kernels.attention import attention_shared, attention_short
from pronghorn.kernels.attention.attention import attention_backward, attention_forward, attention_reference, pick_backend
from pronghorn.kernels.attention.attention_shared import SharedSpans, attention_shared_reference, shared_spans
from pronghorn.kernels.attention.attention_short import Config, Tiles
from pronghorn.kernels.runtime.dispatch import CHIPS
from tables import table

CUDA = torch.cuda.is_available()
# A group of two, a plain document, a group of three whose prompt is shorter than its answers, a group of one, padding.
SEGMENTS = (23, 9, 14, 11, 5, 12, 1, 20, 30, 17, 6)
PROMPTS = (-1, 0, 0, -1, -1, 4, 4, 4, -1, 8, -1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"sinks": True, "window": 20, "softcap": 5.0},
}


def make(device: str, dtype: torch.dtype, *, sinks: bool = False, width: int = 32, **options: Any) -> tuple[Any, ...]:
    """([dout, q, k, v, sinks or nothing], cu_seqlens, prompt_of_S, options)"""
    torch.manual_seed(1)
    heads, kv_heads, tokens = 4, 2, sum(SEGMENTS)
    shapes = [(tokens, heads, width), (tokens, heads, width), (tokens, kv_heads, width), (tokens, kv_heads, width)]
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    tensors += [torch.randn(heads, device=device).to(dtype)] if sinks else []
    ends = list(itertools.accumulate(SEGMENTS, initial=0))
    cu = torch.tensor(ends + [tokens] * 3, dtype=torch.int32, device=device)
    prompts = torch.tensor([*PROMPTS, -1, -1, -1], dtype=torch.int32, device=device)
    return tensors, cu, prompts, {"scale": 1 / math.sqrt(width), **options}


def unshared(tensors: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    """Every answer behind a copy of its prompt, by autograd through the definition of plain attention."""
    dout, *inputs = [x.detach().clone() for x in tensors]
    inputs = [x.requires_grad_() for x in inputs]
    begins = list(itertools.accumulate(SEGMENTS, initial=0))
    rows, lengths, kept = [], [], []
    for segment, prompt in enumerate(PROMPTS):
        own = range(begins[segment], begins[segment + 1])
        before = range(begins[prompt], begins[prompt + 1]) if prompt >= 0 else range(0)
        kept += range(len(rows) + len(before), len(rows) + len(before) + len(own))
        rows += [*before, *own]
        lengths.append(len(before) + len(own))
    cu = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=dout.device)
    q, k, v = (x[rows] for x in inputs[:3])
    sinks = inputs[3] if len(inputs) > 3 else None
    out = attention_reference(q, k, v, cu, sinks_N=sinks, **options)[kept]
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def computed(
    tensors: list[torch.Tensor], cu: torch.Tensor, spans: SharedSpans, options: dict[str, Any], **more: Any
) -> list[torch.Tensor]:
    dout, q, k, v = tensors[:4]
    settings = options | {"sinks_N": tensors[4] if len(tensors) > 4 else None} | spans._asdict() | more
    out, lse = attention_forward(q, k, v, cu, max(SEGMENTS), **settings)
    grads = attention_backward(dout, q, k, v, out, lse, cu, max(SEGMENTS), **settings)
    return [out, *(grad for grad in grads if grad is not None)]


@table("name", list(CASES))
def test_in_float64_it_is_the_unshared_computation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition and plain torch, answer by answer and all answers to a prompt together, within 1e-10."""
    tensors, cu, prompts, options = make("cpu", torch.float64, **CASES[name])
    spans = shared_spans(cu, prompts, len(tensors[0]))
    truth = unshared(tensors, options)
    inputs = [x.clone().requires_grad_() for x in tensors[1:]]
    sinks = inputs[3] if len(inputs) > 3 else None
    out = attention_shared_reference(*inputs[:3], spans, sinks_N=sinks, **options)
    defined = [out.detach(), *torch.autograd.grad(out, inputs, tensors[0])]
    for many in (1000, 2):
        monkeypatch.setattr(attention_shared, "MANY", many)
        found = computed(tensors, cu, spans, options)
        for what, exact, one, other in zip(["o", "q", "k", "v", "sinks"], truth, defined, found, strict=False):
            assert float((one - exact).abs().max()) < 1e-10, (what, "definition")
            assert float((other - exact).abs().max()) < 1e-10, (what, "plain torch", many)


def test_in_bf16_plain_torch_is_as_near_as_the_unshared_one(judge: Judge) -> None:
    tensors, cu, prompts, options = make("cpu", torch.bfloat16, **CASES["all"])
    spans = shared_spans(cu, prompts, len(tensors[0]))
    truth, yardstick = unshared([x.double() for x in tensors], options), unshared(tensors, options)
    for what, mine, theirs, exact in zip(
        ["o", "q", "k", "v", "sinks"], computed(tensors, cu, spans, options), yardstick, truth, strict=False
    ):
        judge(mine, theirs, exact, what)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        small = Config(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))
        monkeypatch.setattr(attention_short, "config_for", lambda *_: small)


# On a GPU with its own tiles: those of heads above 128 are for 16 bits alone, and 192 fills three quarters of them.
ON_A_GPU = [(name, dtype, 32) for name in CASES for dtype in (torch.float32, torch.bfloat16)]
ON_A_GPU += [(name, torch.bfloat16, width) for name in CASES for width in (192, 256)]
INTERPRETED = [("plain", torch.float32, 32), ("all", torch.float32, 192)]


@pytest.mark.parametrize(("name", "dtype", "width"), ON_A_GPU if CUDA else INTERPRETED, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_the_kernel_for_short_documents(where: str, name: str, dtype: torch.dtype, width: int, judge: Judge) -> None:
    tensors, cu, prompts, options = make(where, dtype, width=width, **CASES[name])
    spans = shared_spans(cu, prompts, len(tensors[0]))
    # On the device itself: plain torch sums in another order there than on a CPU.
    truth, yardstick = unshared([x.double() for x in tensors], options), unshared(tensors, options)
    got = computed(tensors, cu, spans, options, backend="short")
    for what, mine, theirs, exact in zip(["o", "q", "k", "v", "sinks"], got, yardstick, truth, strict=False):
        judge(mine, theirs, exact, f"{name} {what}")


# Four answers to a prompt, behind a group whose last answer ends within a block.
GROUP = ((40, 30, 50, 45, 50, 35, 40), (-1, 0, -1, 2, 2, 2, 2))


@pytest.mark.skipif(CUDA, reason="counted in the interpreter")
@table("window", [None, 24])
def test_tiles_read_the_prompt_and_their_own_answer(where: str, monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """A block of keys is read only if some row of the tile sees one of them, with windows nearly so; so is a block of rows by
    dk and dv, without windows."""
    lengths, prompts = GROUP
    tokens, heads, counts = sum(lengths), 2, dict.fromkeys(("key_block", "_way_on"), 0)
    cu = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
    spans = shared_spans(cu, torch.tensor(prompts, dtype=torch.int32), tokens)
    tiles = Config(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))
    monkeypatch.setattr(attention_short, "config_for", lambda *_: tiles)

    def counted(name: str, inner: Any, *args: Any) -> Any:
        counts[name] += 1
        return inner(*args)

    for name in counts:
        monkeypatch.setattr(attention_short, name, partial(counted, name, getattr(attention_short, name)))
    q, k = (torch.randn(tokens, n, 16) for n in (heads, 1))
    settings: dict[str, Any] = {"scale": 0.25, "window": window, "backend": "short", **spans._asdict()}
    out, lse = attention_forward(q, k, k, cu, max(lengths), **settings)
    forward = counts["key_block"]
    attention_backward(q, q, k, k, out, lse, cu, max(lengths), **settings)
    same, each = torch.zeros(tokens, 1, 1), torch.eye(tokens)[:, None]  # values: what of each key arrives at a row
    seen_TT = attention_shared_reference(same, same, each, spans, scale=1.0, window=window)[:, 0] > 0

    def needed(part: Tiles) -> int:
        rows = part.rows // heads
        padded = torch.nn.functional.pad(seen_TT, (0, -tokens % part.keys, 0, -tokens % rows))
        return int(padded.unflatten(1, (-1, part.keys)).unflatten(0, (-1, rows)).any(3).any(1).sum())

    visited = (forward, counts["key_block"] - forward, counts["_way_on"])
    more = [count - needed(part) for count, part in zip(visited, tiles, strict=True)]
    assert more == [0, 0, 0] if window is None else max(more[:2]) <= 1, (visited, more)
    firsts = range(0, tokens, tiles.forward.rows // heads)
    one_range = sum(-(-min(first + 16, tokens) // 16) - int(spans.prefix_2T[0, first]) // 16 for first in firsts)
    assert one_range > 1.3 * forward, (one_range, forward)


@table(
    ("dtype", "width", "shared", "picked"),
    [(torch.bfloat16, 128, True, "short"), (torch.bfloat16, 256, True, "short"), (torch.float16, 192, True, "short"),
     (torch.float32, 128, True, "short"), (torch.float32, 256, True, "torch"), (torch.bfloat16, 512, True, "short"),
     (torch.bfloat16, 520, True, "torch"), (torch.bfloat16, 512, False, "short"), (torch.float16, 320, False, "short"),
     (torch.bfloat16, 520, False, "flex"), (torch.float32, 512, False, "flex"), (torch.bfloat16, 256, False, "flash2")],
)  # fmt: skip
def test_what_no_flash_kernel_computes_is_ours_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, shared: bool, picked: str
) -> None:
    """Gemma's heads: of 256 with shared prompts, of 512 always, whatever the documents' length."""
    monkeypatch.setattr(attention_module, "HAS_TRITON", True)
    monkeypatch.setattr(attention_module, "cuda_capability", lambda device: (9, 0))
    attention_module._pick.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert pick_backend(torch.device("cuda", 0), dtype, width, shared=shared) == picked
    if width <= attention_short.ALONE_WIDTH and dtype != torch.float32:
        for chip in CHIPS.values():
            tiles = attention_short.config_for(width, dtype, chip)
            assert all(part.rows * part.keys for part in tiles)
    attention_module._pick.cache_clear()


def test_only_what_knows_shared_prefixes_is_picked() -> None:
    assert pick_backend(torch.device("cpu"), torch.float32, 64, shared=True, typical=200) == "torch"
