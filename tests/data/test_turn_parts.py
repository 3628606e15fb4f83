"""Which texts stand before questions and answers, derived from templates."""

from __future__ import annotations

import pytest

from pronghorn.data.template.named_templates import TEMPLATES, whole
from pronghorn.data.template.turn_parts import turn_parts
from pronghorn.errors import CommandError
from samples import make_tokenizer
from tables import table

PARTS = {
    "chatml": ("<|im_start|>user\n", "<|im_start|>assistant\n"),
    "llama-3.1": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "gemma": ("<start_of_turn>user\n", "<start_of_turn>model\n"),
    "gemma-4": ("<|turn>user\n", "<|turn>model\n"),
    "phi-3": ("<|user|>\n", "<|assistant|>\n"),
    "phi-4": ("<|im_start|>user<|im_sep|>", "<|im_start|>assistant<|im_sep|>"),
    "mistral": ("[INST] ", "[/INST]"),
    "llama": ("<s>[INST] ", "[/INST]"),
    "vicuna": ("USER: ", "ASSISTANT:"),
    "alpaca": ("### Instruction:\n", "### Response:\n"),
}


@table("name", PARTS)
def test_the_parts_are_those_that_people_write(name: str) -> None:
    row = TEMPLATES[name]
    tokenizer = make_tokenizer(chat_template=whole(row))
    extra = [token for token in (*row.tokens, row.end_of_turn) if token]
    tokenizer.add_special_tokens({"additional_special_tokens": extra, "bos_token": "<s>"})
    tokenizer.add_special_tokens({"eos_token": row.end_of_turn or "</s>"})
    assert turn_parts(tokenizer) == PARTS[name]


@table(("template", "words"), [
    (None, "no chat template"),
    ("{% for message in messages %}{{ message['content'] }}{% endfor %}", "does not mark where"),
    ("{{ messages[-1]['content'] }}", "in sequence"),
    # The same words before questions and answers: labels would be everywhere.
    ("{% for message in messages %}{{ '>> ' + message['content'] + '<|im_end|>' }}{% endfor %}", "the labels of a test"),
])  # fmt: skip
def test_what_cannot_be_derived_exactly_is_refused(template: str | None, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        turn_parts(make_tokenizer(chat_template=template))
    assert words in caught.value.why
    assert "instruction_part=" in caught.value.fix
