"""dy sB and dB from one reading of dy, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pronghorn.kernels.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.lora_pair import Tile, lora_pair, lora_pair_reference

SMALL = Tile(tokens=32, columns=16, splits=2, warps=4, stages=2)  # several blocks and splits at sizes an interpreter can do


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "sizes", "ranks"), [(1, (16,), (16,)), (70, (48, 33), (16, 3)), (33, (20, 7, 64), (1, 0, 24))]
)
def test_both_are_as_near_to_the_truth_as_plain_torch(
    device: str, tokens: int, sizes: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype, judge: Callable[..., None]
) -> None:
    width = 32
    adapters = [
        Adapter(i, torch.randn(rank, width, device=device), torch.randn(sizes[i], rank, device=device), 0.5 + i)
        for i, rank in enumerate(ranks)
        if rank
    ]
    group = LoraGroup([torch.randn(rows, width, device=device).to(dtype) for rows in sizes], adapters)
    dy_ext = torch.full((tokens, group.grad_width), float("nan"), device=device).to(dtype)
    dy_ext[:, : group.O] = torch.randn(tokens, group.O, device=device).to(dtype)
    xa = group.extend(group.widen(torch.randn(tokens, width, device=device).to(dtype)))
    dy, dyb = dy_ext[:, : group.O], dy_ext[:, group.O :]
    found = lora_pair(group, dy, xa, dyb, SMALL)

    sB = group.M[: group.O, group.D :]
    same = dy @ sB if device == "cuda" or dtype == torch.float32 else (dy.float() @ sB.float()).to(dtype)
    judge(dyb, same.cpu(), dy.cpu().double() @ sB.cpu().double(), "dy sB")
    for adapter, columns, grad in zip(group.adapters, group.columns, found, strict=True):
        part, xa_i = dy[:, group.rows[adapter.linear]].cpu(), xa[:, columns].cpu()
        assert grad.dtype == torch.float32
        truth = adapter.scale * part.double().T @ xa_i.double()
        judge(grad.to(dtype), (adapter.scale * part.float().T @ xa_i.float()).to(dtype), truth, f"dB {adapter.linear}")


def test_ranks_above_a_tile_go_through_plain_torch(device: str) -> None:
    adapter = Adapter(0, torch.randn(80, 8, device=device), torch.randn(24, 80, device=device), 1.0)
    group = LoraGroup([torch.randn(24, 8, device=device)], [adapter])
    dy, xa = torch.randn(5, 24, device=device), torch.randn(5, 80, device=device)
    ours, theirs = torch.empty(5, 80, device=device), torch.empty(5, 80, device=device)
    assert torch.equal(lora_pair(group, dy, xa, ours)[0], lora_pair_reference(group, dy, xa, theirs)[0])
    assert torch.equal(ours, theirs)
