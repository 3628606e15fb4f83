"""Families whose files differ from Llama's: loaded in 16 bits, 4 bits and FP8; merged and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.model.export import save_model
from pronghorn.model.load import load_model
from pronghorn.model.lora import add_adapter
from pronghorn.model.text_stack import keep_softcap
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora
from tables import first_of

SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "granite_swa": {"layer_rope_theta": [0, 500.0], "attention_multiplier": 0.25},  # several RoPE modules; sinks
    "apertus": {},  # the activation has parameters
    "cohere2": {},  # a layer has one norm
    "glm4": {},  # gate and up are one linear
    "glm4_moe_lite": {  # latents; all keys and values have one rotated key in common
        "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},  # a file holds each expert by itself
    # A file holds all experts in one tensor.
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.25, "residual_multiplier": 0.5},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},  # the first layer is dense
    "exaone_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "afmoe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},  # routers have a linear inside
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "vaultgemma": {"query_pre_attn_scalar": 16},  # embeddings are scaled by a buffer
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", first_of(FAMILIES, 2))
def test_loaded_as_stored_and_merged_as_published(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **FAMILIES[kind]))
    keep_softcap(model)
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):  # ERNIE's and AFMoE's begin as zeros, and of equal experts either may be chosen
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "model")
    buffers = dict(model.named_buffers())
    mixture = "moe" in kind or "num_experts_per_tok" in FAMILIES[kind]
    targets: Any = ("all-linear", "experts") if mixture else "all-linear"
    for stored in ("bf16", "nf4", "fp8"):
        loaded = load_model(str(tmp_path / "model"), torch.float32, CPU, storage=stored)
        found = dict(loaded.named_buffers())
        assert all(torch.equal(found[name], buffer) for name, buffer in buffers.items()), stored
        adapted = add_adapter(loaded, Lora(r=4, targets=targets), seed=0)
        assert verify(adapted).loss_difference < (1e-2 if stored == "fp8" else 1e-6)
    plain = add_adapter(load_model(str(tmp_path / "model"), torch.float32, CPU), Lora(r=4, targets=targets), seed=0).eval()
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = plain(input_ids=ids, use_cache=False).logits
        save_model(plain.merge_and_unload(), tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        keep_softcap(again)
        torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert again.state_dict().keys() == model.state_dict().keys()
