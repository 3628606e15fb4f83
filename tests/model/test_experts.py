"""Mixtures of experts against transformers: loss and all gradients, packed and unpacked, for LoRA on attention and on experts
and full fine-tuning, with and without the routers' auxiliary loss, in float64 and in float32."""

from __future__ import annotations

import copy
import itertools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from test_decoder_layer import (
    GEMMA4,
    LATENT,
    NTK_ALPHA,
    SMALL,
    apart,
    assert_all_equal,
    assert_float32_is_near,
    fast_loss,
    gradients,
    packed_batch,
    single_batch,
    true_gradients,
    whole_float64,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from pronghorn.compat.hf_forward import install
from pronghorn.errors import RecipeError
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.export import save_model
from pronghorn.model.lora import add_adapter
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.recipe_parts import Lora
from tables import first_of

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
QWEN: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
SIGMOID: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
GRANITE: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
MSCALE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0}
LIMIT = {"swiglu_limit": 3.5} if hasattr(GptOssConfig(), "swiglu_limit") else {}  # transformers 5.17 has it in its code: 7.0
FAMILIES: dict[str, Any] = {
    "gpt_oss": GptOssConfig(
        **SMALL,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters=YARN,
        attention_bias=True,
        **LIMIT,
    ),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **QWEN, head_dim=16, norm_topk_prob=True),
    "qwen3_moe, a dense layer": Qwen3MoeConfig(**(SMALL | {"num_hidden_layers": 3}), **QWEN, head_dim=16, mlp_only_layers=[1]),
    "qwen2_moe": Qwen2MoeConfig(**SMALL, **QWEN, shared_expert_intermediate_size=40),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2, sliding_window=16),
}
ROWS: dict[str, Any] = FAMILIES | {  # other rows of the table: their losses and gradients only
    "mellum": AutoConfig.for_model(
        "mellum",
        **SMALL,
        **QWEN,
        head_dim=16,
        sliding_window=16,
        norm_topk_prob=False,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "mellum, a dense layer": AutoConfig.for_model("mellum", **SMALL, **QWEN, head_dim=16, mlp_layer_types=["dense", "sparse"]),
    "olmoe": AutoConfig.for_model("olmoe", **SMALL, num_experts=8, num_experts_per_tok=3),
    "glm4_moe": AutoConfig.for_model("glm4_moe", **SMALL, **SIGMOID, use_qk_norm=True, first_k_dense_replace=1, head_dim=16),
    "glm4_moe, no qk-norm": AutoConfig.for_model(
        "glm4_moe", **SMALL, **(SIGMOID | {"n_group": 1, "topk_group": 1}), norm_topk_prob=False, attention_bias=True
    ),
    "dots1": AutoConfig.for_model(
        "dots1", **SMALL, **SIGMOID, norm_topk_prob=True, sliding_window=16, layer_types=["full_attention", "sliding_attention"]
    ),
    "solar_open": AutoConfig.for_model(
        "solar_open", **{k: v for k, v in SMALL.items() if k != "intermediate_size"}, **SIGMOID, head_dim=16
    ),
    "minimax_m2": AutoConfig.for_model("minimax_m2", **SMALL, num_local_experts=8, num_experts_per_tok=3, head_dim=16),
    "exaone_moe": AutoConfig.for_model(
        "exaone_moe",
        **SMALL,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "ernie4_5_moe": AutoConfig.for_model(
        "ernie4_5_moe",
        **SMALL,
        moe_intermediate_size=24,
        moe_num_experts=8,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_layer_start_index=0,
        use_bias=True,
    ),
    "granitemoe": AutoConfig.for_model("granitemoe", **SMALL, **GRANITE),
    "granitemoe_swa": AutoConfig.for_model(
        "granitemoe_swa",
        **SMALL,
        **GRANITE,
        layer_rope_theta=[0, 500.0],
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "glm4_moe_lite": AutoConfig.for_model("glm4_moe_lite", **(SMALL | SIGMOID | LATENT)),
    "deepseek_v3, narrow values": AutoConfig.for_model(
        "deepseek_v3",
        **(SMALL | SIGMOID | LATENT | {"v_head_dim": 12}),
        first_k_dense_replace=1,
        attention_bias=True,
        rope_parameters=MSCALE | {"mscale_all_dim": 0.7},
    ),
    "deepseek_v3, queries without a latent": AutoConfig.for_model(
        "deepseek_v3",
        **(SMALL | SIGMOID | LATENT | {"q_lora_rank": None, "v_head_dim": 28}),
        first_k_dense_replace=1,
        rope_interleave=False,
    ),
    "hunyuan_v1_moe": AutoConfig.for_model(
        "hunyuan_v1_moe", **SMALL, num_experts=8, moe_topk=[3, 3], head_dim=16, rope_parameters=NTK_ALPHA
    ),
    "afmoe": AutoConfig.for_model(
        "afmoe",
        **(SMALL | {"num_hidden_layers": 3}),
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        num_dense_layers=1,
        route_scale=1.7,
        mup_enabled=True,
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma4_text, experts": AutoConfig.for_model(
        "gemma4_text",
        **(SMALL | GEMMA4),
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
    ),
    "hy_v3": AutoConfig.for_model(
        "hy_v3",
        **SMALL,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        router_scaling_factor=1.7,
        head_dim=16,
    ),
}
OF_LATENTS = [family for family, config in ROWS.items() if hasattr(config, "kv_lora_rank")]
EXPERTS = ("experts", "q_proj", "o_proj")
METHODS = ["lora on attention", "lora on experts", "full"]


def model_of(family: str, method: str, dtype: torch.dtype) -> Any:
    """Experts and routers are drawn wide, so that limits and imbalance show; norms, biases and sinks are drawn too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(ROWS[family]), attn_implementation="eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name or "scale" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name or "scale" in name else 0.0, std=0.3)
        elif "experts" in name or "router" in name or ".gate." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name or "layer_scalar" in name:
            torch.nn.init.normal_(buffer, mean=float("layer_scalar" in name), std=0.2)
    model = model.to(dtype)
    if method == "full":
        return model.train()
    targets: Any = EXPERTS if method == "lora on experts" else "all-linear"
    if method == "lora on experts" and family in OF_LATENTS:
        targets = ("experts", "all-linear")
    model = add_adapter(model, Lora(r=4, targets=targets, dora=method == "dora"), seed=1).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def own_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    """A document a row, filled up behind its end: in a pack, transformers' gpt-oss lets documents see each other (5.22)."""
    bounds = [
        (start, stop)
        for start, stop in pairwise(batch.cu_seqlens.unique().tolist())
        if (batch.labels_T[start:stop] != IGNORED).any()
    ]
    ids, labels = (
        pad_sequence([values[start:stop] for start, stop in bounds], batch_first=True, padding_value=filler)
        for values, filler in ((batch.ids_T, 1), (batch.labels_T, IGNORED))
    )
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)


# Routers, shared experts and norms are a family's, what is trained decides the code around them: all pairs of the families
# that the other tests are about, of the others each with one kind of adapter and whole.
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *itertools.product(FAMILIES, METHODS),
        *((family, "full") for family in ROWS if family not in FAMILIES),
        *((family, METHODS[i % 2]) for i, family in enumerate(name for name in ROWS if name not in FAMILIES)),
        *((family, "lora on experts") for family in OF_LATENTS if "lite" in family),
    ],
)
def test_loss_and_every_gradient_equal_transformers(family: str, method: str) -> None:
    """In float64, where nothing but a mistake makes a difference."""
    model = model_of(family, method, torch.float64)
    assert_all_equal(model, (packed_batch(), single_batch()), own_loss)
    engine = engine_of(model)
    assert all(layer.fused for layer in engine.layers)


