"""What no client can do to the server: bytes sent by hand, clients that stall or leave, and many of them at once."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.serve_load import burst, chat, post
from processes import wait_until
from pronghorn.generation.decoder import Decoder
from pronghorn.model.causal_lm import install
from pronghorn.serve import handler
from pronghorn.serve.asked import RequestError, read
from pronghorn.serve.engine import SLOTS, Engine, Job
from pronghorn.serve.handler import Handler
from pronghorn.serve.models import Models, Served
from pronghorn.serve.server import Server
from samples import make_lively_model, make_tokenizer
from tables import table

GET = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
CONTEXT = 512


@pytest.fixture(scope="module")
def models() -> Models:
    model = make_lively_model()
    assert install(model) == ""
    return Models(model, [Served("run", None, make_tokenizer())], adapters=False)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def server(models: Models, told: list[str]) -> Iterator[Server]:
    server = Server(models, "127.0.0.1", 0, Handler, told=told.append)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.end()
    thread.join(20)


def place(server: Server) -> tuple[str, int]:
    host, port = server.server_address[:2]
    return str(host), int(port)


def said(server: Server, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(place(server), timeout=60) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), body


CLOSE = "Connection: close\r\n\r\n"
ORIGIN = {"Origin": "https://example.com"}


@table(("data", "status", "word"), [
    (f"{GET}{CLOSE}", 200, '"list"'), (post(chat("a"), Host="[::1"), 400, "is not a host name"),
    (post(chat("a"), Host="example.com"), 403, "loopback"), (post(chat("a"), **ORIGIN), 403, "web pages"),
    (f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: https://a.b\r\n{CLOSE}", 403, "web pages"),
    (f"OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 405, "not allowed"),
    (post(b"", Content_Length="9" * 5000), 413, "larger than 8 MB"), (post(b"", Content_Length="-5"), 400, "Content-Length"),
    (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 411, "Content-Length"),
    (post(b"5\r\nhello\r\n0\r\n\r\n", Transfer_Encoding="chunked"), 411, "Transfer-Encoding"),
    (f"GET /nothing HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 404, "unknown path"),
    (f"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 501, "Unsupported method"),
    (f"GET http://[::1/v1/models HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 400, "is not a path"),
    (f"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 200, '"list"'),
    (f"DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n{CLOSE}", 405, "not allowed"),
    ("one two three four\r\n\r\n", 400, "Bad request"), ("GET / HTTP/7.0\r\n\r\n", 505, "Invalid HTTP version"),
    (f"GET /{'x' * 70_000} HTTP/1.1\r\n\r\n", 414, "Too Long"), (f"{GET}{'a: b' * 40_000}\r\n\r\n", 431, ""),
    (GET + "a: b\r\n" * 200 + CLOSE, 431, ""), (post(b"[" * 200_000), 400, "not JSON"),
    (post(b'{"model": ' + b"9" * 5000 + b"}"), 400, "not JSON"), (post(b" " * (9 << 20)), 413, "larger than"),
    (post(chat("a", model="x" * 100_000)), 404, "is not served"), (post(b"{}", path="/v1/embeddings"), 404, "unknown path"),
    (post(json.dumps({"x" * 100_000: 1}).encode()), 400, "unknown parameter"),
])  # fmt: skip
def test_every_error_is_json(server: Server, told: list[str], data: str | bytes, status: int, word: str) -> None:
    found, headers, body = parts(said(server, data.encode() if isinstance(data, str) else data))
    assert found == status
    assert headers["Content-Type"] == "application/json"
    assert not [name for name in headers if name.startswith("Access-Control")]
    assert len(body) == int(headers["Content-Length"]) < 1000
    if status != 200:
        error = json.loads(body)["error"]
        assert word in error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    if status == 405:
        assert headers["Allow"] in ("POST", "GET, HEAD")
    assert not [line for line in told if "Traceback" in line or len(line) > 300]


def test_a_connection_goes_on_after_an_error(server: Server) -> None:
    """What follows a body is the next request, whatever the first one was."""
    first = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(GET)}\r\n\r\n{GET}"
    unknown = post(b'{"model": "x"}').replace(b"Connection: close\r\n", b"")
    answer = said(server, first.encode() + unknown + f"HEAD /health HTTP/1.1\r\nHost: localhost\r\n{CLOSE}".encode())
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"400", b"200"]
    assert answer.endswith(b"\r\n\r\n")  # of HEAD, without a body


def test_streams_for_http_1_0_have_no_chunks(server: Server) -> None:
    status, headers, body = parts(said(server, post(chat("a", stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")))
    assert (status, headers["Connection"], "Transfer-Encoding" in headers) == (200, "close", False)
    events = body.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") for event in events[:-1])


def test_expect_100_is_answered_after_the_headers_are_checked(server: Server) -> None:
    assert said(server, post(chat("a"), Expect="100-continue")).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert said(server, post(b"", Expect="100-continue", Content_Length=str(1 << 30))).startswith(b"HTTP/1.1 413")


def test_200_clients_at_once_are_all_answered(server: Server) -> None:
    assert burst(place(server), 200) == {"200": 100, "200 ended": 100}
    assert server.engine.jobs == 0


def test_clients_that_leave_free_their_places(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 long answers, more than there are slots; their clients go away while they are generated, or while they wait."""
    real, windows = Decoder.window, list[int]()
    monkeypatch.setattr(Decoder, "window", lambda self, *given: windows.append(1) or real(self, *given))
    body = post(chat("a", max_tokens=450, temperature=2, stream=True))
    gone = [socket.create_connection(place(server), timeout=60) for _ in range(70)]
    for one in gone:
        one.sendall(body)
    assert gone[0].recv(10)
    for one in gone:
        one.close()
    assert parts(said(server, post(chat("b", max_tokens=1))))[0] == 200
    generator = server.engine._answering._generator  # type: ignore[union-attr]
    free = (0, SLOTS, generator._pages)
    wait_until(lambda: (server.engine.jobs, len(generator._slots), len(generator._free)) == free)
    assert len(windows) < 400  # of the 450 that one answer takes


