from __future__ import annotations

import pytest

from pronghorn.errors import CommandError
from pronghorn.memory.gpus import GPUS, find_gpu


@pytest.mark.parametrize(("said", "found"), [
    ("rtx4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("H200", "h200"),
    ("NVIDIA H200", "h200"), ("a100-80", "a100-80"), ("A100 80GB", "a100-80"),
])
def test_a_gpu_is_found_by_any_of_its_names(said: str, found: str) -> None:
    assert find_gpu(said).name == found


def test_an_unknown_one_is_told_with_its_neighbour() -> None:
    with pytest.raises(CommandError) as caught:
        find_gpu("rtx4091")
    assert "did you mean rtx4090" in str(caught.value)
    assert "b200" in str(caught.value)


def test_the_table_has_no_holes() -> None:
    for name, gpu in GPUS.items():
        assert name == gpu.name
        assert min(gpu.memory_gb, gpu.bandwidth_gbs, gpu.bf16_tflops, gpu.link_gbs, gpu.price or 1.0) > 0
        assert gpu.fp8_tflops == 0 or gpu.fp8_tflops > gpu.bf16_tflops