@pytest.mark.parametrize("family", first_of(FAMILIES, 3))
def test_float32_is_within_1e_5_of_transformers(family: str) -> None:
    """The worst seen is 3.7e-6. Two things are not continuous, and float32 could fall on the other side: which experts a token
    chooses (the nearest logits of the last that is chosen and the first that is not are 1.2e-5 apart, float32 is 3e-6 off),
    and gpt-oss's clamp (limit 3.5 acts, and no value is nearer to it than 1.1e-4; with 1.0 one was 2.9e-6 away)."""
    # Each method once: float64 above has them all with both batches, and a step in fewer digits shows in any of them.
    for method, batch in zip(METHODS, (packed_batch(), single_batch(), packed_batch()), strict=True):
        assert_float32_is_near(model_of(family, method, torch.float32), (batch,), own_loss, method)


# ---- the routers' auxiliary loss ---------------------------------------------------------------------------------------


def balanced(family: str, method: str) -> Any:
    model = model_of(family, method, torch.float64)
    base_of(model).config.output_router_logits, base_of(model).router_aux_loss_coef = True, 0.3
    return model


def own_balanced_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    """transformers' own sum of both, of the pack without its padding, times the labels it is a mean of."""
    ids, labels = batch.ids_T[: batch.tokens], batch.labels_T[: batch.tokens]
    output = model(
        input_ids=ids[None], position_ids=batch.positions_T[None, : batch.tokens], use_cache=False, output_router_logits=True
    )
    loss: torch.Tensor = F.cross_entropy(output.logits[0], labels, reduction="sum", ignore_index=IGNORED)
    return loss + 0.3 * output.aux_loss * (labels != IGNORED).sum()


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, "full") for family in FAMILIES),
        *((family, "lora on experts") for family in ("gpt_oss", "mixtral")),
        *((family, "dora") for family in ("qwen2_moe", "qwen3_moe, a dense layer")),  # the family's own MLP
    ],
)
def test_the_auxiliary_loss_is_transformers_without_padding(family: str, method: str) -> None:
    model = balanced(family, method)
    batch = single_batch() if family == "gpt_oss" else packed_batch()
    assert batch.tokens < len(batch.ids_T) or family == "gpt_oss"
    true_loss, truth = true_gradients(model, batch, own_balanced_loss)
    with torch.no_grad(), whole_float64(model):
        plain_loss = own_loss(model, batch)
    assert not install(model)
    loss = fast_loss(model, batch)
    ours = gradients(model, loss)
    assert apart(loss.detach(), true_loss) < 1e-6  # transformers counts in float32
    assert apart(loss.detach(), plain_loss) > 1e-3
    assert ours.keys() == truth.keys()
    for name, gradient in ours.items():
        assert apart(gradient, truth[name]) < 3e-6, name
    with torch.no_grad():  # held-out loss is that of the text alone
        assert apart(fast_loss(model, batch), plain_loss) < 1e-8  # DoRA runs the family's router, in float32


