"""Beyond loopback: not without a password, and not without TLS unless that is said; a password is tried slowly."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.studio import password as passwords
from pronghorn.studio.gate import Gate, Keys, kept_cookie
from pronghorn.studio.password import VARIABLE, Password, read_password
from pronghorn.studio.server import Entry
from studio_parts import Browser, make_run, studio

SECRET = "correct horse é"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page(tmp_path: Path, clock: Clock) -> Iterator[Browser]:
    make_run(tmp_path / "runs" / "one")
    with studio(tmp_path, Keys(password=Password(SECRET, clock))) as one:
        yield one


def login(page: Browser, given: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return page.raw("POST", "/login", urlencode({"password": given}).encode(), **headers)


# What the command must say ---------------------------------------------------------------------------------------------------


FILES = {"tls_cert": Path("c.pem"), "tls_key": Path("k.pem")}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (Entry("0.0.0.0"), "needs TLS"),
        (Entry("192.168.0.1"), "needs TLS"),
        (Entry("example.org"), "needs TLS"),
        (Entry("::"), "needs TLS"),
        (Entry("0.0.0.0", tls_cert=Path("c.pem")), "belong together"),
        (Entry(tls_key=Path("k.pem")), "belong together"),
        (Entry(without_tls=True), "no effect"),
        (Entry("0.0.0.0", without_tls=True, **FILES), "no effect"),
        (Entry(names=("box.lan",)), "no effect"),
        (Entry("0.0.0.0", names=("box.lan:8765",), without_tls=True), "not a name"),
        (Entry("0.0.0.0", names=("a b",), without_tls=True), "not a name"),
    ],
)
def test_beyond_loopback_tls_or_a_flag(entry: Entry, told: str) -> None:
    with pytest.raises(CommandError, match=told) as error:
        entry.require_sound()
    assert error.value.fix


def test_beyond_loopback_a_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for entry in (Entry(), Entry("::1"), Entry("localhost"), Entry("0.0.0.0", without_tls=True), Entry("10.0.0.1", **FILES)):
        entry.require_sound()
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Entry().password() == ""
    for host in ("0.0.0.0", "10.0.0.1", "::", "box.lan"):
        with pytest.raises(CommandError, match="needs a password") as error:
            Entry(host, without_tls=True).password()
        assert "--password-file" in error.value.fix
    monkeypatch.setenv(VARIABLE, SECRET)
    assert Entry("0.0.0.0", without_tls=True).password() == SECRET
    assert VARIABLE not in os.environ  # what is started later does not have it


def test_a_password_is_long_and_only_its_owner_reads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_password(file) == SECRET
    for mode in (0o640, 0o604, 0o644):
        file.chmod(mode)
        with pytest.raises(CommandError, match="other users"):
            read_password(file)
    file.chmod(0o600)
    for text, told in (
        (b"elevenlong1", "11 characters"),
        (b"", "0 characters"),
        (b"x" * 2000, "2000"),
        (b"\xff" * 20, "UTF-8"),
    ):
        file.write_bytes(text)
        with pytest.raises(CommandError, match=told):
            read_password(file)
    with pytest.raises(EnvironmentFault, match="cannot read"):
        read_password(tmp_path / "none")
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(CommandError, match=VARIABLE) as error:
        read_password(None)
    assert "short" not in str(error.value)


# Logging in ------------------------------------------------------------------------------------------------------------------


def test_only_the_password_or_the_link_let_in(page: Browser) -> None:
    for path in ("/api/runs", "/static/main.js", "/nothing", "/api/live?run=runs/one"):
        status, _, body = page.raw("GET", path)
        assert (status, b"Log in" in body) == (401, True), path
    for given in ("", SECRET[:-1], f"{SECRET} "):
        status, headers, _ = login(page, given)
        assert (status, "set-cookie" in headers) == (401, False)
        page.served.studio.app._keys.password._failures.clear()  # type: ignore[attr-defined]
    status, headers, _ = login(page, SECRET)
    assert (status, headers["location"]) == (303, "/")
    assert re.search(r"; HttpOnly.*; SameSite=strict", headers["set-cookie"])
    assert "secure" not in headers["set-cookie"].lower()
    page.cookie = headers["set-cookie"].partition(";")[0]
    assert page.get("/api/runs")["runs"]
    page.cookie = ""
    page.open()  # by the link
    assert page.get("/api/runs")["runs"]


def test_the_login_page_runs_nothing_and_asks_nothing_elsewhere(page: Browser) -> None:
    status, headers, body = page.raw("GET", "/")
    assert status == 401
    style = re.findall(r"<style>(.*?)</style>", body.decode())
    assert "<script" not in body.decode()
    policy = headers["content-security-policy"]
    assert f"style-src 'sha256-{base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()}'" in policy
    for part in ("default-src 'none'", "form-action 'self'", "frame-ancestors 'none'"):
        assert part in policy
    assert "script-src" not in policy
    assert headers["referrer-policy"] == "same-origin"  # `no-referrer` makes browsers send `Origin: null` with the form


def test_other_pages_cannot_try_a_password(page: Browser) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
        assert login(page, SECRET, **headers)[0] == 403
    assert login(page, SECRET, Host="evil.example")[0] == 403
    assert page.raw("POST", "/login", b"password=" + b"x" * (1 << 14))[0] == 413
    assert page.raw("GET", f"/login?password={SECRET[:7]}")[0] == 401
    assert login(page, SECRET, Origin=f"http://127.0.0.1:{page.port}", Sec_Fetch_Site="same-origin")[0] == 303


def test_attempts_wait_longer_and_longer(page: Browser, clock: Clock) -> None:
    waits = []
    for _ in range(8):
        status, headers, _ = login(page, "wrong wrong wrong")
        if status == 429:
            waits.append(int(headers["retry-after"]))
            assert login(page, SECRET)[0] == 429  # the right one waits, too
            clock.now += waits[-1]
            status, _, _ = login(page, "wrong wrong wrong")
        assert status == 401
    assert waits == [1, 2, 4, 8, 16]
    clock.now += 32
    assert login(page, SECRET)[0] == 303
    assert login(page, "wrong wrong wrong")[0] == 401  # and begins anew


def test_many_addresses_wait_together(clock: Clock) -> None:
    one = Password(SECRET, clock)
    for n in range(40):
        one.failed(f"10.0.0.{n}")
    assert one.wait("10.1.1.1") == passwords.LONGEST_OF_ALL
    clock.now += passwords.LONGEST_OF_ALL
    assert one.wait("10.1.1.1") == 0
    one = Password(SECRET, clock)
    for n in range(4):
        one.failed(f"2001:db8::{n}")
    assert one.wait("2001:db8::ffff") == 2 > one.wait("2001:db9::1") == 0
    for n in range(5000):
        one.failed(f"10.0.{n >> 8}.{n & 255}")
    assert len(one._failures) <= passwords.MOST_ADDRESSES
    assert one.wait("10.1.1.1") == passwords.LONGEST_OF_ALL  # the count of all stays
    for _ in range(40):
        one.failed("10.0.0.1")
    assert one.wait("10.0.0.1") == passwords.LONGEST


def test_attempts_are_checked_one_at_a_time(page: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes 16 MB and a thread."""
    gate = page.served.studio.app
    monkeypatch.setattr(gate, "_checking", True)
    status, headers, _ = login(page, SECRET)
    assert (status, headers["retry-after"]) == (429, "1")


