"""What goes to a server and what comes back, where something goes wrong; runs are in tests/train/test_served.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pronghorn.errors import EnvironmentFault
from pronghorn.generation.generator import Request
from pronghorn.generation.sampling import Sampling
from pronghorn.generation.server import Server
from stub_server import Stub

ASKED = [Request([5, 6, 7], [11, -12], 4, Sampling(), [2]), Request([8], [13], 3, Sampling(), [2])]
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def adapter(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(one_layer_model)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(folder))
    return folder


@pytest.fixture
def stub(one_layer_model: Path) -> Iterator[Stub]:
    with Stub(one_layer_model).running() as running:
        yield running


@pytest.fixture
def server(stub: Stub, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(Server, "pause", 0.01)
    found = Server(stub.url + "/", seconds=20.0, slots=2)
    assert found.look() == []
    found.load("run-v1", adapter)
    return found


def test_what_fails_on_the_way_is_repeated_as_it_was(server: Server, stub: Stub, adapter: Path) -> None:
    told: list[tuple[str, int, int]] = []
    whole = server.generate(ASKED, lambda *one: told.append(one))
    assert [len(answers) for answers in whole] == [2, 1]
    assert told[-1] == ("answering", 3, 3)
    for faults in ([503, 429], ["drop"], ["cut", 500]):
        before, stub.faults[COMPLETIONS] = len(stub.seen), list(faults)
        assert server.generate(ASKED) == whole
        sent = [str(sorted(body.items())) for _, body in stub.seen[before:]]
        assert (len(sent), len(set(sent))) == (3 + len(faults), 3), faults
    stub.faults["/v1/load_lora_adapter"] = ["drop"]  # it arrived: the second is refused
    stub.faults["/v1/unload_lora_adapter"] = ["drop"]
    server.load("run-v2", adapter)
    server.unload("run-v1")
    assert list(stub.adapters) == ["run-v2"]


def test_what_the_server_refuses_is_told(server: Server, stub: Stub, adapter: Path) -> None:
    def refused(path: str, fault: Any, what: str, call: Callable[[], Any]) -> EnvironmentFault:
        stub.faults[path] = [fault] * 3
        with pytest.raises(EnvironmentFault, match=what) as found:
            call()
        stub.faults.clear()
        assert found.value.where == stub.url
        assert found.value.fix
        return found.value

    ask = partial(server.generate, ASKED[1:])
    told = refused("/v1/load_lora_adapter", 404, "refuses a request", lambda: server.load("run-v3", adapter))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in told.fix
    assert "status 400" in refused(COMPLETIONS, 400, "refuses a request", ask).why
    assert "status 503" in refused(COMPLETIONS, 503, "did not answer in 3 tries", ask).why
    assert "status 302" in refused(COMPLETIONS, 302, "refuses a request", ask).why
    assert "/elsewhere" not in stub.counts, "a redirect is not followed"
    server.seconds = 0.2
    assert "timed out" in refused(COMPLETIONS, "slow", "did not answer in 3 tries", ask).why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda choice: choice.update(token_ids=None), "0 token ids with"),
        (lambda choice: choice.pop("token_ids"), "'token_ids' is missing"),
        (lambda choice: choice["token_ids"].append(3), "token ids with"),
        (
            lambda choice: choice["logprobs"].update(token_logprobs=[None] * len(choice["token_ids"])),
            "a log-probability is None",
        ),
        (lambda choice: choice.update(logprobs=None), "not subscriptable"),
        (lambda choice: choice.update(prompt_token_ids=[1, 2]), "it read a prompt of 2 tokens"),
        (lambda choice: choice.update(finish_reason="abort"), r"an answer ended after \d tokens \(abort\)"),
        (lambda choice: choice.update(token_ids=[9], logprobs={"token_logprobs": [-1.0]}), "an answer ended after 1 tokens"),
    ],
)
def test_a_reply_of_another_form_is_refused(change: Callable[[Any], Any], why: str, server: Server, stub: Stub) -> None:
    stub.faults[COMPLETIONS] = [lambda reply: change(reply["choices"][0])] * 3
    with pytest.raises(EnvironmentFault, match="not what was asked for") as found:
        server.generate(ASKED[1:])
    assert re.search(why, found.value.why), found.value.why


def test_only_the_address_of_the_recipe_is_contacted(
    stub: Stub, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Server(stub.url, seconds=20.0, slots=1).look() == []
    stub.owner = "llamacpp"
    with pytest.raises(EnvironmentFault, match="neither a vLLM nor an SGLang server") as found:
        Server(stub.url, seconds=20.0, slots=1).look()
    assert found.value.why == "it says that it is 'llamacpp'"
