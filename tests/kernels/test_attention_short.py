"""Our attention kernel for short documents: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.attention import attention_short
from pronghorn.kernels.attention.attention import attention_backward, attention_forward, attention_reference, pick_backend
from pronghorn.kernels.attention.attention_short import Config, Tiles
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.attention.rope import qk_rope_reference
from tables import covering

CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PAIR_DTYPES = DTYPES[:2]
# One token; documents that end in the middle of a block, at its end, and that span several; padding of no tokens behind.
LENGTHS = (1, 37, 26, 64, 3, 90, 5) if CUDA else (1, 20, 11, 32, 2, 29)
WHOLE = (*LENGTHS, 30) if CUDA else (*LENGTHS, 33)  # no tile reaches beyond the pack: nothing is masked where it is loaded
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"heads": 3, "kv_heads": 1},
    "window": {"window": 17},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True, "kv_heads": 1},
    "all": {"sinks": True, "window": 20, "softcap": 5.0, "kv_heads": 1},
    "odd width": {"width": 24},
    "whole": {"lengths": WHOLE},
    "whole, two packs of a group": {"lengths": WHOLE, "heads": 6, "kv_heads": 1},
    "whole, window and softcap": {"lengths": WHOLE, "window": 20, "softcap": 5.0, "kv_heads": 1},
}


# Two key/value heads in a program, or twice two; and where it cannot be: an odd number of them, groups of no power of 2.
PAIRS: dict[str, dict[str, Any]] = {
    "plain": {"heads": 4, "kv_heads": 4},
    "grouped": {"heads": 8},
    "window": {"heads": 4, "window": 17},
    "softcap": {"heads": 4, "softcap": 2.0},
    "sinks": {"heads": 4, "sinks": True},
    "odd width": {"heads": 4, "width": 24},
    "whole, all": {"lengths": WHOLE, "heads": 8, "kv_heads": 4, "sinks": True, "window": 20, "softcap": 5.0},
}
NO_PAIRS: dict[str, dict[str, Any]] = {"three": {"heads": 3, "kv_heads": 3}, "groups of three": {"heads": 6}}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a document at sizes an interpreter can do; unequal, so that a mix-up of the two shows."""
    if not CUDA:
        small = Config(Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))
        monkeypatch.setattr(attention_short, "config_for", lambda *_: small)


