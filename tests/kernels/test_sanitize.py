"""The script for compute-sanitizer launches every kernel there is, and what they compute is right."""

from __future__ import annotations

import pytest
import sanitize
import torch

from pronghorn.kernels.runtime.dispatch import use_triton


def test_every_kernel_is_launched(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("plain torch launches nothing")
    assert sanitize.main() == 0
    assert "kernels ran" in capsys.readouterr().out


def test_a_kernel_that_is_left_out_is_named(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("plain torch launches nothing")
    monkeypatch.setattr(sanitize, "OPS", {"copy_rows": sanitize.check_copy_rows})
    with pytest.raises(AssertionError, match=r"rope\._backward_kernel"):
        sanitize.main()
