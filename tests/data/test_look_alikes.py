"""Every structure of chat templates × every kind of conversation, judged by an oracle that shares no code with us."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from look_alikes import LOOK_ALIKES, SPECIALS

from benchmarks import odd_rows, template_oracle
from benchmarks.chat_templates import Under, judged
from benchmarks.template_oracle import Answer, Facts, Refusal, words_of
from samples import make_tokenizer
from tables import table


def tokenizer_for(name: str) -> Any:
    template, facts = LOOK_ALIKES[name]
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens(sorted(SPECIALS), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = facts.bos, facts.eos or facts.end.strip()
    return tokenizer


@table("name", LOOK_ALIKES)
def test_every_conversation_is_exact_or_refused_for_a_reason(name: str) -> None:
    verdicts = judged(tokenizer_for(name), LOOK_ALIKES[name][1], odd=6, name=name)
    assert {kind: verdict for kind, verdict in verdicts.items() if verdict.result not in ("exact", "refused")} == {}


def test_the_judge_shares_no_code_with_what_it_judges() -> None:
    for module in (template_oracle, odd_rows):
        tree = ast.parse(inspect.getsource(module))
        used = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        used |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not [name for name in used - {"benchmarks.template_oracle"} if name.startswith(("pronghorn", "benchmarks"))]
    assert len(LOOK_ALIKES) >= 40


PIECE = re.compile("|".join(map(re.escape, SPECIALS)) + r"|.", re.DOTALL)


def mistakes(answer: Answer, facts: Facts) -> Iterator[tuple[str, Answer]]:
    """Each border one token too early or too late, a turn without its end, and one with its opener."""
    borders = [0, *(piece.end() for piece in PIECE.finditer(answer.text))]
    for number, (i, start, stop) in enumerate(answer.spans):
        first, last = borders.index(start), borders.index(stop)
        end = next(
            (end for end in (*facts.closing(True, True), facts.last, facts.end) if end and answer.text[:stop].endswith(end)), ""
        )
        header = next((header for header in facts.header if answer.text[:start].endswith(header)), "")
        for what, a, b in (
            ("starts early", borders[max(first - 1, 0)], stop),
            ("starts late", borders[first + 1], stop),
            ("stops early", start, borders[last - 1]),
            ("stops late", start, borders[min(last + 1, len(borders) - 1)]),
            ("has no end", start, stop - len(end)),
            ("has its opener", start - len(header), stop),
        ):
            moved = answer.text[min(stop, b) : max(stop, b)]
            if (a, b) == (start, stop) or (not facts.end and moved and moved.isspace()):
                continue  # nothing changed; without an end, spaces are nobody's
            spans = (*answer.spans[:number], (i, a, b), *answer.spans[number + 1 :])
            yield f"{what}: message {i}", replace(answer, spans=spans, decoded=tuple(answer.text[a:b] for _, a, b in spans))


@table("name", list(LOOK_ALIKES)[::8])
def test_the_judge_finds_every_mistake(name: str) -> None:
    facts, ask, found = LOOK_ALIKES[name][1], under(name), 0
    tokenizer = tokenizer_for(name)

    def render(messages: list[dict[str, Any]], tools: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    def usable(chat: template_oracle.Chat) -> bool:
        return template_oracle.judge(chat, facts, render, ask).result == "exact"

    for chat in odd_rows.odd_chats(name, 10, (), usable):
        twin, row = ask(chat.messages, chat.tools), ask(chat.row, chat.tools)
        if isinstance(row, Refusal):
            continue
        assert isinstance(twin, Answer)
        for what, wrong in mistakes(twin, facts):
            judged_so = template_oracle.judge(replace(chat, contents={}), facts, render, lambda *_, wrong=wrong: wrong)
            assert judged_so.result == "wrong", (chat.kind, what, wrong)
        for what, wrong in mistakes(row, facts):
            found += 1
            assert odd_rows.verdict(chat, facts, twin, wrong, render, ask).result == "wrong", (
                chat.kind,
                chat.contents,
                what,
                wrong,
            )
    assert found > 20


TEXT = st.text(st.sampled_from("ab é\n<|x>h{%}\\\"'水"), max_size=8)
PIECES = st.lists(st.one_of(TEXT, st.sampled_from(["<|x|>", "<|h|>assistant\n", "<|eos|>", "None"])), max_size=3).map("".join)
KINDS = st.lists(st.sampled_from(["says", "two", "calls", "text and call", "thinks"]), min_size=1, max_size=4)


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    """Random texts under words that occur nowhere else, so that each can be found again."""
    numbers = iter(range(100, 999))

    def text() -> str:
        return f"w{next(numbers)}x{draw(PIECES)}w{next(numbers)}x"

    messages = [{"role": "system", "content": text()}] if draw(st.booleans()) else []
    for kind in draw(KINDS):
        messages.append({"role": "user", "content": text()})
        answer: dict[str, Any] = {"role": "assistant", "content": text()}
        if kind in ("calls", "text and call"):
            called = {"name": "look_up", "arguments": {"city": text(), "n": 70013}}
            call = {"id": "call00001", "type": "function", "function": called}
            messages.append(answer | {"content": text() if kind == "text and call" else None, "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(), "tool_call_id": "call00001", "name": "look_up"})
        messages.append(answer | ({"reasoning_content": text()} if kind == "thinks" else {}))
        if kind == "two":
            messages.append({"role": "assistant", "content": text()})
    return messages


@settings(max_examples=25, deadline=None)
@given(conversations(), st.data())
def test_random_conversations_lose_nothing_and_train_what_is_said(messages: list[dict[str, Any]], data: Any) -> None:
    for name in data.draw(st.lists(st.sampled_from(sorted(LOOK_ALIKES)), min_size=12, max_size=12, unique=True)):
        answer = under(name)(messages, None)
        if isinstance(answer, Refusal):
            plain = all(message["role"] in ("user", "assistant") and len(message) == 2 for message in messages)
            assert not plain or "alternate" in answer.reason or "rewrites" in answer.reason, (name, answer.reason)
            continue
        assert_whole(name, answer, messages)


@functools.cache
def under(name: str) -> Under:
    return Under(tokenizer_for(name))


def assert_whole(name: str, answer: Answer, messages: list[dict[str, Any]]) -> None:
    spans = {i: answer.text[start:stop] for i, start, stop in answer.spans}
    assert sorted(spans) == [i for i, message in enumerate(messages) if message["role"] == "assistant"], name
    assert "".join(answer.decoded) == "".join(spans.values()), name
    for i, message in enumerate(messages):
        where = spans.get(i, answer.text)
        assert all(word in where for word in words_of(message)), (name, where)
        others = set().union(*(words_of(other) for j, other in enumerate(messages) if j != i))
        assert i not in spans or not any(word in where for word in others), (name, where)
        texts = [message.get("content") or "", message.get("reasoning_content") or ""]
        assert all(text.strip() in where or "\\" in where for text in texts), (name, where)  # JSON escapes a result's text
    facts = LOOK_ALIKES[name][1]
    last = max(spans)
    ends = facts.closing(last == len(messages) - 1, bool(messages[last].get("tool_calls")))
    assert spans[last].endswith(ends), (name, spans[last])
