"""What the run's log says of its data: rows are counted where they leave, and every document is in the histogram."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from watching import RecipeFor

from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.report.run_log import plain
from pronghorn.train.source import source_of
from samples import chat_rows, write_rows


def test_rows_drops_sources_and_lengths(recipe_for: RecipeFor, tmp_path: Path) -> None:
    rows = chat_rows(20)
    rows += [rows[0], {"messages": [{"role": "user", "content": "long " * 200}, {"role": "assistant", "content": "yes"}]}]
    one, two = write_rows(tmp_path / "one.jsonl", rows), write_rows(tmp_path / "two.jsonl", chat_rows(5, seed=9))
    recipe = recipe_for(data={"train": [str(one), str(two)], "duplicates": "drop-exact", "long": "drop", "eval": 0.2})
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    data = source_of(recipe, tokenizer, report=lambda *_: None, stage=lambda _: nullcontext())
    facts = data.summary()
    assert plain(facts) == facts
    assert facts["read"] == 27
    assert facts["dropped"] == {"exact duplicate": 1, "too long": 1}
    prepared = data.prepared
    copy = next(i for i in range(len(prepared.rows.table)) if prepared.rows.table.where(i).endswith("one.jsonl:21"))
    assert facts["left_out"] == {"copies": [1, prepared.rows.table.lengths[copy]]}
    assert data.held_out is not None
    assert facts["documents"] + len(data.held_out) == 25
    assert [(Path(source["name"]).name, source["rows"]) for source in facts["sources"]] == [("one.jsonl", 22), ("two.jsonl", 5)]
    lengths = facts["lengths"]
    assert sum(rows for _, _, rows in lengths["bins"]) == facts["documents"]
    assert lengths["shortest"] <= lengths["median"] <= lengths["p95"] <= lengths["longest"] <= recipe.data.max_length