# ---- what is kept, counted, exported -----------------------------------------------------------------------------------


def test_tokens_of_each_expert_are_counted_without_padding() -> None:
    model = model_of("qwen3_moe, a dense layer", "full", torch.float32)
    assert not install(model)
    engine, batch = engine_of(model), packed_batch()
    with torch.no_grad():
        fast_loss(model, batch)  # evaluation does not count
    for _ in range(2):
        fast_loss(model, batch)
    counts = engine.expert_counts.read()
    assert list(counts) == [0, 2]  # layer 1 is dense
    assert sum(counts[0]) == 2 * 3 * batch.tokens  # three experts a token
    assert sum(counts[2]) == 2 * 3 * batch.loss_tokens  # only rows with a loss go through the last layer's MLP
    with torch.no_grad():
        logits = model(
            input_ids=batch.ids_T[None, : batch.tokens],
            position_ids=batch.positions_T[None, : batch.tokens],
            output_router_logits=True,
            use_cache=False,
        ).router_logits[0]
    expected = torch.bincount(logits.topk(3).indices.flatten(), minlength=8)
    assert counts[0] == (2 * expected).tolist()
    assert sum(sum(row) for row in engine.expert_counts.read().values()) == 0


@pytest.mark.parametrize("family", first_of(FAMILIES, 2))
def test_generation_is_the_familys_own(family: str) -> None:
    model = model_of(family, "lora on experts", torch.float32).eval()
    ids = torch.arange(1, 9)[None]
    own = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert not install(model)
    gradients(model.train(), fast_loss(model, packed_batch()))  # weights are views of the adapters' buffer now
    fast = model.eval().generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert torch.equal(own, fast)


