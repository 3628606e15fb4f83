"""The gate: the first request of a browser carries a token that counts once, and gets a cookie for it; every later one carries
the cookie. Names in Host and Origin are those of this server, so that no web page elsewhere gets an answer: neither under a
name that leads here (DNS rebinding) nor by posting here."""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Event

from pronghorn.serve.asked import RequestError
from pronghorn.serve.gate import body_length, require_known_names

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
UPLOAD = "/api/data"
READING = ("GET", "HEAD")
NO_WAY_IN = "Open the link that `pronghorn studio` printed. Each link works once; the terminal shows the next one.\n"


class Keys:
    """The token of the next link, and the cookie's value."""

    def __init__(self, renewed: Callable[[str], None] = lambda token: None) -> None:
        """`renewed` is told the next token when one was used."""
        self.token, self.cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets
            return
        answer = self._refusal(scope)
        if answer is not None:
            await answer(scope, receive, _guarded(send))
            return
        await self._app(scope, receive, _guarded(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers, given = Message(), Headers(scope=scope)
        for name, value in given.items():
            headers.add_header(name, value)
        try:
            require_known_names(headers, scope["http_version"], local=True)
            self._require_own_page(given)
            self._require_small_body(scope, headers)
        except RequestError as error:
            return refused(error)
        known = self._keys.fits(cookie_parser(given.get("cookie", "")).get(self._name, ""))
        if scope["path"] == "/" and (token := parse_qs(scope["query_string"].decode("latin-1")).get("token")):
            return self._let_in(token[-1], known=known)
        return None if known else PlainTextResponse(NO_WAY_IN, 401)

    @property
    def _name(self) -> str:
        """Browsers send a cookie to every port of a name: two studios have two."""
        return f"pronghorn-studio-{self._port()}"

    def _let_in(self, token: str, *, known: bool) -> Response:
        answer = RedirectResponse("/", 303)  # the address without the token: nothing of it stays in the history
        if known:  # a bookmark of the link, or a second click on it
            return answer
        if not self._keys.take(token):
            return PlainTextResponse(NO_WAY_IN, 401)
        answer.set_cookie(self._name, self._keys.cookie, httponly=True, samesite="strict", path="/")
        return answer

    def _require_own_page(self, given: Headers) -> None:
        """Pages of other programs on this machine are strangers, too: the whole Origin counts, with its port."""
        origin, host = given.get("origin"), given.get("host", "")
        if origin is not None and origin != f"http://{host}":
            raise RequestError("requests from other web pages are not answered", status=403)
        if given.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise RequestError("requests from other web pages are not answered", status=403)

    def _require_small_body(self, scope: Scope, headers: Message) -> None:
        writes = scope["method"] not in READING
        length = body_length(headers, needed=writes, largest=LARGEST_FILE if scope["path"] == UPLOAD else LARGEST_BODY)
        if not writes and length:
            raise RequestError(f"{scope['method']} has no body")


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
