"""The experts' activation: gpt-oss's clamped one, SiLU, GELU, and relu^2 without a gate, with bias and routing weights, against
float64 truth."""

from __future__ import annotations

import torch
from kernel_parts import Judge

from pronghorn.kernels.moe.moe_gated import (
    RELU2,
    ExpertActivation,
    expert_gated,
    expert_gated_backward,
    expert_gated_forward,
    expert_gated_reference,
)
from tables import covering, table

SILU, GELU = ExpertActivation("silu"), ExpertActivation("gelu_tanh")
CLAMPED = ExpertActivation("clamped", limit=2.0, alpha=1.702)


def transformers_gpt_oss(gate_up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """As GptOssExperts computes it."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


# Activation and bias are branches of one kernel, in each dtype; a size only its tiles.
@table(
    ("activation", "dtype", "T", "K", "width", "with_bias"),
    [
        (activation, dtype, *size, with_bias)
        for activation, dtype, size, with_bias in covering(
            [SILU, GELU, CLAMPED, RELU2],
            [torch.float32, torch.bfloat16, torch.float16],
            [(1, 1, 64), (3, 2, 96), (1, 3, 2500)],
            [False, True],
            together=(0, 1),
        )
    ],
)
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, activation: ExpertActivation, dtype: torch.dtype, T: int, K: int, width: int,
    with_bias: bool,
) -> None:  # fmt: skip
    S, E, both = T * K, 4, activation.parts * width
    gu = 2 * torch.randn(S, both + 8, device=device).to(dtype)[:, :both]
    da = torch.randn(S, width + 5, device=device).to(dtype)[:, :width]
    ids, order = torch.randint(0, E, (T, K), device=device).int(), torch.randperm(S, device=device).int()
    weights = torch.rand(T, K, device=device)
    bias = torch.randn(E, both, device=device).to(dtype) if with_bias else None
    results = []
    for kind in (torch.float64, dtype):
        leaf = gu.detach().to(kind).requires_grad_()
        w = weights.to(torch.promote_types(kind, torch.float32), copy=True).requires_grad_()
        a = expert_gated_reference(leaf, activation, None if bias is None else bias.to(kind), ids, order)
        rows = w.view(-1)[order.long()][:, None] * a
        grads = torch.autograd.grad(rows, (leaf, w), da.to(rows.dtype))
        results.append([a.detach(), grads[0], grads[1], rows.detach().to(kind)])
    space = [torch.full((S, size + 3), float("nan"), dtype=dtype, device=device) for size in (width, both)]
    a = expert_gated_forward(gu, activation, bias_EG=bias, ids_TK=ids, order_S=order, out=space[0][:, :width])
    dgu, dweights, weighted = expert_gated_backward(
        da, gu, activation, order, weights_TK=weights, bias_EG=bias, ids_TK=ids, out=space[1][:, :both]
    )
    for name, ours, true, theirs in zip(("a", "dgu", "dw", "w a"), (a, dgu, dweights, weighted), *results, strict=True):
        assert ours is not None
        judge(ours, theirs, true, name)
    assert space[0][:, width:].isnan().all()
    assert space[1][:, both:].isnan().all()


def test_gradients_may_lie_on_their_inputs(device: str) -> None:
    order = torch.arange(3, dtype=torch.int32, device=device)
    for activation in (SILU, GELU, CLAMPED, RELU2):
        gu, da = torch.randn(3, 40 * activation.parts, device=device), torch.randn(3, 40, device=device)
        expected = expert_gated_backward(da, gu, activation, order)
        found = expert_gated_backward(da, gu, activation, order, out=gu, activation_out=da)
        assert torch.equal(found[0], expected[0])
        assert found[1] is None
        assert found[2] is da
        assert expected[2] is not None
        assert torch.equal(da, expected[2])


def test_it_is_transformers_own_formula(device: str) -> None:
    gu = (3 * torch.randn(6, 60, device=device)).requires_grad_()
    ours, theirs = expert_gated(gu, CLAMPED), transformers_gpt_oss(gu, 2.0, 1.702)
    torch.testing.assert_close(ours, theirs)
    da = torch.randn(6, 30, device=device)
    torch.testing.assert_close(torch.autograd.grad(ours, gu, da)[0], torch.autograd.grad(theirs, gu, da)[0])


def test_nan_and_infinity_are_not_hidden(device: str) -> None:
    gu = torch.zeros(2, 8, device=device)
    gu[0, 0], gu[1, 1] = float("nan"), float("nan")
    a = expert_gated_forward(gu, CLAMPED)
    assert a[0, 0].isnan()
    assert a[1, 0].isnan()
    assert a[:, 1:].isfinite().all()
    assert expert_gated_forward(gu, RELU2)[0, 0].isnan()
    assert expert_gated_forward(gu, GELU)[0, 0].isnan()
    big = torch.full((1, 8), 1e30, device=device)
    assert expert_gated_forward(big, CLAMPED).isfinite().all()
    for activation in (SILU, GELU):
        assert expert_gated_forward(-big, activation).isfinite().all()
