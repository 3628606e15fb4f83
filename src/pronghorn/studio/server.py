"""The studio's server, until Ctrl-C: on loopback, or elsewhere with a password. Runs go on without it."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.serve.gate import host_of, is_loopback
from pronghorn.studio.app import Studio
from pronghorn.studio.gate import Keys, kept_cookie
from pronghorn.studio.password import VARIABLE, Password, read_password
from pronghorn.studio.places import Places

MOST_CONNECTIONS = 256
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # all addresses of this machine, and one that leads here
ON_THE_WAY = "whoever is on the way between a browser and this machine can read the password, and then start commands as you"
FORWARD = "or stay on loopback and forward the port from your machine: ssh -L 8765:127.0.0.1:8765 THIS_MACHINE"


@dataclass(frozen=True)
class Entry:
    """From where the studio may be reached, and with what."""

    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()  # in Host and Origin, beside the address
    password_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    without_tls: bool = False

    @property
    def local(self) -> bool:
        return is_loopback(self.host)

    def password(self) -> str:
        """Read once; empty: there is none, which only loopback may do."""
        found = read_password(self.password_file)
        if not found and not self.local:
            raise CommandError(
                what=f"--host {self.host}: beyond this machine the studio needs a password",
                why="whoever gets in can start commands as you",
                fix=f"write one into a file of your own: --password-file FILE (or set {VARIABLE}); {FORWARD}",
            )
        return found

    def require_sound(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise CommandError(what="--tls-cert and --tls-key belong together", fix="name both files, or none")
        if self.tls_cert is None and not self.without_tls and not self.local:
            raise CommandError(
                what=f"--host {self.host}: beyond this machine the studio needs TLS",
                why=f"without it, {ON_THE_WAY}",
                fix=f"--tls-cert FILE --tls-key FILE; --without-tls, where you trust all that is on the way; {FORWARD}",
            )
        if self.without_tls and (self.local or self.tls_cert):
            raise CommandError(
                what="--without-tls has no effect here",
                why="TLS is asked for" if self.tls_cert else "loopback needs none",
                fix="leave it out",
            )
        if self.names and self.local:
            raise CommandError(
                what=f"--name {self.names[0]} has no effect here",
                why="only loopback's own names lead to loopback",
                fix="leave it out, or name an address to listen on: --host ADDRESS",
            )
        for name in self.names:
            if not name or host_of(name) != name.lower():
                raise CommandError(what=f"--name {name} is not a name", fix="write it as in the address bar, without a port")

    def require_certificate(self) -> None:
        if self.tls_cert is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, lambda: "")
        except OSError as error:  # ssl.SSLError is one
            raise EnvironmentFault.of(
                error, "cannot use the certificate and its key", f"{self.tls_cert}, {self.tls_key}",
                "name PEM files that belong together, with a key that needs no passphrase",
            ) from error  # fmt: skip

    def address(self, port: int) -> str:
        """A name that leads here: the first that was given, the address, or loopback where all addresses do."""
        place = self.names[0] if self.names else EVERYWHERE.get(self.host, self.host)
        return f"http{'s' if self.tls_cert else ''}://{f'[{place}]' if ':' in place else place}:{port}"


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


def prepare(home: Path, runs: list[Path], also: list[Path], entry: Entry, port: int, keys: Keys) -> Served:
    """`runs`: folders that are searched for runs; `also`: others whose files may be used."""
    for folder in also:
        if not folder.is_dir():
            raise CommandError(what="folder not found", where=str(folder), fix="name a folder that exists: --also FOLDER")
    entry.require_certificate()
    listener = _listener(entry.host, port)
    port = int(listener.getsockname()[1])
    studio = Studio(Places(home, [*also, *runs]), runs, keys, lambda: port)
    config = uvicorn.Config(
        studio.app,
        log_level="warning",
        access_log=False,  # addresses hold tokens
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,  # they name the address that attempts at the password are counted for
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=1 << 16,
        ssl_certfile=entry.tls_cert,
        ssl_keyfile=entry.tls_key,
    )
    return Served(studio, uvicorn.Server(config), listener, lambda token: f"{entry.address(port)}/?token={token}")


def serve(
    home: Path, runs: list[Path], also: list[Path], entry: Entry, port: int, *, browse: bool, demo: bool, as_json: bool
) -> None:
    entry.require_sound()
    password = entry.password()
    keys = Keys(
        renewed=lambda token: print(f"another browser: {served.link(token)}", file=sys.stderr, flush=True),
        cookie=kept_cookie(home, password),
        password=Password(password) if password else None,
        names=None if entry.local else [host_of(name) or name for name in (*entry.names, entry.host)],
    )
    served = prepare(home, runs, also, entry, port, keys)
    if demo:
        served.studio.jobs.start("demo", [], "runs/demo")
    link = served.link(keys.token)
    told = f"studio: {link}\nThe link works once{'; without it, the page asks for the password' if password else ''}."
    print(json.dumps({"url": link}) if as_json else f"{told} Ctrl-C ends the studio; runs go on.", flush=True)
    if entry.without_tls:
        print(f"warning: without TLS, {ON_THE_WAY}", file=sys.stderr, flush=True)
    if browse:
        webbrowser.open(link)
    served.run()


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
