"""The image of a checkpoint's files: the bytes that safetensors itself would write, in memory that is used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from pronghorn.train.checkpoint.checkpoint_image import Image, TensorFile, plan, safetensors_header
from tables import table

CPU = torch.device("cpu")
DTYPES = (
    torch.uint64,
    torch.int64,
    torch.float64,
    torch.float32,
    torch.uint32,
    torch.int32,
    torch.bfloat16,
    torch.float16,
    torch.uint16,
    torch.int16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def quiet(text: str) -> None:
    raise AssertionError(text)


def content(image: Image, name: str) -> bytes:
    assert image.memory is not None
    start, stop = image.layout.files[name]
    return image.memory[start:stop]


def every_dtype() -> dict[str, torch.Tensor]:
    return {f"{turn} {dtype}": (torch.arange(turn + 3) % 2).to(dtype) for turn in range(2) for dtype in DTYPES}


ODD = {
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 4),
    'ünïcödé "\\\n\x01\x7f': torch.ones(3),
    "cube": torch.ones(2, 3, 4),
}


@table("metadata", [None, {"format": "pt"}])
@table("tensors", [every_dtype(), ODD, {}])
def test_the_bytes_are_those_of_safetensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
    image = Image(CPU, None, quiet)
    image.take({"a.json": b"{}", "empty": b""}, [TensorFile("x", tensors, metadata), TensorFile("y", {"a": torch.ones(3)})])
    assert content(image, "x") == safetensors.torch.save(tensors, metadata)
    assert content(image, "y") == safetensors.torch.save({"a": torch.ones(3)})
    assert (content(image, "a.json"), content(image, "empty")) == (b"{}", b"")


def test_views_are_stored_as_what_they_show() -> None:
    base = torch.randn(4, 6)
    views = {
        "shared": base,
        "again": base,
        "row": base[1],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([[1.5]]).expand(3, 4),
        "parameter": torch.nn.Parameter(base[2:]),
    }
    image = Image(CPU, None, quiet)
    image.take({}, [TensorFile("x", views)])
    plain = {name: view.detach().clone(memory_format=torch.contiguous_format) for name, view in views.items()}
    assert content(image, "x") == safetensors.torch.save(plain)


def test_the_memory_is_used_again_and_grows(tmp_path: Path) -> None:
    with (tmp_path / "memory").open("w+b") as file:
        image = Image(CPU, file.fileno(), quiet)
        weights = {"a": torch.ones(1000)}
        image.take({"s": b"1"}, [TensorFile("x", weights)])
        first = image.memory
        weights["a"] += 1
        image.take({"s": b"1"}, [TensorFile("x", weights)])
        assert image.memory is first
        assert content(image, "x") == safetensors.torch.save({"a": torch.full((1000,), 2.0)})
        image.take({"s": b"22"}, [TensorFile("x", {"b": torch.ones(5)})])  # fits, but is laid out anew
        assert image.memory is first
        assert (content(image, "x"), content(image, "s")) == (safetensors.torch.save({"b": torch.ones(5)}), b"22")
        image.take({}, [TensorFile("x", {"a": torch.ones(100_000)})])
        assert content(image, "x") == safetensors.torch.save({"a": torch.ones(100_000)})
        assert file.seek(0, 2) == image.layout.size  # the file is the memory: whoever maps it sees the same
        start, stop = image.layout.files["x"]
        assert (tmp_path / "memory").read_bytes()[start:stop] == content(image, "x")


def test_what_cannot_be_stored_is_our_bug() -> None:
    with pytest.raises(TypeError, match=r"x: a has dtype torch\.complex128"):
        safetensors_header(TensorFile("x", {"a": torch.ones(1, dtype=torch.complex128)}))
    with pytest.raises(RuntimeError, match="same name"):
        plan({"x": b""}, [TensorFile("x", {})])
