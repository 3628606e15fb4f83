"""Preference data of every layout, from the raw row to tokens: what is the prompt, what are the answers, what carries loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pronghorn.data.pack.batches import build_batch
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.data.read.splitting import apart
from pronghorn.errors import DataError
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows
from tables import table

Q, A, B = ({"role": "user", "content": "q"}, *({"role": "assistant", "content": said} for said in ("good", "bad")))
S = {"role": "system", "content": "s"}
HUMAN, GPT = {"from": "human", "value": "q"}, [{"from": "gpt", "value": said} for said in ("good", "bad")]
ASKED = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\ns<|im_end|>\n"
PAIR = ["good<|im_end|>", "bad<|im_end|>"]
TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))


def prepared(path: Path, wanted: Any = "pairs", capacity: int | None = None, **spec: Any) -> Prepared:
    data = Data(train=(str(path),), **{"max_length": 256, **spec})
    return prepare(data.train, data, TOKENIZER, wanted=wanted, capacity=capacity)


def read(found: Prepared) -> list[tuple[str, list[str]]]:
    """Of each group what is shared, and what carries loss in each row."""
    rows, groups = found.tokens, dict[int, tuple[str, list[str]]]()
    assert rows.pairs is not None
    for i, group in enumerate(rows.pairs.groups.tolist()):
        ids, shared = rows.ids(i), rows.pairs.prefixes[i]
        prompt = TOKENIZER.decode(ids[:shared])
        assert not rows.loss(i)[:shared].any()
        assert groups.setdefault(group, (prompt, []))[0] == prompt
        groups[group][1].append(TOKENIZER.decode(ids[rows.loss(i)]))
    return list(groups.values())


@table(
    ("row", "prompt", "answers"),
    [
        ({"prompt": "q", "chosen": [A], "rejected": [B]}, ASKED, PAIR),
        ({"prompt": "q", "chosen": A, "rejected": B}, ASKED, PAIR),
        ({"chosen": json.dumps([Q, A]), "rejected": json.dumps([Q, B])}, ASKED, PAIR),  # as in CSV
        ({"chosen": [S, Q, A], "rejected": [S, Q, B]}, SYSTEM + ASKED, PAIR),
        ({"instruction": "a", "input": "b", "chosen": "good", "rejected": "bad"}, ASKED.replace("q", "a\n\nb", 1), PAIR),
        # a question is never left out
        ({"query": "q", "question": "q", "chosen": A, "rejected": [B]}, ASKED, PAIR),
        ({"messages": [S, Q, A], "rejected_response": "bad"}, SYSTEM + ASKED, PAIR),
        ({"prompt": [Q], "chosen": [A], "rejected": ["bad", "worse"]}, ASKED, [*PAIR, "worse<|im_end|>"]),
        ({"chosen": "a b cat", "rejected": "a b car"}, "a b", [" cat<|im_end|>", " car<|im_end|>"]),
        ({"chosen": [Q, A, Q, A], "rejected": [Q, A, Q, B]}, f"{ASKED}good<|im_end|>\n{ASKED}", PAIR),
        # an answer of several turns: the assistant's carry loss, from the first that differs
        ({"chosen": [Q, A, Q, A], "rejected": [Q, B, Q, B]}, ASKED, [PAIR[0] * 2, PAIR[1] * 2]),
        # one is the beginning of the other
        ({"chosen": [Q, A], "rejected": [Q, A, Q, B]}, ASKED, [PAIR[0], "".join(PAIR)]),
    ],
)
def test_layouts_of_pairs(tmp_path: Path, row: dict[str, Any], prompt: str, answers: list[str]) -> None:
    """Those of public data sets are in benchmarks/preference_cases.py."""
    found = prepared(write_rows(tmp_path / "a.jsonl", [row] * 2), duplicates="keep")
    assert read(found) == [(prompt, answers)] * 2
    assert found.tokens.pairs is not None
    assert found.tokens.pairs.roles.tolist() == [*range(len(answers))] * 2
    assert [found.tokens.where(i) for i in range(len(answers))] == [f"{tmp_path / 'a.jsonl'}:1"] * len(answers)


@table(
    ("row", "prompt", "answer"),
    [
        ({"messages": [Q, A], "label": "true"}, ASKED, PAIR[0]),
        ({"messages": [Q, A], "label": 1.0}, ASKED, PAIR[0]),
        ({"conversations": [HUMAN, GPT[0]], "kto_tag": True}, ASKED, PAIR[0]),
        ({"messages": [Q, B, Q, A], "label": True}, f"{ASKED}bad<|im_end|>\n{ASKED}", PAIR[0]),  # the last answer is marked
    ],
)
def test_layouts_of_marked_answers(tmp_path: Path, row: dict[str, Any], prompt: str, answer: str) -> None:
    (mark,) = {"label", "kto_tag"} & set(row)
    found = prepared(write_rows(tmp_path / "a.jsonl", [row, row | {mark: False}]), "marked")
    assert read(found) == [(prompt, [answer])] * 2
    assert found.tokens.pairs is not None
    assert found.tokens.pairs.roles.tolist() == [0, 1]


def test_pairs_serve_as_marked_answers(tmp_path: Path) -> None:
    found = prepared(write_rows(tmp_path / "a.jsonl", [{"prompt": [Q], "chosen": [A], "rejected": ["bad", "worse"]}]), "marked")
    assert read(found) == [(ASKED, [said + "<|im_end|>"]) for said in ("good", "bad", "worse")]
    assert found.tokens.pairs is not None
    assert found.tokens.pairs.roles.tolist() == [0, 1, 1]


def test_a_token_that_straddles_the_border_in_one_answer_is_cut_in_all(tmp_path: Path) -> None:
    """`ab` is one token: the answer `b...` would take the prompt's last letter with it, the answer `c...` would not."""
    tokenizer = make_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["ab"], state["model"]["merges"] = 300, [["a", "b"]]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "cab a", "chosen": "c", "rejected": "b"}])
    data = Data(train=(str(path),))
    rows = prepare(data.train, data, tokenizer, wanted="pairs").tokens
    assert 300 in rows.ids(0)  # of the prompt's first word
    assert rows.pairs is not None
    for i, answer in enumerate(("c", "b")):
        shared = rows.pairs.prefixes[i]
        assert tokenizer.decode(rows.ids(i)[:shared]) == "cab a"
        assert tokenizer.decode(rows.ids(i)[shared:]) == f"{answer}<|im_end|>"


