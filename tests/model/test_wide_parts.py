"""What a family keeps in float32 stays so: loaded in few bits, merged; and each family's own names for it are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn import FastLanguageModel
from pronghorn.model.config import stays_wide
from pronghorn.model.formats.experts import StoredExperts
from pronghorn.model.load import load_model
from samples import make_tokenizer
from tables import table

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
}
ROUTED = {"moe_intermediate_size": 64, "n_routed_experts": 4, "n_shared_experts": 1}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": SIZES
    | ROUTED
    | LATENT
    | {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe": SIZES | ROUTED | {"intermediate_size": 96, "first_k_dense_replace": 1},
    "dots1": SIZES | ROUTED | {"intermediate_size": 96, "first_k_dense_replace": 1},
    "exaone_moe": SIZES | {"intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 4},
    "solar_open": SIZES | ROUTED,
    "hy_v3": SIZES | {"intermediate_size": 96, "moe_intermediate_size": 64, "num_experts": 4, "num_shared_experts": 1},
    "minimax_m2": SIZES | {"intermediate_size": 64, "num_local_experts": 4},
}
BIAS = "e_score_correction_bias"


def saved(family: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """As published: weights in bf16, the bias of the choice in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family])).to(torch.bfloat16)
    for name, module in model.named_modules():
        if BIAS in module._buffers:
            module._buffers[BIAS] = 1 + 0.001 * torch.randn(4)
        assert stays_wide(model, f"{name}.{BIAS}") == (family != "minimax_m2")
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder, biases(model)


def biases(model: Any) -> dict[str, torch.Tensor]:
    return {name.removeprefix("base_model.model."): value for name, value in model.named_buffers() if BIAS in name}


@table("storage", ["nf4", "fp8"])
@table("family", FAMILIES)
def test_every_family_loads_in_few_bits_under_its_own_names(family: str, storage: str, tmp_path: Path) -> None:
    folder, truth = saved(family, tmp_path)
    model = load_model(str(folder), torch.bfloat16, torch.device("cpu"), storage=storage)
    assert any(isinstance(module, StoredExperts) for module in model.modules())
    found = biases(model)
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(found[name], value if family != "minimax_m2" else value.bfloat16()), name


def test_casting_and_merging_leave_them_alone(tmp_path: Path) -> None:
    folder, truth = saved("glm4_moe", tmp_path / "model")
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, dtype=torch.bfloat16)
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
    inside = {name.split(".mlp.")[1].split(".lora_")[0] for name in adapted if ".mlp." in name}
    assert inside == {"experts", "experts.base_layer"}  # as PEFT takes these names for
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert all(torch.equal(biases(merged)[name], value) for name, value in truth.items())
