"""Near copies: which rows `data.duplicates: drop-near` drops. Held-out rows: test_splitting.py."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pronghorn.data.encode.cached_rows import tokenized_rows
from pronghorn.data.encode.tokens import TokenizerFiles
from pronghorn.data.prepare import findings, prepare
from pronghorn.data.read import copies
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows

TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))


def near_copies(tmp_path: Path, rows: list[Any]) -> dict[int, int]:
    """Texts, or whole rows."""
    path = write_rows(tmp_path / "a.jsonl", [row if isinstance(row, dict) else {"text": row} for row in rows])
    data = Data(train=(str(path),))
    found = findings(tokenized_rows(data.train, data, TOKENIZER), near=True)
    assert found.near is not None
    assert set(found.exact) <= set(found.near)
    return found.near


def chat(ask: str, answer: str | None, system: str = "", **more: Any) -> dict[str, Any]:
    before = [{"role": "system", "content": system}] if system else []
    return {"messages": [*before, {"role": "user", "content": ask}, {"role": "assistant", "content": answer, **more}]}


def sentence(rng: random.Random, words: int = 60) -> list[str]:
    return [f"w{rng.randrange(500)}" for _ in range(words)]


def changed(words: list[str], *places: int) -> list[str]:
    return [f"other{at}" if at in places else word for at, word in enumerate(words)]


def test_near_copies_are_found_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    originals = [sentence(rng) for _ in range(300)]
    near = [changed(words, 30) for words in originals[:100]]  # one word of 60: similarity 0.9
    far = [words[:12] + sentence(rng, 48) for words in originals[:100]]  # four fifths are new
    rows = [" ".join(words) for words in (*originals, *near, *far)]
    assert near_copies(tmp_path, rows) == {300 + i: i for i in range(100)}
    monkeypatch.setattr(copies, "BATCH", 7)  # which does not matter
    monkeypatch.setattr(copies, "COPIES_VERSION", 0)
    assert near_copies(tmp_path, rows) == {300 + i: i for i in range(100)}


def test_only_rows_that_are_truly_alike_go(tmp_path: Path) -> None:
    """Of rows alike at 0.94, 0.83 and 0.65: all, most and hardly one."""
    rng = random.Random(6)
    originals = [sentence(rng, 100) for _ in range(200)]
    found = []
    for places in ((50,), (20, 40, 60), (10, 24, 38, 52, 66, 80, 94)):
        rows = [" ".join(words) for words in (*originals, *(changed(words, *places) for words in originals))]
        near = near_copies(tmp_path, rows)
        assert all(i == 200 + first for i, first in near.items())
        found.append(len(near))
    assert found[0] == 200
    assert 100 < found[1] < 200
    assert found[2] < 5


def test_a_chain_loses_only_its_middle(tmp_path: Path) -> None:
    words = sentence(random.Random(2), 40)
    middle, end = changed(words, 10), changed(words, 10, 25)  # neighbours are alike at 0.85, the ends at 0.73
    first, second, third = (" ".join(each) for each in (words, middle, end))
    assert near_copies(tmp_path, [second, third]) == {1: 0}
    assert near_copies(tmp_path, [first, second, third]) == {1: 0}


def test_what_all_rows_share_does_not_make_them_alike(tmp_path: Path) -> None:
    told = "You turn a request into one JSON command and say nothing else. " * 5
    rows = [chat(f"{word} please", f'{{"do": "{word}"}}', system=told) for word in ("towels", "taxi", "wake me")]
    assert near_copies(tmp_path, rows) == {}
    rng = random.Random(7)
    asked = [" ".join(sentence(rng, 12)) for _ in range(30)]
    instruction = " ".join(sentence(rng, 100))
    assert near_copies(tmp_path, [f"{instruction} {text}" for text in [*asked, asked[4]]]) == {30: 4}


def test_the_same_sentences_in_another_order_are_a_near_copy(tmp_path: Path) -> None:
    asked = "Wake me at 7. I am in room 12! Is there coffee?"
    other = "Is there coffee? Wake me at 7. I am in room 12!"
    assert near_copies(tmp_path, [chat(asked, "{}"), chat(other, "{}"), chat(other.replace("12", "21"), "{}")]) == {1: 0}
    words = [" ".join(sentence(random.Random(seed), 3)) + "." for seed in range(2)]
    assert near_copies(tmp_path, [chat(*words), chat(*words[::-1])]) == {}  # a question that was an answer
    assert near_copies(tmp_path, ["He took 3.5 of it.", "He took 5.3 of it.", "He took 5.3 of it?"]) == {}


def test_marks_and_scripts_without_spaces_count(tmp_path: Path) -> None:
    assert near_copies(tmp_path, ["2 + 2 = 4", "2 * 2 = 4", "2 / 2 = 4"]) == {}
    assert near_copies(tmp_path, ["今天天气很好我们去公园散步吧好不好", "今天天气很好我们去公园散步吧好不"]) == {1: 0}
    assert near_copies(tmp_path, ["今天天气很好", "明天我们开会"]) == {}


def test_tool_calls_are_part_of_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calling(city: str) -> dict[str, Any]:
        call = {"function": {"name": "weather", "arguments": {"city": city, "unit": city * 2}}}
        return chat("?", None, tool_calls=[call])

    tool = "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    template = TOKENIZER.chat_template.replace("<|im_end|>", f"{tool}<|im_end|>", 1).replace(
        "message['content']", "message['content'] or ''"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", template)
    assert near_copies(tmp_path, [calling("Oslo"), calling("Rome"), calling("Oslo")]) == {2: 0}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("ab ", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=12))
def test_what_is_kept_is_unlike_and_copies_point_at_kept_earlier_rows(tmp_path: Path, texts: list[str]) -> None:
    found = near_copies(tmp_path, texts)
    assert all(first < index and first not in found for index, first in found.items())
    kept = [text for i, text in enumerate(texts) if i not in found]
    assert near_copies(tmp_path, kept) == {}


def test_the_same_rows_go_in_every_process_without_an_extra_package(tmp_path: Path) -> None:
    """Python's own hash of a text differs from process to process; ours must not. What extras install is not needed."""
    rng = random.Random(3)
    base = sentence(rng, 40)
    path = write_rows(
        tmp_path / "a.jsonl", [{"text": " ".join(w if rng.random() > 0.03 else "other" for w in base)} for _ in range(60)]
    )
    TOKENIZER.save_pretrained(tmp_path / "model")
    data = Data(train=(str(path),))
    tokens = tokenized_rows(data.train, data, TokenizerFiles(str(tmp_path / "model"))).path
    script = f"""
import sys
sys.modules.update(dict.fromkeys(["rensa", "datasets", "gguf", "pandas", "scipy", "sklearn", "triton", "torch"]))
from pronghorn.data.prepare import prepare
from pronghorn.data.encode.tokens import TokenizerFiles
from pronghorn.recipe_parts import Data
data = Data(train={str(path)!r}, duplicates="drop-near")
rows = prepare(data.train, data, TokenizerFiles({str(tmp_path / "model")!r})).tokens
print([rows.row(i) for i in range(len(rows))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (kept,) = tokens.parent.glob("*.copies-*")
    kept.unlink()
    here = prepare(data.train, data.model_copy(update={"duplicates": "drop-near"}), TOKENIZER).tokens
    assert ast.literal_eval(done.stdout) == [here.row(i) for i in range(len(here))]
    assert 1 < len(here) < 55
