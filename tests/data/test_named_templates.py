"""Chat templates by name."""

from __future__ import annotations

import pytest

from pronghorn import get_chat_template
from pronghorn.errors import CommandError
from samples import make_tokenizer


def test_named_chat_templates() -> None:
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = "<|endoftext|>"
    changed = get_chat_template(tokenizer, "chatml")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert changed.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )
    asked = changed.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n")
    assert changed.eos_token == "<|im_end|>"
    assert tokenizer.chat_template is None
    assert get_chat_template(tokenizer, "chatml", map_eos_token=False).eos_token == "<|endoftext|>"
    alpaca = get_chat_template(tokenizer, "alpaca").apply_chat_template(chat, tokenize=False)
    assert alpaca == "### Instruction:\nhi\n\n### Response:\nho<|endoftext|>\n\n"
    with pytest.raises(CommandError, match="no token") as caught:
        get_chat_template(tokenizer, "llama-3.1")
    assert "one of: chatml, mistral, alpaca" in caught.value.fix
    with pytest.raises(CommandError) as caught:
        get_chat_template(tokenizer, "chatlm")
    assert "did you mean 'chatml'" in caught.value.fix


@pytest.mark.parametrize("name", ["llama-3", "gemma", "phi-3", "mistral"])
def test_every_named_template_renders(name: str) -> None:
    from pronghorn.data.named_templates import TEMPLATES

    tokenizer = make_tokenizer(chat_template=None)
    row = TEMPLATES[name]
    extra = [token for token in (*row.tokens, row.end_of_turn) if token]
    tokenizer.add_special_tokens({"additional_special_tokens": extra, "bos_token": "<s>"})
    text = get_chat_template(tokenizer, name).apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], tokenize=False)
    assert text.index("hi") < text.index("ho")
    assert text.rstrip().endswith(row.end_of_turn or tokenizer.eos_token)
