"""Offsets beyond 2^31 elements: packs of half a million tokens have tensors with more elements than an int32 counts.

Rows that are far apart do what rows side by side do. Nobody touches what lies between them, so it takes no memory on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.attention.attention import BACKENDS
from pronghorn.kernels.attention.attention_flash import why_no_flash4
from pronghorn.kernels.attention.attention_short import Short
from pronghorn.kernels.attention.attention_torch import Backend, Computed, Packed
from pronghorn.kernels.attention.rope import qk_rope_backward, qk_rope_forward
from pronghorn.kernels.lora.fp8_lora import fp8_extend
from pronghorn.kernels.lora.gated_lora import gated_lora_backward, gated_lora_forward
from pronghorn.kernels.mlp.fp8_gated import gated_activation_fp8_backward, gated_activation_fp8_forward
from pronghorn.kernels.mlp.gated_mlp import gated_activation_backward, gated_activation_forward
from pronghorn.kernels.mlp.ungated_mlp import Scalars, ungated_activation_backward, ungated_activation_forward
from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_then_add_forward
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_cast_rows
from pronghorn.kernels.quant.fp8_norm import rms_norm_fp8_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows

T = 40
APART = 2**26 - 64  # elements from a row to the next: those from the 34th on begin beyond 2^31; within a tile offsets fit
H, F, R = 16, 32, 16  # head width; MLP width; rank


class Near:
    """Rows side by side."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def values(self, *shape: int) -> Tensor:
        """The same in every place, call by call."""
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(T, width, dtype=dtype, device=self.device)

    def __call__(self, width: int, dtype: torch.dtype = torch.float16, *, filled: bool = True) -> Tensor:
        rows = self.empty(width, dtype)
        if filled:
            rows.copy_(self.values(T, width))
        return rows


