"""The tokens of a request's prompt, or why it has none that fit."""

from __future__ import annotations

from pronghorn.data.template.rendering import applied
from pronghorn.errors import DataError
from pronghorn.serve.asked import Request, RequestError
from pronghorn.serve.models import Models, Served

LETTERS = 16  # a token, at most, over a whole prompt: English has 4.5, indented code up to 8
PART = 1 << 16  # letters that are tokenized at once to see how many tokens a long text has
MORE_IN_PARTS = 1.02  # tokens: a word at the border of two parts may have some more than in the whole text


def prompt_of(models: Models, one: Served, asked: Request) -> list[int]:
    """Its tokens. A prompt that is far too long is refused after a time that depends on the model's context, not on its
    length: 8 MB of text take 15 s to tokenize."""
    if asked.chat:
        letters = sum(len(message["content"]) for message in asked.messages)
        _require_room(models, "messages", letters=letters, messages=len(asked.messages))
        text, special = _rendered(one, asked), False
    elif isinstance(asked.prompt, list):
        _require_room(models, "prompt", tokens=len(asked.prompt))
        if not all(0 <= token < len(one.tokenizer) for token in asked.prompt):
            raise RequestError("`prompt` has tokens that are not in the vocabulary", param="prompt")
        return _that_fits(models, asked, asked.prompt)
    else:
        text, special = asked.prompt, True
        _require_room(models, "prompt", letters=len(text))

    def tokens(part: str) -> list[int]:
        return list(one.tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"])

    if len(text) > PART:
        found = 0
        for start in range(0, len(text), PART):
            found += len(tokens(text[start : start + PART]))
            if found > models.context * MORE_IN_PARTS + PART // LETTERS:
                raise _too_long(models, f"over {models.context}", asked)
    return _that_fits(models, asked, tokens(text))


def _that_fits(models: Models, asked: Request, prompt: list[int]) -> list[int]:
    if not prompt:
        raise RequestError("the prompt has no tokens", param="messages" if asked.chat else "prompt")
    if models.context - len(prompt) < (asked.max_tokens or 1):
        raise _too_long(models, str(len(prompt)), asked)
    return prompt


def _require_room(models: Models, param: str, **counts: int) -> None:
    """Before anything is done with them. Each message, like each id, is at least one token."""
    for name, count in counts.items():
        if count > models.context * (LETTERS if name == "letters" else 1):
            raise RequestError(
                f"a prompt of {count:,} {name} exceeds the context length of {models.context} tokens",
                param=param,
                code="context_length_exceeded",
            )


def _too_long(models: Models, count: str, asked: Request) -> RequestError:
    wanted = f" and {asked.max_tokens} answer tokens" if asked.max_tokens else ""
    return RequestError(
        f"{count} prompt tokens{wanted} exceed the context length of {models.context}",
        param="messages" if asked.chat else "prompt",
        code="context_length_exceeded",
    )


def _rendered(one: Served, asked: Request) -> str:
    tokenizer = one.tokenizer
    if tokenizer.chat_template is None:
        raise RequestError(f"{one.name} has no chat template; use /v1/completions", param="messages")
    try:
        return str(applied(tokenizer, asked.messages, tokenize=False))
    except DataError as error:
        raise RequestError(f"{error.what}: {error.why}", param="messages") from error
