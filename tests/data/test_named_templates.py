"""Chat templates by name: what each row writes, word for word, as the models' own templates write it."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from pronghorn.data.template.named_templates import SAME_AS, TEMPLATES, NamedTemplate, ending_with, named, whole
from samples import make_tokenizer
from tables import table

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "2?"}]
SYSTEM = [{"role": "system", "content": "s"}]
DATE = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


def write(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def head(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


# (name, a conversation of three turns, with a system message, the prompt for an answer)
WRITTEN = {
    "llama-3.1": (
        f"<s>{head('system')}{DATE}<|eot_id|>{head('user')}hi<|eot_id|>{head('assistant')}ho<|eot_id|>{head('user')}2?<|eot_id|>",
        f"<s>{head('system')}{DATE}s<|eot_id|>{head('user')}hi<|eot_id|>", head("assistant"),
    ),
    "llama-3": (
        f"<s>{head('user')}hi<|eot_id|>{head('assistant')}ho<|eot_id|>{head('user')}2?<|eot_id|>",
        f"<s>{head('system')}s<|eot_id|>{head('user')}hi<|eot_id|>", head("assistant"),
    ),
    "gemma-3": (
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nho<end_of_turn>\n<start_of_turn>user\n2?<end_of_turn>\n",
        "<s><start_of_turn>user\ns\n\nhi<end_of_turn>\n", "<start_of_turn>model\n",
    ),
    "gemma-4": (
        "<s><|turn>user\nhi<turn|>\n<|turn>model\nho<turn|>\n<|turn>user\n2?<turn|>\n",
        "<s><|turn>system\ns<turn|>\n<|turn>user\nhi<turn|>\n", "<|turn>model\n",
    ),
    "gemma-4-thinking": (
        "<s><|turn>user\nhi<turn|>\n<|turn>model\nho<turn|>\n<|turn>user\n2?<turn|>\n",
        "<s><|turn>system\ns<turn|>\n<|turn>user\nhi<turn|>\n", "<|turn>model\n<|channel>thought\n<channel|>",
    ),
    "phi-4": (
        "<|im_start|>user<|im_sep|>hi<|im_end|><|im_start|>assistant<|im_sep|>ho<|im_end|><|im_start|>user<|im_sep|>2?<|im_end|>",
        "<|im_start|>system<|im_sep|>s<|im_end|><|im_start|>user<|im_sep|>hi<|im_end|>", "<|im_start|>assistant<|im_sep|>",
    ),
    "qwen-2.5": (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n",
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>assistant\n",
    ),
    "qwen3-thinking": (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n",
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>assistant\n<think>\n",
    ),
    "gemma-chatml": (
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>assistant\nho<end_of_turn>\n"
        "<start_of_turn>user\n2?<end_of_turn>\n",
        "<s><start_of_turn>system\ns<end_of_turn>\n<start_of_turn>user\nhi<end_of_turn>\n", "<start_of_turn>assistant\n",
    ),
    "starling": (
        "<s>GPT4 Correct User: hi<|end_of_turn|>GPT4 Correct Assistant: ho<|end_of_turn|>GPT4 Correct User: 2?<|end_of_turn|>",
        "<s>GPT4 Correct System: s<|end_of_turn|>GPT4 Correct User: hi<|end_of_turn|>", "GPT4 Correct Assistant:",
    ),
    "zephyr": (
        "<|user|>\nhi</s>\n<|assistant|>\nho</s>\n<|user|>\n2?</s>\n",
        "<|system|>\ns</s>\n<|user|>\nhi</s>\n", "<|assistant|>\n",
    ),
    "llama": ("<s>[INST] hi [/INST] ho </s><s>[INST] 2? [/INST]", "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nhi [/INST]", ""),
    "alpaca": (
        "### Instruction:\nhi\n\n### Response:\nho</s>\n\n### Instruction:\n2?\n\n", "s\n\n### Instruction:\nhi\n\n",
        "### Response:\n",
    ),
}  # fmt: skip
PREPARED = {
    "vicuna": "<s>s USER: hi ASSISTANT: ho</s>USER: 2? ASSISTANT:",
    "mistral": "<s>[INST] hi [/INST] ho</s>[INST] 2? [/INST]",
}


@table("name", WRITTEN)
def test_a_row_writes_what_the_models_own_template_writes(name: str) -> None:
    turns, with_system, prompt = WRITTEN[name]
    template = whole(TEMPLATES[name])
    assert write(template, CHAT) == turns
    assert write(template, CHAT, add_generation_prompt=True) == turns + prompt
    assert write(template, SYSTEM + CHAT[:1]) == with_system
    assert write(template, SYSTEM + CHAT).endswith(turns.split("hi", 1)[1])
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert write(template, SYSTEM + parts) == with_system


@pytest.mark.parametrize("name", PREPARED)
def test_formats_of_plain_text(name: str) -> None:
    messages = CHAT if name == "mistral" else SYSTEM + CHAT
    assert write(whole(TEMPLATES[name]), messages, add_generation_prompt=True) == PREPARED[name]


def test_phi_3_ends_with_its_last_token() -> None:
    template = whole(TEMPLATES["phi-3"])
    assert write(template, CHAT[:2]) == "<|user|>\nhi<|end|>\n<|assistant|>\nho<|end|>\n<|endoftext|>"
    assert write(template, CHAT[:1], add_generation_prompt=True) == "<|user|>\nhi<|end|>\n<|assistant|>\n"


def test_qwen3_shows_thoughts_behind_the_last_question_only() -> None:
    template = whole(TEMPLATES["qwen3"])
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nho"}
    assert write(template, [CHAT[0], thought, CHAT[2], thought]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nho<|im_end|>\n"
    )
    assert write(template, CHAT[:2]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nho<|im_end|>\n")
    asked = write(template, CHAT[:1], add_generation_prompt=True, enable_thinking=False)
    assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_gemma_2_refuses_what_its_own_template_refuses() -> None:
    for messages in (SYSTEM + CHAT, [CHAT[0], CHAT[0]]):
        with pytest.raises(jinja2.TemplateError):
            write(whole(TEMPLATES["gemma"]), messages)


def test_other_words_for_roles_and_a_system_message() -> None:
    mapping = {"role": "from", "content": "value", "user": "human", "assistant": "gpt"}
    template = whole(TEMPLATES["chatml"], mapping, 'Say "hü"\nonce')
    said = '<|im_start|>system\nSay "hü"\nonce<|im_end|>\n'
    said += "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    assert write(template, [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]) == said
    assert write(template, CHAT[:2]) == said
    assert write(template, [{"from": "system", "value": "s"}]) == "<|im_start|>system\ns<|im_end|>\n"


def test_what_only_a_models_own_template_writes_is_refused() -> None:
    template = whole(TEMPLATES["chatml"])
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    image = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    for messages, tools in (([CHAT[0], call], None), ([image], None), (CHAT, [tool])):
        with pytest.raises(jinja2.TemplateError, match="named templates"):
            write(template, messages, tools=tools)


def test_names_lead_to_rows_and_an_end_of_turn_can_be_another() -> None:
    assert all(named(name) for name in [*TEMPLATES, *SAME_AS])
    assert named("llama-3.2") is TEMPLATES["llama-3.1"]
    for name, row in {"gemma3n": "gemma-3", "gptoss": "gpt-oss", "phi-35": "phi-3", "qwen-25": "qwen-2.5",
                      "Qwen2.5": "qwen-2.5", "gemma2_chatml": "gemma-chatml", "gemma_chatml": "gemma-chatml",
                      "llama-33": "llama-3.1",
                      "llama_31": "llama-3.1", "qwen-3": "qwen3", "qwen3_instruct": "qwen3-instruct", "phi4": "phi-4",
                      "yi-chat": "chatml", "openchat": "starling"}.items():  # fmt: skip
        assert named(name) is TEMPLATES[row], name
    assert named("nothing") is None
    row = ending_with(NamedTemplate(TEMPLATES["chatml"].body, "<|im_end|>"), "</s>")
    assert write(whole(row), CHAT[:1]) == "<|im_start|>user\nhi</s>\n"
