"""The buffers that the layers of a model share."""

from __future__ import annotations

import copy

import torch

from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.kernels.quant.fp8_cast import E4M3


def test_one_buffer_for_each_kind_of_group_and_dtype(device: str) -> None:
    buffers, where = SharedBuffers(), torch.device(device)
    first, turned = buffers.matrix(("q", "k"), torch.float32, where), buffers.transposed(where)
    assert buffers.matrix(("q", "k"), torch.float32, where) is first
    assert buffers.matrix(("q",), torch.float32, where) is not first
    assert buffers.matrix(("q", "k"), E4M3, where) not in (first, turned)
    assert buffers.transposed(where) is turned


def test_a_buffer_is_as_large_as_its_largest_user_and_counted_when_it_is_allocated(device: str) -> None:
    buffers, where = SharedBuffers(), torch.device(device)
    one, turned = buffers.matrix(("q",), torch.bfloat16, where), buffers.transposed(where)
    one.reserve(100)
    one.reserve(40)
    turned.reserve(7)
    assert buffers.nbytes == 0
    taken = one.take()
    assert (len(taken), float(taken.float().abs().max())) == (100, 0.0)
    assert buffers.nbytes == 200
    assert len(turned.take()) == 7
    assert buffers.nbytes == 207


def test_whoever_grows_it_takes_it_from_its_owner(device: str) -> None:
    one = SharedBuffers().matrix(("q",), torch.float32, torch.device(device))
    one.reserve(4)
    one.take()
    one.owner, one.layout = "owner", (4,)
    assert one.take() is one.take()
    assert one.owner == "owner"
    one.reserve(5)
    assert len(one.take()) == 5
    assert (one.owner, one.layout) == (None, None)


def test_a_copied_model_has_buffers_of_its_own(device: str) -> None:
    buffers, where = SharedBuffers(), torch.device(device)
    one = buffers.matrix(("q",), torch.float32, where)
    one.reserve(4)
    one.owner, one.layout = one.take(), 1
    other = copy.deepcopy(buffers)
    assert other.nbytes == 0
    twin = other.matrix(("q",), torch.float32, where)
    assert (twin.owner, twin.layout) == (None, None)
    assert len(twin.take()) == 4
