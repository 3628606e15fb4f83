"""What a layer in FP8 holds at most, against every allocation it makes, at the size of Llama 3.1 8B (as test_working.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocations import Allocations, stand_in_for_kernels
from test_working import CASES, SMALL_CHANGE, TOKENS, documents
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from pronghorn.bench.workloads import MODELS
from pronghorn.memory.sizes import Job, Recompute, kept_bytes, shape_of, unpacked_bytes
from pronghorn.memory.working import forward_bytes, working_bytes
from pronghorn.model import causal_lm
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers import fp8_linears, mlp, residual
from pronghorn.model.layers.fp8_linears import Fp8LinearGroup
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.saved import leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora
from tables import table


def stand_in_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each allocates on a GPU, beside what it is given to write to."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(len(x), dtype=torch.float32)

    def product(a: Any, scale: Any, b: Any, scale_O: Any, *, dtype: torch.dtype, out: Any = None, **_: Any) -> Any:
        return a.new_empty(len(a), len(b), dtype=dtype) if out is None else out

    def norm_forward(x: Any, weight: Any, eps: float, *, out8: Any, h_out: Any = None, **_: Any) -> Any:
        return SimpleNamespace(y_TD=x.new_empty(x.shape), h_TD=x if h_out is None else h_out, rstd_T=rows(x), scale_T=rows(x))

    def activation_forward(gu: Any, kind: Any, *, out8: Any, **_: Any) -> Any:
        return gu.new_empty(len(gu), gu.shape[1] // 2), out8, rows(gu)

    def activation_backward(da: Any, gu: Any, kind: Any, scale: Any, *, out: Any, out8: Any, activation_out: Any, **_: Any
                            ) -> Any:
        return out, out8, rows(gu), activation_out

    def norm_then_add(x: Any, weight: Any, eps: float, residual: Any, *, out: Any = None, **_: Any) -> Any:
        return x.new_empty(x.shape) if out is None else out, rows(x)

    # By the class: tests/kernels imports its modules afresh, so the one of that name may be another than the layers'.
    own = fp8_linears.Fp8Group.forward.__globals__
    for name, stand_in in {"fp8_mm": product, "fp8_extend": lambda *_: None,
                           "fp8_transpose": lambda q, out=None: out}.items():  # fmt: skip
        monkeypatch.setitem(own, name, stand_in)
    for module, names in {
        fp8_linears: {"fp8_cast_rows": lambda x, *_, out, **__: (out, rows(x)), "rms_norm_fp8_forward": norm_forward,
                      "gated_activation_fp8_forward": activation_forward,
                      "gated_activation_fp8_backward": activation_backward},
        residual: {"rms_norm_then_add_forward": norm_then_add}, mlp: {"rms_norm_then_add_forward": norm_then_add},
    }.items():
        for name, stand_in in names.items():
            monkeypatch.setattr(module, name, stand_in)


def without_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on `meta` is built without working out its values in FP8: they are no part of what is counted, and were two
    thirds of the time."""

    monkeypatch.setattr(fp8_linears, "require_fp8", lambda device: None)
    for splits in (causal_lm.SplitTable, fp8_linears.Fp8Group.__init__.__globals__["SplitTable"]):  # by the class, as above
        monkeypatch.setattr(splits, "run", lambda self: None)


