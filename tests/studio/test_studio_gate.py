"""Who may in: without the cookie, from other pages and beyond the folders there is no answer."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from pronghorn.recipe_file import parse_recipe
from pronghorn.studio import app as studio_app
from pronghorn.studio.gate import LARGEST_BODY, LARGEST_FILE
from studio_parts import Browser, make_run, start, step, studio

RECIPE = "model: m\ndata: {train: data/a.jsonl}\noutput: runs/new\n"
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("studio") / "home"
    make_run(home / "runs" / "one")
    (home / "my.yaml").write_text(RECIPE)
    for secret in (home.parent / "secret.yaml", home.parent / "home-old" / "secret.yaml"):
        secret.parent.mkdir(exist_ok=True)
        secret.write_text("secret: yes\n")
    make_run(home.parent / "outside")
    (home / "link").symlink_to(home.parent)
    (home / "loop.yaml").symlink_to("loop.yaml")
    return home


@pytest.fixture(scope="module")
def page(home: Path) -> Iterator[Browser]:
    with studio(home) as one:
        yield one.open()


EVERYWHERE = ("/", "/static/main.js", "/api/runs", "/api/live?run=runs/one", "/page?file=runs/one/report.html", "/nothing")


def test_without_the_token_nobody_comes_in(page: Browser) -> None:
    for path in EVERYWHERE:
        for cookie in (
            "",
            "pronghorn-studio-1=x",
            f"pronghorn-studio-{page.port}=",
            f"pronghorn-studio-{page.port}={'x' * 43}",
        ):
            status, _, body = page.raw("GET", path, Cookie=cookie)
            assert (status, b"printed" in body) == (401, True), path
    assert page.raw("POST", "/api/stop", b"{}", Cookie="")[0] == 401


def test_a_token_counts_once_and_its_cookie_stays_with_the_browser(page: Browser) -> None:
    assert page.raw("GET", "/?token=wrong", Cookie="")[0] == 401
    token = page.keys.token
    status, headers, _ = page.raw("GET", f"/?token={token}", Cookie="")
    assert (status, headers["location"]) == (303, "/")
    assert re.search(r"; HttpOnly", headers["set-cookie"])
    assert re.search(r"; SameSite=strict", headers["set-cookie"])
    assert page.raw("GET", f"/?token={token}", Cookie="")[0] == 401
    assert page.keys.token != token  # the next link is another
    status, headers, _ = page.raw("GET", f"/?token={token}")
    assert (status, "set-cookie" in headers) == (303, False)  # whoever is in already stays in


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "192.168.0.7", "0.0.0.0", ""]
)
def test_a_foreign_host_is_refused(page: Browser, host: str) -> None:
    """DNS rebinding: the name of a page leads to 127.0.0.1, and its Host header says so."""
    assert page.raw("GET", "/api/runs", Host=host.format(port=page.port))[0] in (400, 403)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},  # another program of this machine
        {"Origin": "http://localhost:{port}"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_a_foreign_page_is_refused(page: Browser, headers: dict[str, str]) -> None:
    sent = {name: value.format(port=page.port) for name, value in headers.items()}
    assert page.raw("POST", "/api/recipe/read", b'{"text":""}', **sent)[0] == 403
    assert page.raw("GET", "/api/runs", **sent)[0] == 403
    own = {"Origin": f"http://127.0.0.1:{page.port}", "Sec_Fetch_Site": "same-origin"}
    assert page.raw("POST", "/api/recipe/read", b'{"text":""}', **own)[0] == 200


def names(home: Path) -> list[str]:
    parts = ("..", "runs/../..", "link")
    return [
        *(f"{part}/secret.yaml" for part in parts), *(f"{part}/outside" for part in parts), str(home.parent / "secret.yaml"),
        "../home-old/secret.yaml", f"{home}-old/secret.yaml", "/etc/passwd", "my.yaml\0.yaml", "runs/one\0", "loop.yaml",
        "~/x.yaml", "x" * 5000, "",
    ]  # fmt: skip


def test_no_name_leads_out_of_the_folders(page: Browser, home: Path) -> None:
    asked = {"/api/recipe": "file", "/api/live": "run", "/api/answers": "run", "/page": "file", "/api/overlay": "run"}
    for name in names(home):
        for path, key in asked.items():
            for text in (quote(name, safe=""), quote(quote(name, safe=""), safe="")):
                status, _, body = page.raw("GET", f"{path}?{key}={text}")
                assert status in (400, 403, 404), (path, name)
                assert b"secret: yes" not in body
                assert b"root:" not in body
        for path, given in (
            ("/api/stop", {"run": name}), ("/api/resume", {"run": name}), ("/api/notes", {"run": name, "note": "", "tags": []}),
            ("/api/start", {"file": name}), ("/api/export", {"run": name, "to": "merged"}), ("/api/talk", {"run": name}),
        ):  # fmt: skip
            status, _, _ = page.raw("POST", path, json.dumps(given).encode())
            assert status in (400, 403, 404), (path, name)
    page.post("/api/recipe/save", 403, file="../new.yaml", text=RECIPE)
    page.post("/api/recipe/save", 400, file="runs/one/run.jsonl", text=RECIPE)
    assert not (home.parent / "new.yaml").exists()
    assert page.raw("GET", "/page?file=my.yaml")[0] == 404  # a page of a run, and no other file


def test_files_of_the_page_are_a_list(page: Browser) -> None:
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/vendor/..%2f..%2fapp.py",
        "/static//etc/passwd",
        "/etc/passwd",
    ):
        assert page.raw("GET", path)[0] == 404, path
    status, headers, body = page.raw("GET", "/static/main.js")
    assert (status, headers["content-type"], b"useEffect" in body) == (200, "text/javascript; charset=utf-8", True)


@pytest.mark.parametrize("key", ["output", "data.train", "model", "data.eval", "up"])
def test_a_recipe_reaches_no_further(page: Browser, home: Path, key: str) -> None:
    lines = {"model": "m", "data.train": "data/a.jsonl", "data.eval": "data/a.jsonl", "output": "runs/new"}
    lines[key if key != "up" else "data.train"] = str(
        home.parent / ("outside" if key in ("output", "model") else "secret.yaml")
    )
    if key == "up":
        lines["data.train"] = "runs/../../*.yaml"  # a pattern is no file's name, and leads out all the same
    text = "model: {model}\ndata: {{train: {data.train}, eval: {data.eval}}}\noutput: {output}\n"
    for name, value in lines.items():
        text = text.replace(f"{{{name}}}", value)
    text = text.replace("{{", "{").replace("}}", "}")
    (home / "far.yaml").write_text(text)
    assert "--also" in page.post("/api/start", 403, file="far.yaml")["error"]["what"]
    assert "--also" in page.post("/api/ask", 403, question="rows", text=text)["error"]["what"]


def ended(page: Browser, job: dict[str, Any]) -> None:
    for _ in range(2000):
        if not page.get(f"/api/job?id={job['id']}")["running"]:
            return
        time.sleep(0.01)
    raise AssertionError("the command goes on")


def test_names_never_reach_a_shell(page: Browser, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that is started writes down its words: each name is one of them, and none is an option."""
    told = tmp_path / "told"
    echo = tmp_path / "echo"
    echo.write_text(
        f"#!{sys.executable}\nimport sys, pathlib\npathlib.Path({str(told)!r}).write_text('\\n'.join(sys.argv[1:]))\n"
    )
    echo.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(echo))
    for name in (
        "a; touch pwned.yaml",
        "$(touch pwned).yaml",
        "`touch pwned`.yaml",
        "a|b & c.yaml",
        "--fresh.yaml",
        "-o x.yaml",
    ):
        (home / name).write_text(RECIPE)
        ended(page, page.post("/api/start", file=name))
        expected = f"./{name}" if name.startswith("-") else name
        assert told.read_text().splitlines() == ["-P", "-m", "pronghorn.cli", "train", expected]
        assert not (home / "pwned").exists()
    page.post("/api/start", 400, file="my.yaml", verb="train --fresh; x")
    for keys in (
        "--budget 9",
        "data.train=/etc/passwd",
        "output=../x",
        "train.lr=1e-4;x",
        "train.lr=$(x)",
        ["train.lr=1"],
        "-o",
    ):
        page.post("/api/start", 400, file="my.yaml", verb="sweep", keys=keys)
    (home / "my.yaml").write_text(RECIPE)
    ended(page, page.post("/api/start", file="my.yaml", verb="sweep", keys="train.lr=1e-4,1e-3 lora.r=8"))
    swept = ["sweep", "my.yaml", "train.lr=1e-4,1e-3", "lora.r=8", "-o", f"{parse_recipe(RECIPE).output}-sweep"]
    assert told.read_text().splitlines() == ["-P", "-m", "pronghorn.cli", *swept]
    page.post("/api/export", 400, run="runs/one", to="merged --push-to-hub a/b")
    page.post("/api/export", 400, run="runs/one", to="--no-check")


