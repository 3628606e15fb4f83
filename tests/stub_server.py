"""A server on loopback that speaks what generation/server.py uses of vLLM's and SGLang's API, after their sources: a tiny
model on stock transformers, with adapters that stock PEFT reads. It never was the real one."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Stub:
    """`faults`: what happens to the next requests of a path: a status, `drop` (the connection), `cut` (half a reply), `slow`,
    or a function that changes the reply. `stale`: adapters are accepted, and the first is used for ever."""

    def __init__(self, model: Path, owner: str = "vllm", *, stale: bool = False, processed: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        self.base = AutoModelForCausalLM.from_pretrained(model).eval()
        self.owner, self.stale, self.processed, self.url = owner, stale, processed, ""
        self.adapters: dict[str, Any] = {}
        self.faults: dict[str, list[Any]] = {}
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.most = 0  # adapters at a time
        self._first: Any = None
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        return Counter(path for path, _ in self.seen)

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        routes = "/v1" if self.owner == "vllm" else ""
        if path == "/v1/models":
            card = {"object": "model", "owned_by": self.owner}
            own = [{"id": name, "parent": "tiny", **card} for name in self.adapters]
            return 200, {"data": [{"id": "tiny", "parent": None, **card}, *own]}
        if path == f"{routes}/load_lora_adapter":
            return self._load(body)
        if path == f"{routes}/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None) is not None
            return (200, "Success") if known else (404, {"error": {"message": "cannot be found"}})
        if path == "/v1/completions":
            return 200, {"choices": [{"index": 0, "text": "", **self._completed(body)}]}
        if path == "/generate" and self.owner == "sglang":
            said = self._log_probs(self.adapters[body["lora_path"]], body["input_ids"], 1.0)
            return 200, {"meta_info": {"input_token_logprobs": [[None, 0, None], *([one, 0, None] for one in said)]}}
        return 404, {"detail": "Not Found"}

    def _load(self, body: dict[str, Any]) -> tuple[int, Any]:
        from peft import PeftModel

        if body["lora_name"] in self.adapters:
            return 400, {"error": {"message": "has already been loaded"}}
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), body["lora_path"]).eval()
        self._first = self._first or model
        self.adapters[body["lora_name"]] = self._first if self.stale else model
        self.most = max(self.most, len(self.adapters))
        return 200, "Success: LoRA adapter added"  # plain text, as vLLM's

    def _log_probs(self, model: Any, ids: Sequence[int], temperature: float) -> list[float]:
        import torch

        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0].float() / temperature
        return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()  # type: ignore[no-any-return]

    def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        import torch

        name = body["model"] if self.owner == "vllm" else body["lora_path"]
        model, ids = self.adapters[name], list(body["prompt"])
        if "prompt_logprobs" in body:
            said = zip(ids[1:], self._log_probs(model, ids, 1.0), strict=True)
            return {"prompt_logprobs": [None, *({str(token): {"logprob": one}} for token, one in said)]}
        chance, temperature = torch.Generator().manual_seed(body["seed"]), float(body["temperature"])
        tokens: list[int] = []
        said_of: list[float] = []
        with torch.no_grad():
            while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in body["stop_token_ids"]):
                logits = model(input_ids=torch.tensor([ids + tokens])).logits[0, -1].float()
                tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=chance)))
                said_of.append(float(torch.log_softmax(logits / (temperature if self.processed else 1.0), -1)[tokens[-1]]))
        ended = tokens[-1] in body["stop_token_ids"]
        found = {"token_ids": tokens, "logprobs": {"token_logprobs": said_of}, "finish_reason": "stop" if ended else "length"}
        return {**found, **({"prompt_token_ids": ids} if self.owner == "vllm" else {})}

    @contextmanager
    def running(self) -> Iterator[Stub]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                with stub._lock:
                    stub.seen.append((self.path, body))
                    fault = stub.faults[self.path].pop(0) if stub.faults.get(self.path) else None
                    status, found = (fault, "busy") if isinstance(fault, int) else stub.reply(self.path, body)
                if callable(fault):
                    fault(found)
                if fault == "slow":
                    time.sleep(0.6)
                if fault == "drop":
                    return
                text = (found if isinstance(found, str) else json.dumps(found)).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", f"{stub.url}/elsewhere")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text[: len(text) // 2] if fault == "cut" else text)

            def log_message(self, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
