"""What of hopper_gemm.py and its CUDA source needs no GPU: what is launched, and that the two files say the same."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pronghorn.kernels.gemm import hopper_gemm
from pronghorn.kernels.runtime import cuda_source

FILE = Path(hopper_gemm.__file__).parent / "hopper_gemm.cu"
MOST_SHARED = 227 * 1024  # bytes that a block can have on Hopper
MAPS = ["TensorMap"] * 4
ARGUMENTS = {
    "GATED": [*MAPS, "TensorMap", "_Sizes"],
    "POWERS": [*MAPS, "c_void_p_Array_3", "c_float", "Tensor", "c_void_p", "_Sizes"],
    "ROPE": [*MAPS, "Tensor", "Tensor", "_Heads", "_Sizes"],
}


@pytest.fixture
def launched_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, ...]]:
    """What a product of tensors on the CPU gives to `launch`."""
    calls: list[tuple[Any, ...]] = []

    def record(*call: Any) -> bool:
        calls.append(call)
        return True

    def run(what: str) -> tuple[Any, ...]:
        x, weight, out, angles = *(torch.zeros(4, 64).bfloat16() for _ in range(3)), torch.ones(4, 32)
        if what == "powers":
            rows = hopper_gemm.Labelled(torch.zeros(4), torch.zeros(4, dtype=torch.long), torch.zeros(4))
            assert hopper_gemm.powers_mm(x, weight, rows, out=out, scale=1.0, sums_2NC=torch.zeros(2, 1, 4))
        elif what == "rope":
            assert hopper_gemm.rope_mm(x, weight, angles, angles, rope_heads=1, head_width=64, out=out)
        else:
            assert hopper_gemm.gated_mm(x, weight, what, gu_out=out, a_out=out[:, :32])  # type: ignore[arg-type]
        return calls.pop()

    monkeypatch.setattr(cuda_source, "_driver", lambda: SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 0))
    monkeypatch.setattr(hopper_gemm, "covered", lambda *_: True)
    monkeypatch.setattr(hopper_gemm, "launch", record)
    return run


@pytest.mark.parametrize(
    ("what", "kernel"), [("silu", "GATED"), ("gelu_tanh", "GATED"), ("powers", "POWERS"), ("rope", "ROPE")]
)
def test_a_product_launches_its_own_kernel(launched_by: Callable[[str], tuple[Any, ...]], what: str, kernel: str) -> None:
    source, name, blocks, threads, shared, arguments = launched_by(what)
    definitions = dict(source.definitions)
    assert {each: definitions[each] for each in ARGUMENTS} == {each: int(each == kernel) for each in ARGUMENTS}
    assert definitions.get("GELU", 0) == (what == "gelu_tanh")
    assert definitions["HALF"] * 2 == hopper_gemm.COLUMNS
    assert [type(argument).__name__ for argument in arguments] == ARGUMENTS[kernel]
    assert f"__launch_bounds__({threads}, 1) {name}(" in FILE.read_text(encoding="utf-8")
    assert blocks % 2 == 0  # two are a cluster
    assert shared <= MOST_SHARED


def test_the_file_has_one_line_to_be_replaced(launched_by: Callable[[str], tuple[Any, ...]]) -> None:
    source, text = launched_by("silu")[0], FILE.read_text(encoding="utf-8")
    assert text.count(source.line[0]) == text.splitlines().count(source.line[0]) == 1
    assert source.line[0] not in source.text()
    assert source.text().count(source.line[1]) == 1
    assert source.line[1] == hopper_gemm._multiplication(192)


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
