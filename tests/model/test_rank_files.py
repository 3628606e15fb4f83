"""Tensors whose rows lie in several files: written by ranks, read as one, refused where something is missing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from pronghorn.errors import ModelError
from pronghorn.model.rank_files import Part, RankFiles, file_name, in_rank_files, write_rank_file

ROWS = ((0, 3), (3, 6), (6, 7))  # of seven rows, what each of three ranks has


def written(folder: Path, tensors: dict[str, torch.Tensor], only: tuple[int, ...] = (0, 1, 2)) -> None:
    folder.mkdir(exist_ok=True)
    for rank in only:
        first, end = ROWS[rank]
        parts = {name: Part(tensor[first:end], first) for name, tensor in tensors.items()}
        parts |= {"scalar": Part(torch.tensor(5.0))} if rank == 0 else {}
        facts = write_rank_file(folder / file_name(rank, 3, "model-"), parts)
        content = (folder / file_name(rank, 3, "model-")).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_read_across_files(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"matrix": torch.randn(7, 4).to(dtype), "vector": torch.randn(7), "strided": torch.randn(5, 7).T}
    written(tmp_path, tensors)
    found = RankFiles(tmp_path)
    assert found.keys() == tensors.keys() | {"scalar"}
    assert found["scalar"][...].item() == 5.0
    for name, tensor in tensors.items():
        rows = found[name]
        assert (rows.shape, rows.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(rows[...], tensor)
        for a, b in ((0, 1), (2, 4), (3, 6), (1, 7), (6, 99)):
            assert torch.equal(rows[a:b], tensor[a:b]), (name, a, b)


def test_what_is_missing_or_of_no_rank_is_refused(tmp_path: Path) -> None:
    tensors = {"matrix": torch.randn(7, 4)}
    written(tmp_path, tensors, (0, 2))
    with pytest.raises(ModelError) as refused:
        RankFiles(tmp_path)
    assert "2 of 3 files are there" in refused.value.why
    write_rank_file(tmp_path / file_name(1, 3, "model-"), {"matrix": Part(tensors["matrix"][4:6], 4)})
    with pytest.raises(ModelError) as refused:
        RankFiles(tmp_path)
    assert "matrix has no row 3" in refused.value.why
    (tmp_path / file_name(1, 3, "model-")).write_bytes(b"no safetensors")
    with pytest.raises(ModelError):
        RankFiles(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"")
    assert in_rank_files(tmp_path / "plain") == []
