"""What is kept, computed again, done in pieces or waiting elsewhere changes no bit of loss and gradients, and sums over
micro-batches are autograd's: for layers of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_decoder_layer
import test_experts
import test_fp8_gemms
import test_fp8_moe_layer
import test_gated_delta_mixer
import test_linears
import test_mamba_mixer
import test_short_conv_mixer
import torch
from test_decoder_layer import fast_loss, gradients, packed_batch

from pronghorn.memory.offload import OffloadPool
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers import wide_gemms
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from tables import first_of

CPU = torch.device("cpu")
Result = tuple[float, dict[str, torch.Tensor]]  # loss, gradients
DENSE: dict[str, Callable[[], Any]] = {  # their MLP can be done in pieces
    "norms elsewhere, full": lambda: test_decoder_layer.model_of("olmo2", "full", torch.float32),
    "four norms": lambda: test_decoder_layer.model_of("gemma2", "lora", torch.float32),
    "fp8, every bias": lambda: test_fp8_gemms.model_of("llama, every bias"),
    "nf4 in fp8": lambda: test_fp8_gemms.model_of("llama", stored="nf4"),
    "no gate, full": lambda: test_decoder_layer.model_of("apertus", "full", torch.float32),
    "qk-norm after RoPE, full": lambda: test_decoder_layer.model_of("hunyuan_v1_dense", "full", torch.float32),
    "norms without weights, full": lambda: test_decoder_layer.model_of("nanochat", "full", torch.float32),
    "fp8, norms without weights": lambda: test_fp8_gemms.model_of("nanochat"),
    "fp8, no gate": lambda: test_fp8_gemms.model_of("apertus"),
    "no gate": lambda: test_decoder_layer.model_of("arcee", "lora", torch.float32),
    "norms of values, layer scales": lambda: test_decoder_layer.model_of("gemma4_unified_text", "lora", torch.float32),
    "gates of their own, full": lambda: test_decoder_layer.model_of("muse_glimmer", "full", torch.float32),
    "gates of their own": lambda: test_decoder_layer.model_of("muse_glimmer", "lora", torch.float32),
    "keys of earlier layers": lambda: test_decoder_layer.model_of("gemma4_text, as E2B", "lora", torch.float32),
    "keys of earlier layers, full": lambda: test_decoder_layer.model_of("gemma4_text, as E2B", "full", torch.float32),
    "qk-norm": lambda: test_decoder_layer.model_of("qwen3", "lora", torch.float32),
    "full": lambda: test_decoder_layer.model_of("llama", "full", torch.float32),
    "fp8, four norms": lambda: test_fp8_gemms.model_of("gemma2"),
    "fp8, norms elsewhere": lambda: test_fp8_gemms.model_of("olmo2"),
    "halves of layers, full": lambda: test_mamba_mixer.model_of("nemotron_h", "full"),
    "halves of layers": lambda: test_mamba_mixer.model_of("nemotron_h", "lora"),
    "fp8, multipliers": lambda: test_fp8_gemms.model_of("granite"),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "nf4": lambda: test_linears.model_of("qwen3", test_linears.LORAS["some"]),
    "attention beside the MLP, full": lambda: test_decoder_layer.model_of("cohere2", "full", torch.float32),
    "attention beside the MLP": lambda: test_decoder_layer.model_of("cohere2", "lora", torch.float32),
    "fp8, attention beside the MLP": lambda: test_fp8_gemms.model_of("cohere2"),
    "experts": lambda: test_experts.model_of("gpt_oss", "lora on experts", torch.float32),
    "experts, full": lambda: test_experts.model_of("qwen2_moe", "full", torch.float32),
    "states in fp8": lambda: test_fp8_gemms.model_of("qwen3_5_text"),
    "experts in fp8": lambda: test_fp8_moe_layer.model_of("gpt_oss", "experts"),
    "experts in fp8, shared expert": lambda: test_fp8_moe_layer.model_of("qwen2_moe", "attention"),
    "convolutions, full": lambda: test_short_conv_mixer.model_of("lfm2", "full"),
    "convolutions, experts": lambda: test_short_conv_mixer.model_of("lfm2_moe", "lora"),
    "latents": lambda: test_experts.model_of("glm4_moe_lite", "lora on experts", torch.float32),
    "latents, full": lambda: test_experts.model_of("deepseek_v3, narrow values", "full", torch.float32),
    "states, full": lambda: test_gated_delta_mixer.model_of("qwen3_5_text", "full"),
    "states, experts": lambda: test_gated_delta_mixer.model_of("qwen3_5_moe_text", "lora"),
    "states, columns in another order": lambda: test_gated_delta_mixer.model_of("qwen3_next", "lora"),
    "experts without a gate, full": lambda: test_mamba_mixer.model_of("nemotron_h, experts", "full"),
    "experts without a gate": lambda: test_mamba_mixer.model_of("nemotron_h, experts", "lora on experts"),
    "mamba beside attention, full": lambda: test_mamba_mixer.model_of("falcon_h1", "full"),
    "mamba beside attention": lambda: test_mamba_mixer.model_of("falcon_h1, a norm", "lora"),
    "mamba, experts": lambda: test_mamba_mixer.model_of("granitemoehybrid, experts", "lora"),
    "experts, norms after them, full": lambda: test_experts.model_of("afmoe", "full", torch.float32),
    "experts, norms after them": lambda: test_experts.model_of("afmoe", "lora on experts", torch.float32),
    "experts beside an MLP, full": lambda: test_experts.model_of("gemma4_text, experts", "full", torch.float32),
    "experts beside an MLP": lambda: test_experts.model_of("gemma4_text, experts", "lora on experts", torch.float32),
    "experts beside an MLP in fp8": lambda: test_fp8_moe_layer.model_of("gemma4_text", "experts"),
    "experts, shared expert": lambda: test_experts.model_of("qwen2_moe", "lora on experts", torch.float32),
    "experts, adapters on attention": lambda: test_experts.model_of("gpt_oss", "lora on attention", torch.float32),
}
KINDS = DENSE | OTHERS
# A kind is a row in every run, further families of it are for `--every-case`.
LATER = ("gates of their own, full", "experts, norms after them, full", "qk-norm", "qk-norm after RoPE, full", "full",
         "fp8, four norms", "fp8, norms elsewhere", "fp8, multipliers", "experts, shared expert",
         "experts, adapters on attention", "fp8, no gate", "no gate", "norms without weights, full",
         "fp8, norms without weights", "states, experts", "states, columns in another order")  # fmt: skip


def rows_of(kinds: dict[str, Any]) -> list[Any]:
    return first_of(sorted(kinds, key=lambda kind: kind in LATER), sum(kind not in LATER for kind in kinds))


def model_of(kind: str) -> tuple[Any, Any]:
    model = KINDS[kind]()
    assert engine_of(model) or install(model) == ""
    return model.train(), engine_of(model)


def set_layers(engine: Any, levels: list[str], pieces: int = 1, place: OffloadPool | None = None) -> None:
    for i, layer in enumerate(engine.layers):
        layer.level, layer.mlp_chunks, layer.offload = levels[i % len(levels)], pieces, place


def result_of(model: Any) -> Result:
    loss = fast_loss(model, packed_batch())
    return float(loss.detach()), gradients(model, loss)


@pytest.mark.parametrize("kind", rows_of(KINDS))
def test_every_level_gives_the_same_bits(kind: str) -> None:
    model, engine = model_of(kind)
    loss, expected = result_of(model)
    assert any(float(gradient.norm()) > 0 for gradient in expected.values())
    assert all(layer.fused for layer in engine.layers)
    pool = OffloadPool(len(engine.layers), 1 << 24, CPU)
    # Layers are nodes of their own: each level both here and elsewhere, and each in the last layer, which leaves out rows.
    for levels, place in (
        (["gate_up", "layer"], None),
        (["layer", "around_attention"], pool),
        (["around_attention", "gate_up"], pool),
        (["layer", "nothing"], pool),
    ):
        set_layers(engine, levels, place=place)
        again, found = result_of(model)
        assert again == loss
        assert found.keys() == expected.keys()
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items()), levels
        pool.finish()


def assert_near(found: Result, expected: Result, what: object) -> None:
    """To the rounding of fp32 sums in another order: 9e-7 of the largest of a gradient seen."""
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).abs().max()) <= 4e-6 * float(gradient.abs().max()) + 1e-12, (name, what)


@pytest.mark.parametrize("kind", rows_of(DENSE))
def test_the_mlp_in_pieces_gives_the_same_gradients(kind: str) -> None:
    """Rows go through the same operations; sums over pieces are in another order."""
    model, engine = model_of(kind)
    loss, expected = result_of(model)
    pool = OffloadPool(len(engine.layers), 1 << 24, CPU)
    for pieces, levels, place in ((3, ["gate_up"], None), (3, ["layer", "nothing"], pool), (7, ["around_attention"], pool)):
        set_layers(engine, levels, pieces, place)
        again, found = result_of(model)
        pool.finish()
        assert_near((again, found), (loss, expected), levels)
    with torch.no_grad():
        assert float(fast_loss(model, packed_batch())) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("kind", rows_of({kind: make for kind, make in KINDS.items() if "full" not in kind and kind != "full"}))
def test_sums_over_micro_batches_are_autograds(kind: str) -> None:
    """As the captured step has them: in one buffer, collected once; with an MLP in pieces where it can be."""
    (model, engine), batches = model_of(kind), (packed_batch(), packed_batch(seed=5))
    for batch in batches:
        fast_loss(model, batch).backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    assert expected.keys() == trained.keys()
    for p in trained.values():
        p.grad.fill_(7)
    set_layers(engine, ["layer", "gate_up"], 3 if kind in DENSE else 1)
    sums = LoraGradBuffer(engine, torch.float32)
    for batch in batches:
        fast_loss(model, batch).backward()
    of_layers = {id(p) for layer in engine.layers for p in layer.parameters()}
    assert all(bool((p.grad == 7).all()) for p in trained.values() if id(p) in of_layers)
    for p in trained.values():  # what is outside the layers, where inputs of layers are made, goes to autograd
        p.grad.sub_(7)
    sums.collect()
    for name, p in trained.items():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


def added_by_norm(layer: Any) -> bool:
    """Whether the norm before the MLP adds the residual."""
    return layer.mixer.after is None and layer.mlp.before is not None and layer.mixer.out.leaves_residual_to_norm(1.0)


@pytest.mark.parametrize(("kind", "by_norm"), [("qk-norm", True), ("norms elsewhere, full", False)])
def test_the_residual_added_by_a_product_gives_the_same_gradients(
    kind: str, by_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Hopper; with a norm behind the projection (Gemma, OLMo 2) there is nothing to choose."""
    model, engine = model_of(kind)
    loss, expected = result_of(model)
    assert {added_by_norm(layer) for layer in engine.layers} == {by_norm}
    monkeypatch.setattr(wide_gemms, "adds_freely", lambda *_: True)
    for pieces in (1, 3):
        set_layers(engine, ["layer"], pieces)
        assert_near(result_of(model), (loss, expected), pieces)
        assert not any(added_by_norm(layer) for layer in engine.layers)