def test_text_of_a_model_is_never_a_page(page: Browser, home: Path) -> None:
    folder = make_run(
        home / "runs" / "evil",
        [start() | {"run": SCRIPT}, step(1), {"event": "notice", "time": 2, "session": 1, "text": SCRIPT}],
    )
    (folder / "answers.jsonl").write_text(json.dumps({"prompt": SCRIPT, "answer": SCRIPT}) + "\n")
    (folder / "report.html").write_text(SCRIPT)
    for path in ("/api/runs", "/api/answers?run=runs/evil", f"/api/recipe?file={quote(SCRIPT)}"):
        _, headers, _ = page.raw("GET", path)
        assert (headers["content-type"], headers["x-content-type-options"]) == ("application/json", "nosniff")
    _, headers, _ = page.raw("GET", "/page?file=runs/evil/report.html")
    assert "sandbox allow-scripts;" in headers["content-security-policy"]  # without an origin, and so without the cookie
    assert "connect-src" not in headers["content-security-policy"]
    static = Path(studio_app.__file__).parent / "static"
    ways_in = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|javascript:")
    assert [file.name for file in static.glob("*.js") if ways_in.search(file.read_text())] == []


def test_no_answer_lets_other_scripts_run(page: Browser) -> None:
    for path in ("/", "/static/main.js", "/api/runs", "/nothing"):
        policy = page.raw("GET", path)[1]["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    assert "content-security-policy" in page.raw("GET", "/", Cookie="")[1]
    html = page.raw("GET", "/")[2].decode()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|https?://", html) == []


def test_a_large_body_is_refused_before_it_is_read(page: Browser) -> None:
    for path, largest in (("/api/recipe/save", LARGEST_BODY), ("/api/data?name=a.jsonl", LARGEST_FILE)):
        line = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        line.putrequest("POST", path)
        line.putheader("Cookie", page.cookie)
        line.putheader("Content-Length", str(100 << 20 if largest < 100 << 20 else largest + 1))
        line.endheaders()  # and not a byte of it
        assert line.getresponse().status == 413
        line.close()
    assert page.raw("POST", "/api/recipe/save", None, Transfer_Encoding="chunked")[0] == 411


def test_a_thousand_streams_are_too_many(page: Browser) -> None:
    most, lines = studio_app.MOST_STREAMS, []
    try:
        found = []
        for _ in range(1000):
            line = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
            line.request("GET", "/api/live?run=runs/one", headers={"Cookie": page.cookie})
            found.append(line.getresponse().status)
            if found[-1] == 200:
                lines.append(line)
            else:
                line.close()
        assert (found.count(200), set(found)) == (most, {200, 429})
        assert page.get("/api/runs")["runs"]  # others are answered
    finally:
        for line in lines:
            line.sock.close() if line.sock else None
            line.close()
    for _ in range(500):  # their places are free again, once the server has seen that they are gone
        line = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
        line.request("GET", "/api/live?run=runs/one", headers={"Cookie": page.cookie})
        status = line.getresponse().status
        line.close()
        if status == 200:
            break
        time.sleep(0.02)
    assert status == 200


def test_stopping_asks_the_run_and_no_other_process(page: Browser, home: Path) -> None:
    """The file of a lock that nobody holds names a process that is somebody else's by now."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lock = home / "runs" / "one" / "run.lock"
        lock.write_text(json.dumps({"pid": bystander.pid, "host": os.uname().nodename}))
        assert page.post("/api/stop", 409, run="runs/one")["error"]["what"] == "the run is not running"
        assert bystander.poll() is None
        lock.unlink()
    finally:
        bystander.kill()
        bystander.wait()
        bystander.stdin.close()  # type: ignore[union-attr]
