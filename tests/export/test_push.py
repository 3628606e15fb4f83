"""`--push-to-hub`, against a stand-in for the hub on loopback: one commit with every file, and nothing without a token."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pronghorn.errors import CommandError, ModelError
from pronghorn.export.push import push, require_push


class Hub(ThreadingHTTPServer):
    """Takes every file inside the commit, as the hub does with small ones."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}
        self.tokens: set[str] = set()
        self.status = 200


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.server.status != 200:
            return self.answer({"error": "no"}, self.server.status)
        here = f"http://127.0.0.1:{self.server.server_port}"
        if self.path.endswith("/repos/create"):
            self.server.created = json.loads(body)
            return self.answer({"url": f"{here}/me/mine", "name": "me/mine"})
        if "/preupload/" in self.path:
            named = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            return self.answer({"files": named})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"{here}/me/mine/commit/1", "commitOid": "1", "success": True})
        return self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import close_session

    hub = Hub()
    threading.Thread(target=lambda: hub.serve_forever(poll_interval=0.01), daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    close_session()
    yield hub
    hub.shutdown()
    close_session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    (tmp_path / "out" / "README.md").write_text("---\ntags: [pronghorn]\n---\n# card\n")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"\0" * 2000)
    (tmp_path / "out" / "adapter" / "adapter_config.json").write_text("{}")
    return tmp_path / "out"


def test_every_file_is_in_one_commit_of_a_private_repository(server: Hub, folder: Path) -> None:
    require_push("me/mine", 1)
    address = push(folder, "me/mine", lambda *_: None)
    assert address.endswith("/me/mine")
    assert server.files == {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }
    assert server.created["visibility"] == "private"
    assert server.tokens == {"Bearer hf_of_a_test"}


def test_a_hub_that_refuses_is_told_and_the_export_stays(server: Hub, folder: Path) -> None:
    server.status = 403
    with pytest.raises(ModelError, match="written, but not uploaded: the Hub refused the upload") as caught:
        push(folder, "me/mine", lambda *_: None)
    assert f"hf upload NAME {folder}" in caught.value.fix
    assert (folder / "model.safetensors").is_file()


def test_what_cannot_be_pushed_is_refused_before_anything_is_written(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, targets, what in (("mine", 1, "not a valid Hub name"), ("me/mine", 2, "takes one target")):
        with pytest.raises(CommandError, match=what):
            require_push(name, targets)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(CommandError, match="needs a token") as caught:
        require_push("me/mine", 1)
    assert "HF_TOKEN" in caught.value.fix
