"""The endpoint: the standard library's HTTP server, a thread a connection, and one answer at a time.

GET  /v1/models, /v1/models/NAME    POST /v1/chat/completions, /v1/completions    GET /health
"""

from __future__ import annotations

import errno
import json
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from pronghorn.errors import EnvironmentFault
from pronghorn.serve import shapes
from pronghorn.serve.answering import Token, answer
from pronghorn.serve.asked import RequestError, read
from pronghorn.serve.models import Models

LOOPBACK = "127.0.0.1"
LOCAL = ("127.0.0.1", "localhost", "::1")
LARGEST_BODY = 8 << 20
IDLE = 60.0  # seconds in which a connection says nothing
PATIENCE = 10.0  # seconds for the answer that is being generated, at the end
ROUTES = {"/v1/chat/completions": True, "/v1/completions": False}  # whether it is a chat


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, models: Models, host: str, port: int, told: Callable[[str], None] = lambda line: None) -> None:
        self.models, self.told, self.since = models, told, int(time.time())
        self.turn = threading.Lock()  # the model answers one request at a time
        self.ending = False
        self.local = host in LOCAL
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            raise EnvironmentFault(
                what=f"cannot listen on {host} port {port}",
                why="another program is listening there" if taken else getattr(error, "strerror", None) or str(error),
                fix="choose another port: --port 8001, or --port 0 for any free port",
            ) from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/v1" if ":" in str(host) else f"http://{host!s}:{port}/v1"

    def end(self) -> None:
        """No new answers; the one that is being generated stops at its next token."""
        self.ending = True
        self.turn.acquire(timeout=PATIENCE)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""
        if not isinstance(sys.exception(), (OSError, ValueError)):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "pronghorn", ""
    timeout = IDLE

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def do_PUT(self) -> None:
        self._guarded(self._not_this_method)

    do_DELETE = do_PATCH = do_HEAD = do_PUT

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        self.server.told(f"{self.address_string()} {format % args}")

    # ---- requests --------------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        self.streaming = False
        try:
            self._require_local_name()
            work()
        except RequestError as error:
            self._fail(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:  # noqa: BLE001 - one request fails, and the server goes on
            traceback.print_exc()
            self._fail(RequestError("internal server error; the traceback is in the server's output", status=500))

    def _get(self) -> None:
        path, names = self._path, self.server.models.names
        if path == "/v1/models":
            self._send(200, shapes.models(names, self.server.since))
        elif path.startswith("/v1/models/") and (name := unquote(path.removeprefix("/v1/models/"))) in names:
            self._send(200, shapes.model(name, self.server.since))
        elif path == "/health":
            self._send(200, {"status": "ok"})
        elif path in ROUTES:
            self._not_this_method()
        else:
            raise RequestError(f"unknown path {path}", status=404, code="not_found")

    def _post(self) -> None:
        body = self._body()
        if self._path not in ROUTES:
            if self._path == "/v1/models":
                self._not_this_method()
            raise RequestError(f"unknown path {self._path}", status=404, code="not_found")
        asked = read(body, chat=ROUTES[self._path])
        one = self.server.models.get(asked.model)
        if one is None:
            known = ", ".join(self.server.models.names)
            raise RequestError(
                f"the model `{asked.model}` is not served; use one of: {known}",
                status=404,
                param="model",
                code="model_not_found",
            )
        shape = shapes.Shapes(asked)

        def on_text(text: str, tokens: list[Token]) -> bool:
            if asked.stream:
                self._event(shape.piece(text, tokens), before=shape.first)
            return self.server.ending or self._gone()

        with self.server.turn:
            if self.server.ending:
                raise RequestError("the server is shutting down", status=503)
            found = answer(self.server.models, one, asked, on_text)
        if not asked.stream:
            self._send(200, shape.whole(found))
            return
        self._event(shape.last(found), before=shape.first)
        if asked.with_usage:
            self._event(shape.used(found))
        self._write(b"data: [DONE]\n\n")
        self._end_stream()

    def _not_this_method(self) -> None:
        self._body()
        raise RequestError(f"{self.command} is not allowed on {self._path}", status=405)

    @property
    def _path(self) -> str:
        return urlsplit(self.path).path.rstrip("/") or "/"

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not length.isdecimal():
            self.close_connection = True
            raise RequestError("the length of the body is unknown; send Content-Length", status=411)
        if int(length) > LARGEST_BODY:
            self.close_connection = True  # the body stays unread
            raise RequestError(f"the body is larger than {LARGEST_BODY >> 20} MB", status=413)
        return self.rfile.read(int(length))

    def _require_local_name(self) -> None:
        """On loopback only names of this machine: a web page could have its own name lead here."""
        host = urlsplit(f"//{self.headers.get('Host', LOOPBACK)}").hostname
        if self.server.local and host not in LOCAL:
            self.close_connection = True
            raise RequestError(f"the Host header `{host}` does not name this machine's loopback interface", status=403)

    # ---- answers ---------------------------------------------------------------------------------------------------------

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fail(self, error: RequestError) -> None:
        try:
            if self.streaming:  # the status is sent already
                self._event(error.as_openai())
                self._end_stream()
            else:
                self._send(error.status, error.as_openai())
        except OSError:
            self.close_connection = True

    def _event(self, content: dict[str, Any], before: Callable[[], dict[str, Any] | None] | None = None) -> None:
        """One piece of a stream, which begins with its first: what is wrong with the request is an ordinary answer."""
        if not self.streaming:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.streaming = True
            if before is not None and (first := before()) is not None:
                self._event(first)
        self._write(b"data: " + json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _gone(self) -> bool:
        """Whether the client has closed its side: the next one waits."""
        look = select.poll()
        look.register(self.connection, select.POLLIN)
        try:
            return bool(look.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True
