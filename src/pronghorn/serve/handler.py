"""One connection: its requests, one after the other, and their answers. Every answer is JSON as OpenAI's API has it.

GET  /v1/models, /v1/models/NAME    POST /v1/chat/completions, /v1/completions    GET /health
"""

from __future__ import annotations

import io
import json
import secrets
import select
import socket
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from pronghorn.serve import gate, shapes
from pronghorn.serve.asked import DEFAULT_TOKENS, SHOWN, Request, RequestError, read
from pronghorn.serve.engine import Job
from pronghorn.serve.models import Served
from pronghorn.serve.prompts import prompt_of
from pronghorn.serve.server import Server
from pronghorn.serve.wire import Reader, Writer, linger

IDLE = 20.0  # seconds between two requests of a connection
HEAD_SECONDS, BODY_SECONDS = 10.0, 30.0  # for the headers, and for the body, to arrive
HEAD_BYTES = 1 << 17
ROUTES = {"/v1/chat/completions": True, "/v1/completions": False}  # whether it is a chat
READING = ("GET", "HEAD")


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "pronghorn", ""
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self._reader, self._writer = Reader(self.connection), Writer(self.connection)
        self._lines = io.BufferedReader(self._reader)
        self.rfile, self.wfile = self._lines, self._writer
        self._unread = self._streaming = False

    def handle_one_request(self) -> None:
        self._unread = self._streaming = False
        try:
            self._reader.allow(IDLE, HEAD_BYTES)
            if not self._lines.peek(1):
                self.close_connection = True
                return
        except TimeoutError:
            self.close_connection = True
            return
        self._reader.allow(HEAD_SECONDS, HEAD_BYTES)
        super().handle_one_request()

    def finish(self) -> None:
        if self._unread:
            linger(self.connection)

    def do_GET(self) -> None:
        with ExitStack() as self._until_answered:
            self._guarded(self._exchange)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def handle_expect_100(self) -> bool:
        """The body is asked for when the headers have been checked."""
        return True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        self.server.told(f"{self.address_string()} {format % args}"[:300])

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For the base: a request that is not HTTP."""
        self.close_connection = self._unread = True
        self.command = getattr(self, "command", None) or "GET"
        if self.request_version in ("", "HTTP/0.9"):  # it is not known; the base would leave out status and headers
            self.request_version = "HTTP/1.0"
        self._fail(RequestError((message or self.responses[code][0])[:SHOWN], status=code))

    # ---- requests --------------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RequestError as error:
            self._fail(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:  # noqa: BLE001 - one request fails, and the server goes on
            self.server.told(traceback.format_exc())
            self._fail(RequestError("internal server error; the traceback is in the server's output", status=500))

    def _exchange(self) -> None:
        self._unread = True
        gate.require_known_names(self.headers, self.request_version, local=self.server.local)
        length = gate.body_length(self.headers, needed=self.command == "POST")
        path = self._path()
        found = self._looked_up(path)
        allowed = ("POST",) if path in ROUTES else READING if found is not None else ()
        if not allowed:
            raise RequestError(f"unknown path {path[:SHOWN]}", status=404, code="not_found")
        if self.command not in allowed:
            raise RequestError(f"{self.command} is not allowed on {path[:SHOWN]}", status=405, allow=", ".join(allowed))
        with self.server.room.for_body(length):
            body = self._body(length)
            self._until_answered.enter_context(self.server.busy())
            if found is not None:
                self._send(200, found)
                return
            one, asked, prompt = self._read(body, chat=ROUTES[path])
            del body
        self._answer(one, asked, prompt)

    def _path(self) -> str:
        try:
            return urlsplit(self.path).path.rstrip("/") or "/"
        except ValueError:
            raise RequestError(f"`{self.path[:SHOWN]}` is not a path") from None

    def _looked_up(self, path: str) -> dict[str, Any] | None:
        """What GET answers; None: the path is unknown."""
        names, name = self.server.models.names, unquote(path.removeprefix("/v1/models/"))
        if path.startswith("/v1/models/") and name in names:
            return shapes.model(name, self.server.since)
        return {"/health": {"status": "ok"}, "/v1/models": shapes.models(names, self.server.since)}.get(path)

    def _body(self, length: int) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        self._reader.allow(BODY_SECONDS, length)
        try:
            body = self.rfile.read(length)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408) from None
        if len(body) < length:
            raise ConnectionAbortedError("the client left")
        self._unread = False
        return body

    def _read(self, body: bytes, *, chat: bool) -> tuple[Served, Request, list[int]]:
        """Which model, what is wanted, and the prompt's tokens; the texts of the request are not kept."""
        with self.server.room.to_read(len(body)):
            asked = read(body, chat=chat)
            one = self.server.models.get(asked.model)
            if one is None:
                known = ", ".join(self.server.models.names)
                raise RequestError(
                    f"the model `{asked.model[:SHOWN]}` is not served; use one of: {known}",
                    status=404,
                    param="model",
                    code="model_not_found",
                )
            return one, replace(asked, messages=[], prompt=""), prompt_of(self.server.models, one, asked)

    def _answer(self, one: Served, asked: Request, prompt: list[int]) -> None:
        shape = shapes.Shapes(asked)
        room = self.server.models.context - len(prompt)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        job = Job(one, asked, prompt, asked.max_tokens or min(room, DEFAULT_TOKENS), seed)
        self.server.engine.submit(job)
        try:
            for piece in job.read(self._leave):
                self._event(shape.piece(piece.choice, piece.text, piece.tokens), before=shape.first)
        finally:
            self.server.engine.leave(job)
        if not asked.stream:
            self._send(200, shape.whole(job))
            return
        for last in shape.last(job):
            self._event(last, before=shape.first)
        if asked.with_usage:
            self._event(shape.used(job))
        self._piece(b"data: [DONE]\n\n")
        self._end_stream()

    def _leave(self) -> None:
        """Raises if the client has closed its side: the next one waits."""
        look = select.poll()
        look.register(self.connection, select.POLLIN)
        try:
            gone = bool(look.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            gone = True
        if gone:
            raise ConnectionAbortedError("the client left")

    # ---- answers ---------------------------------------------------------------------------------------------------------

    def _send(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Connection" not in headers and (self.close_connection or self._unread or self.server.crowded or self.server.ending):
            self.send_header("Connection", "close")
        self.end_headers()

    def _fail(self, error: RequestError) -> None:
        try:
            if self._streaming:  # the status is sent already
                self._event(error.as_openai())
                self._end_stream()
            else:
                self._send(error.status, error.as_openai(), error.headers)
        except OSError:
            self.close_connection = True

    def _event(self, content: dict[str, Any], before: Callable[[], list[dict[str, Any]]] = list) -> None:
        """One piece of a stream, which begins with its first: what is wrong with the request is an ordinary answer."""
        if not self._streaming:
            chunked = {"Transfer-Encoding": "chunked"} if self.request_version == "HTTP/1.1" else {"Connection": "close"}
            self._head(200, {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **chunked})
            self._streaming = True
            for first in before():
                self._event(first)
        self._piece(b"data: " + json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n")

    def _piece(self, data: bytes) -> None:
        """HTTP/1.0 has no chunks: there the stream ends with the connection."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self.request_version == "HTTP/1.1" else data)

    def _end_stream(self) -> None:
        if self.request_version == "HTTP/1.1":
            self.wfile.write(b"0\r\n\r\n")
