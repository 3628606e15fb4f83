"""The table against plain lists, and tokenizers that are missing, changed or hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pronghorn.data.tokens import TokenizerFiles, TokenRow, TokenTable, fingerprint, load_tokenizer, record_batch, write_table
from pronghorn.errors import EnvironmentFault, ModelError, RecipeError
from samples import CHATML, make_tokenizer


def some_rows(count: int) -> list[TokenRow]:
    random = np.random.default_rng(0)
    rows = []
    for n in range(count):
        length = int(random.integers(1, 30))
        borders = np.unique(random.integers(0, length + 1, 2 * int(random.integers(0, 3))))
        runs = tuple((int(a), int(b)) for a, b in borders[: len(borders) // 2 * 2].reshape(-1, 2))
        rows.append(TokenRow(random.integers(0, 1000, length).astype(np.int32), runs, f"a.jsonl:{n + 1}", f'{{"n": {n}}}'))
    return rows


def mask_of(row: TokenRow) -> list[bool]:
    return [any(start <= at < stop for start, stop in row.runs) for at in range(len(row.ids))]


def test_a_table_on_disk_is_its_rows(tmp_path: Path) -> None:
    rows = some_rows(50)
    assert any(row.runs and row.runs[0][0] == 0 for row in rows)  # a loss token at position 0, which has no label
    write_table(tmp_path / "t.arrow", (record_batch(rows[at : at + 7]) for at in range(0, 50, 7)))
    table = TokenTable.open(tmp_path / "t.arrow")
    assert len(table) == 50
    assert table.lengths.dtype == table.loss_counts.dtype == np.int32
    for i, row in enumerate(rows):
        assert table.ids(i).tolist() == row.ids.tolist()
        assert table.loss(i).tolist() == mask_of(row)
        assert table.loss_counts[i] == sum(mask_of(row)[1:])
        assert (table.lengths[i], table.where(i), table.example_json(i)) == (len(row.ids), row.where, row.example)
    assert [path.name for path in tmp_path.iterdir()] == ["t.arrow"]


def test_a_table_is_opened_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for `to_numpy`, where it is installed: 0.5 s of every start."""
    write_table(tmp_path / "table", [record_batch(some_rows(3))])
    code = """
import sys
from pathlib import Path
from pronghorn.data.tokens import TokenTable
table = TokenTable.open(Path(sys.argv[1]))
assert len(table) == 3 and len(table.ids(2)) == table.lengths[2]
sys.exit("pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "table")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_views_of_rows_and_of_parts_of_rows() -> None:
    rows = some_rows(30)
    table = TokenTable.of(rows)
    chosen = table.select([5, 3, 20])
    assert [chosen.where(i) for i in range(3)] == ["a.jsonl:6", "a.jsonl:4", "a.jsonl:21"]
    assert table.select(table.lengths > 15).lengths.min() > 15
    pieces = [(i, at, at + 4) for i, row in enumerate(rows) for at in range(0, len(row.ids), 4)]
    cut = table.cut(pieces)
    for n, (i, start, stop) in enumerate(pieces):
        assert cut.ids(n).tolist() == rows[i].ids[start:stop].tolist()
        assert cut.loss(n).tolist() == mask_of(rows[i])[start:stop]
        assert cut.loss_counts[n] == sum(mask_of(rows[i])[start:stop][1:])
        assert cut.row(n) == i
    again = cut.select([1, 2]).cut([(1, 1, 3)])
    i, start, _ = pieces[2]
    assert again.ids(0).tolist() == rows[i].ids[start + 1 : start + 3].tolist()


def test_an_empty_table(tmp_path: Path) -> None:
    write_table(tmp_path / "t.arrow", [])
    assert len(TokenTable.open(tmp_path / "t.arrow")) == 0
    assert len(TokenTable.of([]).lengths) == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_cut_file_is_noticed(tmp_path: Path, share: float) -> None:
    path = tmp_path / "t.arrow"
    write_table(path, [record_batch(some_rows(50))])
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises((pa.ArrowInvalid, OSError)):
        TokenTable.open(path)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def batches() -> Iterator[Any]:
        yield record_batch(some_rows(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_table(tmp_path / "t.arrow", batches())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_behind_goes_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / ".a.arrow.17.tmp", tmp_path / ".b.arrow.18.tmp"
    for file, age in ((old, 90_000), (young, 3_600)):
        file.write_bytes(b"half of it")
        os.utime(file, (time.time() - age,) * 2)
    write_table(tmp_path / "t.arrow", [])
    assert sorted(file.name for file in tmp_path.iterdir()) == [young.name, "t.arrow"]


def test_a_full_disk_can_be_repaired_and_the_command_repeated() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        write_table(Path("/dev/null/t.arrow"), [])
    assert "PRONGHORN_CACHE" in caught.value.fix


# Tokenizers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_missing_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_tokenizer(str(tmp_path / "nothing"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path / "empty"), None)
    assert "tokenizer.json" in caught.value.fix
    assert caught.value.why == "there is no tokenizer.json in the folder"
    with pytest.raises(ModelError) as caught:  # HF_HUB_OFFLINE is set for all tests
        load_tokenizer("nobody/no-such-model", None)
    assert caught.value.where == "nobody/no-such-model"
    assert caught.value.exit_code == 2


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_tokenizer(str(folder), None)


def test_code_in_a_model_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_tokenizer(str(folder), None)
    assert "run code" in caught.value.why
    assert "put tokenizer.json" not in caught.value.fix  # it is there
    assert not (tmp_path / "ran").exists()


def test_a_template_file_replaces_the_tokenizers_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_tokenizer(str(folder), None).chat_template == CHATML
    assert load_tokenizer(str(folder), str(tmp_path / "mine.jinja")).chat_template == "mine"
    with pytest.raises(RecipeError, match="cannot be read"):
        load_tokenizer(str(folder), str(tmp_path / "other.jinja"))


def test_a_tokenizers_own_truncation_is_not_used(folder: Path) -> None:
    parts = json.loads((folder / "tokenizer.json").read_text())
    parts["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    assert len(load_tokenizer(str(folder), None).backend_tokenizer.encode("abcdefgh").ids) == 8


def test_a_fingerprint_follows_the_files_and_the_template(folder: Path, tmp_path: Path) -> None:
    first = TokenizerFiles(str(folder)).fingerprint()
    assert fingerprint(load_tokenizer(str(folder), None)) == first
    (folder / "model.safetensors").write_bytes(b"weights are not the tokenizer's")
    assert TokenizerFiles(str(folder)).fingerprint() == first
    (tmp_path / "mine.jinja").write_text("mine")
    assert TokenizerFiles(str(folder), str(tmp_path / "mine.jinja")).fingerprint() != first
    changed = load_tokenizer(str(folder), None)
    changed.chat_template = "changed in Python"
    assert fingerprint(changed) != first
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|im_end|>", "<|endoftext|>"))
    assert TokenizerFiles(str(folder)).fingerprint() != first


def test_a_fingerprint_needs_neither_transformers_nor_torch(folder: Path) -> None:
    code = (
        "import sys; from pronghorn.data.prepare import prepare; from pronghorn.data.tokens import TokenizerFiles;"
        f"TokenizerFiles({str(folder)!r}).fingerprint(); print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
