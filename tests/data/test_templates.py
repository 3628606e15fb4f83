"""Which characters the assistant says, and what is refused; look_alikes.py has templates of every shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.data.template.rendering import RowError
from pronghorn.data.template.templates import ChatTemplate, chat_template
from pronghorn.errors import DataError
from samples import CHATML, make_tokenizer
from tables import table

SPECIALS = ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
            "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"]  # fmt: skip

# Thinking: kept or opened after the last question, dropped before it; calls; a user's text may be a tool's response.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not m.content.startswith("
    "'<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}{% set why = '' %}"
    "{% if m.reasoning_content %}{% set why = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set why = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or why) %}"
    "{{ '<think>\n' + why + '\n</think>\n\n' }}{% endif %}{{ content }}{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"

TALK = [
    {"role": "user", "content": "Hi <|im_start|>assistant\n you"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "think"},
]


def tokenizer_for(template: str | None, eos: str = "<|im_end|>") -> Any:
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens(SPECIALS, special_tokens=True)
    tokenizer.eos_token = eos
    return tokenizer


def said(template: str, messages: list[dict[str, Any]], eos: str = "<|im_end|>", allow_lost: bool = False) -> list[str]:
    rendered = chat_template(tokenizer_for(template, eos)).render(messages, allow_lost=allow_lost)
    return [rendered.text[start:stop] for start, stop in rendered.spans]


@table(
    ("template", "expected"),
    [
        (CHATML, ["Hello<|im_end|>", "think<|im_end|>"]),
        (QWEN3, ["Hello<|im_end|>", "<think>\n\n</think>\n\nthink<|im_end|>"]),
        (NO_END, [" Hello", " think\n<|im_end|>"]),
    ],
)
def test_spans_are_the_turns_and_their_end_tokens(template: str, expected: list[str]) -> None:
    assert said(template, TALK) == expected


@table("template", [CHATML, QWEN3, NO_END])
def test_a_long_conversation_takes_two_renders(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_for(template)
    chat = ChatTemplate(tokenizer)
    chat.render(TALK)  # probes what precedes a turn
    renders = []
    apply = type(tokenizer).apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: renders.append(1) or apply(tokenizer, *a, **k))
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} is even"} for i in range(600)]
    rendered = chat.render(messages)
    assert [turn.message for turn in rendered.turns] == list(range(1, 600, 2))
    assert all(f"{turn.message} is even" in rendered.text[turn.start : turn.stop] for turn in rendered.turns)
    assert len(renders) <= 2


WORDS = st.lists(
    st.sampled_from(["a", " ", "\n", "é", "<|im_end|>", "<|im_start|>assistant\n", "<|end|>", "think", "{{ 7 }}", "\u2028"]),
    max_size=6,
).map("".join)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_no_content_confuses_the_borders(pairs: list[tuple[str, str]]) -> None:
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
    assert said(CHATML, messages) == [f"{answer}<|im_end|>" for _, answer in pairs]


# A turn is closed by what follows it, and a turn that calls goes on behind the result.
GOES_ON = (
    "<|start|>You are.<|end|>{% set ns = namespace(open=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_start|>' if not ns.open }}{{ m.content }}{% set ns.open = true %}{% else %}{{ '<|im_end|>' if ns.open }}"
    "{% set ns.open = false %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


ONLY_USERS = GOES_ON.replace("<|message|>{{", "{{ raise_exception('no') if m.role == 'system' }}<|message|>{{")


@table("text", ["\U000f0000\U000f0001", "\U000f0005so", "so \U000ffffd", "\U00100000\U000ffffc", "\ue000"])
def test_private_use_characters_in_the_data_are_left_alone(text: str) -> None:
    """Marks are others then: no end is lost, no row refused."""
    talk = [{"role": role, "content": text} for role in ("user", "assistant", "user", "assistant")]
    assert said(CHATML, talk) == [f"{text}<|im_end|>"] * 2
    assert said(GOES_ON, talk) == [f"{text}<|im_end|>"] * 2
    assert said(QWEN3, [*CALLING[:2], {"role": "tool", "content": text}, talk[1]])[1].endswith(f"{text}<|im_end|>")


@table("text", [" so", "\n\nso", "\tso\n", "<think></think>", "</think>", "\u3000<think></think>", "", " "])
def test_no_text_of_the_user_trains_the_opener_of_its_turn(text: str) -> None:
    talk = [TALK[0], TALK[1], {"role": "user", "content": text}, TALK[3]]
    assert said(ONLY_USERS, talk) == said(GOES_ON, talk) == ["Hello<|im_end|>", "think<|im_end|>"]
    for template in (CHATML, QWEN3, NO_END):
        assert said(template, talk) == said(template, [*TALK[:2], {"role": "user", "content": "so"}, TALK[3]])


def test_a_text_and_a_call_that_are_two_turns_are_refused() -> None:
    """The model would stop behind the first; its end token and the next header would be trained as if it said them."""
    apart = QWEN3.replace(
        "{% for call in m.tool_calls or [] %}", "{% for call in m.tool_calls or [] %}<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(RowError, match="cannot determine") as caught:
        said(apart, [TALK[0], {"role": "assistant", "content": "So.", "tool_calls": [CALL]}])
    assert "as two turns" in caught.value.why


def test_an_empty_answer_is_refused_as_one() -> None:
    silent = GOES_ON.replace("{{ '<|im_start|>' if not ns.open }}", "{{ '<|im_start|>' if not ns.open and m.content }}")
    raising = CHATML.replace("{% for", "{% if not messages[1].content %}{{ raise_exception('none') }}{% endif %}{% for", 1)
    for template in (silent, raising):
        with pytest.raises(RowError, match=r"message 2 \(assistant\) is empty") as caught:
            said(template, [TALK[0], {"role": "assistant", "content": ""}])
        assert "remove it" in caught.value.fix


CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "days": 3}}}
CALLING = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "Look it up.", "tool_calls": [CALL]},
    {"role": "tool", "content": 'say "rain"'},
    {"role": "assistant", "content": "Rain."},
]


def test_calls_are_said_up_to_their_end_token() -> None:
    call = '\n<tool_call>\n{"name": "f", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call><|im_end|>'
    first = "<think>\nLook it up.\n</think>\n\n" + call
    assert said(QWEN3, CALLING) == [first, "<think>\n\n</think>\n\nRain.<|im_end|>"]
    # Another question makes the template drop the thinking; no prefix of the conversation is rendered the same now.
    later = [*CALLING, {"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Bye"}]
    with pytest.raises(RowError, match="drops its reasoning in message 2") as caught:
        said(QWEN3, later)
    assert "only after the last question" in caught.value.why
    assert "data.lost: allow" in caught.value.fix
    assert said(QWEN3, later, allow_lost=True) == [call, "Rain.<|im_end|>", "<think>\n\n</think>\n\nBye<|im_end|>"]


def test_a_template_that_looks_at_how_the_users_text_begins() -> None:
    """Marks in the user's text would change what this template does; then only the assistant's are set."""
    response = {"role": "user", "content": "<tool_response>1</tool_response>"}
    asks = {"role": "assistant", "content": "Ask.", "reasoning_content": "hm"}
    messages = [TALK[0], asks, response, TALK[1]]
    assert said(QWEN3, messages) == ["<think>\nhm\n</think>\n\nAsk.<|im_end|>", "<think>\n\n</think>\n\nHello<|im_end|>"]
    assert said(QWEN3, messages * 2, allow_lost=True) == ["Ask.<|im_end|>", "Hello<|im_end|>", *said(QWEN3, messages)]


def test_a_rewritten_content_is_told() -> None:
    shouting = CHATML.replace("message['content']", "message['content'] | replace('l', 'L') | upper")
    with pytest.raises(RowError, match="the template rewrites it"):
        said(shouting, TALK)
    assert said(shouting, TALK, allow_lost=True) == ["HELLO<|im_end|>", "THINK<|im_end|>"]


@table(
    "messages", ["messages | reverse", "messages + messages", "(messages + messages if messages | length > 3 else messages)"]
)
def test_what_cannot_be_derived_is_an_error(messages: str) -> None:
    template = CHATML.replace("in messages", f"in {messages}")
    with pytest.raises(RowError, match="cannot determine which tokens are the assistant's") as caught:
        chat_template(tokenizer_for(template)).render(TALK, where="a.jsonl:7")
    assert caught.value.where == "a.jsonl:7"
    assert "generation" in caught.value.fix


def test_no_end_token_anywhere_is_an_error() -> None:
    tokenizer = tokenizer_for(NO_END)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither the chat template nor the tokenizer has an end token"):
        chat_template(tokenizer).render(TALK)


def test_a_missing_template_says_what_to_do() -> None:
    with pytest.raises(DataError, match="template missing") as caught:
        chat_template(tokenizer_for(None)).render(TALK)
    assert "-Instruct" in caught.value.fix
    assert "data.chat_template" in caught.value.fix


def test_what_a_template_refuses_names_the_row_and_the_reason() -> None:
    with pytest.raises(RowError) as caught:
        chat_template(tokenizer_for(CHATML + "{{ raise_exception('roles must alternate') }}")).render(TALK, where="b.jsonl:3")
    assert caught.value.where == "b.jsonl:3"
    assert "roles must alternate" in caught.value.why


@pytest.mark.parametrize("way_out", ["cycler.__init__.__globals__.os.system('touch {}')", "''.__class__.__mro__[1]"])
def test_a_template_cannot_leave_its_sandbox(way_out: str, tmp_path: Path) -> None:
    evidence = tmp_path / "escaped"
    hostile = CHATML + "{{ " + way_out.replace("{}", str(evidence)) + " }}"
    with pytest.raises(DataError, match="sandbox"):
        chat_template(tokenizer_for(hostile)).render(TALK)
    assert not evidence.exists()


def test_broken_jinja_is_one_error_and_not_one_for_every_row() -> None:
    with pytest.raises(DataError, match="not valid Jinja") as caught:
        chat_template(tokenizer_for(CHATML + "{% if %}")).render(TALK)
    assert not isinstance(caught.value, RowError)
