"""The table against plain lists, and tokenizers that are missing, changed or hostile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from token_rows import mask_of, some_rows

from pronghorn.data.encode.tokens import TokenizerFiles, TokenRow, TokenTable, fingerprint, load_tokenizer
from pronghorn.errors import ModelError, RecipeError
from pronghorn.recipe_parts import Data
from samples import CHATML, make_tokenizer


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


def test_content_is_every_token_and_mark_and_nothing_else() -> None:
    rows = some_rows(30)
    table = TokenTable.of(rows)
    moved = [TokenRow(row.ids, row.runs, f"elsewhere:{n}", "{}") for n, row in enumerate(rows)]
    assert TokenTable.of(moved).content == table.content
    for n in (0, 2, 29):  # one token, one mark, one token more, anywhere
        for change in ("token", "mark", "length"):
            other = list(rows)
            ids = rows[n].ids.copy()
            ids[-1] ^= change == "token"
            ids = np.append(ids, ids[-1:]) if change == "length" else ids
            runs = ((0, 1),) if change == "mark" and rows[n].runs != ((0, 1),) else () if change == "mark" else rows[n].runs
            other[n] = TokenRow(ids, runs, rows[n].where, rows[n].example)
            assert TokenTable.of(other).content != table.content
    assert table.select([1, 2]).content != table.select([2, 1]).content != table.content
    assert table.cut([(1, 0, 1)]).content != table.cut([(2, 0, 1)]).content


# Tokenizers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_missing_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_tokenizer(str(tmp_path / "nothing"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(str(tmp_path / "empty"), None)
    assert "tokenizer.json" in caught.value.fix
    assert caught.value.why == "the folder has no tokenizer.json"
    with pytest.raises(ModelError) as caught:  # HF_HUB_OFFLINE is set for all tests
        load_tokenizer("nobody/no-such-model", None)
    assert caught.value.where == "nobody/no-such-model"
    assert caught.value.exit_code == 2


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(str(folder), None)


def test_two_tokens_of_one_id_are_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    plain = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = plain["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first] = vocabulary[second]
    file.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ModelError, match="two tokens the same id"):
        load_tokenizer(str(folder))


def test_code_in_a_model_folder_does_not_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "MyTokenizer", "auto_map": {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(str(folder), None)
    assert "needs code" in caught.value.why
    assert "put tokenizer.json" not in caught.value.fix  # it is there
    assert not (tmp_path / "ran").exists()


def test_a_template_file_replaces_the_tokenizers_own(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    assert load_tokenizer(str(folder), None).chat_template == CHATML
    assert load_tokenizer(str(folder), Data(train="-", chat_template=str(tmp_path / "mine.jinja"))).chat_template == "mine"
    with pytest.raises(RecipeError, match="cannot read"):
        load_tokenizer(str(folder), Data(train="-", chat_template=str(tmp_path / "other.jinja")))


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
    assert TokenizerFiles(str(folder), Data(train="-", chat_template=str(tmp_path / "mine.jinja"))).fingerprint() != first
    changed = load_tokenizer(str(folder), None)
    changed.chat_template = "changed in Python"
    assert fingerprint(changed) != first
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|im_end|>", "<|endoftext|>"))
    assert TokenizerFiles(str(folder)).fingerprint() != first
