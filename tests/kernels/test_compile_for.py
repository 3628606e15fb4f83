"""What a build asks of a chip, and which tiles a chip gets. tests/bench/test_compile_matrix.py compiles."""

from __future__ import annotations

import importlib

import pytest
import torch

from pronghorn.kernels.lora import gated_lora, lora_grad_gemm
from pronghorn.kernels.moe import grouped_gemm, grouped_quantized, moe_gather
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER, Chip

pytest.importorskip("triton")
Build = importlib.import_module("benchmarks.compile_for").Build
SMALL = (CHIPS[8, 6], CHIPS[8, 9], CHIPS[12, 0])


def test_what_is_wrong_with_a_build() -> None:
    most = Build("a", CHIPS[8, 6], shared=99 * 1024, registers=255, warps=8)
    assert most.wrong == ""
    assert "101,377 bytes of shared memory" in most._replace(shared=99 * 1024 + 1).wrong
    assert most._replace(chip=CHIPS[8, 0], shared=99 * 1024 + 1).wrong == ""
    assert "8 bytes of registers" in most._replace(spilled=8).wrong
    assert "16 warps" in most._replace(warps=16).wrong
    assert "tensor memory" in most._replace(chip=CHIPS[10, 0], tensor_columns=513).wrong
    assert most._replace(error="fp8e4nv not supported").wrong == "fp8e4nv not supported"


def test_hopper_has_the_tiles_that_were_measured_there() -> None:
    assert [lora_grad_gemm._tile(ranks).registers(ranks, HOPPER) for ranks in (16, 32, 64)] == [168, 168, 168]
    assert [lora_grad_gemm._tile(ranks).programs(ranks, HOPPER) for ranks in (16, 32, 64)] == [3, 3, 3]
    assert [gated_lora._backward_tile(rank, 2, HOPPER).registers for rank in (16, 32, 64)] == [128, 168, 128]
    assert [gated_lora._forward_tile(rank, 2, HOPPER).registers for rank in (16, 32, 64)] == [128, 128, 128]
    bf16 = torch.bfloat16
    assert grouped_gemm._tile(10**5, 8, 4096, bf16, HOPPER) == (128, 256, 64, 8, 3)
    assert grouped_gemm._tile(10**5, 8, 16, bf16, HOPPER) == (64, 16, 128, 4, 4)
    assert grouped_gemm._weight_tile(4096, 4096, bf16, HOPPER) == (128, 256, 64, 8, 3)
    assert grouped_quantized._tile(10**5, 8, bf16, HOPPER) == (128, 128, 64, 8, 3)
    assert moe_gather._lora_tile(bf16, HOPPER) == (64, 16, 128, 4, 3)


@pytest.mark.parametrize("chip", SMALL, ids=lambda chip: str(chip.sm))
def test_small_chips_have_small_tiles_and_all_registers(chip: Chip) -> None:
    bf16 = torch.bfloat16
    for tile in (
        grouped_gemm._tile(10**5, 8, 4096, bf16, chip),
        grouped_gemm._tile(10**5, 8, 16, bf16, chip),
        grouped_gemm._weight_tile(4096, 4096, bf16, chip),
        moe_gather._lora_tile(bf16, chip),
    ):
        assert tile.stages * (tile.rows + tile.columns) * tile.inner * 2 <= 99 * 1024
    assert [lora_grad_gemm._tile(ranks).registers(ranks, chip) for ranks in (16, 32, 64)] == [None, None, None]
    assert gated_lora._backward_tile(64, 2, chip).registers is None
