"""Whatever kind of loop trains it, a model of `FastLanguageModel` gives the numbers of stock transformers and PEFT, to 1e-5."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropin.hf_trainer_uses import TRAINERS
from dropin.loop_change_uses import LOOPS
from dropin.model_uses import ADAPTERS, MODELS
from dropin.same_numbers import compare, fast_model, runs, stock_model, with_captured_layers, written
from pronghorn.kernels.runtime import dispatch

ADAPTED = ["llama", "qwen3", "gemma3", "gpt-oss", "llama"]  # five: each family meets each way to run layers
WHOLE = ["tied", "gemma3", "gpt-oss", "tied", "qwen3"]
ON_THE_OWN_LAYERS = {"masks of four dimensions and with holes"}
# Stock gpt-oss lets packed documents see each other (ours does not), and has no experts in float64.
NOT_OF_GPT_OSS = {"flattened without padding", "positions given", "in double precision"}
USES = {**LOOPS, **MODELS, **ADAPTERS}
SLOW = {"a compiled model"}  # seconds, and the same with an adapter


LAYERS = ("plain", "recomputing", "captured")  # how they run
# What a captured forward and its backward could get wrong runs captured; tests/compat/test_captured_layers.py has it on a GPU.
CAPTURED = {
    "accumulation over all tokens", "the loss times a factor", "two losses added", "two backwards of one forward",
    "two forwards and the first backward last", "one forward beside another that is kept", "autograd grad instead of backward",
    "gradients of the embeddings that come in", "a loss on the logits beside the models",
    "evaluation and generation between steps",
}  # fmt: skip


def turns(names: list[str], families: list[str], ways: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """One family each, and one way: all of them times all take minutes. Stock Gemma compiles twice as long as Llama."""
    found = []
    for number, name in enumerate(names):
        family = families[number % len(families)]
        family = families[0] if name in SLOW or (family == "gpt-oss" and name in NOT_OF_GPT_OSS) else family
        way = ways[number % len(ways)]
        if name in CAPTURED and "captured" in ways:
            family, way = "llama" if family == "gpt-oss" else family, "captured"  # experts are not captured
        found.append((name, family, way))
    return found


def every(names: list[str], families: list[str], ways: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [
        (name, family, way)
        for name in names
        for family in sorted(set(families))
        for way in ways
        if not (family == "gpt-oss" and name in NOT_OF_GPT_OSS)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make dropin-cases` takes all of them."""
    assert set(USES) >= CAPTURED
    full = metafunc.config.getoption("--every-case")
    names, families, ways = {
        "test_an_adapter_trains_as_with_stock_libraries": (sorted(USES if full else set(USES) - SLOW), ADAPTED, LAYERS),
        "test_a_whole_model_trains_as_with_stock_libraries": (
            sorted({*LOOPS, *MODELS} if full else {*sorted({*LOOPS, *MODELS})[::6], *SLOW}),
            WHOLE,
            LAYERS[:2],
        ),
        "test_trainer_trains_as_with_stock_libraries": (list(TRAINERS), ["llama", "qwen3", "gemma3"], LAYERS[:2]),
    }[metafunc.definition.name]
    metafunc.parametrize(("name", "family", "way"), (every if full else turns)(names, families, ways))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    monkeypatch.setattr("pronghorn.compat.captured_layers.EAGER_TIMES", 0)


def test_an_adapter_trains_as_with_stock_libraries(
    models: Path, name: str, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(models, family)
    plain = stock_model(folder)
    fast = fast_model(folder, plain, recompute=way == "recomputing")
    if way == "captured" and family != "gpt-oss":
        fast = with_captured_layers(fast)
    ran = runs(monkeypatch)
    compare(USES[name], plain, fast)
    assert bool(ran) == (name not in ON_THE_OWN_LAYERS)


def test_a_whole_model_trains_as_with_stock_libraries(
    models: Path, name: str, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(models, family)
    plain = stock_model(folder, adapter=False)
    ran = runs(monkeypatch)
    compare(USES[name], plain, fast_model(folder, plain, adapter=False, recompute=way == "recomputing"))
    assert bool(ran) == (name not in ON_THE_OWN_LAYERS)


def test_trainer_trains_as_with_stock_libraries(
    models: Path, tmp_path: Path, name: str, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, recompute = written(models, family), way == "recomputing"
    whole = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens", "lm_head"]} if recompute else {}
    plain = stock_model(folder, **whole)
    fast = fast_model(folder, plain, recompute=recompute, **whole)
    folders = {id(plain): tmp_path / "plain", id(fast): tmp_path / "fast"}
    ran = runs(monkeypatch)
    compare(lambda model: TRAINERS[name](model, folders[id(model)]), plain, with_captured_layers(fast))
    assert ran
