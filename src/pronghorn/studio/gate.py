"""The gate: the first request of a browser carries a token that counts once, or the password where there is one, and gets a
cookie for it; every later one carries the cookie. Names in Host and Origin are those of this server, so that no web page
elsewhere gets an answer: neither under a name that leads here (DNS rebinding) nor by posting here."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from email.message import Message
from pathlib import Path
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request, cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from pronghorn.folders import cache_folder
from pronghorn.serve.asked import RequestError
from pronghorn.serve.gate import body_length, require_known_names
from pronghorn.studio.password import Password, digest, login_page, plain_address

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
# report.html carries its script and style in itself. It runs without an origin: it can neither read nor ask anything here.
POLICY_OF_REPORTS = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LARGEST_BODY = 1 << 20  # bytes
LARGEST_FILE = 64 << 20  # of one that is dropped on the page; larger ones are copied into the folder
LARGEST_LOGIN = 1 << 14
UPLOAD, LOGIN = "/api/data", "/login"
READING = ("GET", "HEAD")
UNKNOWN = "the studio does not know this browser (any more)"
NO_WAY_IN = "Open the link that `pronghorn studio` printed. Each link works once; the terminal shows the next one."
NOT_LOGGED_IN = "Log in with the password on the studio's first page, or open the link that `pronghorn studio` printed."
KEPT_FOR = 30 * 86_400.0  # seconds for which a cookie may outlive its server


class Keys:
    """The token of the next link, the cookie's value, the password, and the names that lead here beside the address."""

    def __init__(
        self,
        renewed: Callable[[str], None] = lambda token: None,
        cookie: str = "",
        password: Password | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        """`renewed` is told the next token when one was used. `names`: None where only loopback's own lead here."""
        self.token, self.cookie = secrets.token_urlsafe(32), cookie or secrets.token_urlsafe(32)
        self.password, self.names = password, names
        self._renewed, self._lock = renewed, threading.Lock()

    def take(self, token: str) -> bool:
        """Whether it is the token; then it is used up."""
        with self._lock:
            if not hmac.compare_digest(token.encode(), self.token.encode()):
                return False
            self.token = secrets.token_urlsafe(32)
        self._renewed(self.token)
        return True

    def fits(self, cookie: str) -> bool:
        return hmac.compare_digest(cookie.encode("utf-8", "replace"), self.cookie.encode())


class Gate:
    """In front of everything, style sheets included."""

    def __init__(self, app: ASGIApp, keys: Keys, port: Callable[[], int]) -> None:
        self._app, self._keys, self._port = app, keys, port
        self._checking = False  # a password: one after the other, whatever comes in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets
            return
        with suppress(ClientDisconnect):  # in the middle of a body
            answer = self._refusal(scope)
            if answer is None and self._logs_in(scope):
                answer = await self._login(Request(scope, receive))
            await (answer or self._app)(scope, receive, _guarded(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers, given = Message(), Headers(scope=scope)
        for name, value in given.items():
            headers.add_header(name, value)
        try:
            here = plain_address((scope.get("server") or ("",))[0])  # where this connection came in
            names = set() if self._keys.names is None else {here, *self._keys.names}
            require_known_names(headers, scope["http_version"], local=True, names=names)
            self._require_own_page(given, scope["scheme"])
            self._require_small_body(scope, headers)
        except RequestError as error:
            return refused(error)
        known = self._keys.fits(cookie_parser(given.get("cookie", "")).get(self._name, ""))
        if scope["path"] == "/" and (token := parse_qs(scope["query_string"].decode("latin-1")).get("token")):
            return self._let_in(token[-1], scope["scheme"], known=known)
        if known or self._logs_in(scope):
            return None
        return self._no_way_in(scope["path"])

    def _no_way_in(self, path: str) -> Response:
        way = NO_WAY_IN if self._keys.password is None else NOT_LOGGED_IN
        if path.startswith("/api/"):
            return as_json({"error": {"what": UNKNOWN, "fix": way}}, 401)
        if self._keys.password is not None and path in ("/", LOGIN):
            return login_page(401)
        return PlainTextResponse(f"{way}\n", 401)

    def _logs_in(self, scope: Scope) -> bool:
        return self._keys.password is not None and scope["path"] == LOGIN and scope["method"] == "POST"

    async def _login(self, request: Request) -> Response:
        password, address = self._keys.password, request.client.host if request.client else ""
        assert password is not None
        given = parse_qs((await request.body()).decode("latin-1"), errors="replace").get("password", [""])[-1]
        wait = math.ceil(password.wait(address)) or int(self._checking)
        if wait:
            return login_page(429, f"Too many attempts. Wait {wait} s, then try again.", wait)
        self._checking = True
        try:
            fits = await run_in_threadpool(password.fits, given)
        finally:
            self._checking = False
        if not fits:
            password.failed(address)
            return login_page(401, "That is not the password.")
        password.succeeded(address)
        return self._with_cookie(RedirectResponse("/", 303), request.url.scheme)

    @property
    def _name(self) -> str:
        """Browsers send a cookie to every port of a name: two studios have two."""
        return f"pronghorn-studio-{self._port()}"

    def _let_in(self, token: str, scheme: str, *, known: bool) -> Response:
        answer = RedirectResponse("/", 303)  # the address without the token: nothing of it stays in the history
        if known:  # a bookmark of the link, or a second click on it
            return answer
        if not self._keys.take(token):
            return self._no_way_in("/")
        return self._with_cookie(answer, scheme)

    def _with_cookie(self, answer: Response, scheme: str) -> Response:
        secure = scheme == "https"
        answer.set_cookie(self._name, self._keys.cookie, httponly=True, samesite="strict", path="/", secure=secure)
        return answer

    def _require_own_page(self, given: Headers, scheme: str) -> None:
        """Pages of other programs on this machine are strangers, too: the whole Origin counts, with its port."""
        origin, host = given.get("origin"), given.get("host", "")
        if origin is not None and origin != f"{scheme}://{host}":
            raise RequestError("requests from other web pages are not answered", status=403)
        if given.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise RequestError("requests from other web pages are not answered", status=403)

    def _require_small_body(self, scope: Scope, headers: Message) -> None:
        writes = scope["method"] not in READING
        largest = {UPLOAD: LARGEST_FILE, LOGIN: LARGEST_LOGIN}.get(scope["path"], LARGEST_BODY)
        length = body_length(headers, needed=writes, largest=largest)
        if not writes and length:
            raise RequestError(f"{scope['method']} has no body")


def kept_cookie(home: Path, password: str) -> str:
    """A browser that is in stays in when the same user starts the studio again in the same folder, with the same password. The
    secret is kept in the user's cache, not below `home`: that may be copied, committed, or come from somebody else."""
    place = cache_folder() / "studio" / hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:32]
    secret = secrets.token_bytes(32)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(place, flags, 0o600), "r+b") as file:
            about = os.fstat(file.fileno())
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o077:
                kept = file.read(len(secret) + 1)
                if len(kept) == len(secret) and time.time() - about.st_mtime < KEPT_FOR:
                    secret = kept
                else:
                    file.seek(0)
                    file.truncate()
                    file.write(secret)
    return digest(password, secret).hex()


def refused(error: RequestError) -> Response:
    return as_json({"error": {"what": error.what}}, error.status)


def as_json(value: object, status: int = 200) -> Response:
    """In ASCII: a file's name may hold bytes that are no text."""
    return Response(json.dumps(value, allow_nan=False, separators=(",", ":")), status, media_type="application/json")


def _guarded(send: Send) -> Send:
    """With the headers that every answer has."""

    async def guarded(event: Event) -> None:
        if event["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in event.get("headers", [])}
            for name, value in (
                ("content-security-policy", POLICY),
                ("x-content-type-options", "nosniff"),
                ("referrer-policy", "no-referrer"),
                ("cross-origin-opener-policy", "same-origin"),
                ("cross-origin-resource-policy", "same-origin"),
                ("cache-control", "no-store"),
            ):
                headers.setdefault(name.encode(), value.encode())
            cookies = [pair for pair in event.get("headers", []) if pair[0].lower() == b"set-cookie"][1:]
            event = {**event, "headers": [*headers.items(), *cookies]}
        with suppress(OSError):  # the browser is gone
            await send(event)

    return guarded