def test_there_is_an_end_to_waiting(models: Models, told: list[str]) -> None:
    engine = Engine(models, told.append, most=0)
    with pytest.raises(RequestError, match="waiting already") as error:
        engine.submit(Job(models.all[0], read(chat("a"), chat=True), [5], 4, 0))
    assert (error.value.status, error.value.headers) == (503, {"Retry-After": "1"})
    engine.end()
    with pytest.raises(RequestError, match="shutting down"):
        engine.submit(Job(models.all[0], read(chat("a"), chat=True), [5], 4, 0))


@table(("content", "words"), [
    ({"messages": [{"role": "user", "content": "a " * 3_900_000}]}, "7,800,000 letters exceeds the context length of 512"),
    ({"messages": [{"role": "user", "content": ""}] * 100_000}, "100,000 messages exceeds"),
    ({"messages": [{"role": "user", "content": "a"}] * 600}, "600 messages exceeds"),
    ({"messages": [{"role": "user", "content": "a" * 1000}]}, "exceed the context length of 512"),
    ({"prompt": "a" * 7_900_000}, "7,900,000 letters exceeds"), ({"prompt": [1] * 1_000_000}, "1,000,000 tokens exceeds"),
])  # fmt: skip
def test_a_prompt_far_beyond_the_context_is_refused_unseen(
    server: Server, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], words: str
) -> None:
    longest: list[int] = []
    tokenizer = server.models.get("run").tokenizer  # type: ignore[union-attr]
    encode = type(tokenizer)._encode_plus
    monkeypatch.setattr(
        type(tokenizer), "_encode_plus", lambda self, text, **more: longest.append(len(text)) or encode(self, text, **more)
    )
    path = "/v1/chat/completions" if "messages" in content else "/v1/completions"
    status, _, body = parts(said(server, post(json.dumps({"model": "run", **content}).encode(), path=path)))
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert words in error["message"]
    assert all(length < 2 * CONTEXT * 16 for length in longest)  # what was tokenized at all


def test_others_are_answered_while_a_large_prompt_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    read = handler.read

    def slow(body: bytes, *, chat: bool) -> Any:
        if len(body) > 100_000:
            reading.set()
            assert go_on.wait(60)
        return read(body, chat=chat)

    monkeypatch.setattr(handler, "read", slow)
    thread = threading.Thread(target=said, args=(server, post(chat("a" * 200_000))))
    thread.start()
    assert reading.wait(60)
    assert parts(said(server, post(chat("a"))))[0] == 200
    go_on.set()
    thread.join(60)


def test_slow_clients_are_cut_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(handler, "IDLE", 0.2)
        assert said(server, b"") == b""  # says nothing
    with monkeypatch.context() as short:
        short.setattr(handler, "HEAD_SECONDS", 0.2)
        assert said(server, b"GET /v1/models HT") == b""
    monkeypatch.setattr(handler, "BODY_SECONDS", 0.2)
    status, _, body = parts(said(server, post(b'{"model"', Content_Length="500")))
    assert (status, b"did not arrive within" in body) == (408, True)


def test_there_are_no_more_threads_than_places(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds no place waits for one, and is answered."""
    monkeypatch.setattr("pronghorn.serve.server.MOST_CONNECTIONS", 8)
    server = Server(models, "127.0.0.1", 0, Handler)
    threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True).start()
    holding = [socket.create_connection(place(server)) for _ in range(8)]
    wait_until(lambda: server._open == 8)
    late = socket.create_connection(place(server), timeout=60)
    late.sendall(f"{GET}{CLOSE}".encode())
    assert not select.select([late], [], [], 0.1)[0]
    assert server._open == 8
    for one in holding:
        one.close()
    assert late.recv(100).startswith(b"HTTP/1.1 200")
    late.close()
    server.shutdown()
    server.end()


def test_the_end_lets_a_stream_end(models: Models) -> None:
    """The last events reach the clients, and there is nothing left to wait for."""
    server = Server(models, "127.0.0.1", 0, Handler)
    threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True).start()
    found: dict[str, bytes] = {}
    begun = threading.Event()

    def stream() -> None:
        with socket.create_connection(place(server), timeout=60) as connection:
            connection.sendall(post(chat("a", stream=True, max_tokens=400, temperature=2)))
            data = connection.recv(65536)
            begun.set()
            found["stream"] = data + b"".join(iter(lambda: connection.recv(65536), b""))

    def wait() -> None:
        found["other"] = said(server, post(chat("b", max_tokens=400)))

    threads = [threading.Thread(target=stream), threading.Thread(target=wait)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    # one that still waits would be told 503
    wait_until(lambda: not threads[1].is_alive() or any(not job.asked.stream for job, _ in server.engine._under_way))
    server.shutdown()
    server.end()
    for thread in threads:
        thread.join(60)
    assert found["stream"].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b'"finish_reason": "length"' in found["stream"]
    assert parts(found["other"])[0] == 200
    server.engine._thread.join(60)
    assert not server.engine._thread.is_alive()


def test_a_failure_is_one_requests_own(server: Server, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr("pronghorn.generation.decoder.Decoder.read", fail)
        status, _, body = parts(said(server, post(chat("a"))))
    assert (status, json.loads(body)["error"]["type"]) == (500, "server_error")
    assert any("no memory" in line for line in told)
    assert parts(said(server, post(chat("a"))))[0] == 200
