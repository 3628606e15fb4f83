"""The endpoint, asked by plain HTTP and by the `openai` package: what it says is what the trained model says."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_parts import Place
from pronghorn.cli import main
from pronghorn.errors import CommandError
from pronghorn.serve.asked import RequestError, read
from pronghorn.serve.handler import Handler
from pronghorn.serve.models import Models, load
from pronghorn.serve.server import Server
from pronghorn.train.run.trained_run import Chat
from tables import table

QUESTION = {"messages": [{"role": "user", "content": "add 1 and 2"}], "max_tokens": 32, "temperature": 1, "seed": 5}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def models(place: Place) -> Models:
    return load([place.run, place.runs / "slow"], "last")


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Server]:
    server = Server(models, "127.0.0.1", 0, Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.end()


@pytest.fixture(scope="module")
def spoken(place: Place) -> dict[str, str]:
    """What `pronghorn chat` answers, with each run loaded alone; and the base model. The tiny models' likeliest tokens are not
    text, so all of them sample, with one seed."""
    found = {}
    for name in ("run", "slow"):
        talk = Chat(place.runs / name, "last", max_tokens=32, temperature=1.0)
        talk.seed = 5
        found[name] = talk.answer("add 1 and 2")
    talk.forget()
    talk.seed = 5
    with talk.model.disable_adapter():
        found[Path(place.model).name] = talk.answer("add 1 and 2")
    return found


def ask(server: Server, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any]:
    """Status and JSON; of a stream the list of its events."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
    content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.headers["Content-Type"].startswith("text/event-stream"):
        lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
        assert lines.pop() == b"[DONE]"
        return response.status, [json.loads(line) for line in lines]
    return response.status, json.loads(data)


