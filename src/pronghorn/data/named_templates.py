"""Chat templates by the names people use for them, for tokenizers that come without one or with another."""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from typing import Any

from pronghorn.errors import CommandError

_ROLES = "{% for message in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"


@dataclass(frozen=True)
class NamedTemplate:
    template: str
    end_of_turn: str = ""
    tokens: tuple[str, ...] = ()  # besides end_of_turn


TEMPLATES = {
    "chatml": NamedTemplate(
        _ROLES + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        + _END + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>", ("<|im_start|>",),
    ),
    "llama-3": NamedTemplate(
        "{{ bos_token }}" + _ROLES + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
        "+ message['content'] | trim + '<|eot_id|>' }}"
        + _END + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "gemma": NamedTemplate(
        "{{ bos_token }}" + _ROLES
        + "{% if message['role'] == 'system' %}{{ raise_exception('gemma knows no system role') }}{% endif %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
        "+ message['content'] | trim + '<end_of_turn>\n' }}"
        + _END + "{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>", ("<start_of_turn>",),
    ),
    "phi-3": NamedTemplate(
        _ROLES + "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
        + _END + "{{ '<|assistant|>\n' }}{% endif %}",
        "<|end|>", ("<|user|>", "<|assistant|>"),
    ),
    "mistral": NamedTemplate(
        "{{ bos_token }}" + _ROLES + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('mistral knows the roles user and assistant') }}{% endif %}{% endfor %}",
    ),
    "alpaca": NamedTemplate(
        _ROLES + "{% if message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}"
        "{% elif message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}"
        "{% else %}{{ message['content'] + '\n\n' }}{% endif %}" + _END + "{{ '### Response:\n' }}{% endif %}",
    ),
}  # fmt: skip
SAME_AS = {"llama-3.1": "llama-3", "llama-3.2": "llama-3", "llama-3.3": "llama-3", "llama3": "llama-3", "gemma-2": "gemma",
           "gemma2": "gemma", "gemma-3": "gemma", "gemma3": "gemma", "phi3": "phi-3", "qwen-2.5": "chatml",
           "qwen2.5": "chatml"}


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", map_eos_token: bool = True) -> Any:
    """A copy of the tokenizer with this template; `map_eos_token` makes the format's end of turn its end token."""
    name = SAME_AS.get(chat_template, chat_template)
    if name not in TEMPLATES:
        known = [*TEMPLATES, *SAME_AS]
        close = difflib.get_close_matches(chat_template, known, n=1)
        raise CommandError(what=f"chat_template={chat_template!r}",
                           fix=(f"did you mean {close[0]!r}? " if close else "") + f"one of: {', '.join(TEMPLATES)}")
    chosen, vocabulary = TEMPLATES[name], tokenizer.get_vocab()
    missing = [token for token in (*chosen.tokens, chosen.end_of_turn) if token and token not in vocabulary]
    if missing:
        able = [other for other, row in TEMPLATES.items()
                if all(token in vocabulary for token in (*row.tokens, row.end_of_turn) if token)]
        raise CommandError(what=f"chat_template={chat_template!r}: this tokenizer has no token {missing[0]}",
                           why="as plain text it would be several tokens, and generation would not stop there",
                           fix=f"one of: {', '.join(able)}; or tokenizer.chat_template = a template of your own")
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = chosen.template
    if map_eos_token and chosen.end_of_turn:
        changed.eos_token = chosen.end_of_turn
    return changed
