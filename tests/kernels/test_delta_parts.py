"""What stands around the delta rule (inputs, gates, norm): error against float64 at most twice plain torch's, on both paths."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from kernel_parts import Judge, strided, truth_and_plain, untouched_beside
from torch import Tensor

from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.delta.delta_gates import delta_gates, delta_gates_backward, delta_gates_forward, delta_gates_reference
from pronghorn.kernels.delta.delta_inputs import (
    Heads,
    delta_inputs,
    delta_inputs_backward,
    delta_inputs_forward,
    delta_inputs_reference,
    unnormed,
)
from pronghorn.kernels.delta.gated_norm import gated_norm, gated_norm_reference
from pronghorn.kernels.delta.gated_norm import gated_norm_backward as norm_backward
from pronghorn.kernels.delta.gated_norm import gated_norm_forward as norm_forward
from tables import covering, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [Heads(1, 16, 2, 24), Heads(2, 24, 2, 16), Heads(1, 128, 1, 128)]


def spans_of(lengths: list[int], device: str) -> Tensor:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return spans(bounds, int(bounds[-1]))


def alone(qkv: Tensor, taps: Tensor, lengths: list[int], heads: Heads, bias: Tensor | None = None) -> list[Tensor]:
    """Each document by itself, by torch's own convolution and norm."""
    outs = []
    for document in filter(len, qkv.split(lengths)):
        padded = torch.nn.functional.pad(document.T, (taps.shape[1] - 1, 0))
        conv = torch.nn.functional.conv1d(padded[None], taps[:, None], bias, groups=len(taps))
        outs.append(torch.nn.functional.silu(conv[0].T))
    q, k, v = heads.split(torch.cat(outs))
    return [*(x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)), v]


@table(
    ("dtype", "taps", "heads", "lengths"), covering(DTYPES, [4, 2, 3], HEADS, [[63, 1, 65], [1, 0, 2], [130]], together=(0,))
)
def test_inputs(device: str, judge: Judge, dtype: torch.dtype, taps: int, heads: Heads, lengths: list[int]) -> None:
    T, where, X = sum(lengths), spans_of(lengths, device), heads.columns
    qkv, weight = strided(T, X, 16, dtype, device), torch.randn(X, taps, device=device).to(dtype)
    grads = heads.split(strided(T, X, 5, dtype, device))
    true, plain = truth_and_plain(lambda x, taps: delta_inputs_reference(x, taps, where, heads), [qkv, weight], grads)
    for exact, expected in zip(true, alone(qkv.double(), weight.double(), lengths, heads), strict=False):
        torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)

    made, out = delta_inputs_forward(qkv, weight, where, heads), strided(T, X, 7, dtype, device, empty=True)
    back = delta_inputs_backward(*grads, qkv, weight, where, heads, out=out)
    assert back[0] is out
    assert untouched_beside(out)
    for name, ours, truth, theirs in zip(("q", "k", "v", "dqkv", "dtaps"), (*made, *back), true, plain, strict=True):
        assert ours is not None
        judge(ours, theirs, truth, name)
    assert delta_inputs_backward(*grads, qkv, weight, where, heads, need_taps=False)[1] is None


