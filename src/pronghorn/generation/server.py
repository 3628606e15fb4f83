"""Another engine behind `Generator.generate`: a vLLM or SGLang server that somebody else started, over HTTP.

Both speak OpenAI's /v1/completions. A prompt goes out as token ids, each answer as a request of its own with its own seed: both
engines would make separate sequences of `n` answers, too, and share the prompt's pages by their prefix caches. Whatever a
server would take from the model's generation_config.json instead (penalties, top_p) is sent. Token ids and log-probabilities
come back, text is not read. Where the two differ is a row of `KINDS`.

Requests go to the recipe's address and nowhere else: no proxy, no redirect. One that fails on the way, or with a status that
passes, is repeated as it was. What the server refuses, or answers in another form than asked for, ends the run with a reason.
"""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.error import HTTPError, URLError

from pronghorn.errors import EnvironmentFault
from pronghorn.generation.generator import Completion, Request

T = TypeVar("T")
TRIES = 3
PASSING = (408, 425, 429, 500, 502, 503, 504)  # statuses after which the same request may succeed
MOST_BYTES = 64 << 20  # of a reply
POSITIVE = (1 << 63) - 1


@dataclass(frozen=True)
class Kind:
    """What is not OpenAI's. `adapters`: path prefix of their routes. `named`: the field of a request that names an adapter.
    `more`: further fields, so that the token that ended an answer comes back with it."""

    adapters: str
    named: str
    more: dict[str, Any]
    started: str  # options with which the server takes adapters


