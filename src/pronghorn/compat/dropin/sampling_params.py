"""`SamplingParams` by vLLM's names and defaults, for `fast_generate` and for scripts that import it from vllm."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from pronghorn.errors import CommandError

HONOURED: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,  # also -1: all
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "skip_special_tokens": True,
}
# Known to vLLM, and here only with these values.
ONLY = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "logprobs": None,
    "prompt_logprobs": None, "detokenize": True, "spaces_between_special_tokens": True, "bad_words": None, "logit_bias": None,
    "allowed_token_ids": None, "logits_processors": None, "truncate_prompt_tokens": None, "guided_decoding": None,
    "structured_outputs": None, "extra_args": None, "best_of": None,
}  # fmt: skip
RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "n": ("at least 1", lambda value: value >= 1),
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("above 0, up to 1", lambda value: 0 < value <= 1),
    "top_k": ("-1, or at least 0", lambda value: value >= -1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "max_tokens": ("at least 1", lambda value: value is None or value >= 1),
}


def is_refused(name: str, value: object) -> bool:
    return name in ONLY and value != ONLY[name] and bool(value)


class SamplingParams:
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop_token_ids: list[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int | None
    skip_special_tokens: bool

    def __init__(self, **given: Any) -> None:
        for name, value in given.items():
            if name not in HONOURED and name not in ONLY:
                close = difflib.get_close_matches(name, [*HONOURED, *ONLY], n=1)
                raise TypeError(
                    f"SamplingParams has no option `{name}`; {f'did you mean `{close[0]}`?' if close else 'remove it'}"
                )
            if is_refused(name, value):
                raise CommandError(
                    what=f"SamplingParams({name}={value!r}) is not supported",
                    why=f"Pronghorn samples by {', '.join(list(HONOURED)[1:5])}",
                    fix=f"remove {name}",
                )
        self.given = {name: value for name, value in given.items() if name in HONOURED}  # by the script, not by default
        for name, value in (HONOURED | self.given).items():
            setattr(self, name, value)
        for name, (words, fits) in RANGES.items():
            if not fits(getattr(self, name)):
                raise CommandError(what=f"SamplingParams({name}={getattr(self, name)!r})", fix=f"use a value {words}")

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.given.items())})"

    @property
    def stop_strings(self) -> list[str]:
        stop: Any = self.given.get("stop") or []
        return [stop] if isinstance(stop, str) else list(stop)


def of(params: Any) -> SamplingParams:
    """Ours, or vLLM's own, where that is installed. Also a dict, as older versions have it."""
    if isinstance(params, SamplingParams):
        return params
    names = getattr(type(params), "__struct_fields__", ())
    if not names and not isinstance(params, dict):
        raise CommandError(what=f"sampling_params is a {type(params).__name__}", fix="pass SamplingParams(...)")
    given = params if isinstance(params, dict) else {name: getattr(params, name) for name in names if not name.startswith("_")}
    usual = {} if isinstance(params, dict) else {name: getattr(type(params)(), name) for name in given}
    return SamplingParams(**{name: value for name, value in given.items() if name in HONOURED or value != usual.get(name)})
