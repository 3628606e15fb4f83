"""Products with what follows them inside, against float64 and, for the product itself, torch's bits. All on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.attention.rope import qk_rope_reference
from pronghorn.kernels.gemm import hopper_gemm
from pronghorn.kernels.gemm.hopper_gemm import COLUMNS, Labelled, column_tiles, covered, gated_mm, powers_mm, rope_mm
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation_reference
from tables import gpu_rows

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
# A tile has 128 rows, two of them are a cluster's, 64 terms, 96 neurons or 192 columns: less, more, and nothing that divides.
SHAPES = [(1, 8, 8), (256, 64, 96), (300, 136, 200), (1000, 2112, 1000), (4096, 528, 2048)]
LOG2_E = 1.4426950408889634


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def random(*shape: int, by: float = 1.0, room: int = 0) -> Tensor:
    """bf16; `room`: in rows with so many columns more."""
    return (torch.randn(shape[0], shape[1] + room, device="cuda") * by).bfloat16()[:, : shape[1]]


def test_nothing_is_done_where_there_is_no_hopper() -> None:
    x, weight, out = torch.randn(4, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.zeros(4, 16).bfloat16()
    assert not covered(x, weight, out)
    assert not gated_mm(x, weight, "silu", gu_out=out, a_out=out[:, :8])
    rows = Labelled(torch.zeros(4), torch.zeros(4, dtype=torch.long), torch.zeros(4))
    assert not powers_mm(x, weight, rows, out=out, scale=1.0, sums_2NC=torch.zeros(2, 1, 4))
    assert not rope_mm(x, weight, torch.ones(4, 32), torch.ones(4, 32), rope_heads=0, head_width=64, out=out)
    assert not out.any()


@on_hopper
@pytest.mark.parametrize(
    ("T", "K", "F", "kind"), gpu_rows((*shape, kind) for shape in SHAPES for kind in ("silu", "gelu_tanh"))
)
def test_gate_up_and_their_activation(T: int, K: int, F: int, kind: Kind) -> None:
    torch.manual_seed(T)
    x, weight = random(T, K, room=8), random(2 * F, K, by=3 * K**-0.5, room=16)
    gu, a = torch.full((T, 2 * F + 64), 7.0).bfloat16().cuda(), torch.full((T, F + 16), 7.0).bfloat16().cuda()
    assert gated_mm(x, weight, kind, gu_out=gu[:, : 2 * F], a_out=a[:, :F])
    torch.testing.assert_close(gu[:, : 2 * F], x @ weight.T, rtol=0, atol=0)
    assert off(a[:, :F], gated_activation_reference(gu[:, : 2 * F].double(), kind)) < 2.5e-3
    assert (gu[:, 2 * F :] == 7).all()
    assert (a[:, F:] == 7).all()


@on_hopper
def test_an_activation_far_out_is_no_nan() -> None:
    x, weight = torch.eye(8).bfloat16().cuda() * 1e4, torch.ones(16, 8).bfloat16().cuda()
    weight[:8] *= torch.tensor([-1.0, 1.0] * 4).bfloat16().cuda()
    gu, a = torch.empty(8, 16).bfloat16().cuda(), torch.empty(8, 8).bfloat16().cuda()
    for kind in ("silu", "gelu_tanh"):
        assert gated_mm(x, weight, kind, gu_out=gu, a_out=a)  # type: ignore[arg-type]
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), gated_activation_reference(gu.double(), kind), rtol=4e-3, atol=1e-30)  # type: ignore[arg-type]


@on_hopper
@pytest.mark.parametrize(("C", "K", "V"), gpu_rows([*SHAPES, (300, 256, 50257), (2048, 2048, 128256)]))
def test_powers_with_the_sum_and_the_largest_of_each_tile(C: int, K: int, V: int) -> None:
    torch.manual_seed(C)
    x, weight = random(C, K), random(V, K, by=3 * K**-0.5)
    stride = -(-V // 64) * 64
    out, sums = torch.full((C, stride), 7.0).bfloat16().cuda(), torch.full((2, column_tiles(V), C), 7.0, device="cuda")
    logits = x.double() @ weight.double().T
    anchors = (logits.max(1).values * LOG2_E).ceil().float() - 3
    anchors[-1] = torch.inf
    labels = torch.randint(0, V, (C,), device="cuda")
    labels[::5] = -100
    rows = Labelled(anchors, labels, torch.full((C,), 7.0, device="cuda"))
    assert powers_mm(x, weight, rows, out=out[:, :V], scale=LOG2_E, sums_2NC=sums)
    at_labels = torch.where(labels < 0, 7.0, logits.gather(1, labels.clamp(0)[:, None])[:, 0])
    torch.testing.assert_close(rows.logits_C.double(), at_labels, rtol=1e-5, atol=1e-4)
    powers = torch.exp2(logits * LOG2_E - anchors.double()[:, None])
    tiles = [(part.sum(1), part.max(1).values) for part in powers.split(COLUMNS, dim=1)]
    assert not out[-1, :V].any()
    if C > 1:
        assert off(out[:-1, :V], powers[:-1]) < 3e-3
        assert off(sums[0, :, :-1], torch.stack([total for total, _ in tiles])[:, :-1]) < 1e-4
    most = torch.stack([part.max(1).values for part in logits.split(COLUMNS, dim=1)])
    torch.testing.assert_close(sums[1].double(), most, rtol=1e-5, atol=1e-4)


@on_hopper
def test_powers_that_nobody_wants_are_not_written() -> None:
    x, weight, out = random(256, 64), random(192, 64), torch.full((256, 192), 7.0).bfloat16().cuda()
    sums, wanted = torch.full((2, 1, 256), 7.0, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    rows = Labelled(torch.zeros(256, device="cuda"), torch.zeros(256, dtype=torch.long, device="cuda"), torch.zeros(256).cuda())
    assert powers_mm(x, weight, rows, out=out, scale=1.0, sums_2NC=sums, wanted=wanted)
    assert (out == 7).all()
    assert (sums == 7).all()
    assert powers_mm(x, weight, rows, out=out, scale=1.0, sums_2NC=sums, wanted=wanted + 1)
    assert off(out, torch.exp2(x.double() @ weight.double().T)) < 3e-3


@on_hopper
@pytest.mark.parametrize(
    ("T", "K", "heads", "kv_heads", "width"),
    gpu_rows(
        [
            (1, 8, 1, 1, 64),
            (300, 136, 4, 2, 64),
            (1000, 2112, 5, 1, 64),
            (1000, 520, 4, 2, 128),
            (256, 64, 1, 1, 256),
            (512, 64, 3, 1, 192),
        ]
    ),
)
def test_queries_and_keys_are_rotated(T: int, K: int, heads: int, kv_heads: int, width: int) -> None:
    torch.manual_seed(T)
    X = (heads + 2 * kv_heads) * width
    x, weight = random(T, K, room=8), random(X, K, by=K**-0.5, room=16)
    angles = torch.rand(T, width // 2, device="cuda") * 6.28
    out = torch.full((T, X + 64), 7.0).bfloat16().cuda()
    assert rope_mm(x, weight, angles.cos(), angles.sin(), rope_heads=heads + kv_heads, head_width=width, out=out[:, :X])
    exact = qk_rope_reference(
        x.double() @ weight.double().T,
        angles.double().cos(),
        angles.double().sin(),
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
    )
    assert off(out[:, :X], torch.cat([part.flatten(1) for part in exact], dim=1)) < 2.5e-3
    values = (heads + kv_heads) * width
    torch.testing.assert_close(out[:, values:X], (x @ weight.T)[:, values:], rtol=0, atol=0)
    assert (out[:, X:] == 7).all()


@on_hopper
def test_what_only_turns_in_part_is_left_to_others() -> None:
    x, weight, out = random(256, 64), random(192, 64), torch.full((256, 192), 7.0).bfloat16().cuda()
    angles = torch.ones(256, 16, device="cuda")
    assert not rope_mm(x, weight, angles, angles, rope_heads=1, head_width=64, out=out)
    assert not rope_mm(x, weight, angles[:, :16], angles, rope_heads=1, head_width=32, out=out)
    assert (out == 7).all()


@on_hopper
def test_terms_in_a_tensor_of_their_own() -> None:
    torch.manual_seed(1)
    T, K, R, F = 700, 192, 80, 256
    x, behind, weight = random(T, K, room=8), random(T, R), random(2 * F, K + R)
    whole, angles = torch.cat([x, behind], dim=1), torch.rand(T, 32, device="cuda")
    out = [torch.full((T, 3 * F), 7.0).bfloat16().cuda() for _ in range(4)]
    assert gated_mm(x, weight, "silu", gu_out=out[0][:, : 2 * F], a_out=out[0][:, 2 * F :], lora_TR=behind)
    assert gated_mm(whole, weight, "silu", gu_out=out[1][:, : 2 * F], a_out=out[1][:, 2 * F :])
    rope = {"rope_heads": 6, "head_width": 64}
    assert rope_mm(x, weight, angles.cos(), angles.sin(), **rope, out=out[2][:, : 2 * F], lora_TR=behind)
    assert rope_mm(whole, weight, angles.cos(), angles.sin(), **rope, out=out[3][:, : 2 * F])
    torch.testing.assert_close(out[0], out[1], rtol=0, atol=0)
    torch.testing.assert_close(out[2], out[3], rtol=0, atol=0)
    torch.testing.assert_close(out[0][:, : 2 * F], whole @ weight.T, rtol=0, atol=0)


@on_hopper
@pytest.mark.parametrize("band", [1, 5, 1000])
def test_any_order_of_tiles_covers_all(band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_gemm, "BAND", band)
    test_gate_up_and_their_activation(1000, 72, 1000, "silu")
