"""Groups that take turns in one buffer: after `load`, M is that of a group with a buffer of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.lora.shared_buffers import SharedBuffer
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.quant.nf4 import NF4Tensor, nf4_dequantize, nf4_quantize

D = 128
Weights = list[NF4Tensor | Tensor]


def draw(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def weights_of(seed: int, device: str, widths: Iterable[int] = (64, 32, 32), dtype: torch.dtype = torch.float32) -> Weights:
    return [nf4_quantize(draw(width, D, seed=seed + i, device=device).to(dtype)) for i, width in enumerate(widths)]


def adapters_of(weights: Weights, ranks: dict[int, int], seed: int, device: str) -> list[Adapter]:
    return [
        Adapter(
            i,
            draw(rank, D, seed=seed + i, device=device),
            draw(weights[i].shape[0], rank, seed=seed + 10 + i, device=device),
            0.5 + i,
        )
        for i, rank in ranks.items()
    ]


def plain(weights: Weights, adapters: list[Adapter], dtype: torch.dtype) -> LoraGroup:
    return LoraGroup([w.to(dtype) if isinstance(w, Tensor) else nf4_dequantize(w, dtype=dtype) for w in weights], adapters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_take_turns(device: str, dtype: torch.dtype) -> None:
    """Of other shapes, ranks and places, without adapters, with a weight in 16 bits: nothing of the last one is left."""
    scratch = SharedBuffer(dtype, torch.device(device))
    cases = []
    for number, (widths, ranks) in enumerate(
        (
            ((64, 32, 32), {0: 4, 1: 4, 2: 4}),
            ((64, 32, 32), {0: 4, 2: 8}),
            ((64, 32, 32), {}),
            ((96,), {0: 16}),
            ((64, 32, 32), {0: 60, 1: 3, 2: 8}),
        )
    ):
        weights = weights_of(100 * number, device, widths, dtype)
        if number == 1:
            weights[1] = nf4_dequantize(weights[1], dtype=dtype) if isinstance(weights[1], NF4Tensor) else weights[1]
        adapters = adapters_of(weights, ranks, 1000 * (number + 1), device)
        cases.append((StoredLoraGroup(weights, adapters, scratch), plain(weights, adapters, dtype)))
    for number in (0, 1, 0, 2, 0, 3, 4, 2, 1, 4, 3, 0):
        ours, expected = cases[number]
        ours.load()
        assert scratch.owner is ours
        assert torch.equal(ours.M, expected.M), number  # both from the same kernels, so also where the interpreter rounds
        x = draw(5, D, seed=7, device=device).to(dtype)
        assert torch.equal(*(group.forward(torch.nn.functional.pad(x, (0, group.R))) for group in (ours, expected)))
        dy = torch.zeros(5, ours.grad_width, dtype=dtype, device=device)
        dy[:, : ours.O] = draw(5, ours.O, seed=8, device=device)
        assert torch.equal(ours.extend_grad(dy), expected.extend_grad(dy.clone()))
    assert len({ours.M.data_ptr() for ours, _ in cases}) == 1  # one buffer, sized before it was first used


def test_an_owner_loads_once_and_again_when_it_was_forgotten(device: str) -> None:
    scratch = SharedBuffer(torch.float32, torch.device(device))
    weights = weights_of(0, device)
    adapters = adapters_of(weights, {0: 4, 1: 4, 2: 4}, 50, device)
    group = StoredLoraGroup(weights, adapters, scratch)
    group.load()
    before = group.M.clone()
    adapters[1].B_OR.mul_(3.0)  # an optimizer's update
    group.load()
    assert torch.equal(group.M, before)
    scratch.forget()
    group.M.fill_(float("nan"))
    group.load()
    assert torch.equal(group.M, plain(weights, adapters, torch.float32).M)
    assert not torch.equal(group.M, before)


def test_a_larger_group_that_comes_later(device: str) -> None:
    scratch = SharedBuffer(torch.float32, torch.device(device))
    small_weights, large_weights = weights_of(0, device, (32,)), weights_of(9, device, (256,))
    small = StoredLoraGroup(small_weights, [], scratch)
    small.load()
    large = StoredLoraGroup(large_weights, [], scratch)
    for group, weights in ((large, large_weights), (small, small_weights), (large, large_weights)):
        group.load()
        assert torch.equal(group.M, plain(weights, [], torch.float32).M)
    assert small.M.data_ptr() == large.M.data_ptr()
