"""Chat templates by the names people use for them, each a row: what a model's own template writes for text.

A row is the part of the template that writes messages; what all rows share is put in front of it: contents in parts are read as
their texts, other keys and roles are read as `role` and `content`, a missing system message is filled in, and what only the
model's own template can write (tools) is an error of the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

# `said(message)`: its text. Parts of an image would be left out silently, so they are refused.
_SAID = (
    "{%- macro said(message, trims=false) -%}"
    "{%- if message['tool_calls'] -%}"
    "{{ raise_exception('named templates do not support tool calls; use the template of the model') }}"
    "{%- endif -%}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim if trims else message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] != 'text' -%}{{ raise_exception('named templates support text content only') }}{%- endif -%}"
    "{{ part['text'] | trim if trims else part['text'] }}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- if tools -%}{{ raise_exception('named templates do not support tools; use the template of the model') }}{%- endif -%}"
)
_ROLES = "{%- for message in messages -%}"
_ASK = "{%- endfor -%}{%- if add_generation_prompt -%}"
_ALTERNATE = (
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate: user, assistant, user, ...') }}{%- endif -%}"
)
_HEADER = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + said(message) | trim + '<|eot_id|>' }}"
_TAKE_SYSTEM = (
    "{%- set has_system = messages[0]['role'] == 'system' -%}{%- set system = said(messages[0]) if has_system else '' -%}"
    "{%- set messages = messages[1:] if has_system else messages -%}"
)
# What the last user asked decides: only answers behind it show what the model thought.
_LAST_QUESTION = (
    "{%- set last = namespace(question=messages | length - 1, found=false) -%}"
    "{%- for message in messages[::-1] -%}{%- if message['role'] == 'user' and not last.found -%}"
    "{%- set last.question = messages | length - 1 - loop.index0 -%}{%- set last.found = true -%}{%- endif -%}{%- endfor -%}"
)
_QWEN3 = (
    _LAST_QUESTION + _ROLES + "{%- set text = said(message) -%}{%- set thought = '' -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- if message['reasoning_content'] is string -%}{%- set thought = message['reasoning_content'] -%}"
    "{%- elif '</think>' in text -%}"
    "{%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{%- if loop.index0 > last.question and (loop.last or thought) -%}"
    "{%- set text = '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') -%}{%- endif -%}{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + text + '<|im_end|>\n' }}" + _ASK + "{{ '<|im_start|>assistant\n' }}"
)
_GEMMA4 = (
    "{%- macro without_thought(text) -%}{%- for piece in text.split('<channel|>') -%}"
    "{{ piece.split('<|channel>')[0] }}{%- endfor -%}{%- endmacro -%}"
    "{{ bos_token }}{%- set thinks = enable_thinking | default(false) -%}"
    "{%- if messages[0]['role'] in ['system', 'developer'] -%}"
    "{%- set system = said(messages[0]) | trim -%}{%- set messages = messages[1:] -%}{%- set has_system = true -%}{%- endif -%}"
    "{%- if has_system or thinks -%}"
    "{{ '<|turn>system\n' + ('<|think|>\n' if thinks else '') + (system or '') + '<turn|>\n' }}{%- endif -%}"
    + _ROLES
    + "{%- set text = said(message, true) -%}"
    "{{ '<|turn>' + ('model\n' + without_thought(text) | trim if message['role'] == 'assistant' "
    "else message['role'] + '\n' + text) + '<turn|>\n' }}" + _ASK + "{{ '<|turn>model\n' }}"
)
_END = "{%- endif -%}"


@dataclass(frozen=True)
class NamedTemplate:
    body: str  # "": the tokenizer's own template is the only one
    end_of_turn: str = ""
    tokens: tuple[str, ...] = ()  # besides end_of_turn
    system: str = ""  # what the model's own template says where nobody else does
    needs_nothing: bool = False  # a template that is whole as it is

    @property
    def template(self) -> str:
        return whole(self)


def whole(row: NamedTemplate, mapping: Mapping[str, str] | None = None, system: str | None = None) -> str:
    """The template of a row. `mapping`: the data's word for role, content, user, assistant and so on; `system`: the message
    that stands in front of conversations without one."""
    return (
        _renamed(mapping or {})
        + _with_system(row.system if system is None else system)
        + ("" if row.needs_nothing else _SAID)
        + row.body
    )


def _renamed(mapping: Mapping[str, str]) -> str:
    if not mapping:
        return ""
    role, content = (_text(mapping.get(key, key)) for key in ("role", "content"))
    roles = json.dumps({theirs: ours for ours, theirs in mapping.items() if ours not in ("role", "content")})
    return (
        "{%- set renamed = namespace(messages=[]) -%}{%- for message in messages -%}"
        f"{{%- set role = message[{role}] if {role} in message else message['role'] -%}}"
        f"{{%- set content = message[{content}] if {content} in message else message['content'] -%}}"
        f"{{%- set role = {roles}.get(role, role) -%}}"
        "{%- set renamed.messages = renamed.messages + [dict(message, role=role, content=content)] -%}"
        "{%- endfor -%}{%- set messages = renamed.messages -%}"
    )


def _with_system(text: str) -> str:
    if not text:
        return ""
    return (
        "{%- if messages[0]['role'] != 'system' -%}"
        f"{{%- set messages = [{{'role': 'system', 'content': {_text(text)}}}] + messages -%}}{{%- endif -%}}"
    )


def _text(text: str) -> str:
    """A literal of Jinja's: JSON's, whose escapes Jinja reads alike."""
    return json.dumps(text, ensure_ascii=False)


CHATML = _ROLES + "{{ '<|im_start|>' + message['role'] + '\n' + said(message) + '<|im_end|>\n' }}" + _ASK
CHATML += "{{ '<|im_start|>assistant\n' }}" + _END
IM_TOKENS = ("<|im_start|>",)
GEMMA_TURNS = (
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' + before "
    "+ said(message, true) + '<end_of_turn>\n' }}" + _ASK + "{{ '<start_of_turn>model\n' }}" + _END
)
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>")
LLAMA3_ASK = _ASK + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}" + _END

TEMPLATES = {
    "chatml": NamedTemplate(CHATML, "<|im_end|>", IM_TOKENS),
    "qwen-2.5": NamedTemplate(CHATML, "<|im_end|>", IM_TOKENS,
                              system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": NamedTemplate(
        _QWEN3 + "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\n\n</think>\n\n' }}"
        + _END + _END, "<|im_end|>", IM_TOKENS,
    ),
    "qwen3-instruct": NamedTemplate(CHATML, "<|im_end|>", IM_TOKENS),
    "qwen3-thinking": NamedTemplate(_QWEN3 + "{{ '<think>\n' }}" + _END, "<|im_end|>", IM_TOKENS),
    "llama-3": NamedTemplate("{{ bos_token }}" + _ROLES + _HEADER + LLAMA3_ASK, "<|eot_id|>", LLAMA3_TOKENS),
    "llama-3.1": NamedTemplate(
        "{{ bos_token }}" + _TAKE_SYSTEM
        + "{{ '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: ' "
        "+ (date_string or '26 Jul 2024') + '\n\n' + system | trim + '<|eot_id|>' }}" + _ROLES + _HEADER + LLAMA3_ASK,
        "<|eot_id|>", LLAMA3_TOKENS,
    ),
    "gemma": NamedTemplate(
        "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('gemma has no system role') }}"
        "{%- endif -%}{%- set before = '' -%}" + _ROLES + _ALTERNATE + GEMMA_TURNS, "<end_of_turn>", ("<start_of_turn>",),
    ),
    "gemma-3": NamedTemplate(
        "{{ bos_token }}" + _TAKE_SYSTEM + _ROLES + _ALTERNATE
        + "{%- set before = system + '\n\n' if loop.first and has_system else '' -%}" + GEMMA_TURNS,
        "<end_of_turn>", ("<start_of_turn>",),
    ),
    "gemma-4": NamedTemplate(_GEMMA4 + _END, "<turn|>", ("<|turn>",)),
    "gemma-4-thinking": NamedTemplate(
        _GEMMA4 + "{%- if not thinks -%}{{ '<|channel>thought\n<channel|>' }}{%- endif -%}" + _END,
        "<turn|>", ("<|turn>", "<|channel>", "<channel|>"),
    ),
    "phi-3": NamedTemplate(
        _ROLES + "{%- if message['role'] in ['user', 'assistant'] or (message['role'] == 'system' and message['content']) -%}"
        "{{ '<|' + message['role'] + '|>\n' + said(message) + '<|end|>\n' }}{%- endif -%}"
        + _ASK + "{{ '<|assistant|>\n' }}{%- else -%}{{ '<|endoftext|>' }}" + _END,
        "<|end|>", ("<|user|>", "<|assistant|>", "<|endoftext|>"),
    ),
    "phi-4": NamedTemplate(
        _ROLES + "{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + said(message) + '<|im_end|>' }}"
        + _ASK + "{{ '<|im_start|>assistant<|im_sep|>' }}" + _END, "<|im_end|>", ("<|im_start|>", "<|im_sep|>"),
    ),
    "gemma-chatml": NamedTemplate(
        "{{ bos_token }}" + CHATML.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>"),
        "<end_of_turn>", ("<start_of_turn>",),
    ),
    "starling": NamedTemplate(
        "{{ bos_token }}" + _ROLES
        + "{{ 'GPT4 Correct ' + message['role'] | title + ': ' + said(message) + '<|end_of_turn|>' }}"
        + _ASK + "{{ 'GPT4 Correct Assistant:' }}" + _END, "<|end_of_turn|>",
    ),
    "gpt-oss": NamedTemplate("", "", ("<|start|>", "<|message|>", "<|channel|>", "<|return|>")),
    "mistral": NamedTemplate(
        "{{ bos_token }}" + _ROLES + "{%- if message['role'] == 'user' -%}{{ '[INST] ' + said(message) + ' [/INST]' }}"
        "{%- elif message['role'] == 'assistant' -%}{{ ' ' + said(message) + eos_token }}"
        "{%- else -%}{{ raise_exception('mistral supports the roles user and assistant only') }}{%- endif -%}{%- endfor -%}",
    ),
    "llama": NamedTemplate(
        _TAKE_SYSTEM + "{%- set before = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' if system else '' -%}" + _ROLES + _ALTERNATE
        + "{%- if message['role'] == 'user' -%}"
        "{{ bos_token + '[INST] ' + ((before if loop.first else '') + said(message)).strip() + ' [/INST]' }}"
        "{%- else -%}{{ ' ' + said(message).strip() + ' ' + eos_token }}{%- endif -%}{%- endfor -%}",
    ),
    "zephyr": NamedTemplate(
        _ROLES + "{{ '<|' + message['role'] + '|>\n' + said(message) + eos_token + '\n' }}" + _ASK
        + "{{ '<|assistant|>\n' }}" + _END,
    ),
    "vicuna": NamedTemplate(
        "{{ bos_token }}" + _TAKE_SYSTEM + "{{ system + ' ' }}" + _ROLES
        + "{%- if message['role'] == 'user' -%}{{ 'USER: ' + said(message) + ' ' }}"
        "{%- elif message['role'] == 'assistant' -%}{{ 'ASSISTANT: ' + said(message) + eos_token }}"
        "{%- else -%}{{ raise_exception('vicuna supports the roles user and assistant only') }}{%- endif -%}"
        + _ASK + "{{ 'ASSISTANT:' }}" + _END,
        system="A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
        "and polite answers to the user's questions.",
    ),
    "alpaca": NamedTemplate(
        _ROLES + "{%- if message['role'] == 'user' -%}{{ '### Instruction:\n' + said(message) + '\n\n' }}"
        "{%- elif message['role'] == 'assistant' -%}{{ '### Response:\n' + said(message) + eos_token + '\n\n' }}"
        "{%- else -%}{{ said(message) + '\n\n' }}{%- endif -%}" + _ASK + "{{ '### Response:\n' }}" + _END,
    ),
}  # fmt: skip
SAME_AS = {
    "llama-3.2": "llama-3.1", "llama-3.3": "llama-3.1", "llama-2": "llama", "gemma-2": "gemma", "gemma-3n": "gemma-3",
    "gemma2-chatml": "gemma-chatml", "phi-3.5": "phi-3", "yi-chat": "chatml", "openchat": "starling",
}  # fmt: skip


def _letters(name: str) -> str:
    """People write phi-3.5, phi-35 and phi3.5."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_LETTERS = {_letters(name): SAME_AS.get(name, name) for name in (*TEMPLATES, *SAME_AS)}


def named(name: str) -> NamedTemplate | None:
    return TEMPLATES.get(_BY_LETTERS.get(_letters(name), ""))


def ending_with(row: NamedTemplate, token: str) -> NamedTemplate:
    """The same with another end of turn, for a vocabulary that has not the usual one."""
    return replace(row, body=row.body.replace(row.end_of_turn, token.replace("'", "\\'")), end_of_turn=token)
