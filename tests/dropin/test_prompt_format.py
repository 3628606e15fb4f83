"""Formats written as an example."""

from __future__ import annotations

import jinja2
import pytest

from pronghorn.compat.dropin.prompt_format import DEFAULT_SYSTEM, Pieces, pieces_of, template_of
from pronghorn.errors import CommandError
from samples import make_tokenizer
from tables import table

LLAMA_3 = (
    "<s><|start|>system<|end|>\n\n{SYSTEM}<|eot|><|start|>user<|end|>\n\n{INPUT}<|eot|><|start|>assistant<|end|>\n\n"
    "{OUTPUT}<|eot|>"
)
CHATML = (
    "<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{INPUT}<|im_end|>\n<|im_start|>assistant\n{OUTPUT}<|im_end|>"
)
ONE = "Tasks.\n\n## Q:\n{INPUT}\n\n## A:\n{OUTPUT}"


@table(("text", "pieces"), [
    (LLAMA_3, ("<s><|start|>system<|end|>\n\n{SYSTEM}<|eot|>", "<|start|>user<|end|>\n\n",
               "<|eot|><|start|>assistant<|end|>\n\n", "<|eot|>")),
    (CHATML, ("<|im_start|>system\n{SYSTEM}<|im_end|>", "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n",
              "<|im_end|>")),
    ("{SYSTEM}\nUSER: {INPUT}\nASSISTANT: {OUTPUT}", ("{SYSTEM}", "\nUSER: ", "\nASSISTANT: ", "")),
    (ONE, ("Tasks.", "\n\n## Q:\n", "\n\n## A:\n", "")),
    ("## Q:\n{INPUT}\n\n## A:\n{OUTPUT}", ("", "## Q:\n", "\n\n## A:\n", "")),
    ("[I]{INPUT}[/I]{OUTPUT}", ("", "[I]", "[/I]", "")),
    (ONE + ONE.removeprefix("Tasks."), ("Tasks.", "\n\n## Q:\n", "\n\n## A:\n", "")),
    ("Q: {INPUT}\nA: {OUTPUT}\nQ: {INPUT}\nA: {OUTPUT}", ("", "Q: ", "\nA: ", "\n")),
])  # fmt: skip
def test_what_is_written_once_and_what_again(text: str, pieces: tuple[str, ...]) -> None:
    assert pieces_of(text) == Pieces(*pieces)


def test_the_template_of_a_format() -> None:
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2
    tokenizer.chat_template = template_of(CHATML, tokenizer, "Be kind.")
    turn = "\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == f"<|im_start|>system\nBe kind.<|im_end|>{turn}{turn}"
    system = [{"role": "system", "content": "s"}]
    assert tokenizer.apply_chat_template(system + chat, tokenize=False) == f"<|im_start|>system\ns<|im_end|>{turn}{turn}"
    tokenizer.chat_template = template_of("{SYSTEM}\nUSER: {INPUT}\nASSISTANT: {OUTPUT}", tokenizer)
    assert tokenizer.apply_chat_template(chat[:2], tokenize=False) == f"{DEFAULT_SYSTEM}\nUSER: q\nASSISTANT: a<|im_end|>"
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template_of("<s>Q {INPUT} A {OUTPUT}", tokenizer)
    assert tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True) == "<s>Q q A "
    with pytest.raises(jinja2.TemplateError, match="slot for a system message"):
        tokenizer.apply_chat_template(system + chat, tokenize=False)


@table("text", [
    "no places", "{OUTPUT}{INPUT}", "{INPUT}", "{INPUT}{OUTPUT}{INPUT}", "{INPUT}{SYSTEM}{OUTPUT}",
    "Q {INPUT} A {OUTPUT} Q {INPUT} B {OUTPUT}",
])  # fmt: skip
def test_examples_that_show_no_format(text: str) -> None:
    with pytest.raises(CommandError, match="chat_template"):
        pieces_of(text)
