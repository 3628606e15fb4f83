"""Few rows times NF4 weights with adapters, without a dequantized copy: against float64, and in a group's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_parts import Judge
from torch import Tensor

from pronghorn.kernels.lora import nf4_rows
from pronghorn.kernels.lora.lora_linear import Adapter
from pronghorn.kernels.lora.nf4_rows import NF4Rows, nf4_rows_reference, reading_bits
from pronghorn.kernels.lora.shared_buffers import SharedBuffer
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.quant.nf4 import NF4Tensor, nf4_quantize
from tables import table

CUDA = torch.cuda.is_available()
# The interpreter multiplies bf16 by its bits.
DTYPE = torch.bfloat16 if CUDA else torch.float16


def weights_of(widths: tuple[int, ...], D: int, where: str, *, nested: bool = True) -> list[NF4Tensor]:
    return [nf4_quantize((torch.randn(width, D) / 8).to(where, DTYPE), nested=nested) for width in widths]


@table(
    ("B", "widths", "D", "R", "more"),
    [(1, (40,), 128, 16, {}),
     (5, (64, 32, 96), 192, 64, {"bias": True}),
     (33, (70,), 256, 0, {"nested": False, "h": True}),
     (16, (32, 32), 1088, 16, {"h": True, "bias": True})],
)  # fmt: skip
def test_against_float64(where: str, judge: Judge, B: int, widths: tuple[int, ...], D: int, R: int, more: Any) -> None:
    """Also in splits, with an odd number of blocks, and with nothing but NaN beside the rows that are read."""
    weights, outputs = weights_of(widths, D, where, nested=more.get("nested", True)), sum(widths)
    wide = torch.full((B, D + R + 8), float("nan"), dtype=DTYPE, device=where)
    x_ext, sB = wide[:, : D + R], torch.randn(outputs, R + 8, device=where).to(DTYPE)[:, :R]
    x_ext.copy_(torch.randn(B, D + R))
    bias = torch.randn(outputs, device=where).to(DTYPE) if more.get("bias") else None
    h = torch.randn(B, outputs, device=where).to(DTYPE) if more.get("h") else None
    out = torch.full((B, outputs + 8), 7.0, dtype=DTYPE, device=where)
    found = NF4Rows(weights)(x_ext, sB, bias, out[:, :outputs], h, 0.5)
    assert (out[:, outputs:] == 7).all()

    def by(kind: torch.dtype) -> Tensor:
        W = torch.cat([weight.dequantize(dtype=DTYPE) for weight in weights]).to(kind)
        y = x_ext[:, :D].to(kind) @ W.T + x_ext[:, D:].to(kind) @ sB.to(kind).T
        y = y if bias is None else y + bias.to(kind)
        return y if h is None else h.to(kind) + 0.5 * y

    reference = nf4_rows_reference(x_ext, weights, sB, bias, h, 0.5)
    judge(found, reference, by(torch.float64), f"{B} rows")
    if h is not None:  # in place
        assert torch.equal(NF4Rows(weights)(x_ext, sB, bias, h, h, 0.5), found)


def test_a_group_dequantizes_for_many_rows_only(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_rows, "FEW", 4)
    D, scratch = 128, SharedBuffer(DTYPE, torch.device(where))
    groups = []
    for _ in range(2):
        weights = weights_of((64, 32), D, where)
        adapters = [Adapter(1, torch.randn(8, D, device=where), torch.randn(32, 8, device=where), 0.5)]
        groups.append(StoredLoraGroup(weights, adapters, scratch))
    x = torch.randn(6, D, device=where).to(DTYPE)
    for turn, group in enumerate(groups * 2):
        many, few = (torch.nn.functional.pad(rows, (0, group.R)) for rows in (x, x[:3]))
        with reading_bits(True):
            group.load(few)
            assert scratch.owner is None
            few_y, few_h = group.forward(few), group.forward_add(x[:3, :96], few, 2.0)
        group.load(many)
        assert scratch.owner is group
        torch.testing.assert_close(few_y, group.forward(many)[:3], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(few_h, group.forward_add(x[:, :96], many, 2.0)[:3], rtol=2e-2, atol=2e-2)
        assert torch.equal(few[:, D:], many[:3, D:]), turn
        with reading_bits(True):
            group.load(few)  # is there already
        assert scratch.owner is group
        assert not group.few(few)
