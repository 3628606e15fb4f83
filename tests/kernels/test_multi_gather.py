"""Adapter gradients taken out of the sums of a group."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.lora import multi_gather
from pronghorn.kernels.lora.multi_gather import GatherJob, GatherTable, multi_gather_reference


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_every_value_lands_in_its_place(device: str, weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_gather, "TILE", 64)  # several tiles a job at sizes an interpreter can do
    sums = torch.randn(48, 130, device=device)
    weight = torch.randn(33, device=device).to(weight_dtype)
    jobs = [
        GatherJob(sums[:16, :33], torch.full((16, 33), 9.0, device=device), weight=weight),
        GatherJob(sums[3:8, 97:], torch.full((5, 33), 9.0, device=device), weight=weight, one_plus=True),
        GatherJob(sums[16:32, 5:120], torch.full((115, 16), 9.0, device=device), scale=0.25, transposed=True),
        GatherJob(sums[47:, :1], torch.full((1, 1), 9.0, device=device), scale=-2.0),
    ]
    untouched = sums.clone()
    GatherTable(jobs).run()
    for job in jobs:
        torch.testing.assert_close(job.target, multi_gather_reference(job), rtol=1e-6, atol=0)
    assert torch.equal(sums, untouched)


def test_the_definition() -> None:
    source = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    transposed = GatherJob(source, torch.zeros(3, 2), scale=2.0, transposed=True)
    assert multi_gather_reference(transposed).tolist() == [[2.0, 8.0], [4.0, 10.0], [6.0, 12.0]]
    weighted = GatherJob(source, torch.zeros(2, 3), weight=torch.tensor([0.0, 1.0, -1.0]), one_plus=True)
    assert multi_gather_reference(weighted).tolist() == [[1.0, 4.0, 0.0], [4.0, 10.0, 0.0]]