def test_each_model_says_what_it_says_alone(server: Server, spoken: dict[str, str]) -> None:
    status, listed = ask(server, "/v1/models")
    assert status == 200
    assert [one["id"] for one in listed["data"]] == list(spoken)
    assert len(set(spoken.values())) > 1  # else the test could not tell one from the other
    for name in (*spoken, "run"):  # and back again
        status, answer = ask(server, CHAT, {**QUESTION, "model": name})
        assert status == 200
        assert answer["choices"][0]["message"]["content"].strip() == spoken[name]
        assert answer["object"] == "chat.completion"
        assert ask(server, f"/v1/models/{name}")[1]["id"] == name
    assert answer["usage"]["completion_tokens"] <= 32
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_stream_is_the_answer_in_pieces(server: Server) -> None:
    asked = {**QUESTION, "model": "run", "temperature": 1.1, "top_p": 0.95}
    answers = [ask(server, CHAT, asked)[1] for _ in range(2)]
    text = answers[0]["choices"][0]["message"]["content"]
    assert text == answers[1]["choices"][0]["message"]["content"]  # the seed makes it repeatable
    assert any(ask(server, CHAT, {**asked, "seed": seed})[1]["choices"][0]["message"]["content"] != text for seed in (6, 7, 8))
    _, events = ask(server, CHAT, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    first, *pieces, last, used = events
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == text
    assert len(pieces) > 1
    assert last["choices"][0]["finish_reason"] == answers[0]["choices"][0]["finish_reason"]
    assert (used["choices"], used["usage"]) == ([], answers[0]["usage"])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_a_stop_string_ends_the_answer_before_it(server: Server) -> None:
    asked = {"model": "run", "prompt": "add", "max_tokens": 32, "temperature": 1, "seed": 3}
    text = ask(server, TEXT, asked)[1]["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    for extra in ({}, {"stream": True}):
        _, found = ask(server, TEXT, {**asked, "stop": [stop, "never said"], **extra})
        choices = [event["choices"][0] for event in (found if extra else [found])]
        assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"


def test_log_probabilities_are_the_models(server: Server, models: Models) -> None:
    """Against one forward of prompt and answer, in float64."""
    asked = {"model": "slow", "prompt": "add 1", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    found = ask(server, TEXT, asked)[1]["choices"][0]
    one = models.get("slow")
    assert one is not None
    prompt = one.tokenizer("add 1")["input_ids"]
    ids = prompt + one.tokenizer.convert_tokens_to_ids(found["logprobs"]["tokens"])
    with models.using(one) as model, torch.no_grad():
        truth = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for at, (token, measured, top) in enumerate(
        zip(ids[len(prompt) :], found["logprobs"]["token_logprobs"], found["logprobs"]["top_logprobs"], strict=True)
    ):
        row = truth[len(prompt) - 1 + at]
        assert measured == pytest.approx(row[token].item(), abs=1e-4)
        assert max(top.values()) == pytest.approx(row.max().item(), abs=1e-4)
    chat = {**QUESTION, "model": "slow", "logprobs": True, "top_logprobs": 3}
    content = ask(server, CHAT, chat)[1]["choices"][0]["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 3 and token["logprob"] <= 0 for token in content)
    streamed = [c["choices"][0]["logprobs"] for c in ask(server, CHAT, {**chat, "stream": True})[1]]
    assert [token for one in streamed if one for token in one["content"]] == content


@table(("path", "body", "status", "said"), [
    (CHAT, b"{", 400, "not JSON"), (CHAT, [1], 400, "not a JSON object"),
    (CHAT, {**QUESTION}, 400, "`model` is missing"), (CHAT, {**QUESTION, "model": "gpt-4"}, 404, "is not served"),
    (CHAT, {"model": "run"}, 400, "`messages`"), (CHAT, {**QUESTION, "model": "run", "n": 99}, 400, "`n` is not"),
    (CHAT, {**QUESTION, "model": "run", "tools": [{}]}, 400, "`tools`"),
    (CHAT, {**QUESTION, "model": "run", "mirostat": 2}, 400, "unknown parameter `mirostat`"),
    (CHAT, {**QUESTION, "model": "run", "temperature": 3}, 400, "`temperature`"),
    (CHAT, {**QUESTION, "model": "run", "max_tokens": 0}, 400, "`max_tokens`"),
    (CHAT, {**QUESTION, "model": "run", "max_tokens": 10**6}, 400, "exceed the context"),
    (CHAT, {**QUESTION, "model": "run", "max_tokens": 10**6, "stream": True}, 400, "exceed the context"),
    (CHAT, {**QUESTION, "model": "run", "stop": [1]}, 400, "`stop`"),
    (CHAT, {"model": "run", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "is not text"),
    (TEXT, {"model": "run", "prompt": ["a", "b"]}, 400, "several requests"),
    (TEXT, {"model": "run", "prompt": [10**9]}, 400, "not in the vocabulary"),
    (TEXT, {"model": "run", "prompt": "\udcff"}, 400, "surrogate"),
    (TEXT, None, 405, "not allowed"), ("/v1/embeddings", {}, 404, "unknown path"), ("/", None, 404, "unknown path"),
])  # fmt: skip
def test_what_cannot_be_answered(server: Server, path: str, body: Any, status: int, said: str) -> None:
    found, answer = ask(server, path, body)
    assert found == status
    assert said in answer["error"]["message"]
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_only_this_machine_is_answered(server: Server) -> None:
    """A web page whose name leads to 127.0.0.1 is not; nor is a body without an end."""
    assert ask(server, "/v1/models", Host="attacker.example:8000")[0] == 403
    assert ask(server, "/v1/models", Host="localhost:8000")[0] == 200
    assert ask(server, CHAT, b"", **{"Content-Length": str(1 << 40)})[0] == 413
    assert ask(server, CHAT, b"", method="DELETE")[0] == 405


def test_models_of_one_base_take_turns(server: Server, spoken: dict[str, str]) -> None:
    """Many clients at once, for three models: each answer is its model's own, and none is lost."""
    found: dict[str, set[str]] = {name: set() for name in spoken}

    def one(name: str) -> None:
        found[name].add(ask(server, CHAT, {**QUESTION, "model": name})[1]["choices"][0]["message"]["content"].strip())

    threads = [threading.Thread(target=one, args=(name,)) for _ in range(4) for name in spoken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {name: {text} for name, text in spoken.items()}


def test_several_choices_and_rules(server: Server) -> None:
    asked = {**QUESTION, "model": "run", "temperature": 1.5, "n": 3, "max_tokens": 8}
    _, found = ask(server, CHAT, asked)
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert len(set(texts)) == 3
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert texts[0] == ask(server, CHAT, {**asked, "n": 1})[1]["choices"][0]["message"]["content"]
    _, events = ask(server, CHAT, {**asked, "stream": True})
    pieces = ["", "", ""]
    for event in events:
        (choice,) = event["choices"]
        pieces[choice["index"]] += choice["delta"].get("content", "")
    assert pieces == texts
    greedy = ask(server, CHAT, {**asked, "n": 1, "temperature": 0})[1]["choices"][0]["message"]["content"]
    for rule in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0}):
        assert ask(server, CHAT, {**asked, "n": 1, **rule})[1]["choices"][0]["message"]["content"] == greedy


def test_a_request_that_needs_more_room_gets_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronghorn.serve.engine.TOKENS", {"cpu": 64})
    monkeypatch.setattr(server.engine, "_answering", None)
    for tokens in (8, 100):
        status, found = ask(server, TEXT, {"model": "run", "prompt": "add " * 20, "max_tokens": tokens, "seed": 3})
        assert (status, server.engine._tokens >= 64 + tokens) == (200, True)
        assert found["usage"]["completion_tokens"] <= tokens


def test_the_openai_package_talks_to_it(server: Server, spoken: dict[str, str]) -> None:
    if find_spec("openai") is None:
        pytest.skip("openai is not installed; pip install openai tests it")
    import openai

    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == list(spoken)
    messages: Any = QUESTION["messages"]
    answer = client.chat.completions.create(model="run", messages=messages, max_tokens=32, temperature=1, seed=5)
    assert str(answer.choices[0].message.content).strip() == spoken["run"]
    stream = client.chat.completions.create(model="slow", messages=messages, max_tokens=32, temperature=1, seed=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream).strip() == spoken["slow"]
    text = client.completions.create(model="run", prompt="add", max_tokens=3, temperature=0, logprobs=1)
    assert len(text.choices[0].logprobs.tokens) <= 3  # type: ignore[union-attr, arg-type]
    with pytest.raises(openai.NotFoundError, match="is not served"):
        client.chat.completions.create(model="gpt-4", messages=messages)
    with pytest.raises(openai.BadRequestError, match="`n` is not"):
        client.chat.completions.create(model="run", messages=messages, n=99)


def test_the_command_serves_until_ctrl_c(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(place.run), "--port", str(port)]) == 3
        assert "another program is listening there" in capfd.readouterr().err
    statuses: list[int] = []

    def press() -> None:
        deadline = time.monotonic() + 100
        while not statuses and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            try:
                connection.request("GET", "/v1/models")
                statuses.append(connection.getresponse().status)
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
            finally:
                connection.close()
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        helper.start()
        assert main(["serve", str(place.run), "--port", str(port), "--json"]) == 0
        helper.join()
    finally:
        signal.signal(signal.SIGINT, before)
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"url": f"http://127.0.0.1:{port}/v1", "models": ["run", Path(place.model).name]}
    assert "stopped" in printed.err
    assert statuses == [200]


def test_runs_that_cannot_be_served_together(place: Place, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="the same run is named twice"):
        load([place.run, place.run], "last")
    assert main(["serve", str(place.run), "--port", "70000"]) == 2
    with pytest.raises(RequestError):
        read(b"null", chat=True)