class Far(Near):
    """Rows of all tensors in the same few columns of one buffer."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.buffers: dict[torch.dtype, Tensor] = {}
        self.used: dict[torch.dtype, int] = {}

    def empty(self, width: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self.buffers:
            self.buffers[dtype] = torch.empty((T - 1) * APART + 8192, dtype=dtype, device=self.device)
            self.used[dtype] = 0
        start = self.used[dtype]
        self.used[dtype] += -(-width // 64) * 64
        assert self.used[dtype] <= 8192
        rows = self.buffers[dtype][start:].as_strided((T, width), (APART, 1), start)
        rows.view(torch.uint8).zero_() if dtype == E4M3 else rows.zero_()
        return rows


def norms(make: Near) -> list[Tensor]:
    weight = make.values(48).half()
    y, h, rstd = rms_norm_forward(make(48), weight, 1e-5, residual_TD=make(48), out=make(48, filled=False), in_place=True)
    after, _ = rms_norm_then_add_forward(make(48), weight, 1e-5, make(48), out=make(48, filled=False))
    dx, _ = rms_norm_backward(make(48), h, weight, rstd, add_TD=make(48), out=make(48, filled=False))
    also, dw = rms_norm_backward(make(48), h, weight, rstd, need_weight_grad=True, out=make(48, filled=False))
    assert dw is not None
    return [y, h, rstd, after, dx, also, dw]


def copies(make: Near) -> list[Tensor]:
    return [copy_rows(make(48), make(48, filled=False)), copy_rows(make(48), make(48, filled=False), 0.5)]


def activations(make: Near) -> list[Tensor]:
    a = gated_activation_forward(make(2 * F), "silu", out=make(F, filled=False))
    dgu, again = gated_activation_backward(
        make(F), make(2 * F), "silu", out=make(2 * F, filled=False), activation_out=make(F, filled=False)
    )
    assert again is not None
    return [a, dgu, again]


def activations_without_a_gate(make: Near) -> list[Tensor]:
    scalars = Scalars(make.values(1), make.values(1))
    a = ungated_activation_forward(make(F), scalars, out=make(F, filled=False))
    du, again, of_alphas = ungated_activation_backward(
        make(F), make(F), scalars, need_alpha=True, out=make(F, filled=False), activation_out=make(F, filled=False)
    )
    assert again is not None
    assert of_alphas is not None
    return [a, du, again, of_alphas]


def activations_with_adapters(make: Near) -> list[Tensor]:
    out = gated_lora_forward(make(2 * F), "silu", make.values(R, F).half(), out_ext=make(F + R, filled=False))
    down, gate_up, dgu = make.values(R, F), make.values(2 * R, 2 * F), make(2 * F, filled=False)
    gated_lora_backward(
        make(F),
        make(2 * F),
        "silu",
        dgu_out=dgu,
        dyb_TR=make(R),
        xa_TR=make(2 * R),
        gate_columns=slice(0, R),
        up_columns=slice(R, 2 * R),
        sums_down_RF=down,
        sums_gate_up_RG=gate_up,
    )
    return [out, dgu, down, gate_up]


def rotations(make: Near) -> list[Tensor]:
    heads: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_width": H}
    cos, sin = (make(H // 2, torch.float32) for _ in range(2))
    qkv, raw = make(8 * H), make(8 * H)
    weights: dict[str, Any] = {"q_norm_H": make.values(H).half(), "k_norm_H": make.values(H).half()}
    q, k, v, _ = qk_rope_forward(qkv, cos, sin, in_place=True, **heads)
    normed_q, normed_k, _, rstd = qk_rope_forward(raw, cos, sin, **heads, **weights)
    grads = [make(n * H).unflatten(1, (n, H)) for n in (4, 2, 2)]
    dqkv = qk_rope_backward(grads[0], grads[1], grads[2], cos, sin, out=make(8 * H, filled=False))[0]
    through = qk_rope_backward(
        grads[0],
        grads[1],
        grads[2],
        cos,
        sin,
        qkv_TX=raw,
        rstd=rstd,
        need_norm_grad=True,
        out=make(8 * H, filled=False),
        **weights,
    )
    assert through[1] is not None
    assert through[2] is not None
    return [q, k, v, normed_q, normed_k, dqkv, *(t for t in through if t is not None)]


def short_attention(make: Near) -> list[Tensor]:
    q, out, dout = (make(4 * H).unflatten(1, (4, H)) for _ in range(3))
    k, v = (make(2 * H).unflatten(1, (2, H)) for _ in range(2))
    packed = Packed(torch.tensor([0, 1, 30, T, T], dtype=torch.int32, device=make.device), T, 0.25)
    out, lse = Short.forward(q, k, v, packed, out)
    grads = tuple(make(n * H, filled=False).unflatten(1, (n, H)) for n in (4, 2, 2))
    dq, dk, dv, _ = Short.backward(dout, Computed(q, k, v, out, lse), packed, grads)  # type: ignore[arg-type]
    return [out, lse, dq, dk, dv]


def in_fp8(make: Near) -> list[Tensor]:
    bound, scale = make.values(1).abs(), make.values(2 * F).abs() + 0.5
    x8, x_scale = fp8_cast_rows(make(48), scale[:48], bound=bound, out=make(48, E4M3, filled=False))
    normed = rms_norm_fp8_forward(
        make(48),
        make.values(48).half(),
        1e-5,
        residual_TD=make(48),
        out=make(48, filled=False),
        out8=make(48, E4M3, filled=False),
        h_out=make(48, filled=False),
    )
    forward = gated_activation_fp8_forward(make(2 * F), "silu", out=make(F, filled=False), out8=make(F, E4M3, filled=False))
    backward = gated_activation_fp8_backward(
        make(F),
        make(2 * F),
        "silu",
        scale,
        out=make(2 * F, filled=False),
        out8=make(2 * F, E4M3, filled=False),
        activation_out=make(F, filled=False),
    )
    columns = make(3 * R, E4M3, filled=False)
    fp8_extend(make(R), x_scale, make.values(R).abs(), columns)
    return [x8, x_scale, *normed, *forward, *(t for t in backward if t is not None), columns]


CASES = [norms, copies, activations, activations_without_a_gate, activations_with_adapters, rotations, short_attention, in_fp8]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_rows_far_apart_are_rows_side_by_side(where: str, case: Callable[[Near], list[Tensor]]) -> None:
    near, far = case(Near(where)), case(Far(where))
    assert any(t.stride(0) == APART for t in far)
    # To the bit in the interpreter; compiled for other strides, a GPU may round to the neighbour, in FP8 an eighth away.
    rtol, atol = (0.13, 1e-2) if where == "cuda" else (0.0, 0.0)
    for one, other in zip(near, far, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=rtol, atol=atol)
        assert one.float().count_nonzero() > 0


# ---- on a GPU: libraries, at the sizes of an 8B model ------------------------------------------------------------------------

LONG = 400_000  # tokens: rows of q, k and v together begin beyond 2^31 elements from the 345,923rd on
TAIL, WINDOW = 1000, 512
WIDTH = 6144 + 64
ROOMY = torch.cuda.is_available() and torch.cuda.mem_get_info()[1] > 60e9
big_gpu = pytest.mark.skipif(not ROOMY, reason="needs a GPU of 60 GB")


def heads_of(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    parts = qkv[:, :6144].split([4096, 1024, 1024], dim=1)
    q, k, v = (part.unflatten(1, (n, 128)) for part, n in zip(parts, (32, 8, 8), strict=True))
    return q, k, v


@pytest.mark.alone
@big_gpu
@pytest.mark.parametrize("backend", ["flash4", "flash2"])
@pytest.mark.parametrize("one", [True, False], ids=["one document", "many"])
def test_attention_of_a_long_pack(backend: Backend, one: bool) -> None:
    """Its last tokens are those of a short one: by a window, or in a document of their own. Gradients go where q, k, v are."""
    if backend == "flash4" and why_no_flash4():
        pytest.skip(str(why_no_flash4()))
    torch.manual_seed(0)
    near = WINDOW - 1 if one else 0  # tokens before the last ones that they look at
    qkv = torch.empty(LONG, WIDTH, dtype=torch.bfloat16, device="cuda").normal_()
    dout = torch.empty(LONG, 32, 128, dtype=torch.bfloat16, device="cuda").normal_()
    small, small_dout = qkv[-TAIL - near :].clone(), dout[-TAIL - near :].clone()

    def run(qkv: Tensor, dout: Tensor, bounds: list[int]) -> list[Tensor]:
        cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        packed = Packed(cu, max(b - a for a, b in itertools.pairwise(bounds)), 0.088, WINDOW if one else None)
        q, k, v = heads_of(qkv)
        out = torch.empty(len(qkv), 4096 + 16, dtype=torch.bfloat16, device="cuda")[:, :4096].unflatten(1, (32, 128))
        out, lse = BACKENDS[backend].forward(q, k, v, packed, out)
        tail = out[-TAIL:].clone()
        grads = None if backend == "flash2" else (q, k, v)
        found = BACKENDS[backend].backward(dout, Computed(q, k, v, out, lse), packed, grads)
        return [tail, *(grad[-TAIL:].clone() for grad in found[:3])]

    long = run(qkv, dout, [0, LONG] if one else list(range(0, LONG + 1, TAIL)))
    for mine, theirs in zip(long, run(small, small_dout, [0, len(small)]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.004)  # sums in another order, then bf16
        assert theirs.float().abs().mean() > 1e-2


@pytest.mark.alone
@big_gpu
def test_products_of_more_values_than_an_int32_counts() -> None:
    torch.manual_seed(0)
    x = torch.empty(LONG, 256, dtype=torch.bfloat16, device="cuda").normal_()
    w = torch.empty(6144, 256, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty(LONG, WIDTH, dtype=torch.bfloat16, device="cuda")
    torch.mm(x, w.T, out=y[:, :6144])
    torch.testing.assert_close(y[-TAIL:, :6144], x[-TAIL:] @ w.T, rtol=0.01, atol=0.01)
    dx = torch.mm(y[:, :6144], w)
    torch.testing.assert_close(dx[-TAIL:], y[-TAIL:, :6144] @ w, rtol=0.01, atol=1.0)  # sums of 6,144 products of about 16
    dw = torch.mm(y[:, :6144].T[:16], x, out_dtype=torch.float32)
    torch.testing.assert_close(dw, y[:, :16].float().T @ x.float(), rtol=0.01, atol=10.0)
