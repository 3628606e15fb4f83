"""What a client asks for: the body of a request, checked. What would be ignored is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pronghorn.errors import PronghornError

MOST_STOPS, MOST_LOGPROBS, MOST_CHOICES = 16, 20, 16
SHOWN = 80  # letters of what a client sent, in an error
DEFAULT_TOKENS = 1024  # of an answer, where the request does not say; less where the context is shorter
# Parameters that change nothing here.
HARMLESS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Parameters that would change the answer, with the values that do not.
AT_REST: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "echo": (False,),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
SHARED = {"model", "stream", "stream_options", "stop", "max_tokens", "temperature", "top_p", "seed", "logprobs", "n"}
SHARED |= {"top_k", "min_p"}  # as vLLM has them
OWN = {True: {"messages", "max_completion_tokens", "top_logprobs"}, False: {"prompt"}}


class RequestError(PronghornError):
    """A request that cannot be answered, with the status and the fields of OpenAI's error. `headers`: more of the answer's."""

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        allow: str | None = None,
        retry: int | None = None,
    ) -> None:
        super().__init__(what)
        self.status, self.param, self.code = status, param, code
        self.headers = {name: str(value) for name, value in (("Allow", allow), ("Retry-After", retry)) if value is not None}

    def as_openai(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.what, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Request:
    chat: bool  # or a completion of plain text
    model: str
    messages: list[dict[str, Any]]  # of a chat
    prompt: str | list[int]  # of a completion
    stream: bool
    with_usage: bool  # at the end of a stream
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int  # 0: all
    min_p: float
    n: int  # answers
    seed: int | None
    logprobs: bool
    top_logprobs: int


def read(body: bytes, *, chat: bool) -> Request:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(values, dict):
        raise RequestError("the body is not a JSON object")
    values = {name: value for name, value in values.items() if value is not None}
    _require_known(values, chat)
    most = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    options = values.get("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise RequestError("`stream_options` is not an object with include_usage: true or false", param="stream_options")
    logprobs, top = _logprobs(values, chat)
    return Request(
        chat=chat,
        model=_model(values),
        messages=_messages(values.get("messages")) if chat else [],
        prompt="" if chat else _prompt(values.get("prompt")),
        stream=_truth(values, "stream"),
        with_usage=bool(options.get("include_usage")),
        stop=_stops(values.get("stop", [])),
        max_tokens=_whole(values, most, 1, 1 << 24),
        temperature=_number(values, "temperature", 0.0, 2.0),
        top_p=_number(values, "top_p", 0.0, 1.0),
        top_k=max(0, _whole(values, "top_k", -1, 1 << 24) or 0),
        min_p=_number(values, "min_p", 0.0, 1.0, 0.0),
        n=_whole(values, "n", 1, MOST_CHOICES) or 1,
        seed=_whole(values, "seed", -(2**63), 2**63 - 1),
        logprobs=logprobs,
        top_logprobs=top,
    )


def _require_known(values: dict[str, Any], chat: bool) -> None:
    for name, value in values.items():
        if name in AT_REST:
            if value not in AT_REST[name]:
                raise RequestError(
                    f"`{name}` is not supported by this server; remove it", param=name, code="unsupported_parameter"
                )
        elif name not in SHARED | OWN[chat] | HARMLESS:
            short = name[:SHOWN]
            raise RequestError(f"unknown parameter `{short}`", param=short, code="unknown_parameter")


def _model(values: dict[str, Any]) -> str:
    if not isinstance(values.get("model"), str):
        raise RequestError("`model` is missing; GET /v1/models lists them", param="model")
    return str(values["model"])


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError("`messages` is not a list of messages", param="messages")
    found = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"`{where}` is not a message with a role", param=where)
        content = message.get("content")
        if isinstance(content, list):
            parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            content = "".join(parts) if len(parts) == len(content) else None
        if not isinstance(content, str):
            raise RequestError(f"`{where}.content` is not text", param=where)
        found.append({"role": message["role"], "content": content})
        _require_letters(content, where)
    return found


def _prompt(prompt: object) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        _require_letters(prompt, "prompt")
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise RequestError(
        "`prompt` is neither a string nor a list of token ids; send several prompts as several requests", param="prompt"
    )


def _require_letters(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"`{where}` contains half of a surrogate pair, which is not valid text", param=where) from None


def _stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"`stop` is neither a string nor a list of up to {MOST_STOPS} strings", param="stop")
    return tuple(stops)


def _logprobs(values: dict[str, Any], chat: bool) -> tuple[bool, int]:
    if chat:
        wanted, top = _truth(values, "logprobs"), _whole(values, "top_logprobs", 0, MOST_LOGPROBS) or 0
        if top and not wanted:
            raise RequestError("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        return wanted, top
    top_or_none = _whole(values, "logprobs", 0, MOST_LOGPROBS)
    return top_or_none is not None, top_or_none or 0


def _truth(values: dict[str, Any], name: str) -> bool:
    if not isinstance(values.get(name, False), bool):
        raise RequestError(f"`{name}` is not true or false", param=name)
    return bool(values.get(name, False))


def _whole(values: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = values.get(name)
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise RequestError(f"`{name}` is not a whole number from {least} to {most}", param=name)
    return value


def _number(values: dict[str, Any], name: str, least: float, most: float, default: float = 1.0) -> float:
    value = values.get(name, default)
    if type(value) not in (int, float) or not least <= value <= most:
        raise RequestError(f"`{name}` is not a number from {least:g} to {most:g}", param=name)
    return float(value)
