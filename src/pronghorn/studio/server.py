"""The studio's server, on loopback, until Ctrl-C. Runs go on without it."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.serve.gate import is_loopback
from pronghorn.studio.app import Studio
from pronghorn.studio.gate import Keys
from pronghorn.studio.places import Places

MOST_CONNECTIONS = 256


@dataclass
class Served:
    studio: Studio
    server: uvicorn.Server
    listener: socket.socket
    link: Callable[[str], str]  # of a token

    def run(self) -> None:
        try:
            with contextlib.suppress(KeyboardInterrupt):
                self.server.run(sockets=[self.listener])
        finally:
            self.studio.close()
            self.listener.close()


def prepare(home: Path, runs: list[Path], also: list[Path], host: str, port: int, keys: Keys) -> Served:
    """`runs`: folders that are searched for runs; `also`: others whose files may be used."""
    require_loopback(host)
    for folder in also:
        if not folder.is_dir():
            raise CommandError(what="folder not found", where=str(folder), fix="name a folder that exists: --also FOLDER")
    listener = _listener(host, port)
    port = int(listener.getsockname()[1])
    studio = Studio(Places(home, [*also, *runs]), runs, keys, lambda: port)
    config = uvicorn.Config(
        studio.app,
        log_level="warning",
        access_log=False,  # addresses hold tokens
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=1 << 16,
    )
    place = f"[{host}]" if ":" in host else host
    return Served(studio, uvicorn.Server(config), listener, lambda token: f"http://{place}:{port}/?token={token}")


def serve(
    home: Path, runs: list[Path], also: list[Path], host: str, port: int, *, browse: bool, demo: bool, as_json: bool
) -> None:
    keys = Keys(renewed=lambda token: print(f"another browser: {served.link(token)}", file=sys.stderr, flush=True))
    served = prepare(home, runs, also, host, port, keys)
    if demo:
        served.studio.jobs.start("demo", [], "runs/demo")
    link = served.link(keys.token)
    told = f"studio: {link}\nThe link works once. Ctrl-C ends the studio; runs go on."
    print(json.dumps({"url": link}) if as_json else told, flush=True)
    if browse:
        webbrowser.open(link)
    served.run()


def require_loopback(host: str) -> None:
    if not is_loopback(host):
        raise CommandError(
            what=f"--host {host}: the studio listens on this machine only",
            why="whoever reaches it can start commands as you",
            fix="forward the port from your machine: ssh -L 8765:127.0.0.1:8765 THIS_MACHINE",
        )


def _listener(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise CommandError(what=f"--port {port} is not a port", fix="use 0 to 65535")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        fix = "choose another port: --port 8766, or --port 0 for any free port"
        raise EnvironmentFault.of(error, f"cannot listen on {host} port {port}", "", fix) from error
    return listener