def test_answers_that_teach_nothing_are_left_out_and_told(tmp_path: Path) -> None:
    rows = [
        {"prompt": [Q], "chosen": "good", "rejected": "bad"},
        {"prompt": [Q], "chosen": "good", "rejected": "good"},
        {"prompt": [Q], "chosen": "", "rejected": "bad"},
        {"prompt": [Q], "chosen": "good", "rejected": " "},
        {"prompt": [Q], "chosen": "good", "rejected": ["bad", "good", ""]},
    ]
    found = prepared(write_rows(tmp_path / "a.jsonl", rows))
    assert read(found) == [(ASKED, PAIR)] * 2
    assert "left out 3 pairs with an empty answer" in found.remarks
    assert "left out 2 pairs with identical answers" in found.remarks
    again = prepared(tmp_path / "a.jsonl")  # out of the cache
    assert again.remarks == found.remarks


@table(
    ("row", "wanted", "what", "fix"),
    [
        ({"prompt": "q", "completion": "a", "label": True}, "pairs", "single answers marked by `label`", "objective: kto"),
        ({"chosen": [Q, A], "rejected": [S, B]}, "pairs", "have no message in common", "a column `prompt`"),
        ({"messages": [Q, A], "chosen": "a", "rejected": "b"}, "pairs", "ends with an assistant turn", "end it before"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "pairs", "`prompt` is not text, but a number", "quotes"),
        ({"prompt": [Q], "chosen": [Q], "rejected": [B]}, "pairs", "no assistant turn in `chosen`", "add an answer"),
        ({"text": "t", "label": True}, "marked", "plain text has no answer", "prompt and completion"),
        ({"prompt": "q", "context": "c", "completion": "a", "label": True}, "marked", "`context` is a text", "input: context"),
        ({"context": "c", "chosen": [Q, A], "rejected": [Q, B]}, "pairs", "`context` is a text", "put `context` into both"),
        (
            {"prompt": "q", "completion": "a", "label": "good"},
            "marked",
            "`label` is 'good', not true or false",
            "jq -c '.label =",
        ),
    ],
)
def test_rows_that_are_no_preferences_are_told(tmp_path: Path, row: dict[str, Any], wanted: str, what: str, fix: str) -> None:
    with pytest.raises(DataError) as caught:
        prepared(write_rows(tmp_path / "a.jsonl", [row]), wanted)
    assert what in caught.value.what
    assert fix in caught.value.fix