@pytest.mark.parametrize(
    ("family", "targets"),
    first_of(
        [
            ("gpt_oss", EXPERTS),
            ("qwen2_moe", ("all-linear", "experts")),
            ("qwen3_moe, a dense layer", "all-linear"),  # of which the dense layer's linears are none
            ("mixtral", ("all-linear", "experts")),
            ("gemma4_text, experts", ("all-linear", "experts")),
            *((family, ("all-linear", "experts")) for family in FAMILIES if family not in ("qwen2_moe", "mixtral")),
            ("qwen2_moe", EXPERTS),
            ("qwen2_moe", "all-linear"),
        ],
        5,
    ),
)
def test_adapters_load_in_stock_peft_with_equal_logits(family: str, targets: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(copy.deepcopy(ROWS[family]))
    base.save_pretrained(tmp_path / "base")
    model = add_adapter(base, Lora(r=4, targets=targets), seed=1)
    assert not install(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    batch = packed_batch()
    for _ in range(2):  # B is zero before the first step, and A has no gradient
        fast_loss(model, batch).backward()
        optimizer.step()
    save_model(model, tmp_path / "adapter")
    fresh = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        truth = fresh.eval()(input_ids=ids).logits
        with fresh.disable_adapter():
            plain = fresh(input_ids=ids).logits
        ours = model.eval()(input_ids=ids, use_cache=False).logits
        merged = fresh.merge_and_unload(safe_merge=True)
        save_model(merged, tmp_path / "merged")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(input_ids=ids).logits
    assert apart(ours, truth) < 1e-5
    assert apart(reloaded, truth) < 1e-5
    assert apart(plain, truth) > 1e-3


def test_experts_are_asked_for_by_name() -> None:
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen3_moe"]))
    with pytest.raises(RecipeError, match=r"expert.*matches no linear") as caught:
        add_adapter(model, Lora(targets=("q_proj", "expert")), seed=1)
    assert "did you mean `experts`" in caught.value.fix
    with pytest.raises(RecipeError, match=r"dropout.*experts"):
        add_adapter(model, Lora(targets=("experts",), dropout=0.1), seed=1)
    attention_only = add_adapter(copy.deepcopy(model), Lora(), seed=1)
    assert not any("experts" in name for name, p in attention_only.named_parameters() if p.requires_grad)
    experts_only = add_adapter(model, Lora(targets=("experts",)), seed=1)
    assert all("experts" in name for name, p in experts_only.named_parameters() if p.requires_grad)


def test_a_router_can_be_trained_beside_adapters_or_adapted() -> None:
    batch = packed_batch()
    for kind in ("trained", "adapted"):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["qwen3_moe"])).double()
        model.set_experts_implementation("eager")
        parameters = ["experts.down_proj"] + (["gate.weight"] if kind == "adapted" else [])
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["v_proj"], target_parameters=parameters))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
            if kind == "trained" and name.endswith("mlp.gate.weight"):
                parameter.requires_grad_()
        true_loss, truth = true_gradients(model.train(), batch, own_loss)
        assert any(".gate." in name for name in truth)
        assert not install(model)
        loss = fast_loss(model, batch)
        assert apart(loss.detach(), true_loss) < 1e-6  # PEFT multiplies adapters of parameters in float32
        for name, gradient in gradients(model, loss).items():
            assert apart(gradient, truth[name]) < 1e-5, name