# Names, and TLS --------------------------------------------------------------------------------------------------------------


def asked(keys: Keys, headers: dict[str, str], server: str, scheme: str = "https") -> int:
    """The status that the gate answers where the connection came to this address; 200: let through."""
    told: list[int] = []

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(event: Any) -> None:
        told.append(event.get("status", 0))

    sent = {"cookie": f"pronghorn-studio-8765={keys.cookie}", **headers}
    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": "/api/runs", "query_string": b"", "scheme": scheme,
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()], "server": (server, 8765),
        "client": ("10.0.0.9", 4000),
    }  # fmt: skip
    asyncio.run(Gate(inside, keys, lambda: 8765)(scope, None, send))  # type: ignore[arg-type]
    return told[0]


@pytest.mark.parametrize(
    ("host", "server", "status"),
    [
        ("10.0.0.5:8765", "10.0.0.5", 200),
        ("10.0.0.5:8765", "::ffff:10.0.0.5", 200),
        ("[2001:db8::7]:8765", "2001:db8::7", 200),
        ("box.lan:8765", "10.0.0.5", 200),
        ("BOX.lan.", "10.0.0.5", 200),
        ("localhost:8765", "127.0.0.1", 200),
        ("10.0.0.6:8765", "10.0.0.5", 403),
        ("evil.example:8765", "10.0.0.5", 403),
        ("box.lan.evil.example", "10.0.0.5", 403),
    ],
)
def test_names_that_lead_here(host: str, server: str, status: int) -> None:
    keys = Keys(names=["box.lan", "0.0.0.0"])
    assert asked(keys, {"host": host}, server) == status
    assert asked(keys, {"host": host, "origin": f"https://{host}"}, server) == status
    assert asked(keys, {"host": host, "origin": f"http://{host}"}, server) == 403
    assert asked(keys, {"host": host, "origin": "https://evil.example"}, server) == 403
    assert asked(keys, {"host": host, "origin": "null"}, server) == 403
    if "localhost" not in host:
        assert asked(Keys(), {"host": host}, server) == 403  # on loopback none of them is known