KINDS = {
    "vllm": Kind("/v1", "model", {}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank R"),
    "sglang": Kind("", "lora_path", {"no_stop_trim": True}, "python -m sglang.launch_server --model-path MODEL --enable-lora "
                   "--max-lora-rank R --lora-target-modules all"),
}  # fmt: skip


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """What the recipe does not name is not contacted: a redirect is a status that the server refuses with."""


class Server:
    pause = 2.0  # seconds before a request is repeated, and twice that before the last time

    def __init__(self, url: str, *, seconds: float, slots: int) -> None:
        """`seconds`: for one reply. `slots`: requests at a time."""
        self.url, self.seconds, self.slots = url.rstrip("/"), seconds, slots
        self.base, self.kind, self.adapter = "", KINDS["vllm"], ""
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def look(self) -> list[str]:
        """What it is; returns the names of the adapters that it has."""
        cards = self._read("/v1/models", None, lambda reply: [(c["id"], c.get("parent"), c["owned_by"]) for c in reply["data"]])
        bases = [(name, owner) for name, parent, owner in cards if parent is None]
        if not bases or bases[0][1] not in KINDS:
            told = f"it says that it is {bases[0][1]!r}" if bases else "it names no model"
            raise self._fault("rollouts.engine: neither a vLLM nor an SGLang server", told, "start one of them at this address")
        self.base, self.kind = bases[0][0], KINDS[bases[0][1]]
        return [name for name, parent, _ in cards if parent is not None]

    def load(self, name: str, folder: Path) -> None:
        self._changed("load", name, lora_path=str(folder))
        self.adapter = name

    def unload(self, name: str) -> None:
        self._changed("unload", name)

    def _changed(self, verb: str, name: str, **more: str) -> None:
        """What counts is which adapters it has afterwards: a repeated request is refused if the first one arrived."""
        refused = self._fault(f"the server did not {verb} the adapter {name}", "it said that it had", "see its log")
        try:
            self._sent(f"{self.kind.adapters}/{verb}_lora_adapter", {"lora_name": name, **more})
        except EnvironmentFault as fault:
            refused = fault
        if (name in self.look()) != (verb == "load"):
            raise refused

    def generate(
        self, requests: Sequence[Request], progress: Callable[[str, int, int], None] | None = None
    ) -> list[list[Completion]]:
        """The answers to each request, in order; of the adapter that was loaded last."""
        asked = [(row, number) for row, request in enumerate(requests) for number in range(len(request.keys))]
        found = [[Completion() for _ in request.keys] for request in requests]
        with ThreadPoolExecutor(max(1, min(self.slots, len(asked)))) as threads:
            begun = {threads.submit(self._answer, requests[row], requests[row].keys[n]): (row, n) for row, n in asked}
            try:
                for done, ended in enumerate(as_completed(begun), 1):
                    row, number = begun[ended]
                    found[row][number] = ended.result()
                    if progress:
                        progress("answering", done, len(asked))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return found

    def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Those of each token but the first, at temperature 1."""
        if self.kind is KINDS["sglang"]:
            once = {"max_new_tokens": 1, "temperature": 0.0}
            asked = {"input_ids": list(ids), "sampling_params": once, "return_logprob": True, "logprob_start_len": 0}
            return self._read(
                "/generate",
                asked | {"lora_path": self.adapter},
                lambda reply: [_number(one[0]) for one in reply["meta_info"]["input_token_logprobs"][1 : len(ids)]],
            )
        asked = {"model": self.adapter, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}
        return self._read(
            "/v1/completions",
            asked,
            lambda reply: [
                _number(one[str(token)]["logprob"])
                for token, one in zip(ids[1:], reply["choices"][0]["prompt_logprobs"][1:], strict=True)
            ],
        )

    # ---- one request ---------------------------------------------------------------------------------------------

    def _answer(self, request: Request, key: int) -> Completion:
        rule = request.rule
        asked = {
            "model": self.base, "prompt": list(request.prompt), "max_tokens": request.max_new_tokens, "n": 1,
            "temperature": rule.temperature, "top_k": rule.top_k or -1, "top_p": rule.top_p, "min_p": rule.min_p,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": key & POSITIVE,
            "stop_token_ids": list(request.stops), "logprobs": 0, "return_token_ids": True,
            **self.kind.more, **({self.kind.named: self.adapter} if self.adapter else {}),
        }  # fmt: skip

        def read(reply: Any) -> Completion:
            (choice,) = reply["choices"]
            tokens = [int(token) for token in choice["token_ids"] or ()]
            log_probs = [_number(one) for one in choice["logprobs"]["token_logprobs"]]
            if not tokens or len(tokens) != len(log_probs):
                raise ValueError(f"{len(tokens)} token ids with {len(log_probs)} log-probabilities")
            prompt = choice.get("prompt_token_ids")
            if prompt is not None and prompt != asked["prompt"]:
                raise ValueError(f"it read a prompt of {len(prompt)} tokens, not the {len(request.prompt)} that were sent")
            ended = tokens[-1] in request.stops
            if not ended and (choice["finish_reason"], len(tokens)) != ("length", request.max_new_tokens):
                raise ValueError(
                    f"an answer ended after {len(tokens)} tokens ({choice['finish_reason']}), at none that ends answers here; "
                    "does it serve this model, with room for prompt and answer (--max-model-len, --context-length)?"
                )
            return Completion(tokens, log_probs, list(log_probs), ended)

        return self._read("/v1/completions", asked, read)

    def _read(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
        reply = self._sent(path, body, json.loads)
        try:
            return read(reply)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            why = f"{path}: " + (f"{error} is missing" if isinstance(error, KeyError) else str(error))
            fix = "use vLLM 0.10.2 or newer, or an SGLang whose /v1/completions has return_token_ids"
            raise self._fault("the server's answer is not what was asked for", why, fix) from None

    def _sent(self, path: str, body: dict[str, Any] | None, read: Callable[[bytes], Any] = bytes) -> Any:
        data = None if body is None else json.dumps(body).encode()
        why = ""
        for attempt in range(TRIES):
            time.sleep(self.pause * attempt)
            try:
                return read(self._whole(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})))
            except HTTPError as error:
                why = f"{path}: status {error.code}: {error.read(2000).decode(errors='replace').strip()[:500] or error.reason}"
                error.close()
                if error.code not in PASSING:
                    fix = f"start it so that it takes adapters: {self.kind.started}" if "lora" in path else "see its log"
                    raise self._fault("the server refuses a request", why, fix) from None
            except (HTTPException, OSError, ValueError) as error:  # a reply that was cut off is no JSON
                reason = error.reason if isinstance(error, URLError) else error
                why = f"{path}: {reason or type(error).__name__}"
        raise self._fault(
            f"the server did not answer in {TRIES} tries", why, "start it, or fix rollouts.engine; a slow one needs a larger "
            f"rollouts.engine_seconds (now {self.seconds:g})",
        )  # fmt: skip

    def _whole(self, request: urllib.request.Request) -> bytes:
        """A reply within its time, however slowly it comes."""
        until, found = time.monotonic() + self.seconds, b""
        with self._opener.open(request, timeout=self.seconds) as reply:
            while piece := reply.read1(1 << 20):
                found += piece
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
                if len(found) > MOST_BYTES:
                    raise ValueError(f"the reply is larger than {MOST_BYTES >> 20} MB")
        return found

    def _fault(self, what: str, why: str, fix: str) -> EnvironmentFault:
        return EnvironmentFault(what=what, where=self.url, why=why, fix=f"{fix}; then run the same command again")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a log-probability is {value!r}")
    return float(value)
