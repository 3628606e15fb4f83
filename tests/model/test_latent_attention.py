"""Multi-head latent attention against transformers, where tests of all families do not look: methods, precisions, pages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import test_experts
import torch
from test_decoder_layer import assert_float32_is_near, fast_loss, gradients, packed_batch, single_batch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.generation.cache import bytes_of_a_token
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.families import heads_of
from pronghorn.model.formats.store import dequantize_, store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora
from tables import first_of

KINDS = test_experts.OF_LATENTS
LITE = "glm4_moe_lite"


def stored_model(kind: str, stored: str) -> Any:
    """Sizes that FP8 multiplies."""
    config = copy.deepcopy(test_experts.ROWS[kind])
    sizes = {"hidden_size": 64, "q_lora_rank": config.q_lora_rank and 48, "kv_lora_rank": 32, "moe_intermediate_size": 32,
             "v_head_dim": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "intermediate_size": 48,
             "initializer_range": 0.08}  # fmt: skip
    for name, value in sizes.items():
        setattr(config, name, value)
    config.head_dim, config.qk_head_dim = config.qk_rope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.set_experts_implementation("eager")
    store_linears_(model, FORMATS[stored], skip=("lm_head",))
    store_experts_(model, FORMATS[stored])
    model.requires_grad_(False)
    model = add_adapter(model, Lora(r=4), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.mark.parametrize("kind", first_of([LITE, *(kind for kind in KINDS if kind != LITE)], 1))
def test_float32_is_within_1e_5_of_transformers(kind: str) -> None:
    for method, batch in zip((*test_experts.METHODS, "dora"), (packed_batch(), single_batch()) * 2, strict=True):
        model = test_experts.model_of(kind, method, torch.float32)
        assert_float32_is_near(model, (batch,), test_experts.own_loss, method)
        assert all(layer.fused == (method != "dora") for layer in engine_of(model).layers)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_finds_every_gradient_equal(kind: str) -> None:
    model = test_experts.model_of(kind, "lora on attention", torch.float32)
    found = verify(model).gradients
    assert min(gradient.cosine for gradient in found) > 0.99999
    adapted = {
        gradient.parameter.split(".lora_")[0].rpartition(".")[2] for gradient in found if "self_attn" in gradient.parameter
    }
    queries = {"q_a_proj", "q_b_proj"} if model.config.q_lora_rank else {"q_proj"}
    assert adapted == queries | {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    require_isolated_documents(model, torch.device("cpu"), 59)


@pytest.mark.parametrize("stored", ["nf4", "fp8"])
@pytest.mark.parametrize("kind", first_of([LITE, KINDS[-1]], 1))
def test_frozen_weights_in_few_bits(kind: str, stored: str) -> None:
    """With NF4 the numbers of the dequantized model; FP8 products are as near as FP8 is."""
    model, twin = stored_model(kind, stored), stored_model(kind, stored)
    dequantize_(twin, torch.float32)
    assert install(model) == ""
    batch = packed_batch()
    loss, truth = fast_loss(model, batch), test_experts.own_loss(twin, batch)
    ours, theirs = gradients(model, loss), gradients(twin, truth)
    assert all(layer.fused for layer in engine_of(model).layers)
    assert any("q_b_proj" in name or "q_proj" in name for name in ours)
    assert float(loss.detach()) == pytest.approx(float(truth.detach()), rel=1e-5 if stored == "nf4" else 0.02)
    for name, true in theirs.items():
        cosine = torch.nn.functional.cosine_similarity(ours[name].flatten(), true.flatten(), dim=0)
        assert float(cosine) > (0.99999 if stored == "nf4" else 0.95), name


def test_adapters_sums_over_a_step_are_autograds() -> None:
    """Those of the linears behind the latents are divided by their norm, too."""
    model = test_experts.model_of(LITE, "lora on attention", torch.float32)
    assert install(model) == ""
    engine, batch = engine_of(model), packed_batch()
    expected = gradients(model, fast_loss(model, batch) * 2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    buffer = LoraGradBuffer(engine, torch.float32)
    for _ in range(2):
        fast_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    buffer.collect()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_pages_hold_expanded_heads() -> None:
    """As wide as attention computes them, and as plans count them."""
    for kind in KINDS:
        model = test_experts.model_of(kind, "full", torch.float32)
        assert install(model) == ""
        heads, width = heads_of(model.config, 0)
        assert (heads, width) == (4, 28 if kind == KINDS[-1] else 20)
        assert bytes_of_a_token(engine_of(model), torch.float32) == 2 * 2 * heads * width * 4


def test_glm_4_7_flash_has_plain_heads_of_256() -> None:
    assert heads_of(AutoConfig.for_model("glm4_moe_lite"), 0) == (20, 256)
    assert heads_of(AutoConfig.for_model("deepseek_v3"), 0) == (128, 192)