@table(("dtype", "columns", "lengths"), covering(DTYPES, [24, 256, 5], [[63, 1, 65], [1, 0, 2]]))
def test_inputs_of_mamba(device: str, judge: Judge, dtype: torch.dtype, columns: int, lengths: list[int]) -> None:
    """Nothing is normed, and the convolution has a bias."""
    T, where, heads = sum(lengths), spans_of(lengths, device), unnormed(columns)
    assert heads.columns == columns
    x, taps = strided(T, columns, 16, dtype, device), torch.randn(columns, 4, device=device).to(dtype)
    bias, dy = torch.randn(columns, device=device).to(dtype), strided(T, columns, 5, dtype, device)

    def reference(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
        return delta_inputs_reference(x, taps, where, heads, bias)[2].flatten(1)

    true, plain = truth_and_plain(reference, [x, taps, bias], [dy])
    expected = alone(x.double(), taps.double(), lengths, heads, bias.double())[2].flatten(1)
    torch.testing.assert_close(true[0], expected, rtol=1e-12, atol=1e-12)
    made = delta_inputs_forward(x, taps, where, heads, bias)[2].flatten(1)
    grads = heads.split(dy)
    dx, weights = delta_inputs_backward(*grads, x, taps, where, heads, bias)
    assert weights is not None
    ours = made, dx, weights[:, :4], weights[:, 4]
    for name, got, truth, theirs in zip(("y", "dx", "dtaps", "dbias"), ours, true, plain, strict=True):
        judge(got, theirs, truth, name)
    assert delta_inputs_backward(*grads, x, taps, where, heads, bias, need_taps=False)[1] is None


def test_documents_are_apart_to_the_bit(device: str) -> None:
    heads, lengths = HEADS[0], [5, 1, 40, 2]
    where, weight = spans_of(lengths, device), torch.randn(heads.columns, 4, device=device)
    qkv = torch.randn(48, heads.columns, device=device)
    other = qkv.clone()
    other[:6], other[46:] = torch.randn(6, heads.columns, device=device), float("inf")
    for one, two in zip(*(delta_inputs_forward(each, weight, where, heads) for each in (qkv, other)), strict=True):
        assert torch.equal(one[6:46], two[6:46])
    dy = torch.zeros(48, heads.columns, device=device)
    dy[6:46] = torch.randn(40, heads.columns, device=device)
    dqkv, _ = delta_inputs_backward(*heads.split(dy), qkv, weight, where, heads)
    assert not dqkv[:6].any()
    assert not dqkv[46:].any()
    assert dqkv[6:46].all()


@table(("dtype", "shape"), covering(DTYPES, [(70, 5), (3, 32), (30, 48)]))
def test_gates(device: str, judge: Judge, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """With values of which 1 + e^x is rounded away, and some that overflow e^x."""
    rows = [strided(*shape, 3, dtype, device, size=8) for _ in range(2)]
    rows[0][-1, :2] = torch.tensor([100, -30], device=device)
    weights = [torch.randn(shape[1], device=device) for _ in range(2)]
    grads = [torch.randn(shape, device=device) for _ in range(2)]
    inputs = [*rows, *weights]
    true, plain = truth_and_plain(delta_gates_reference, inputs, grads)
    out = tuple(strided(*shape, 9, dtype, device, empty=True) for _ in range(2))
    ours = (*delta_gates_forward(*inputs), *delta_gates_backward(*grads, *inputs, out=out))
    assert all(map(untouched_beside, out))
    for name, got, truth, theirs in zip(("g", "beta", "da", "db", "dA_log", "ddt_bias"), ours, true, plain, strict=True):
        assert got is not None
        judge(got, theirs, truth, name)
    assert delta_gates_backward(*grads, *inputs, need_weights=False)[2:] == (None, None)
    far = torch.full((1, 1), -20.0, device=device)
    g, _ = delta_gates_forward(far, far, torch.zeros(1, device=device), torch.zeros(1, device=device))
    torch.testing.assert_close(g, -torch.exp(far), rtol=1e-5, atol=0)


@table(("dtype", "limits"), covering(DTYPES, [(0.0, math.inf), (0.05, 1.5)]))
def test_gates_of_mamba(device: str, judge: Judge, dtype: torch.dtype, limits: tuple[float, float]) -> None:
    """No b; steps beyond the limits have no gradient."""
    a, dg, dstep = strided(70, 5, 3, dtype, device, size=4), *(torch.randn(70, 5, device=device) for _ in range(2))
    weights = [torch.randn(5, device=device) for _ in range(2)]
    true, plain = truth_and_plain(lambda a, *given: delta_gates_reference(a, None, *given, limits), [a, *weights], [dg, dstep])
    out = strided(70, 5, 9, dtype, device, empty=True)
    back = delta_gates_backward(dg, dstep, a, None, *weights, limits, out=(out,))
    assert untouched_beside(out)
    ours = *delta_gates_forward(a, None, *weights, limits), back[0], *back[2:]
    for name, got, truth, theirs in zip(("g", "dt", "da", "dA_log", "ddt_bias"), ours, true, plain, strict=True):
        assert got is not None
        judge(got, theirs, truth, name)
    if limits[0]:
        assert not back[0].all()
    assert delta_gates_backward(dg, dstep, a, None, *weights, limits, need_weights=False)[2:] == (None, None)


@table(
    ("dtype", "shape", "gate_first"),
    covering(DTYPES, [(7, 3, 24), (33, 2, 128), (1, 1, 16), (5, 1, 3000)], [False, True], together=(1, 2)),
)
def test_norm(device: str, judge: Judge, dtype: torch.dtype, shape: tuple[int, int, int], gate_first: bool) -> None:
    T, N, V = shape
    o, weight = torch.randn(shape, device=device).to(dtype), torch.randn(N * V if gate_first else V, device=device)
    gated_norm_forward, gated_norm_backward = (partial(f, gate_first=gate_first) for f in (norm_forward, norm_backward))
    z, dy = strided(T, N * V, 3, dtype, device), strided(T, N * V, 5, dtype, device)
    true, plain = truth_and_plain(lambda *x: gated_norm_reference(*x, 1e-6, gate_first=gate_first), [o, z, weight], [dy])
    y, dz = (strided(T, N * V, 4, dtype, device, empty=True) for _ in range(2))
    ours = (
        gated_norm_forward(o, z, weight, 1e-6, out=y), *gated_norm_backward(dy, o, z, weight, 1e-6, out=dz)
    )  # fmt: skip
    assert untouched_beside(y)
    assert untouched_beside(dz)
    for name, got, truth, theirs in zip(("y", "do", "dz", "dweight"), ours, true, plain, strict=True):
        assert got is not None
        judge(got, theirs, truth, name)
    fewer = gated_norm_backward(dy, o, z, weight, 1e-6, need_weight=False)
    assert fewer[2] is None
    assert torch.equal(fewer[0], ours[1])


@pytest.mark.parametrize("trained", [True, False])
def test_autograd_sees_what_backward_gives(device: str, trained: bool) -> None:
    heads, where = HEADS[0], spans_of([3, 4], device)
    J, K, N, V = heads

    def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]

    def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(shape, device=device).requires_grad_(trained) for shape in shapes]

    (qkv, a, b, o, z) = leaves((7, heads.columns), (7, N), (7, N), (7, N, V), (7, N * V))
    ones = partial(torch.ones, device=device)
    taps, A_log, bias, weight, wide = weights((heads.columns, 4), (N,), (N,), (V,), (N * V,))
    cases = [
        (delta_inputs(qkv, taps, where, heads), [qkv], [taps],
         delta_inputs_backward(ones(7, J, K), ones(7, J, K), ones(7, N, V), qkv, taps, where, heads)),
        (delta_gates(a, b, A_log, bias), [a, b], [A_log, bias],
         delta_gates_backward(ones(7, N), ones(7, N), a, b, A_log, bias)),
        ((gated_norm(o, z, weight, 1e-6),), [o, z], [weight], norm_backward(ones(7, N * V), o, z, weight, 1e-6)),
        (delta_gates(a, None, A_log, bias), [a], [A_log, bias],
         delta_gates_backward(ones(7, N), ones(7, N), a, None, A_log, bias)),
        ((gated_norm(o, z, wide, 1e-6, gate_first=True),), [o, z], [wide],
         norm_backward(ones(7, N * V), o, z, wide, 1e-6, gate_first=True)),
    ]  # fmt: skip
    cases[3] = (*cases[3][:3], (cases[3][3][0], *cases[3][3][2:]))  # without b
    for outs, inputs, parameters, expected in cases:
        found = torch.autograd.grad(sum(out.sum() for out in outs), [*inputs, *(parameters if trained else [])])
        for one, other in zip(found, expected, strict=False):
            assert other is not None
            assert torch.equal(one, other)
