"""The endpoint: the standard library's HTTP server with a thread for each of a bounded number of connections."""

from __future__ import annotations

import errno
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pronghorn.errors import EnvironmentFault
from pronghorn.serve.engine import Engine
from pronghorn.serve.gate import is_loopback
from pronghorn.serve.models import Models
from pronghorn.serve.room import Room

MOST_CONNECTIONS = 512  # whoever comes beyond them waits, in the system's queue
MOST_QUEUED = 1024
MOST_BODIES, SMALL_BODY = 64 << 20, 1 << 16  # bytes of all large bodies at once; a small one needs no room
PATIENCE = 10.0  # seconds for the answers under way, at the end
SPARE_FILES = 128  # descriptors for everything that is not a connection


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = MOST_QUEUED

    def __init__(
        self,
        models: Models,
        host: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.models, self.told, self.since = models, told, int(time.time())
        self.room = Room(MOST_BODIES, SMALL_BODY)
        self.ending = False
        self.local = is_loopback(host)
        self._most = max(8, min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES))
        self._free = threading.Semaphore(self._most)
        self._open = self._busy = 0
        self._changed = threading.Condition()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            raise EnvironmentFault(
                what=f"cannot listen on {host} port {port}",
                why="another program is listening there" if taken else getattr(error, "strerror", None) or str(error),
                fix="choose another port: --port 8001, or --port 0 for any free port",
            ) from error
        self.engine = Engine(models, self.told)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://[{host!s}]:{port}/v1" if ":" in str(host) else f"http://{host!s}:{port}/v1"

    @property
    def crowded(self) -> bool:
        """Then connections are closed after an answer, to let others in."""
        return self._open > self._most // 2

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around what the server waits for at its end."""
        self._count(busy=1)
        try:
            yield
        finally:
            self._count(busy=-1)

    def end(self) -> None:
        """No new answers; those that are being generated stop at their next token, and every client is told."""
        self.ending = True
        self.engine.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, PATIENCE)
        self.server_close()

    def get_request(self) -> tuple[Any, Any]:
        """Takes a connection once there is a place for it. An OSError: the loop looks whether to end, and comes again."""
        if not self._free.acquire(timeout=0.5):
            raise TimeoutError
        try:
            return super().get_request()
        except OSError:
            self._free.release()
            time.sleep(0.05)  # no file descriptor is left, for example
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        self._count(connections=1)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started; the base closes the connection
            self._closed()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error."""
        if not isinstance(sys.exception(), (OSError, ValueError)):
            self.told(traceback.format_exc())

    def _closed(self) -> None:
        self._count(connections=-1)
        self._free.release()

    def _count(self, *, connections: int = 0, busy: int = 0) -> None:
        with self._changed:
            self._open, self._busy = self._open + connections, self._busy + busy
            self._changed.notify_all()
