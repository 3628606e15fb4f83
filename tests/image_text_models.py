"""Tiny checkpoints of models that read images, too, as their publishers name what is in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from samples import make_tokenizer

TEXT: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
GLM_TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 24}
IMAGE = {"image_token_id": 255, "video_token_id": 256, "vision_start_token_id": 257, "vision_end_token_id": 258}
GEMMA4: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
AS_E2B = {
    "num_hidden_layers": 4,
    "layer_types": GEMMA4["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 259,
}
GEMMA4_TOWER = {key: value for key, value in TOWER.items() if key != "image_size"} | {"num_key_value_heads": 2, "head_dim": 8}
OUTSIDE = {"image_token_id": 1000, "video_token_id": 1001, "audio_token_id": 1002}  # random text has none of them
WITH_VISION_MODEL = ("gemma3", "llava", "llava_next", "llava_onevision")  # a level of names in the vision tower's files
PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT
        | {
            "model_type": "gemma3_text",
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": 255,
        "boi_token_index": 256,
        "eoi_token_index": 257,
    },
    "gemma4": {
        "text_config": TEXT | GEMMA4 | {"model_type": "gemma4_text", **AS_E2B},
        "vision_config": GEMMA4_TOWER,
        **OUTSIDE,
    },
    "gemma4_unified": {
        "text_config": TEXT | GEMMA4 | {"model_type": "gemma4_unified_text"},
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8, "output_proj_dims": 32},
        "audio_config": {"audio_embed_dim": 16},
        **OUTSIDE,
    },
    "muse_glimmer": {
        "text_config": TEXT | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
        "out_hidden_size": 16,
        "projector_hidden_size": 16,
        **{name: OUTSIDE[name] for name in ("image_token_id", "video_token_id")},
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "image_token_index": 255,
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
    },
    "ministral3": {
        "model_type": "mistral3",
        "image_token_index": 255,
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
        "text_config": TEXT
        | {
            "model_type": "ministral3",
            "sliding_window": None,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    },
    "qwen2_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        **IMAGE,
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        **IMAGE,
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 24},
    },
    "glm4v": {"text_config": TEXT | {"rope_parameters": ROPE}, **IMAGE, "vision_config": GLM_TOWER},
    "glm46v": {
        "text_config": TEXT | {"model_type": "glm4v_text", "rope_parameters": ROPE},
        **IMAGE,
        "vision_config": GLM_TOWER,
    },
    "glm_ocr": {"text_config": TEXT | {"rope_parameters": ROPE}, **IMAGE, "vision_config": GLM_TOWER},
    "glm4v_moe": {
        "text_config": TEXT
        | {
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        **IMAGE,
        "vision_config": GLM_TOWER,
    },
    "lighton_ocr": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
        "image_token_id": 255,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen3"},
        "vision_config": TOWER | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 255,
    },
    "lfm2_vl": {
        "text_config": TEXT
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        "vision_config": TOWER | {"model_type": "siglip2_vision_model", "num_patches": 4},
        "image_token_id": 255,
        "projector_hidden_size": 16,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
        "image_token_index": 255,
    },
    "llava_next": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": TOWER | {"model_type": "clip_vision_model"},
        "image_token_index": 255,
        "image_grid_pinpoints": [[28, 28]],
    },
    "llava_onevision": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "image_token_index": 255,
        "image_grid_pinpoints": [[28, 28]],
    },
    "qwen3_vl_moe": {
        "text_config": TEXT
        | {"rope_parameters": ROPE, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        **IMAGE,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "deepstack_visual_indexes": [0],
        },
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        **IMAGE,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "intermediate_size": 24,
            "deepstack_visual_indexes": [0],
        },
    },
}


def make_image_text_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(**({"model_type": kind} | PARTS[kind]))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def published_name(kind: str, name: str) -> str:
    """Of a weight, out of transformers' own name for it."""
    if kind in (*WITH_VISION_MODEL, "internvl", "mistral3", "ministral3"):
        for ours, theirs in (
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
            ("model.vision_tower.", "vision_tower." + "vision_model." * (kind in WITH_VISION_MODEL)),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("model.image_newline", "image_newline"),
        ):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return name


def save_image_text_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """With the files that a publisher puts beside it."""
    model = make_image_text_model(kind, dtype)
    model.save_pretrained(folder)
    state = {
        published_name(kind, name): value.clone()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" or model.lm_head.weight is not model.get_input_embeddings().weight
    }
    if kind != "glm4v_moe":  # transformers itself writes each expert by itself there
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5, 0.5, 0.5]}))
    return str(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
