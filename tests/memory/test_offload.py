"""What comes back is what left, byte for byte, in the order of a step; on a GPU also beside compute and in a captured graph."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.memory.offload import OffloadPool, bytes_needed
from tables import table

CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def layer_tensors(layer: int, device: torch.device = CPU, rows: int = 33) -> list[Tensor | None]:
    """As a layer keeps them: views of one buffer, rows with extra columns, other dtypes, a scalar, some missing."""
    generator = torch.Generator().manual_seed(layer)

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    qkv, o_ext = random(rows, 24), random(rows, 20)
    q, k, v = (part.unflatten(1, (-1, 4)) for part in qkv.split([16, 4, 4], dim=1))
    numbers = torch.arange(rows, dtype=torch.int64, device=device) + layer
    return [
        random(rows, 16),
        q,
        k,
        v,
        o_ext[:, :16],
        o_ext,
        random(4, rows, dtype=torch.float32),
        None,
        numbers,
        torch.full((), float(layer), device=device),
        random(rows, 7, dtype=torch.float64),
        random(0, 3),
    ]


def clones(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.clone() for t in tensors]


def same(one: Any, other: Any) -> bool:
    """Bit for bit, with dtype and shape."""
    return all(
        a is b is None or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def pool_for(layers: int, device: torch.device = CPU) -> OffloadPool:
    return OffloadPool(layers, bytes_needed(layer_tensors(0, device)), device)


@table("turn", [True, False])
@table("layers", [1, 2, 3, 7])
def test_a_step_gets_back_what_it_left(layers: int, turn: bool) -> None:
    pool = pool_for(layers)
    for step in range(3):
        expected = {}
        for layer in range(layers):
            tensors = layer_tensors(100 * step + layer)
            expected[layer] = clones(tensors)
            pool.leave(layer, tensors)
        if turn:
            pool.start_prefetch()
        for layer in reversed(range(layers)):
            assert same(pool.back(layer), expected[layer])
        pool.finish()


def test_views_come_back_as_views_of_one_another() -> None:
    pool = pool_for(2)
    before = layer_tensors(5)
    strides = [None if t is None else t.stride() for t in before]
    pool.leave(0, before)
    pool.leave(1, layer_tensors(1))
    pool.back(1)
    after = pool.back(0)
    assert [None if t is None else t.stride() for t in after] == strides
    assert after[4].data_ptr() == after[5].data_ptr()
    shared = [t.untyped_storage().data_ptr() for t in after[1:4] if t is not None]
    assert len(set(shared)) == 1
    qkv_bytes, others = 33 * 24 * 2, 0
    assert bytes_needed(before[1:4]) == -(-qkv_bytes // 256) * 256 + others  # once, not three times


def test_only_a_part_of_a_storage_travels() -> None:
    wide = torch.arange(4096, dtype=torch.float32)
    part = wide[1000:1100]
    assert bytes_needed([part]) <= 512
    pool = OffloadPool(2, 512, CPU)
    pool.leave(0, [part])
    pool.leave(1, [])
    wide.zero_()
    pool.back(1)
    (found,) = pool.back(0)
    assert found.tolist() == list(range(1000, 1100))


def test_the_device_tensors_are_let_go_of_one_layer_later() -> None:
    pool = pool_for(3)
    alive = []
    for layer in range(3):
        tensors = layer_tensors(layer)
        alive.append(weakref.ref(tensors[0]))
        pool.leave(layer, tensors)
        del tensors
        gc.collect()
        assert [ref() is not None for ref in alive] == [False] * layer + [True]


def test_the_last_to_leave_was_never_away() -> None:
    pool = pool_for(2)
    pool.leave(0, layer_tensors(0))
    last = layer_tensors(1)
    pool.leave(1, last)
    pool.start_prefetch()
    assert all(a is b for a, b in zip(pool.back(1), last, strict=True))


def test_two_buffers_serve_any_number_of_layers() -> None:
    """What was handed out stays whole until the next `back`, while the next ones arrive."""
    pool = pool_for(6)
    expected = {}
    for layer in range(6):
        tensors = layer_tensors(layer)
        expected[layer] = clones(tensors)
        pool.leave(layer, tensors)
    pool.start_prefetch()
    places = []
    for layer in reversed(range(6)):
        tensors = pool.back(layer)
        assert same(tensors, expected[layer])  # after the prefetches that `back` began
        places.append(tensors[0].data_ptr())
    assert len(set(places[1:])) == 2
    assert pool.host_bytes == 5 * pool.slot_bytes


# ---- on a GPU ----------------------------------------------------------------------------------------------------------------


def step(pool: OffloadPool | None, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Layers y = tanh(x W), each keeping x and y, and backward by hand: the gradient of the sum by x."""
    kept = []
    for layer, weight in enumerate(weights):
        y = torch.tanh(x @ weight)
        if pool is None:
            kept.append((x, y))
        else:
            pool.leave(layer, [x, y])
        x = y
        del y
    if pool is not None:
        pool.start_prefetch()
    gradient = torch.ones_like(x)
    del x
    for layer in reversed(range(len(weights))):
        before, after = kept[layer] if pool is None else pool.back(layer)
        assert before is not None
        assert after is not None
        gradient = (gradient * (1 - after * after)) @ weights[layer].T + before
    if pool is not None:
        pool.finish()
    return gradient


@pytest.mark.gpu
@GPU
def test_pinned_memory_is_pinned_and_bytes_are_the_same() -> None:
    device = torch.device("cuda")
    pool = pool_for(4, device)
    assert pool._host.is_pinned()
    expected = {}
    for layer in range(4):
        tensors = layer_tensors(layer, device)
        expected[layer] = clones(tensors)
        pool.leave(layer, tensors)
    pool.start_prefetch()
    for layer in reversed(range(4)):
        assert same(pool.back(layer), expected[layer])
    pool.finish()


@pytest.mark.gpu
@GPU
def test_beside_compute_the_result_is_the_same_to_the_bit() -> None:
    device = torch.device("cuda")
    weights = [torch.randn(2048, 2048, device=device) / 45 for _ in range(8)]
    pool = OffloadPool(8, 2 * 4096 * 2048 * 4 + 512, device)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4096, 2048, device=device)
        assert torch.equal(step(pool, x, weights), step(None, x, weights))


@pytest.mark.gpu
@GPU
def test_a_captured_step_replays_with_new_inputs() -> None:
    device = torch.device("cuda")
    weights = [torch.randn(1024, 1024, device=device) / 32 for _ in range(6)]
    pool = OffloadPool(6, 2 * 2048 * 1024 * 4 + 512, device)
    x = torch.randn(2048, 1024, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(pool, x, weights)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        result = step(pool, x, weights)
    for seed in range(4):
        torch.manual_seed(seed)
        x.copy_(torch.randn(2048, 1024, device=device))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, step(None, x, weights))


@pytest.mark.gpu
@GPU
def test_offloading_makes_the_peak_smaller() -> None:
    device = torch.device("cuda")
    weights = [torch.randn(1024, 1024, device=device) / 32 for _ in range(12)]
    x = torch.randn(8192, 1024, device=device)
    pool = OffloadPool(12, 2 * x.nbytes + 512, device)
    peaks = []
    for one in (None, pool):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(one, x, weights)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < peaks[0] - 6 * x.nbytes
