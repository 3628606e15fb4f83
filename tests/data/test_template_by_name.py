"""A tokenizer with a template by name."""

from __future__ import annotations

import pytest

from pronghorn.data.template.named_templates import TEMPLATES, whole
from pronghorn.data.template.template_by_name import with_template
from pronghorn.errors import CommandError
from samples import CHATML, make_tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_a_copy_of_the_tokenizer_has_the_template_and_its_end() -> None:
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = "<|endoftext|>"
    changed = with_template(tokenizer, "chatml")
    assert changed.apply_chat_template(CHAT, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )
    assert changed.eos_token == "<|im_end|>"
    assert tokenizer.chat_template is None
    assert with_template(tokenizer, "chatml", map_eos_token=False).eos_token == "<|endoftext|>"
    assert with_template(changed, "chatml").chat_template == changed.chat_template
    mapped = with_template(tokenizer, "chatml", mapping={"role": "from", "content": "value", "user": "human"})
    assert mapped.apply_chat_template([{"from": "human", "value": "hi"}], tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    spoken_to = with_template(tokenizer, "chatml", system_message="Be kind.")
    assert spoken_to.apply_chat_template(CHAT, tokenize=False).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    with pytest.raises(CommandError, match="mapping: 'human'"):
        with_template(tokenizer, "chatml", mapping={"human": "user"})


def test_a_tokenizer_whose_own_template_writes_the_same_keeps_it() -> None:
    tokenizer = make_tokenizer()
    assert with_template(tokenizer, "qwen3-instruct").chat_template == CHATML
    assert with_template(tokenizer, "qwen-2.5").chat_template == whole(TEMPLATES["qwen-2.5"])
    assert with_template(tokenizer, "chatml", system_message="s").chat_template != CHATML


def test_an_own_template_that_writes_the_end_token_is_compared_with_the_new_one() -> None:
    """Phi-3.5 ends a conversation with its end token, which is another one once the end of turn is."""
    own = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = make_tokenizer(chat_template=own)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    tokenizer.eos_token = "<|endoftext|>"
    assert with_template(tokenizer, "phi-3", map_eos_token=False).chat_template == own
    changed = with_template(tokenizer, "phi-3")
    assert changed.eos_token == "<|end|>"
    expected = "<|user|>\nhi<|end|>\n<|assistant|>\nho<|end|>\n<|endoftext|>"
    assert changed.apply_chat_template(CHAT, tokenize=False) == expected


def test_an_end_of_turn_that_the_vocabulary_lacks() -> None:
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = "<|endoftext|>"
    notices: list[str] = []
    changed = with_template(tokenizer, "gemma-3", say=notices.append)
    text = changed.apply_chat_template(CHAT[:1], tokenize=False)
    assert text == "<start_of_turn>user\nhi<|endoftext|>\n"
    assert changed.eos_token == "<|endoftext|>"
    assert "no <end_of_turn>, so turns end with <|endoftext|>" in notices[0]
    assert "no <start_of_turn>, so it is encoded as several" in notices[1]
    for options in ({"map_eos_token": False, "say": notices.append}, {}):
        with pytest.raises(CommandError, match="no token <start_of_turn>") as caught:
            with_template(tokenizer, "gemma-3", **options)
        assert "one of: chatml, qwen-2.5" in caught.value.fix


def test_names_that_do_not_exist_or_do_not_fit() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(CommandError) as caught:
        with_template(tokenizer, "chatlm")
    assert "did you mean 'chatml'" in caught.value.fix
    with pytest.raises(CommandError, match="belongs to a different kind of model"):
        with_template(tokenizer, "gpt-oss")
    tokenizer.add_tokens(list(TEMPLATES["gpt-oss"].tokens))
    assert with_template(tokenizer, "gpt-oss").chat_template == CHATML


def test_a_template_of_ones_own() -> None:
    tokenizer = make_tokenizer()
    template = "{% for message in messages %}{{ message['value'] + eos_token }}{% endfor %}"
    changed = with_template(tokenizer, (template, "eos_token"))
    assert changed.apply_chat_template([{"value": "hi"}], tokenize=False) == "hi<|im_end|>"
    assert changed.chat_template == template
    assert with_template(tokenizer, (template, "<|endoftext|>")).eos_token == "<|endoftext|>"
    with pytest.raises(CommandError, match="no token <end>"):
        with_template(tokenizer, (template, "<end>"))
