"""The demo's pairs: generated, the same everywhere, and not decided by length."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pronghorn.demo import hotel, replies
from pronghorn.demo.preference import _likelier
from pronghorn.demo.replies import CASUAL, FORMAL
from samples import preference_table


def test_pairs_are_the_same_everywhere_and_ask_what_the_hotel_is_asked(tmp_path: Path) -> None:
    train, held_out = replies.write(tmp_path, train=20, held_out=10)
    assert [json.loads(line) for line in train.read_text().splitlines()] == replies.generate(20, 0)
    asked = [row["messages"][1]["content"] for row in hotel.generate(20, 0)]
    assert [pair["prompt"][0]["content"] for pair in replies.generate(20, 0)] == asked
    assert len(held_out.read_text().splitlines()) == 10


def test_a_held_out_pair_has_replies_that_training_never_has() -> None:
    pairs = {split: replies.generate(200, 0, split) for split in ("train", "held_out")}  # type: ignore[arg-type]
    for side, style in (("chosen", FORMAL), ("rejected", CASUAL)):
        said = {split: {pair[side][0]["content"] for pair in rows} for split, rows in pairs.items()}
        new = [word for words in style for word in words.unseen]
        assert not any(word in text for text in said["train"] for word in new)
        assert sum(any(word in text for word in new) for text in said["held_out"]) > len(said["held_out"]) / 4


def test_length_does_not_tell_which_reply_is_preferred() -> None:
    rows = replies.generate(300, 0)
    gaps = [len(row["chosen"][0]["content"].split()) - len(row["rejected"][0]["content"].split()) for row in rows]
    assert abs(np.mean(gaps)) < 1.0  # words
    assert 0.2 < np.mean([gap > 0 for gap in gaps]) < 0.7


def test_the_likelier_answer_is_the_one_with_the_larger_sum() -> None:
    table = preference_table(3)
    values = np.concatenate([np.full(n, -1.0 if i in (0, 3, 4) else -9.0, np.float32) for i, n in enumerate(table.loss_counts)])
    assert _likelier(table, values).tolist() == [True, False, True]  # type: ignore[arg-type]
