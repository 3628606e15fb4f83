"""Answers as OpenAI's protocol has them: whole ones, and the pieces of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from pronghorn.generation.text import GrowingText
from pronghorn.serve.asked import Request
from pronghorn.serve.engine import Job, Token


class Shapes:
    """The JSON of the answers to one request."""

    def __init__(self, asked: Request) -> None:
        self._chat, self._logprobs = asked.chat, asked.logprobs
        kind = "chat.completion" if asked.chat else "text_completion"
        mark = "chatcmpl" if asked.chat else "cmpl"
        self._head = {"id": f"{mark}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
        self._object, self._piece = kind, f"{kind}.chunk" if asked.chat else kind
        self._letters = [0] * asked.n  # of each text so far: text_offset counts them

    def whole(self, job: Job) -> dict[str, Any]:
        choices = [self._choice(number, text) for number, text in enumerate(job.texts)]
        return {**self._head, "object": self._object, "choices": choices, "usage": usage(job)}

    def _choice(self, number: int, text: GrowingText) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text.text, "refusal": None}}
        content: dict[str, Any] = message if self._chat else {"text": text.text}
        return {"index": number, **content, "logprobs": self._measured(number, text.notes), "finish_reason": reason(text)}

    def first(self) -> list[dict[str, Any]]:
        """The first chunks of a stream, which have the role."""
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(number, role, [], None) for number in range(len(self._letters))] if self._chat else []

    def piece(self, number: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._chunk(number, {"delta": {"content": text}} if self._chat else {"text": text}, tokens, None)

    def last(self, job: Job) -> list[dict[str, Any]]:
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return [self._chunk(number, content, [], reason(text)) for number, text in enumerate(job.texts)]

    def used(self, job: Job) -> dict[str, Any]:
        """After the last piece, where the client asks for it."""
        return {**self._head, "object": self._piece, "choices": [], "usage": usage(job)}

    def _chunk(self, number: int, content: dict[str, Any], tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        logprobs = self._measured(number, tokens) if tokens else None
        choice = {"index": number, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "object": self._piece, "choices": [choice]}

    def _measured(self, number: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            content = [
                {**_one(token.text, token.logprob), "top_logprobs": [_one(*other) for other in token.top]} for token in tokens
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._letters[number])
            self._letters[number] += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": offsets,
        }


def reason(text: GrowingText) -> str:
    return "stop" if text.stopped else "length"


def usage(job: Job) -> dict[str, int]:
    prompt, answers = len(job.prompt), sum(text.count for text in job.texts)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def _one(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def models(names: Sequence[str], since: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, since) for name in names]}


def model(name: str, since: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": since, "owned_by": "pronghorn"}