def pairs(tmp_path: Path, lengths: list[tuple[int, int]]) -> Path:
    rows = [{"prompt": [Q], "chosen": "a" * one, "rejected": f"{i % 10}" * other} for i, (one, other) in enumerate(lengths)]
    return write_rows(tmp_path / "a.jsonl", rows)


def test_a_pair_that_is_too_long_goes_as_a_pair(tmp_path: Path) -> None:
    path = pairs(tmp_path, [(5, 5), (5, 90), (60, 60), (7, 7)])
    dropped = prepared(path, max_length=100, long="drop")
    assert dropped.counts.kept == 3
    assert (dropped.counts.dropped_long, dropped.counts.too_long) == (1, 1)
    assert any("dropped 1 of 4 pairs: longer than 100 tokens" in remark for remark in dropped.remarks)
    fit = prepared(path, max_length=100, capacity=150, long="drop")  # no pack holds the third, side by side
    assert fit.counts.kept == 2
    assert fit.tokens.pairs is not None
    assert fit.tokens.pairs.sizes.tolist() == [2, 2]
    cut = prepared(path, max_length=100, capacity=150, long="truncate")
    assert cut.counts.kept == 4
    assert cut.tokens.lengths.tolist() == [27, 27, 27, 100, 75, 75, 29, 29]  # 20 of the prompt, 2 behind an answer
    batch = build_batch(cut.tokens.sharing(True), np.arange(4), 256)
    assert batch.tokens == 3 * 27 + 100 - 2 * 20
    said = r"2 of 4 pairs .50.0%. have a prompt and answer of more than 100 tokens, or .* train.capacity: 150"
    with pytest.raises(DataError, match=said):
        prepared(path, max_length=100, capacity=150)


def test_copies_are_copies_of_whole_pairs(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    rows = [pair, pair | {"rejected": "c"}, {"prompt": "q", "chosen": "b", "rejected": "a"}, pair]
    found = prepared(write_rows(tmp_path / "a.jsonl", rows), duplicates="drop-exact")
    assert [said for _, said in read(found)] == [[f"{one}<|im_end|>" for one in two] for two in ("ab", "ac", "ba")]
    assert found.counts.exact_duplicates == 1


def test_weights_and_holding_out_keep_pairs_whole(tmp_path: Path) -> None:
    path = pairs(tmp_path, [(n, 2 * n) for n in range(3, 13)])
    data = Data.model_validate({"train": {"path": str(path), "weight": 2}, "eval": 0.2})
    twice = prepare(data.train, data, TOKENIZER, wanted="pairs")
    assert twice.tokens.pairs is not None
    assert twice.tokens.pairs.sizes.tolist() == [2] * 20
    sides = apart(twice, None, data, seed=1)
    train, held = sides.train, sides.held
    assert held is not None
    assert (len(train), len(held)) == (32, 8)  # two pairs of ten, each of them twice
    assert held.pairs is not None
    assert held.pairs.sizes.tolist() == [2] * 4
    assert not {train.row(i) for i in range(len(train))} & {held.row(i) for i in range(len(held))}


def test_labels_margins_and_prefixes_are_part_of_the_content(tmp_path: Path) -> None:
    good = {"prompt": "q", "completion": "a", "label": True}
    contents = {
        prepared(write_rows(tmp_path / f"{i}.jsonl", [row]), "marked").tokens.content
        for i, row in enumerate((good, good | {"label": False}))
    }
    assert len(contents) == 2
