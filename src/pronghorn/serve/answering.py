"""One answer, token by token: text as soon as it is certain, stop strings, log-probabilities, and why it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pronghorn.data.template.rendering import applied
from pronghorn.errors import DataError
from pronghorn.hf_types import Tokenizer
from pronghorn.model.generate import end_tokens, stream_tokens
from pronghorn.serve.asked import DEFAULT_TOKENS, Request, RequestError
from pronghorn.serve.models import Models, Served

BROKEN = "\ufffd"  # of a letter whose last bytes are in the next token
LETTERS = 16  # a token, at most, over a whole prompt: English has 4.5, indented code up to 8
PART = 1 << 16  # letters that are tokenized at once to see how many tokens a long text has
MORE_IN_PARTS = 1.02  # tokens: a word at the border of two parts may have some more than in the whole text


@dataclass(frozen=True)
class Token:
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass
class Generated:
    """`text` grows while it is generated."""

    prompt_tokens: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)  # where log-probabilities are wanted
    count: int = 0
    finish_reason: str = "length"


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


def answer(
    models: Models,
    one: Served,
    asked: Request,
    prompt: list[int],
    on_text: Callable[[str, list[Token]], None],
    over: Callable[[], bool],
) -> Generated:
    """`on_text` gets each piece of text with its tokens. `over` is asked at every token: whether nobody reads any more."""
    with models.using(one) as model:
        growing = _Growing(one.tokenizer, asked, len(prompt), set(end_tokens(model, one.tokenizer)), on_text)
        stream_tokens(
            model,
            one.tokenizer,
            prompt,
            lambda token, logits: growing.add(token, logits) or over(),
            max_new_tokens=asked.max_tokens or min(models.context - len(prompt), DEFAULT_TOKENS),
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
        )
    return growing.finished()


class _Growing:
    def __init__(
        self,
        tokenizer: Tokenizer,
        asked: Request,
        prompt_tokens: int,
        ends: set[int],
        on_text: Callable[[str, list[Token]], None],
    ) -> None:
        self._tokenizer, self._asked, self._ends, self._on_text = tokenizer, asked, ends, on_text
        self._answer = Generated(prompt_tokens)
        self._ids: list[int] = []
        self._window = self._read = 0  # tokens before which nothing changes any more; tokens whose text is known
        self._held = ""  # may be the beginning of a stop string
        self._waiting: list[Token] = []  # whose text was not handed on yet

    def add(self, token: int, logits: torch.Tensor) -> bool:
        """Whether the answer is over."""
        answer = self._answer
        answer.count += 1
        if token in self._ends:
            answer.finish_reason = "stop"
            return True
        self._ids.append(token)
        if self._asked.logprobs:
            self._waiting.append(self._measured(token, logits))
        return self._stops(self._new_text())

    def finished(self) -> Generated:
        """What was held back turned out to be text."""
        self._send(self._held + self._new_text(last=True), last=True)
        return self._answer

    def _new_text(self, *, last: bool = False) -> str:
        """The text of the tokens since the last call; a character of several tokens waits for its last one."""
        known = self._decode(self._ids[self._window : self._read])
        text = self._decode(self._ids[self._window :])
        if text.endswith(BROKEN) and not last:
            return ""
        self._window, self._read = self._read, len(self._ids)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _stops(self, text: str) -> bool:
        """Hands the text on, up to a stop string: whether there is one."""
        whole, self._held = self._held + text, ""
        found = [at for stop in self._asked.stop if (at := whole.find(stop)) >= 0]
        if found:
            self._answer.finish_reason = "stop"
            self._send(whole[: min(found)])
            return True
        held = max((_overlap(whole, stop) for stop in self._asked.stop), default=0)
        self._held = whole[len(whole) - held :]
        self._send(whole[: len(whole) - held])
        return False

    def _send(self, text: str, *, last: bool = False) -> None:
        if not text and not (last and self._waiting):
            return
        tokens, self._waiting = self._waiting, []
        self._answer.text += text
        self._answer.tokens += tokens
        self._on_text(text, tokens)

    def _measured(self, token: int, logits: torch.Tensor) -> Token:
        logprobs = logits.float().log_softmax(-1)
        best = logprobs.topk(self._asked.top_logprobs) if self._asked.top_logprobs else None
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best is not None else ()
        return Token(
            self._tokenizer.decode([token]),
            float(logprobs[token]),
            tuple((self._tokenizer.decode([other]), value) for other, value in top),
        )


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of the text begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
