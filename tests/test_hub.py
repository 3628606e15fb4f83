"""Models from the hub, against a hub of our own on this machine: what is fetched and sent, and what is said when it fails."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from pronghorn import hub
from pronghorn.cli import main
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.read.sources import fingerprint, resolve
from pronghorn.errors import DataError, EnvironmentFault, ModelError
from pronghorn.hub import model_folder
from pronghorn.model.load import load_model
from samples import chat_rows, write_rows

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CPU = torch.device("cpu")


class Hub(ThreadingHTTPServer):
    """`somebody/tiny` out of a folder; with `status`, nothing but that."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.folder, self.status, self.headers, self.asked = folder, 0, dict[str, str](), list[str]()
        self.agents: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place = self.path.split("?")[0]
        self.server.asked.append(f"{self.command} {place}")
        self.server.agents.add(self.headers.get("user-agent", ""))
        wanted = self.server.folder / place.rpartition("/resolve/")[2].partition("/")[2]
        if self.server.status:
            self.answer(self.server.status, b"{}", self.server.headers)
        elif place == "/api/models/somebody/tiny":
            files = [str(file.relative_to(self.server.folder)) for file in self.server.folder.rglob("*") if file.is_file()]
            content = {"id": "somebody/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self.answer(200, json.dumps(content).encode())
        elif "/resolve/" in place and wanted.is_file():
            self.answer(200, wanted.read_bytes(), {"ETag": f'"{wanted.name}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound" if "/api/" in place else "EntryNotFound"})

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def files(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "repository"))


@pytest.fixture
def server(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """As if this process had begun with HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_DISABLE_TELEMETRY, and without HF_HUB_OFFLINE."""
    with Hub(files) as server:
        threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True).start()
        use(server.address, tmp_path, monkeypatch)
        yield server
        server.shutdown()


def use(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import close_session

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hub, "_answered", {})
    monkeypatch.setattr(hub, "PAUSE", 0.01)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    close_session()


def test_a_model_by_its_hub_name(server: Hub, files: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "mine.py", "consolidated.safetensors", "onnx/model.json", ".hidden.json"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(b"not to be fetched")
    tokenizer = load_tokenizer("somebody/tiny")
    assert tokenizer.name_or_path == "somebody/tiny"
    assert not any("safetensors" in place for place in server.asked)
    model = load_model("somebody/tiny", torch.float32, CPU)
    assert model.name_or_path == model.config._name_or_path == "somebody/tiny"
    fetched = {path.rpartition("/")[2] for path in server.asked if "/resolve/" in path}
    assert fetched == {file.name for file in files.iterdir() if file.suffix in (".json", ".jinja")} - {".hidden.json"} | {
        "model.safetensors"
    }
    assert server.asked.count("GET /api/models/somebody/tiny") == 1
    server.asked.clear()
    load_model("somebody/tiny", torch.float32, CPU, storage="nf4")
    assert server.asked == []  # all of it is there


def test_an_adapter_by_its_hub_name(server: Hub, files: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn import FastLanguageModel

    assert FastLanguageModel.from_pretrained("somebody/tiny", load_in_4bit=False)[0].name_or_path == "somebody/tiny"
    shutil.rmtree(files)
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model), load_in_4bit=False)
    FastLanguageModel.get_peft_model(model, r=4).save_pretrained(str(files))
    (files / "training_args.bin").write_bytes(b"not to be fetched")
    shutil.rmtree(files.parent / "hub-cache")
    monkeypatch.setattr(hub, "_answered", {})
    server.asked.clear()
    model, _ = FastLanguageModel.from_pretrained("somebody/tiny", load_in_4bit=False)
    assert model.peft_config["default"].r == 4
    assert not any(".bin" in place for place in server.asked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert FastLanguageModel.from_pretrained("somebody/tiny", load_in_4bit=False)[0].peft_config
    assert not server.asked
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (files / "adapter_model.safetensors").rename(files / "adapter_model.bin")
    with pytest.raises(ModelError, match="safetensors is missing") as caught:
        FastLanguageModel.from_pretrained("somebody/tiny", load_in_4bit=False)
    assert "pickle" in caught.value.why
    server.status = 503
    with pytest.raises(EnvironmentFault, match="503"):
        FastLanguageModel.from_pretrained("somebody/other", load_in_4bit=False)


def test_nothing_is_sent_but_requests_for_files(server: Hub) -> None:
    load_tokenizer("somebody/tiny")
    load_model("somebody/tiny", torch.float32, CPU)
    assert all(path.split(" ")[1].startswith(("/api/models/somebody/tiny", "/somebody/tiny/resolve/")) for path in server.asked)
    for agent in server.agents:
        assert agent.startswith("pronghorn/")
        assert {part.partition("/")[0] for part in agent.split("; ")} == {"pronghorn", "hf_hub", "python"}


def test_shards_are_those_of_the_index(server: Hub, files: Path) -> None:
    from samples import make_model

    (files / "model.safetensors").unlink()
    make_model().save_pretrained(files, max_shard_size="40KB")
    (files / "other.safetensors").write_bytes(b"the same weights once more")
    assert len(list(files.glob("model-*.safetensors"))) > 1
    load_model("somebody/tiny", torch.float32, CPU)
    assert not any("other.safetensors" in path for path in server.asked)


def test_pickled_weights_on_the_hub_are_not_fetched(server: Hub, files: Path) -> None:
    (files / "model.safetensors").rename(files / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        load_model("somebody/tiny", torch.float32, CPU)
    assert not any(".bin" in path for path in server.asked)


def test_an_adapter_is_no_model(server: Hub, files: Path) -> None:
    (files / "config.json").rename(files / "adapter_config.json")
    with pytest.raises(ModelError, match="an adapter, not a model"):
        load_tokenizer("somebody/tiny")


CASES = [
    (401, {}, 2, ["no such model, or it is private (401)", "HF_TOKEN"]),
    (403, {"X-Error-Code": "GatedRepo"}, 2, ["licence", "HF_TOKEN", "/somebody/tiny"]),
    (403, {}, 2, ["licence", "HF_TOKEN", "/somebody/tiny"]),
    (404, {"X-Error-Code": "RepoNotFound"}, 2, ["no such model", "spelling"]),
    (429, {}, 3, ["answers with status 429", "later"]),
    (503, {}, 3, ["answers with status 503", "again later"]),
]


@pytest.mark.parametrize(("status", "headers", "code", "said"), CASES)
def test_one_message_says_what_to_do(
    server: Hub,
    status: int,
    headers: dict[str, str],
    code: int,
    said: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    server.status, server.headers = status, headers
    rows = write_rows(tmp_path / "train.jsonl", chat_rows(3))
    (tmp_path / "recipe.yaml").write_text(f"model: somebody/tiny\ndata: {{train: [{rows}]}}\noutput: {tmp_path / 'run'}\n")
    assert main(["check", str(tmp_path / "recipe.yaml"), "--json"]) == code
    out, err = capfd.readouterr()
    told = json.loads(out)
    text = " ".join(str(part) for part in told.values())
    assert all(part in text for part in said), text
    assert "etry" not in err  # no line for a try
    assert len(server.asked) == (3 if code == 3 else 1)


@pytest.mark.parametrize(
    ("status", "headers", "kind", "said"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, DataError, ["licence", "HF_TOKEN", "/datasets/somebody/rows"]),
        (404, {"X-Error-Code": "RepoNotFound"}, DataError, ["no such data set", "if it is a file"]),
        (503, {}, EnvironmentFault, ["answers with status 503", "HF_HUB_OFFLINE=1"]),
    ],
)
def test_data_sets_likewise(
    server: Hub, status: int, headers: dict[str, str], kind: type[Exception], said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    server.status, server.headers = status, headers
    with pytest.raises(kind) as caught:
        fingerprint(resolve("somebody/rows")[0])
    assert all(part in str(caught.value) for part in said), caught.value
    assert "etry" not in capfd.readouterr().err
    assert set(server.asked) == {"GET /api/datasets/somebody/rows"}


def test_what_is_in_the_cache_is_used_while_the_hub_has_a_fault(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model("somebody/tiny", torch.float32, CPU)
    monkeypatch.setattr(hub, "_answered", {})
    server.status = 503
    load_model("somebody/tiny", torch.float32, CPU)
    server.status = 404
    with pytest.raises(ModelError, match="no such model"):  # that is no fault
        load_model("somebody/tiny", torch.float32, CPU)


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """It accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        use(address, tmp_path, monkeypatch)
        yield address


def test_a_hub_that_never_answers_is_given_up(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 0.2)
    with pytest.raises(EnvironmentFault, match="the Hub does not answer") as caught:
        model_folder("somebody/tiny")
    assert silent in caught.value.why
    assert hub.TRIES * 10 < 60


def test_a_download_that_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SILENCE", 0.1)
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda thread, seconds=None: join(thread, 0.02))
    over, sizes = threading.Event(), iter((1, 2))
    monkeypatch.setattr(hub, "_bytes_below", lambda folder: next(sizes, 2))  # what arrives keeps it alive
    with pytest.raises(EnvironmentFault, match="the download stalled"):
        hub._watched(lambda: over.wait(60), tmp_path, "somebody/tiny")
    over.set()
    assert next(sizes, None) is None
    assert hub._watched(lambda: 7, tmp_path, "somebody/tiny") == 7
    with pytest.raises(KeyError):
        hub._watched(lambda: {}[1], tmp_path, "somebody/tiny")


def test_who_is_offline_by_choice_and_who_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="not in the Hub cache"):
        model_folder("somebody/no-such-model")
    monkeypatch.setenv(hub.SILENT, "Connection refused")
    with pytest.raises(EnvironmentFault, match="the Hub cannot be reached") as caught:
        model_folder("somebody/no-such-model")
    assert caught.value.why == "Connection refused"
