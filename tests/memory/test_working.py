"""What a layer's forward and backward hold at most, against every allocation they make, at the size of Llama 3.1 8B."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from allocations import Allocations, stand_in_for_kernels
from transformers import AutoModelForCausalLM, LlamaConfig

from pronghorn.bench.workloads import MODELS
from pronghorn.kernels.attention.attention_flash import backward_chunks
from pronghorn.kernels.lora.gated_lora import THIN_CONFIGS
from pronghorn.kernels.lora.gated_lora_thin import ThinSums
from pronghorn.memory.sizes import FROM_ITS_INPUT, Job, Recompute, kept_bytes, shape_of
from pronghorn.memory.working import _sums_of_attention, _thin_sums, forward_bytes, pieces_worth_trying, working_bytes
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers import attention
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.saved import leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora
from tables import gpu_rows, table

TOKENS = 16384
SMALL_CHANGE = 30e6  # partial sums of the adapters' gradients, which the stand-ins do not make, and what is T x R
CASES: list[tuple[Recompute, int]] = [("nothing", 1), ("gate_up", 1), ("gate_up", 2), ("gate_up", 4),
                                      *((what, pieces) for what in FROM_ITS_INPUT for pieces in (1, 2, 4, 8))]


def eight_b() -> Any:
    """Two layers of it; fp32, because products of bf16 on other devices than a GPU make copies."""
    settings = {key: value for key, value in MODELS["llama-8b"].items() if key != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**(settings | {"num_hidden_layers": 2, "vocab_size": 512})))
        model = add_adapter(model.float(), Lora(r=16), seed=0)
    assert not install(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return model


@pytest.fixture(scope="module")
def built() -> DecoderLayer:
    engine = engine_of(eight_b())
    assert engine is not None
    LoraGradBuffer(engine, torch.float32)
    return engine.layers[0]


@pytest.fixture
def layer(built: DecoderLayer, monkeypatch: pytest.MonkeyPatch) -> DecoderLayer:
    stand_in_for_kernels(monkeypatch)
    return built


def documents() -> Documents:
    with torch.device("meta"):
        tables = {"every layer": (torch.empty(TOKENS, 64), torch.empty(TOKENS, 64))}
        return Documents(torch.empty(80, dtype=torch.int32), 1408, tables, torch.empty(2, TOKENS, dtype=torch.int32), 324)


@table(("recompute", "pieces"), CASES)
def test_a_layer_holds_what_the_formulas_say(layer: DecoderLayer, recompute: Recompute, pieces: int) -> None:
    job = Job(shape_of(MODELS["llama-8b"]), TOKENS, element=4)
    layer.level, layer.mlp_chunks = recompute, pieces
    shared, h = documents(), torch.empty(TOKENS, 4096, device="meta")
    with torch.no_grad(), Allocations() as counted:
        counted.know(h, *layer.parameters())
        out, kept = layer.forward_at(recompute, h, shared)
        forward = counted.peak + h.nbytes
        left = leave(kept, 0, None)
        del kept, out
        assert counted.alive + h.nbytes == kept_bytes(job, recompute)
        assert forward == pytest.approx(kept_bytes(job, recompute) + forward_bytes(job, recompute, pieces), abs=SMALL_CHANGE)

        shared.grad_buffer.buffer = torch.empty(TOKENS, 4096 + layer.down.extra, device="meta")
        dh = shared.grad_buffer.buffer[:, :4096]
        counted.peak = counted.alive
        found = layer.restored(left, shared, None)
        del left
        layer.backward(dh, found, shared)
    held = counted.peak + h.nbytes
    expected = kept_bytes(job, recompute) + working_bytes(job, recompute, pieces)
    assert held == pytest.approx(expected, abs=SMALL_CHANGE)


@table(("recompute", "pieces"), [
    ("nothing", 1), ("gate_up", 1), ("gate_up", 4), *((what, pieces) for what in FROM_ITS_INPUT for pieces in (1, 32)),
])
@table("tokens", [131072, 524288])
def test_one_long_document_holds_what_the_formulas_say(layer: DecoderLayer, recompute: Recompute, pieces: int, tokens: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Through flash-attn-4, which adds up in fp32 and then writes the gradient of q, k, v in their place."""
    job = Job(shape_of(MODELS["llama-8b"]), tokens, element=4, documents=32, attended=tokens, in_place=True)

    def attention_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *_: Any, grads: Any, **__: Any) -> Any:
        assert all(mine.data_ptr() == theirs.data_ptr() and mine.stride() == theirs.stride()
                   for mine, theirs in zip(grads, (q, k, v), strict=True))
        turns = backward_chunks(tokens, 32, 8, 128)
        assert turns == {131072: 2, 524288: 8}[tokens]
        sums = [q.new_empty(tokens + 128 * 32, x.shape[1] // turns, x.shape[2]) for x in (q, k, v)]
        del sums
        return (*grads, None)

    monkeypatch.setattr(attention, "attention_backward", attention_backward)
    monkeypatch.setattr(attention, "pick_backend", lambda *_, **__: "flash4")
    layer.level, layer.mlp_chunks = recompute, pieces
    with torch.device("meta"):
        tables = {"every layer": (torch.empty(tokens, 64), torch.empty(tokens, 64))}
        spans = torch.empty(2, tokens, dtype=torch.int32)
        shared = Documents(torch.empty(32, dtype=torch.int32), tokens, tables, spans, tokens)
        h, shared.grad_buffer.buffer = torch.empty(tokens, 4096), torch.empty(tokens, 4096 + layer.down.extra)
    with torch.no_grad(), Allocations() as counted:
        counted.know(h, *layer.parameters())
        kept = layer.forward_at(recompute, h, shared)[1]
        left = leave(kept, 0, None)
        del kept
        assert counted.alive + h.nbytes == kept_bytes(job, recompute)
        counted.peak = counted.alive
        found = layer.restored(left, shared, None)
        del left
        layer.backward(shared.grad_buffer.buffer[:, :4096], found, shared)
    expected = kept_bytes(job, recompute) + working_bytes(job, recompute, pieces)
    assert counted.peak + h.nbytes == pytest.approx(expected, rel=0.003)


@table(
    ("changed", "own"),
    [({}, True), ({"attended": 512}, True), ({"attended": 513}, False), ({"attended": 4096, "own_attention": True}, True),
     ({"own_attention": False}, False), ({"width": 256}, False)])  # fmt: skip
def test_sums_are_those_of_whose_attention_it_is(changed: dict[str, Any], own: bool) -> None:
    """Two numbers a row in our kernel; q, k and v in fp32 and 128 rows more a document in the others, to which go long
    documents and heads of 256 (Gemma), whatever the documents."""
    shape = shape_of(MODELS["llama-8b"])
    width = changed.get("width", shape.head_width)
    given = {name: value for name, value in changed.items() if name != "width"}
    job = Job(replace(shape, head_width=width), 16384, documents=128, **given)
    assert _sums_of_attention(job) == (16384 * 32 * 2 * 4 if own else (16384 + 128 * 128) * (32 + 16) * width * 4)


def test_partial_sums_of_the_gated_kernel_are_counted_where_there_are_any() -> None:
    job = Job(shape_of(MODELS["llama-1b"]), 16384)
    thin = ThinSums.empty(8192 // THIN_CONFIGS[0].columns, 16384, torch.device("meta"))
    assert _thin_sums(job) == sum(tensor.nbytes for tensor in thin) == 136_314_880
    assert working_bytes(job, "nothing") - working_bytes(replace(job, rank=17), "nothing") > 130e6
    for other in (replace(job, rank=17), replace(job, element=4), replace(job, graphed=False)):
        assert _thin_sums(other) == 0


def test_pieces_are_not_too_small() -> None:
    shape = shape_of(MODELS["llama-8b"])
    assert pieces_worth_trying(Job(shape, 16384)) == (1, 2, 4, 8)
    assert pieces_worth_trying(Job(shape, 3000)) == (1,)
    assert pieces_worth_trying(Job(shape, 2**20)) == (1, 2, 4, 8, 16, 32)
    assert pieces_worth_trying(Job(shape, 16384, method="fp8")) == (1, 2, 4, 8)
    assert pieces_worth_trying(Job(shape, 16384, method="full", compute="fp8")) == (1,)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("recompute", "pieces"), gpu_rows(CASES))
def test_the_allocator_of_a_gpu_agrees(recompute: Recompute, pieces: int) -> None:
    """A layer of Llama 3.2 1B in bf16, its own kernels, 16,384 tokens of short documents."""
    gc.collect()  # models of earlier tests, which would be counted as freed in the middle of this one
    settings = {key: value for key, value in MODELS["llama-1b"].items() if key != "model_type"}
    config = LlamaConfig(**(settings | {"num_hidden_layers": 2, "vocab_size": 512}))
    model = add_adapter(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), Lora(r=16), seed=0).to("cuda")
    assert not install(model)
    engine = engine_of(model)
    assert engine is not None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    sums = LoraGradBuffer(engine, torch.bfloat16)
    bounds = torch.arange(0, TOKENS + 1, 256, dtype=torch.int32, device="cuda")
    shared = engine.documents(bounds, 256, torch.arange(TOKENS, device="cuda") % 256, 256)
    layer, job = engine.layers[0], Job(shape_of(MODELS["llama-1b"]), TOKENS)
    layer.level, layer.mlp_chunks = recompute, pieces
    h = torch.randn(TOKENS, 2048, device="cuda", dtype=torch.bfloat16)
    found: dict[str, int] = {}

    def mark(name: str, before: int) -> None:
        found[name] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()

    with torch.no_grad():
        for _ in range(2):  # kernels are compiled, and libraries take their workspaces, in the first round
            shared.grad_buffer.buffer = torch.empty(
                TOKENS, 2048 + layer.down.extra, device="cuda", dtype=torch.bfloat16).normal_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - h.nbytes
            kept = layer.forward_at(recompute, h, shared)[1]
            mark("forward", before)
            left = leave(kept, 0, None)
            del kept
            assert torch.cuda.memory_allocated() - before == pytest.approx(kept_bytes(job, recompute), rel=0.01)
            again = layer.restored(left, shared, None)
            del left
            layer.backward(shared.grad_buffer.buffer[:, :2048], again, shared)
            mark("backward", before - shared.grad_buffer.buffer.nbytes)
            del again
    sums.release()
    kept_size = kept_bytes(job, recompute)
    assert found["forward"] == pytest.approx(kept_size + forward_bytes(job, recompute, pieces), rel=0.02, abs=SMALL_CHANGE)
    assert found["backward"] == pytest.approx(kept_size + working_bytes(job, recompute, pieces), rel=0.02, abs=SMALL_CHANGE)
