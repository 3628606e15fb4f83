"""The process that loads a GGUF file with llama.cpp (xllamacpp). Started by llama_cpp.py, never by a user.

It imports xllamacpp and nothing else of size: a crash of the C++ code, or a thread of it that does not end, stays here.
Arguments: a file with what is asked (JSON) and one for answers, a JSON line each, so that the parent sees how far it is.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any, TextIO

LIKELIEST = 64  # tokens; all of them only where the one asked for is not among them
ALL = 1 << 22


class LlamaCpp:
    def __init__(self, job: dict[str, Any]) -> None:
        import xllamacpp

        wanted = xllamacpp.CommonParams()
        wanted.model.path = job["model"]
        wanted.n_ctx = job["context"]
        wanted.n_batch = wanted.n_ubatch = min(512, job["context"])
        wanted.n_parallel = 1
        wanted.n_gpu_layers = 0
        wanted.warmup = False
        wanted.use_jinja = True
        wanted.verbosity = -1
        if job["lora"]:
            wanted.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(job["lora"], 1.0)]
        wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = job["threads"]
        self.server = xllamacpp.Server(wanted)
        self.plain: int = self.tokens("a")["ids"][-1]

    def ask(self, path: str, **body: object) -> Any:
        address = f"{self.server.listening_address}/{path}"  # on loopback
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=600) as answer:
            return json.load(answer)

    def drawn(self, ids: list[int], token: int, count: int) -> dict[str, Any] | None:
        """`token` is drawn after `ids`, whatever the model says; what llama.cpp tells of it and of the `count` likeliest. None:
        it tells nothing of a token that ends the text or is not a whole letter. What the last call read is not read again."""
        draw = {"temperature": 0, "logit_bias": [[token, 1e4]]}
        answer = self.ask("completion", prompt=ids, n_predict=1, n_probs=count, cache_prompt=True, **draw)
        told: dict[str, Any] | None = next(iter(answer.get("completion_probabilities") or []), None)
        return told if told is not None and told["id"] == token else None

    def next_token(self, ids: list[int], token: int) -> tuple[int, float]:
        """The likeliest one after `ids`, and the log-probability of `token`."""
        if told := self.drawn(ids, token, 1):
            return told["top_logprobs"][0]["id"], told["logprob"]
        likely: dict[int, float] = {}
        for count in (LIKELIEST, ALL):
            if token not in likely:
                told = self.drawn(ids, self.plain, count) or {"top_logprobs": []}
                likely = {one["id"]: one["logprob"] for one in told["top_logprobs"]}
        return next(iter(likely)), likely.get(token, float("-inf"))

    def score(self, ids: list[int], start: int) -> dict[str, Any]:
        found = [self.next_token(ids[:place], ids[place]) for place in range(start, len(ids))]
        return {"best": [best for best, _ in found], "log_probs": [log_prob for _, log_prob in found]}

    def rendered(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        text = self.ask("apply-template", messages=messages)["prompt"]
        return {"text": text, **self.tokens(text, special=True)}

    def tokens(self, text: str, *, special: bool = False) -> dict[str, Any]:
        return {"ids": self.ask("tokenize", content=text, add_special=special, parse_special=True)["tokens"]}


def work(model: LlamaCpp, job: dict[str, Any], out: TextIO) -> None:
    def told(answer: dict[str, Any]) -> None:
        out.write(json.dumps(answer) + "\n")
        out.flush()

    for messages in job["messages"]:
        told(model.rendered(messages))
    for text in job["texts"]:
        told(model.tokens(text))
    for row in job["rows"]:
        told(model.score(row["ids"], row["start"]))


def main(asked: str, answers: str) -> None:
    job = json.loads(Path(asked).read_text(encoding="utf-8"))
    with Path(answers).open("w", encoding="utf-8") as out:
        work(LlamaCpp(job), job, out)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the server's threads


if __name__ == "__main__":
    main(*sys.argv[1:])
