"""Answers as OpenAI's protocol has them: whole ones, and the pieces of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from pronghorn.serve.answering import Generated, Token
from pronghorn.serve.asked import Request


class Shapes:
    """The JSON of the answers to one request."""

    def __init__(self, asked: Request) -> None:
        self._chat, self._logprobs = asked.chat, asked.logprobs
        kind = "chat.completion" if asked.chat else "text_completion"
        mark = "chatcmpl" if asked.chat else "cmpl"
        self._head = {"id": f"{mark}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.model}
        self._object, self._piece = kind, f"{kind}.chunk" if asked.chat else kind
        self._letters = 0  # of the text so far: text_offset counts them

    def whole(self, answer: Generated) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": answer.text, "refusal": None}} if self._chat else {"text": answer.text}
        )
        choice = {"index": 0, **content, "logprobs": self._measured(answer.tokens), "finish_reason": answer.finish_reason}
        return {**self._head, "object": self._object, "choices": [choice], "usage": usage(answer)}

    def first(self) -> dict[str, Any] | None:
        """The first chunk of a stream, which has the role."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, [], None) if self._chat else None

    def piece(self, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}} if self._chat else {"text": text}, tokens, None)

    def last(self, answer: Generated) -> dict[str, Any]:
        return self._chunk({"delta": {}} if self._chat else {"text": ""}, [], answer.finish_reason)

    def used(self, answer: Generated) -> dict[str, Any]:
        """After the last piece, where the client asks for it."""
        return {**self._head, "object": self._piece, "choices": [], "usage": usage(answer)}

    def _chunk(self, content: dict[str, Any], tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": self._measured(tokens) if tokens else None, "finish_reason": reason}
        return {**self._head, "object": self._piece, "choices": [choice]}

    def _measured(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            content = [
                {**_one(token.text, token.logprob), "top_logprobs": [_one(*other) for other in token.top]} for token in tokens
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._letters)
            self._letters += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": offsets,
        }


def usage(answer: Generated) -> dict[str, int]:
    total = answer.prompt_tokens + answer.count
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.count, "total_tokens": total}


def _one(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def models(names: Sequence[str], since: int) -> dict[str, Any]:
    return {"object": "list", "data": [model(name, since) for name in names]}


def model(name: str, since: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": since, "owned_by": "pronghorn"}
