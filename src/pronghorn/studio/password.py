"""Logging in with a password: how it is read and checked, how often it may be tried, and the page that asks for it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import html
import ipaddress
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from starlette.responses import HTMLResponse, Response

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.small_files import read_small

VARIABLE = "PRONGHORN_STUDIO_PASSWORD"
LEAST, MOST = 12, 1024  # characters
FREE, LONGEST = 3, 900.0  # failures of one address that cost no wait, and the longest wait in seconds; it doubles each time
FREE_OF_ALL, LONGEST_OF_ALL = 20, 60.0  # the same for all addresses together: 1,440 guesses a day
FORGOTTEN = 3600.0  # seconds after which failures no longer count
MOST_ADDRESSES = 1000
ALL = ""

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:22em;margin:18vh auto 0;padding:0 20px;color:#1c1b19;background:#fbfaf7}"
    "label,input,button{display:block;width:100%;box-sizing:border-box;font:inherit}input,button{padding:8px;margin:6px 0 14px}"
    "@media(prefers-color-scheme:dark){body{color:#eee;background:#16171a}}"
)
# Nothing of the studio's own is let through before the password: the style stands in the page, known by its hash.
POLICY_OF_LOGIN = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def read_password(file: Path | None) -> str:
    """From the file, or the variable, which commands that are started later do not get; empty: there is none."""
    given = os.environ.pop(VARIABLE, "")
    if file is not None:
        given = _content(file)
    if (file is not None or given) and not LEAST <= len(given) <= MOST:
        raise CommandError(
            what=f"the password has {len(given)} characters",
            where=VARIABLE if file is None else str(file),
            why=f"it needs {LEAST} to {MOST:,}: whoever guesses it can start commands as you",
            fix="python -c 'import secrets; print(secrets.token_urlsafe())' prints a good one",
        )
    return given


def _content(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            raise CommandError(
                what="other users may read the password", where=str(file), why=f"its mode is {mode & 0o777:o}",
                fix=f"chmod 600 {file}",
            )  # fmt: skip
        return read_small(file, 4 * MOST).decode().rstrip("\r\n")
    except OSError as error:
        raise EnvironmentFault.of(error, "cannot read the password", file, "name a file that exists") from error
    except UnicodeDecodeError:
        raise CommandError(what="the password is not UTF-8 text", where=str(file), fix="write it as text") from None


def digest(password: str, salt: bytes) -> bytes:
    """50 ms and 16 MB each."""
    return hashlib.scrypt(password.encode("utf-8", "replace"), salt=salt, n=1 << 14, r=8, p=1)


class Password:
    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._salt, self._clock = secrets.token_bytes(16), clock
        self._digest = digest(text, self._salt)
        self._failures: dict[str, tuple[int, float]] = {}  # of an address: how many, and when the last was; the oldest first

    def fits(self, given: str) -> bool:
        return hmac.compare_digest(digest(given[: MOST + 1], self._salt), self._digest)

    def wait(self, address: str) -> float:
        """Seconds until this address may try again."""
        waits = ((address_group(address), FREE, LONGEST), (ALL, FREE_OF_ALL, LONGEST_OF_ALL))
        return max(self._wait(*one) for one in waits)

    def _wait(self, who: str, free: int, longest: float) -> float:
        count, last = self._failures.get(who, (0, 0.0))
        return max(0.0, last + min(longest, 2.0 ** min(count - free, 30)) - self._clock()) if count >= free else 0.0

    def failed(self, address: str) -> None:
        now = self._clock()
        for who in (address_group(address), ALL):
            count, last = self._failures.pop(who, (0, now))
            self._failures[who] = (count + 1 if now - last < FORGOTTEN else 1, now)
        while len(self._failures) > MOST_ADDRESSES:
            del self._failures[next(iter(self._failures))]

    def succeeded(self, address: str) -> None:
        self._failures.pop(address_group(address), None)


def plain_address(text: str) -> str:
    """IPv4 as such, also where it comes by way of IPv6."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    return str(getattr(found, "ipv4_mapped", None) or found)


def address_group(text: str) -> str:
    """One machine has one IPv4 address, and 2^64 of IPv6."""
    address = plain_address(text)
    return str(ipaddress.ip_network(f"{address}/64", strict=False)) if ":" in address else address or "?"


def login_page(status: int, told: str = "", wait: int = 0) -> Response:
    """A form without a script. Its Origin is only sent where the page may tell who it is, and the gate asks for it."""
    said = f'<p role="alert">{html.escape(told)}</p>' if told else ""
    headers = {"content-security-policy": POLICY_OF_LOGIN, "referrer-policy": "same-origin"}
    return HTMLResponse(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<title>Pronghorn studio</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main>'
        f'<h1>Pronghorn studio</h1>{said}<form method="post" action="/login"><label for="password">Password</label>'
        '<input id="password" name="password" type="password" autocomplete="current-password" required autofocus>'
        "<button>Log in</button></form></main></body></html>",
        status,
        headers | ({"retry-after": str(wait)} if wait else {}),
    )
