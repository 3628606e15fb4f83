"""Many scaled copies in one launch."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.lora import multi_copy
from pronghorn.kernels.lora.multi_copy import CopyJob, CopyTable


def test_every_value_lands_in_its_place_and_nothing_else_is_touched(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_copy, "TILE", 64)  # several tiles a job at sizes an interpreter can do
    wide = torch.full((40, 50), 7.0, device=device, dtype=torch.float16)
    sources = [torch.randn(3, 50, device=device), torch.randn(30, 5, device=device), torch.randn(1, 1, device=device)]
    targets = [wide[:3], wide[5:35, 10:15], wide[39:, 49:]]
    scales = [1.0, 0.3, -2.0]
    expected = wide.clone()
    for target, source, scale in zip((expected[:3], expected[5:35, 10:15], expected[39:, 49:]), sources, scales, strict=True):
        target.copy_(source * scale)
    CopyTable([CopyJob(*job) for job in zip(sources, targets, scales, strict=True)]).run()
    assert torch.equal(wide, expected)


def test_a_change_that_torch_does_not_count_is_copied_too(device: str) -> None:
    source, target = torch.randn(4, 4, device=device), torch.zeros(4, 4, device=device)
    table = CopyTable([CopyJob(source, target, 2.0)])
    table.run()
    version = source._version
    source.data.add_(1)  # as fused optimizers do
    assert source._version == version
    table.run()
    assert torch.equal(target, source * 2)