def test_the_link_has_a_name_that_leads_here() -> None:
    assert Entry().address(80) == "http://127.0.0.1:80"
    assert Entry("::1").address(80) == "http://[::1]:80"
    assert Entry("0.0.0.0", **FILES).address(80) == "https://127.0.0.1:80"
    assert Entry("0.0.0.0", names=("box.lan", "b")).address(80) == "http://box.lan:80"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("tls")
    pair = (folder / "cert.pem", folder / "key.pem")
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run(["openssl", *words, "-out", pair[0], "-keyout", pair[1]], check=True, capture_output=True)
    return pair


def test_over_tls_the_cookie_stays_there(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    make_run(tmp_path / "runs" / "one")
    entry = Entry("127.0.0.1", tls_cert=certificate[0], tls_key=certificate[1])
    with studio(tmp_path, Keys(password=Password(SECRET)), entry) as page:
        assert page.served.link("t") == f"https://127.0.0.1:{page.port}/?token=t"
        own = {"Origin": f"https://127.0.0.1:{page.port}"}
        status, headers, _ = login(page, SECRET, **own)
        assert (status, "; Secure" in headers["set-cookie"]) == (303, True)
        page.cookie = headers["set-cookie"].partition(";")[0]
        assert page.raw("GET", "/api/runs", **own)[0] == 200
        assert page.raw("GET", "/api/runs", Origin=f"http://127.0.0.1:{page.port}")[0] == 403


def test_a_certificate_that_cannot_be_used_is_told_before_anything_listens(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    for wrong in (Entry("0.0.0.0", tls_cert=cert, tls_key=cert), Entry("0.0.0.0", tls_cert=key.parent / "none", tls_key=key)):
        with pytest.raises(EnvironmentFault, match="certificate"):
            wrong.require_certificate()
    Entry("0.0.0.0", tls_cert=cert, tls_key=key).require_certificate()


# What outlives the server ----------------------------------------------------------------------------------------------------


def test_a_cookie_outlives_the_server_for_the_same_user_folder_and_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "home"
    first = kept_cookie(home, "")
    (file,) = (tmp_path / "cache" / "studio").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes().hex() not in first
    assert kept_cookie(home, "") == first
    assert len({first, kept_cookie(tmp_path, ""), kept_cookie(home, SECRET), kept_cookie(home, f"{SECRET}2")}) == 4
    os.utime(file, (0, 0))  # a month later
    second = kept_cookie(home, "")
    assert second != first
    assert kept_cookie(home, "") == second
    file.chmod(0o644)  # others may have read it
    assert kept_cookie(home, "") != second != kept_cookie(home, "")
    file.unlink()
    file.symlink_to(tmp_path / "planted")
    (tmp_path / "planted").write_bytes(b"x" * 32)
    assert kept_cookie(home, "") != kept_cookie(home, "")


def test_without_a_place_to_keep_it_the_cookie_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    assert kept_cookie(tmp_path, "") != kept_cookie(tmp_path, "")
