from __future__ import annotations

import pytest

from pronghorn.errors import CommandError
from pronghorn.kernels.runtime.dispatch import CHIPS
from pronghorn.memory.gpus import GPUS, find_gpu
from tables import table


@table(
    ("said", "found"),
    [
        ("rtx4090", "rtx4090"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("A100 80GB", "a100-80"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti-16"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_is_found_by_any_of_its_names(said: str, found: str) -> None:
    assert find_gpu(said).name == found


def test_an_unknown_one_is_told_with_its_neighbour() -> None:
    with pytest.raises(CommandError) as caught:
        find_gpu("rtx4091")
    assert "did you mean rtx4090" in str(caught.value)
    assert "b200" in str(caught.value)


@table("said", ["t4", "T4", "Tesla T4", "NVIDIA Tesla V100-SXM2-16GB", "rtx2080ti"])
def test_one_that_is_too_old_is_known_as_such(said: str) -> None:
    with pytest.raises(CommandError, match=r"compute capability [67]\.[05]") as caught:
        find_gpu(said)
    assert "8.0 (Ampere) and newer" in caught.value.why


def test_gpus_and_chips_say_the_same() -> None:
    """kernels/runtime/dispatch.py names the GPUs that have a chip: the planner knows them, and whether they have FP8."""
    for chip in CHIPS.values():
        for name in chip.gpus.split(", "):
            known = [gpu for gpu in GPUS.values() if gpu.title.removeprefix("GeForce ").startswith(name)]
            assert known, name
            assert all((gpu.fp8_tflops > 0) == (chip.capability >= (8, 9)) for gpu in known)
