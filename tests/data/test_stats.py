"""What `data stats` counts, and that people can read it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.stats import Stats, collect
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer, write_rows


def stats_of(path: Path, rows: list[dict[str, Any]], **spec: Any) -> Stats:
    return collect(Data(train=(str(write_rows(path, rows)),), **spec), 512, 1, make_tokenizer())


def shown(stats: Stats) -> str:
    out = io.StringIO()
    Console(file=out, width=400).print(stats.table())
    return out.getvalue()


@pytest.fixture
def dirty() -> list[dict[str, Any]]:
    def answer(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}

    return [*chat_rows(40), answer(""), answer("twin"), answer("twin"), answer("no " * 150)]


def test_everything_is_counted(tmp_path: Path, dirty: list[dict[str, Any]]) -> None:
    stats = stats_of(tmp_path / "a.jsonl", dirty, max_length=300, long="truncate")
    assert (stats.counts.read, stats.counts.kept) == (44, 44)
    assert stats.exact_duplicates.rows >= 1
    assert stats.junk["empty answer"].rows == 1
    assert stats.junk["empty answer"].example == f"{tmp_path / 'a.jsonl'}:41"
    assert stats.junk["absurd repetition"].rows == 1
    assert (stats.counts.too_long, stats.counts.truncated) == (1, 1)
    assert stats.lengths.largest > 300  # before it is cut
    assert stats.lengths.longest_row == f"{tmp_path / 'a.jsonl'}:44"
    assert 0 < stats.loss_share < 1
    assert stats.packing.packs == -(-stats.counts.tokens // 512) or stats.packing.efficiency < 1
    assert stats.packing.efficiency == pytest.approx(stats.counts.tokens / (stats.packing.packs * 512))
    assert sum(one.rows for one in stats.lengths.bins) == 44
    assert json.loads(json.dumps(stats.as_dict()))["counts"]["read"] == 44


def test_people_can_read_it(tmp_path: Path, dirty: list[dict[str, Any]]) -> None:
    text = shown(stats_of(tmp_path / "a.jsonl", dirty, max_length=300, long="truncate"))
    for part in ("44 documents of 44 rows", "carry loss", "█", "exact duplicates", "junk: empty answer", "a.jsonl:41",
                 "longer than 300, 1 truncated", "of 512 tokens are real tokens"):  # fmt: skip
        assert part in text


def test_too_many_long_rows_are_a_remark_here(tmp_path: Path) -> None:
    stats = stats_of(tmp_path / "a.jsonl", chat_rows(40), max_length=50)
    assert any("data.long" in remark for remark in stats.remarks)
    assert "data.long" in shown(stats)


def test_the_second_time_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    make_tokenizer().save_pretrained(tmp_path / "model")
    path = write_rows(tmp_path / "a.jsonl", chat_rows(30))
    first = collect(Data(train=str(path)), 512, 1, load_tokenizer(str(tmp_path / "model"), None))
    code = (
        "import sys; from pronghorn.data.stats import collect; from pronghorn.data.encode.tokens import TokenizerFiles;"
        f"from pronghorn.recipe_parts import Data; stats = collect(Data(train={str(path)!r}), 512, 1,"
        f" TokenizerFiles({str(tmp_path / 'model')!r})); stats.table();"
        "print(stats.counts.tokens, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert again.stdout == f"{first.counts.tokens} []\n"


def pairs_stats(path: Path, answers: list[tuple[str, str]], wanted: Any = "pairs") -> Stats:
    rows = [{"prompt": f"question {i}", "chosen": one, "rejected": other} for i, (one, other) in enumerate(answers)]
    data = Data(train=(str(write_rows(path, rows)),))
    return collect(data, 512, 1, make_tokenizer(), wanted=wanted)


def test_a_length_bias_of_pairs_shows(tmp_path: Path) -> None:
    long, short = "a" * 40, "b" * 20
    biased = pairs_stats(tmp_path / "a.jsonl", [(long, short)] * 9 + [(short, long)])
    assert biased.pairs is not None
    assert (biased.counts.kept, biased.pairs.comparisons, biased.pairs.longer) == (10, 10, 0.9)
    assert (biased.pairs.chosen, biased.pairs.rejected, biased.pairs.gaps) == (39.0, 23.0, (-20, 20, 20))  # with end tokens
    told = "chosen answers are longer in 90% of the pairs (39 tokens against 23 on average)"
    assert any(told in remark for remark in biased.remarks)
    assert told in shown(biased)
    assert "10 pairs of 10 rows (pairs: prompt)" in shown(biased)
    even = pairs_stats(tmp_path / "b.jsonl", [(long, short), (short, long)] * 4)
    assert even.pairs is not None
    assert not any("chosen answers" in remark for remark in even.remarks)
    # ten bytes of each prompt are there twice, in documents of 31 and 51
    assert even.pairs.shared == pytest.approx(10 / 82)
    assert even.packing.efficiency * even.packing.packs * 512 == pytest.approx(8 * 72)
    assert json.loads(json.dumps(even.as_dict()))["pairs"]["groups"] == 8


def test_marked_answers_are_counted_by_their_marks(tmp_path: Path) -> None:
    stats = pairs_stats(tmp_path / "a.jsonl", [("good one", "bad")] * 3, "marked")
    assert stats.pairs is not None
    assert (stats.counts.kept, stats.pairs.comparisons, stats.pairs.chosen, stats.pairs.rejected) == (6, 0, 9.0, 4.0)
    assert "desirable 9 · undesirable 4" in shown(stats)
