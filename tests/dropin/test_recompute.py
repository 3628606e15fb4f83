"""Who decides about recomputing: the user, else the memory there is, never a trainer's default."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import api_parts
from pronghorn import FastLanguageModel
from pronghorn.compat.dropin import recompute
from pronghorn.compat.dropin.recompute import KeptByMemory, job_of
from pronghorn.compat.outer_loop import loop_of
from pronghorn.generation.cache import free_bytes
from pronghorn.memory.dry_run import kept_bytes
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of
from samples import make_model, make_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    """On the CPU even where there is a GPU: how much memory is free is made up here."""
    return api_parts.load(folder, device_map="cpu", **options)


def engine_in(model: Any) -> FastCausalLM:
    engine = engine_of(model)
    assert engine is not None
    return engine


def levels(model: Any) -> set[str]:
    return {layer.effective_level for layer in engine_in(model).layers}


@pytest.mark.parametrize(
    ("loading", "adapting", "level"),
    [
        (True, "unsloth", "layer"),
        (False, "unsloth", "nothing"),
        (False, True, "layer"),
        (True, False, "nothing"),
        ("unsloth", False, "nothing"),
        ("unsloth", True, "layer"),
        ("unsloth", "unsloth", "layer"),  # without a GPU: as asked
    ],
)
def test_what_was_asked_for_stands(
    folder: Path, loading: Any, adapting: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("pronghorn.compat.dropin.recompute.say_once", said.append)
    model, _ = load(folder, use_gradient_checkpointing=loading)
    model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=adapting)
    assert levels(model) == {level}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # as a trainer does
    model.enable_input_require_grads()
    assert levels(model) == {level}
    assert base_of(model).device.type == "cuda" or not any("GPU memory decides" in text for text in said)
    assert not base_of(model).get_input_embeddings()._forward_hooks
    FastLanguageModel.for_training(FastLanguageModel.for_inference(model))
    assert levels(model) == {level}
    FastLanguageModel.for_training(model, use_gradient_checkpointing=level != "layer")
    assert levels(model) == {"nothing" if level == "layer" else "layer"}


def test_a_trainer_may_ask_where_nobody_else_did() -> None:
    from pronghorn.model.causal_lm import install

    model = make_model()
    assert install(model) == ""
    model.gradient_checkpointing_enable()
    assert levels(model) == {"layer"}


# The memory's word, on a model that believes to be on a GPU


def planned(folder: Path, free: int, **options: Any) -> tuple[Any, KeptByMemory]:
    model, _ = load(folder, **options)
    model = FastLanguageModel.get_peft_model(model, r=4)
    engine = engine_in(model)
    chooser = loop_of(model).chooser = KeptByMemory(engine, free=lambda: free)
    for layer in engine.layers:
        layer.recompute, layer.planned = None, True
    return model, chooser


def forward(model: Any, tokens: int) -> float:
    ids = torch.randint(3, 259, (1, tokens), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def test_what_fits_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(recompute, "ASIDE", 0)
    model, _ = planned(folder, 10**9)
    forward(model, 40)
    assert levels(model) == {"nothing"}
    assert "nothing is recomputed" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [True, False, "unsloth"])
def test_the_planned_peak_is_told_with_its_parts(folder: Path, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(recompute, "say_once", said.append)
    monkeypatch.setattr(recompute, "ASIDE", 0)
    model, _ = planned(folder, 10**9)
    loop, engine = loop_of(model), engine_in(model)
    chooser = loop.chooser = KeptByMemory(engine, asked, free=lambda: 10**9)
    assert chooser.planned_bytes == 0
    forward(model, 40)
    small = chooser.planned_bytes
    assert small > 96 << 20  # what libraries take
    assert f"memory: planned peak {small / 1e9:.1f} GB of 1.0 GB (weights 0.0, adapters" in said[0]
    assert "answers" not in said[0]
    assert asked is True or said[0].endswith(("recomputed in backward", "True: 0.1 GB)"))
    assert levels(model) == {"layer" if asked is True else "nothing"}
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=70, do_sample=False)
    forward(model, 40)
    assert chooser.planned_bytes == small + loop.generator.nbytes > small
    assert "keys, values and logits of answers 0.0" in said[1]


def test_the_process_share_of_a_gpu_is_what_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {
        "mem_get_info": (70, 100), "memory_reserved": 25, "memory_allocated": 20, "get_per_process_memory_fraction": 0.5
    }  # fmt: skip
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, number=number: number)
    assert free_bytes(torch.device("cuda")) == 30
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    assert free_bytes(torch.device("cuda")) == 75


def test_with_less_some_layers_are_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "ASIDE", 0)
    model, _ = planned(folder, 0)
    job = job_of(engine_in(model), 4096)
    more = kept_bytes(job, "nothing") - kept_bytes(job, "layer")
    found = []
    for free in range(0, 400 * more, 2 * more):
        chooser = KeptByMemory(engine_in(model), free=lambda free=free: free)  # type: ignore[misc]
        chooser.before(4000)
        found.append([layer.level for layer in engine_in(model).layers])
    assert found[0] == ["layer"] * len(found[0])
    assert found[-1] == ["nothing"] * len(found[0])
    between = [each for each in found if each not in (found[0], found[-1])]
    assert between  # and there is something in between, which only ever keeps more
    amounts = [sum(kept_bytes(job, level) for level in each) for each in found]  # type: ignore[arg-type]
    assert amounts == sorted(amounts)


def test_a_larger_batch_is_planned_for_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "ASIDE", 0)
    asked: list[int] = []
    model, _ = planned(folder, 0)
    chooser = KeptByMemory(engine_in(model), free=lambda: asked.append(1) or 10**9)  # type: ignore[func-returns-value]
    for tokens in (100, 90, 128, 129, 250, 3000, 3000):
        chooser.before(tokens)
    assert len(asked) == 3  # 128, 256, 3072


def test_a_forward_that_runs_out_of_memory_is_repeated_with_less_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "ASIDE", 0)
    model, _ = planned(folder, 10**12)
    expected = forward(model, 300)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    engine, tried = engine_in(model), []
    hidden = FastCausalLM.hidden

    def fails(self: FastCausalLM, *args: Any) -> torch.Tensor:
        tried.append([layer.level for layer in engine.layers])
        if len(tried) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden(self, *args)

    monkeypatch.setattr(FastCausalLM, "hidden", fails)
    assert forward(model, 300) == expected
    assert tried[0] == ["nothing"] * len(tried[0])
    assert tried[2] != tried[0]
    assert all(
        torch.equal(p.grad, before)
        for p, before in zip([p for p in model.parameters() if p.grad is not None], gradients, strict=True)
    )
    monkeypatch.setattr(FastCausalLM, "hidden", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(torch.OutOfMemoryError):
        forward(model, 300)
    assert levels(model) == {"layer"}


def test_a_copy_of_the_model_plans_for_itself(folder: Path) -> None:
    model, chooser = planned(folder, 10**12)
    twin = copy.deepcopy(model)
    theirs = loop_of(twin).chooser
    assert isinstance(theirs, KeptByMemory)
    assert theirs is not chooser
    assert theirs.engine is engine_in(twin)