def engine_of_size(config: Any) -> Any:
    """Two layers, weights in FP8; 32 bits beside them, because products of bf16 on other devices than a GPU make copies."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        without_contents(patch)
        model = AutoModelForCausalLM.from_config(config)
        store_linears_(model.float(), FORMATS["fp8"])
        model = add_adapter(model, Lora(r=16), seed=0)
        assert not install(model)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        engine = engine_of(model)
        assert engine is not None
        LoraGradBuffer(engine, torch.float32)
    assert engine.layers[0].fp8
    return engine


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_kernels(monkeypatch)
    stand_in_for_fp8(monkeypatch)


@pytest.fixture(scope="module")
def eight_b() -> Any:
    settings = {key: value for key, value in MODELS["llama-8b"].items() if key != "model_type"}
    return engine_of_size(LlamaConfig(**(settings | {"num_hidden_layers": 2, "vocab_size": 512})))


def weights_of(layer: DecoderLayer) -> list[torch.Tensor]:
    """What is there all the time."""
    found: list[Any] = []
    for projections in layer.groups:
        assert isinstance(projections, Fp8LinearGroup)
        group = projections.group
        found += [group.M, group.A_RD, group.sB_OR, group.scale_O, group.factors_2R, group.bounds_2, *(group.sums or ())]
    return [*found, layer.groups[0].workspace.transposed.take(torch.device("meta"))]


def most_held(layer: DecoderLayer, recompute: Recompute, pieces: int, job: Job, shared: Documents) -> tuple[int, int]:
    """Bytes in the layer's forward, and in its backward."""
    layer.level, layer.mlp_chunks, there, D = recompute, pieces, weights_of(layer), job.shape.width
    h = torch.empty(job.capacity, D, device="meta")
    with torch.no_grad(), Allocations() as counted:
        counted.know(h, *layer.parameters(), *there)
        out, kept = layer.forward_at(recompute, h, shared)
        forward = counted.peak + h.nbytes
        left = leave(kept, 0, None)
        del kept, out
        assert counted.alive + h.nbytes == kept_bytes(job, recompute)
        dh = torch.empty(job.capacity, D, device="meta")
        shared.grad_buffer.buffer = dh if pieces > 1 else None  # at once, the gradient that comes out has a place of its own
        counted.peak = counted.alive
        found = layer.restored(left, shared, None)
        del left
        layer.backward(dh, found, shared)
    return forward, counted.peak + h.nbytes


@table(("recompute", "pieces"), CASES)
@pytest.mark.usefixtures("stand_ins")
def test_a_layer_holds_what_the_formulas_say(eight_b: Any, recompute: Recompute, pieces: int) -> None:
    job = Job(shape_of(MODELS["llama-8b"]), TOKENS, element=4, method="fp8")
    forward, held = most_held(eight_b.layers[0], recompute, pieces, job, documents())
    kept = kept_bytes(job, recompute) - unpacked_bytes(job)
    expected = kept + working_bytes(job, recompute, pieces)
    assert held <= expected
    assert held == pytest.approx(expected, abs=0.02 * expected + SMALL_CHANGE)
    assert forward == pytest.approx(kept + forward_bytes(job, recompute, pieces), rel=0.01)


WIDE: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 512, "pad_token_id": 0}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(hidden_size=5120, intermediate_size=17408, num_attention_heads=40, num_key_value_heads=8, **WIDE),
    "gemma2": Gemma2Config(hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8, **WIDE),
}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("family", CONFIGS)
def test_norms_in_other_places_are_counted(family: str) -> None:
    """Of q and k, whose values before and after it are kept; behind a branch, whose output it needs again."""
    engine = engine_of_size(CONFIGS[family])
    tables = {kind: (torch.empty(TOKENS, 64, device="meta"),) * 2 for kind in engine.positions.kinds}
    job = Job(shape_of(CONFIGS[family]), TOKENS, element=4, method="fp8", own_attention=True)  # as the stand-ins say
    for pieces, recompute in itertools.product((2, 32), ("gate_up", "around_attention", "layer")):
        forward, held = most_held(engine.layers[0], recompute, pieces, job, replace(documents(), rotary=tables))
        kept = kept_bytes(job, recompute) - unpacked_bytes(job)
        assert forward == pytest.approx(kept + forward_bytes(job, recompute, pieces), rel=0.01), (recompute, pieces)
        assert held == pytest.approx(kept + working_bytes(job, recompute, pieces), rel=0.01), (recompute, pieces)
