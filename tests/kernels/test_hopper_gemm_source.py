"""What of hopper_gemm.py and its CUDA source needs no GPU: that the two files say the same."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from pronghorn.kernels.gemm import hopper_gemm

FILE = Path(hopper_gemm.__file__).parent / "hopper_gemm.cu"


def test_the_instruction_names_each_result_of_a_thread() -> None:
    text = hopper_gemm._multiplication(192)
    assert text.count("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16") == 1
    assert [int(number) for number in re.findall(r'"\+f"\(d\[(\d+)\]\)', text)] == list(range(96))
    # The operands in the order of the text: whether it adds, the results, x and w.
    assert [int(number) for number in re.findall(r"%(\d+)", text)] == [98, *range(96), 96, 97]
    assert re.findall(r'"[lr]"\(\w+\)', text) == ['"l"(x)', '"l"(w)', '"r"(add)']


@pytest.mark.parametrize("structure", [hopper_gemm._Sizes, hopper_gemm._Heads])
def test_structures_have_the_files_fields(structure: type[ctypes.Structure]) -> None:
    name = structure.__name__.removeprefix("_")
    [fields] = re.findall(rf"struct {name} {{ int ([\w, ]+); }};", FILE.read_text(encoding="utf-8"))
    assert [(field, ctypes.c_int) for field in fields.split(", ")] == list(structure._fields_)


def test_tiles_have_the_files_sizes() -> None:
    text = FILE.read_text(encoding="utf-8")
    assert f"constexpr int ROWS = {hopper_gemm.ROWS}, TERMS = {hopper_gemm.TERMS};" in text
    chunks = [int(number) for number in re.findall(r"constexpr int CHUNK = (\d+),", text)]
    assert chunks == [hopper_gemm.POWERS_CHUNK, hopper_gemm.NARROW_CHUNK]
