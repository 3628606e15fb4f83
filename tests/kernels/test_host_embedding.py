from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.embedding.host_embedding import host_embedding, host_embedding_reference, seen_by_gpu
from tables import table


@table("dtype", [torch.float32, torch.bfloat16, torch.float16])
@table(("rows", "width"), [(7, 1), (50, 96), (130, 576), (5, 5000)])
def test_rows_are_gathered_exactly(device: str, rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(rows, width).to(dtype).to(device)
    ids = torch.randint(rows, (33,), device=device)
    ids[0], ids[1] = rows - 1, 0
    assert torch.equal(host_embedding(weight, ids), host_embedding_reference(weight, ids))
    many = ids[:32].view(4, 8)
    assert torch.equal(host_embedding(weight, many), host_embedding_reference(weight, many))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_read_where_it_is_also_by_a_graph() -> None:
    host = torch.randn(1000, 4096).to(torch.bfloat16).pin_memory()
    before = torch.cuda.memory_allocated()
    weight = seen_by_gpu(host)
    assert weight.is_cuda
    assert torch.cuda.memory_allocated() == before
    ids = torch.randint(1000, (513,), device="cuda")
    assert torch.equal(host_embedding(weight, ids).cpu(), host[ids.cpu()])
    assert torch.equal(torch.nn.functional.embedding(ids, weight).cpu(), host[ids.cpu()])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = host_embedding(weight, ids)
    ids.copy_(torch.randint(1000, (513,)))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), host[ids.cpu()])
