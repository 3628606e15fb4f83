"""Which headers are let in."""

from __future__ import annotations

from email.message import Message

import pytest

from pronghorn.serve.asked import RequestError
from pronghorn.serve.gate import LARGEST_BODY, body_length, is_loopback, require_known_names
from tables import table


def headers(*pairs: tuple[str, str]) -> Message:
    found = Message()
    for name, value in pairs:
        found[name] = value
    return found


@table(("host", "origin", "local", "status"), [
    ("localhost:8000", None, True, 0), ("127.0.0.1", None, True, 0), ("[::1]:8000", None, True, 0),
    ("127.9.9.9", None, True, 0), ("LOCALHOST.", None, True, 0), ("attacker.example:8000", None, True, 403),
    ("localhost.attacker.example", None, True, 403),
    ("127.0.0.1.attacker.example", None, True, 403), ("10.0.0.7", None, True, 403), ("[::1", None, True, 400),
    ("", None, True, 400), ("user@localhost", None, True, 400), ("localhost:80:80", None, True, 400), ("a b", None, True, 400),
    ("localhost", "http://localhost:3000", True, 0), ("localhost", "http://127.0.0.1", True, 0),
    ("localhost", "https://example.com", True, 403), ("localhost", "null", True, 403), ("localhost", "", True, 403),
    ("localhost", "http://localhost.example.com", True, 403), ("localhost", "chrome-extension://abc", True, 403),
    ("localhost", "http://[::1", True, 403), ("localhost", "file://", True, 403),
    ("box.lan:8000", None, False, 0), ("box.lan:8000", "http://box.lan:8000", False, 0),
    ("box.lan:8000", "https://example.com", False, 403), ("[::1", None, False, 400),
])  # fmt: skip
def test_names(host: str, origin: str | None, local: bool, status: int) -> None:
    found = headers(("Host", host), *((("Origin", origin),) if origin is not None else ()))
    if not status:
        require_known_names(found, "HTTP/1.1", local=local)
        return
    with pytest.raises(RequestError) as error:
        require_known_names(found, "HTTP/1.1", local=local)
    assert error.value.status == status


def test_a_request_has_one_host() -> None:
    require_known_names(headers(), "HTTP/1.0", local=True)
    for found in (headers(), headers(("Host", "localhost"), ("Host", "localhost"))):
        with pytest.raises(RequestError, match="Host headers instead of one"):
            require_known_names(found, "HTTP/1.1", local=True)
    with pytest.raises(RequestError, match="web pages"):
        require_known_names(
            headers(("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "http://a.b")), "HTTP/1.1", local=True
        )


@table(("pairs", "length"), [
    ((("Content-Length", "12"),), 12), ((("Content-Length", " 0012 "),), 12), ((("Content-Length", "0" * 5000 + "7"),), 7),
    ((("Content-Length", str(LARGEST_BODY)),), LARGEST_BODY),
    ((), 411), ((("Transfer-Encoding", "chunked"),), 411), ((("Transfer-Encoding", ""), ("Content-Length", "1")), 411),
    ((("Transfer-Encoding", "identity"), ("Content-Length", "1")), 411),
    ((("Content-Length", str(LARGEST_BODY + 1)),), 413), ((("Content-Length", "9" * 5000),), 413),
    ((("Content-Length", "-1"),), 400), ((("Content-Length", "+1"),), 400), ((("Content-Length", "1_0"),), 400),
    ((("Content-Length", "0x10"),), 400), ((("Content-Length", ""),), 400), ((("Content-Length", "\u0663"),), 400),
    ((("Content-Length", "5"), ("Content-Length", "5")), 400), ((("Content-Length", "5, 6"),), 400),
])  # fmt: skip
def test_lengths(pairs: tuple[tuple[str, str], ...], length: int) -> None:
    if length not in (400, 411, 413):
        assert body_length(headers(*pairs), needed=True) == length
        return
    with pytest.raises(RequestError) as error:
        body_length(headers(*pairs), needed=True)
    assert error.value.status == length


def test_a_request_without_a_body() -> None:
    assert body_length(headers(), needed=False) == 0
    assert [is_loopback(name) for name in ("localhost", "::1", "127.0.0.1", "0.0.0.0", "::", "box")] == [True] * 3 + [False] * 3