def make(
    device: str, dtype: torch.dtype, lengths: tuple[int, ...] = LENGTHS, *, heads: int = 2, kv_heads: int = 2, width: int = 32,
    sinks: bool = False, **options: Any,
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:  # fmt: skip
    """([dout, q, k, v, sinks or nothing], cu_seqlens, options); q, k and v are parts of one buffer with wider rows."""
    tokens = sum(lengths)
    parts = [heads * width, kv_heads * width, kv_heads * width, 16]
    q, k, v, _ = torch.randn(tokens, sum(parts), device=device).to(dtype).split(parts, dim=1)
    tensors = [torch.randn(tokens, heads, width, device=device).to(dtype), q.unflatten(1, (heads, width)),
               k.unflatten(1, (kv_heads, width)), v.unflatten(1, (kv_heads, width))]  # fmt: skip
    tensors += [torch.randn(heads, device=device)] if sinks else []
    ends = list(itertools.accumulate(lengths, initial=0))
    cu = torch.tensor(ends + [tokens] * 4, dtype=torch.int32, device=device)
    return tensors, cu, {"scale": 1 / math.sqrt(width), **options}


def by_autograd(
    tensors: list[torch.Tensor], cu: torch.Tensor, options: dict[str, Any], dtype: torch.dtype
) -> list[torch.Tensor]:
    """On the device itself: plain torch sums in another order there than on a CPU."""
    dout, *inputs = [x.detach().to(dtype) for x in tensors]
    inputs = [x.clone().requires_grad_() for x in inputs]
    sinks = inputs[3] if len(inputs) > 3 else None
    out = attention_reference(*inputs[:3], cu, sinks_N=sinks, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def ours(tensors: list[torch.Tensor], cu: torch.Tensor, options: dict[str, Any], **more: Any) -> list[torch.Tensor]:
    dout, q, k, v = tensors[:4]
    settings = options | {"sinks_N": tensors[4] if len(tensors) > 4 else None, "backend": "short"} | more
    rotated = settings.pop("rotated", None)
    out, lse = attention_forward(q, k, v, cu, max(LENGTHS), **settings)
    grads = attention_backward(dout, q, k, v, out, lse, cu, max(LENGTHS), rotated=rotated, **settings)
    return [out, *(grad for grad in grads if grad is not None)]


# The interpreter takes half a second a case: each in one dtype in turn, the one with everything in all of them.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(CASES, DTYPES)]
    if CUDA
    else [*covering(CASES, DTYPES), ("all", torch.float32), ("all", torch.bfloat16)],
    ids=str,
)
def test_forward_and_backward_are_as_near_to_the_truth_as_plain_torch(
    where: str, name: str, dtype: torch.dtype, judge: Judge
) -> None:
    if not CUDA and (dtype == torch.bfloat16 or (dtype == torch.float16 and name not in ("all", "whole"))):
        pytest.skip("the interpreter multiplies bf16 by its bits, and what fp16 adds to fp32 one case shows")
    tensors, cu, options = make(where, dtype, **CASES[name])
    truth, yardstick = (by_autograd(tensors, cu, options, kind) for kind in (torch.float64, dtype))
    got = ours(tensors, cu, options)
    assert len(got) == len(truth)
    for what, mine, theirs, exact in zip(("out", "dq", "dk", "dv", "dsinks"), got, yardstick, truth, strict=False):
        judge(mine, theirs, exact, f"{name} {what}")


def test_the_real_tiles_compute_the_same(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, tolerance = (torch.bfloat16, 3e-2) if CUDA else (torch.float32, 1e-5)
    tensors, cu, options = make(where, dtype, heads=4)  # two key/value heads: tiles that take a pair of them do
    expected = by_autograd(tensors, cu, options, torch.float64)
    for width, configs in attention_short.CONFIGS.items():
        for config in configs:
            monkeypatch.setattr(attention_short, "config_for", lambda *_, config=config: config)
            for mine, exact in zip(ours(tensors, cu, options), expected, strict=True):
                torch.testing.assert_close(mine.double(), exact, rtol=tolerance, atol=tolerance, msg=f"{width} {config}")


@pytest.mark.parametrize("config", [attention_short.CONFIGS[512][0], attention_short.SMALL_CONFIGS[512]])
def test_heads_of_512(where: str, judge: Judge, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's global layers, in the tiles of large and of small chips."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    monkeypatch.setattr(attention_short, "config_for", lambda *_: config)
    tensors, cu, options = make(where, dtype, heads=4, kv_heads=1, width=512, window=17)
    truth, yardstick = (by_autograd(tensors, cu, options, kind) for kind in (torch.float64, dtype))
    for what, mine, theirs, exact in zip(("out", "dq", "dk", "dv"), ours(tensors, cu, options), yardstick, truth, strict=True):
        judge(mine, theirs, exact, what)


class _Noted:
    """A kernel; notes with how many programs it is launched, and whether for pairs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*inputs: Any, **options: Any) -> None:
            self.launches.append((options["PAIR"], *grid))
            self.kernel[grid](*inputs, **options)

        return launch


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product([*PAIRS, *NO_PAIRS], PAIR_DTYPES)]
    if CUDA
    else [*covering([*PAIRS, *NO_PAIRS], PAIR_DTYPES), ("whole, all", torch.bfloat16)],
    ids=str,
)
def test_two_heads_in_a_program_give_the_bits_of_one(
    where: str, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CUDA and dtype == torch.bfloat16 and name not in ("softcap", "whole, all"):
        pytest.skip("the interpreter multiplies bf16 by its bits: large numbers, which a soft-cap keeps finite")
    case = {"lengths": LENGTHS} | (PAIRS | NO_PAIRS)[name]
    (_, q, k, v, *sinks), cu, options = make(where, dtype, **case)
    settings = options | {"sinks_N": sinks[0] if sinks else None, "backend": "short"}
    kernel = _Noted(attention_short._forward_kernel)
    monkeypatch.setattr(attention_short, "_forward_kernel", kernel)
    found = []
    for pair in (False, True):
        tiles = Config(Tiles(32, 16, 4, 1, pair=pair), Tiles(16, 32, 4, 1), Tiles(16, 32, 4, 1))
        monkeypatch.setattr(attention_short, "config_for", lambda *_, tiles=tiles: tiles)
        found.append(attention_forward(q, k, v, cu, max(LENGTHS), **settings))
    (_, programs), (paired, fewer) = kernel.launches
    assert (paired, fewer) == ((True, programs // 2) if name in PAIRS else (False, programs))
    for one, two in zip(*found, strict=True):
        assert one.isfinite().all()
        if CUDA and options.get("softcap"):  # whose long formula the compiler may join differently into multiply-adds
            torch.testing.assert_close(two, one, rtol=2**-7, atol=1e-5)
        else:
            assert torch.equal(bits(one), bits(two))


def test_results_go_where_they_are_asked_for_and_repeat_bit_for_bit(where: str) -> None:
    tensors, cu, options = make(where, torch.float16, kv_heads=1)
    dout, q, k, v = tensors
    first = ours(tensors, cu, options)
    wide = torch.full((len(q), 2 * 32 + 8), 7.0, dtype=q.dtype, device=where)
    room = torch.full((len(q), 4 * 32 + 8), 7.0, dtype=q.dtype, device=where)
    parts = room[:, :128].split([64, 32, 32], dim=1)
    grads = tuple(part.unflatten(1, (-1, 32)) for part in parts)
    settings = options | {"backend": "short", "spans_2T": spans(cu, len(q))}
    out, lse = attention_forward(q, k, v, cu, max(LENGTHS), out=wide[:, :64].unflatten(1, (2, 32)), **settings)
    attention_backward(dout, q, k, v, out, lse, cu, max(LENGTHS), grads=grads, **settings)
    for mine, expected in zip((out, *grads), first, strict=True):
        assert torch.equal(mine, expected)
    assert (wide[:, 64:] == 7).all()
    assert (room[:, 128:] == 7).all()


@pytest.mark.parametrize("lengths", [LENGTHS, WHOLE], ids=["", "whole"])
def test_gradients_can_be_those_before_the_rotary_positions(where: str, lengths: tuple[int, ...], judge: Judge) -> None:
    """Against autograd through RoPE and attention. cos and sin have a factor in them, as YaRN's do."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    tensors, cu, options = make(where, dtype, lengths, kv_heads=1)
    T, half = sum(lengths), 16
    angles = torch.arange(T, device=where)[:, None] * 0.7 ** torch.arange(half, device=where)
    cos, sin = 1.3 * angles.cos(), 1.3 * angles.sin()

    def through(kind: torch.dtype) -> list[torch.Tensor]:
        dout, *qkv = [x.detach().to(kind).clone() for x in tensors]
        qkv = [x.requires_grad_() for x in qkv]
        row = torch.cat([x.flatten(1) for x in qkv], dim=1)
        rotated = qk_rope_reference(row, cos, sin, heads=2, kv_heads=1, head_width=2 * half)
        return list(torch.autograd.grad(attention_reference(*rotated, cu, **options), qkv, dout))

    dout, q, k, v = tensors
    row = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    q, k, v = qk_rope_reference(row, cos, sin, heads=2, kv_heads=1, head_width=2 * half)
    got = ours([dout, q, k, v], cu, options, rotated=(cos, sin))[1:]
    for what, mine, theirs, exact in zip(("dq", "dk", "dv"), got, through(dtype), through(torch.float64), strict=True):
        judge(mine, theirs, exact, what)


def test_spans_by_hand() -> None:
    cu = torch.tensor([0, 2, 3, 6, 6, 6], dtype=torch.int32)
    assert spans(cu, 6).tolist() == [[0, 0, 2, 3, 3, 3], [2, 2, 3, 6, 6, 6]]


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_short_documents_choose_it_and_long_ones_do_not() -> None:
    device = torch.device("cuda")
    assert pick_backend(device, torch.bfloat16, 64, typical=300) == "short"
    assert pick_backend(device, torch.bfloat16, 64, typical=40_000) != "short"
    assert pick_backend(device, torch.float32, 64, typical=4000) == "short"
    assert pick_backend(device, torch.bfloat16, 256, typical=300) != "short"
