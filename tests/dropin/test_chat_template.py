"""`get_chat_template` as scripts call it."""

from __future__ import annotations

import pytest

from pronghorn.chat_templates import CHAT_TEMPLATES, get_chat_template
from pronghorn.data.template.named_templates import TEMPLATES
from samples import make_tokenizer


def test_the_call_of_scripts_for_a_base_model(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = "<|endoftext|>"
    changed = get_chat_template(
        tokenizer, chat_template="gemma-3", map_eos_token=True,
        mapping={"role": "from", "content": "value", "user": "human", "assistant": "gpt"},
    )  # fmt: skip
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    assert changed.apply_chat_template(chat, tokenize=False) == (
        "<start_of_turn>user\nhi<|endoftext|>\n<start_of_turn>model\nho<|endoftext|>\n"
    )
    assert "turns end with <|endoftext|>" in capsys.readouterr().err
    assert get_chat_template(make_tokenizer()).eos_token == "<|im_end|>"
    assert CHAT_TEMPLATES["phi-4"] == (TEMPLATES["phi-4"].template, "<|im_end|>")
