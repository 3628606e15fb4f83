"""What is measured: architectures, documents and systems. Every process builds its documents here, from the same seed.

Imports numpy alone: a system's process reads this before its own library is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pronghorn.errors import CommandError

LORA_RANK = 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LEARNING_RATE = 2e-4  # constant, AdamW without decay, gradients clipped to 1
# Of families whose linears have other names; a router is none of them.
_CONV = ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")  # of attention: an MLP's would be experts'
_DELTA = (*LINEARS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
LINEARS_OF = {"lfm2": _CONV, "glm4_moe_lite": _LATENT, "qwen3_5_text": _DELTA}
ATTENTION = LINEARS[:4]
EXPERTS = (*LINEARS, "gate_up_proj")  # Unsloth's names for a mixture's experts
CLIP = 1.0
SEED = 1
FIRST_ID, LAST_ID = 300, 120_000  # token ids of documents: above the byte tokenizer's, below every vocabulary here
PEER_ROW = 2048  # tokens in a row of a peer's packed batch, unless documents are longer

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_QWEN = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
_GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
_QWEN_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}

_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_GEMMA_4 = {
    "model_type": "gemma4_unified_text",
    "vocab_size": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}
_GLM_FLASH = {
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}


def _sized(family: dict[str, Any], width: int, mlp: int, layers: int, *, tied: bool = False, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return family | sizes | others


_TINY = {"vocab_size": 512, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
MODELS: dict[str, dict[str, Any]] = {  # the published sizes; weights are random, because speed does not depend on them
    "qwen3-0.6b": _sized(_QWEN, 1024, 3072, 28, num_attention_heads=16, tied=True),
    "llama-1b": _sized(_LLAMA, 2048, 8192, 16, head_dim=64, tied=True),
    "llama-8b": _sized(_LLAMA, 4096, 14336, 32, head_dim=128),
    # Llama 3.1 8B told that it may read a million tokens: peers stretch the rotary positions of longer texts than they know.
    "llama-8b-long": _sized(_LLAMA, 4096, 14336, 32, head_dim=128, max_position_embeddings=2**20),
    "qwen3-14b": _sized(_QWEN, 5120, 17408, 40, num_attention_heads=40),
    "gemma3-1b": _sized(_GEMMA, 1152, 6912, 26, tied=True),
    "gpt-oss-20b-4layers": _GPT_OSS | {"num_hidden_layers": 4},
    # All of it, with the experts in MXFP4, as it is published.
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "quantization_config": {"quant_method": "mxfp4"}},
    "qwen3-30b-a3b-4layers": _sized(_QWEN_MOE, 2048, 6144, 4),
    # The first layers of 9B: three with a state, then one of attention.
    "qwen3.5-9b-8layers": _sized(_QWEN3_5, 4096, 12288, 8),
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,  # of which two thirds are used: block_auto_adjust_ff_dim
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    # Of 48 layers every sixth is global; here the sixth and, as the config demands, the last.
    "gemma-4-12b-8layers": _sized(_GEMMA_4, 3840, 15360, 8, tied=True),
    # Experts beside the dense MLP of every layer. Sizes from memory.
    "gemma-4-26b-a4b-6layers": _sized(
        _GEMMA_4
        | {
            "model_type": "gemma4_text",
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        2816,
        2112,
        6,
        tied=True,
    ),
    # The first layer is dense, as it is published.
    "glm-4.7-flash-4layers": _sized(_GLM_FLASH, 2048, 10240, 4),
    "tiny-delta": _sized(
        _QWEN3_5 | _TINY,
        64,
        128,
        4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "tiny-moe": _sized(_QWEN_MOE | _TINY, 64, 6144, 2, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
    "tiny": _sized(_LLAMA | _TINY, 64, 128, 2, rope_theta=1e4, tied=True),
}


@dataclass(frozen=True)
class System:
    name: str
    label: str
    needs: tuple[str, ...] = ()  # modules; without them it is "not installed"
    recompute: bool | Literal["unsloth"] = False  # activations in the backward pass (use_gradient_checkpointing)
    padded: bool = False  # documents padded to the longest of their micro-batch, instead of packed
    script: str = ""  # what a script for Unsloth and TRL imports: the same script, with another import

    @property
    def captures(self) -> bool:
        """Whether it may replay steps as CUDA graphs, whose memory the allocator counts when they are captured, never again."""
        return "pronghorn" in (self.name, self.script)


_UNSLOTHS = ("unsloth", "trl", "datasets")
_OURS_IN_TRL = ("peft", "pydantic", "trl", "datasets")
# "Best of" a peer means: both ways are measured and shown, and ratios are to the faster one.
SYSTEMS = {
    system.name: system
    for system in (
        System("pronghorn", "Pronghorn", needs=("peft", "pydantic")),
        System("dropin", "Pronghorn in TRL", needs=_OURS_IN_TRL, script="pronghorn"),
        System("dropin-true", "Pronghorn in TRL, checkpointing", needs=_OURS_IN_TRL, recompute=True, script="pronghorn"),
        System(
            "dropin-unsloth", "Pronghorn in TRL, by its memory", needs=_OURS_IN_TRL, recompute="unsloth", script="pronghorn"
        ),
        System("unsloth", "Unsloth", needs=_UNSLOTHS, script="unsloth"),
        System("unsloth-true", "Unsloth, checkpointing", needs=_UNSLOTHS, recompute=True, script="unsloth"),
        System("unsloth-ckpt", "Unsloth, its checkpointing", needs=_UNSLOTHS, recompute="unsloth", script="unsloth"),
        System("liger", "transformers + Liger", needs=("liger_kernel", "peft")),
        System("liger-ckpt", "transformers + Liger, checkpointing", needs=("liger_kernel", "peft"), recompute=True),
        System("packed", "transformers, packed", needs=("peft",)),
        System("packed-ckpt", "transformers, packed, checkpointing", needs=("peft",), recompute=True),
        System("padded", "transformers, padded", needs=("peft",), padded=True),
        System("trl", "TRL", needs=("peft", "trl", "datasets"), padded=True),
        System("trl-ckpt", "TRL, checkpointing", needs=("peft", "trl", "datasets"), padded=True, recompute=True),
    )
}
_ALL = ("pronghorn", "unsloth", "unsloth-ckpt", "liger", "packed", "padded")
_UNSLOTH = ("pronghorn", "unsloth", "unsloth-ckpt")
_PACKED = (*_UNSLOTH, "packed", "packed-ckpt")
_TRL = ("pronghorn", "dropin", "dropin-true", "dropin-unsloth", "unsloth", "unsloth-true", "unsloth-ckpt")
_PAIRS = ("pronghorn", "dropin", "trl", "trl-ckpt", "unsloth", "unsloth-ckpt")
_STATES = (*_UNSLOTH, "padded")
_LARGE = ("pronghorn", "unsloth", "unsloth-ckpt", "liger", "liger-ckpt", "packed-ckpt")


@dataclass(frozen=True)
class Workload:
    name: str
    model: str  # key of MODELS
    tokens: int  # in an optimizer step, one micro-batch
    document: int = 0  # every document has so many tokens; 0: lengths as instruction data has them
    systems: tuple[str, ...] = _ALL
    method: Literal["lora", "qlora", "full"] = "lora"
    rank: int = LORA_RANK
    ours: Literal["", "fp8"] = ""  # our method, where it is not the peers'
    compute: Literal["auto", "fp8"] = "auto"  # our products
    adapters: Literal["linears", "attention", "experts"] = "linears"  # of mixtures of experts: on what
    budget: str = ""  # our side plans its memory for this (recipe.Memory.budget); empty: it keeps everything
    pairs: bool = False  # preference pairs and DPO, with lengths as such data has them (pairs.py)

    @property
    def row(self) -> int:
        """Tokens in a row of a peer's packed batch."""
        return min(self.tokens, max(PEER_ROW, self.document))

    @property
    def fp8(self) -> bool:
        """Whether our products of frozen weights are in FP8."""
        return self.ours == "fp8" or self.compute == "fp8"

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the adapted linears."""
        return LINEARS_OF.get(self.config["model_type"], LINEARS if self.adapters == "linears" else ATTENTION)

    @property
    def config(self) -> dict[str, Any]:
        return MODELS[self.model]

    def describe(self) -> str:
        documents = f"documents of {self.document:,} tokens" if self.document else "short documents"
        documents = "DPO on preference pairs" if self.pairs else documents
        stored = "MXFP4" if "quantization_config" in self.config else "NF4"
        method = {"lora": "LoRA bf16", "qlora": f"QLoRA {stored}", "full": "full fine-tuning"}[self.method]
        method += f" r={self.rank}" * (self.rank != LORA_RANK)
        if self.fp8:
            method = f"{'LoRA FP8' if self.ours else 'QLoRA NF4 with FP8 products'} (others: {method})"
        if self.adapters != "linears":
            method += " on attention" + " and experts" * (self.adapters == "experts")
        ours = ", Pronghorn within " + re.sub(r"(?<=\d)(?=[A-Z])", " ", self.budget) if self.budget else ""
        model = re.sub(r"-(\d)layers", r" (\1 layers)", self.model)
        return f"{model}, {method}, {documents}, {self.tokens:,} tokens per step{ours}"


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("qwen3-0.6b", "qwen3-0.6b", 16384),
        Workload("llama-1b", "llama-1b", 16384),
        Workload("llama-8b", "llama-8b", 16384, systems=_LARGE),
        Workload("llama-1b-8k", "llama-1b", 16384, document=8192, systems=_LARGE),
        Workload("llama-8b-8k", "llama-8b", 16384, document=8192, systems=_LARGE),
        Workload("llama-8b-32k", "llama-8b", 32768, document=32768, systems=_LARGE),
        Workload("qwen3-14b", "qwen3-14b", 8192, systems=("pronghorn", "unsloth-ckpt", "liger-ckpt"), method="qlora"),
        Workload("llama-8b-20gb", "llama-8b", 16384, systems=("pronghorn", "unsloth-ckpt"), budget="20GB"),
        # About as much as Unsloth takes with its own checkpointing.
        Workload("qwen3-14b-12gib", "qwen3-14b", 8192, systems=("pronghorn", "unsloth-ckpt"), method="qlora", budget="12GiB"),
        # The peers' best on the same documents, beside our FP8.
        Workload("llama-1b-fp8", "llama-1b", 16384, systems=_UNSLOTH, ours="fp8"),
        Workload("llama-8b-fp8", "llama-8b", 16384, systems=_UNSLOTH, ours="fp8"),
        Workload("qwen3-14b-fp8", "qwen3-14b", 8192, systems=_UNSLOTH, method="qlora", ours="fp8"),
        Workload("qwen3-14b-qlora-fp8", "qwen3-14b", 8192, systems=_UNSLOTH, method="qlora", compute="fp8"),
        Workload(
            "qwen3-14b-qlora-fp8-12gib",
            "qwen3-14b",
            8192,
            systems=("pronghorn", "unsloth-ckpt"),
            method="qlora",
            compute="fp8",
            budget="12GiB",
        ),
        # Mixtures of experts at full width. transformers' gpt-oss lets packed documents see each other, so it is padded there.
        Workload("gpt-oss-20b-4layers", "gpt-oss-20b-4layers", 8192, systems=(*_UNSLOTH, "padded"), adapters="attention"),
        Workload("gpt-oss-20b-4layers-experts", "gpt-oss-20b-4layers", 8192, systems=(*_UNSLOTH, "padded"), adapters="experts"),
        Workload("qwen3-30b-a3b-4layers", "qwen3-30b-a3b-4layers", 8192, systems=_PACKED, adapters="attention"),
        Workload("qwen3-30b-a3b-4layers-experts", "qwen3-30b-a3b-4layers", 8192, systems=_PACKED, adapters="experts"),
        Workload(
            "qwen3-30b-a3b-4layers-fp8", "qwen3-30b-a3b-4layers", 8192, systems=_UNSLOTH, adapters="attention", ours="fp8"
        ),
        Workload("gpt-oss-20b-4layers-fp8", "gpt-oss-20b-4layers", 8192, systems=_UNSLOTH, adapters="attention", ours="fp8"),
        Workload(
            "gpt-oss-20b-4bit", "gpt-oss-20b", 4096, systems=("pronghorn", "unsloth-ckpt"), method="qlora", adapters="attention"
        ),
        # transformers' layers with a state or a convolution let packed documents see each other, so they are padded there.
        Workload("qwen3.5-9b-8layers", "qwen3.5-9b-8layers", 16384, systems=_STATES),
        Workload("lfm2-1.2b", "lfm2-1.2b", 16384, systems=_STATES),
        Workload("gemma-4-12b-8layers", "gemma-4-12b-8layers", 16384, systems=_PACKED),
        Workload("glm-4.7-flash-4layers", "glm-4.7-flash-4layers", 16384, systems=_PACKED, adapters="attention"),
        # The same script under Unsloth and under us, only its import changed; and what `pronghorn train` does of the same work.
        Workload("llama-1b-trl", "llama-1b", 16384, systems=_TRL),
        Workload("llama-1b-trl-qlora", "llama-1b", 16384, systems=_TRL, method="qlora"),
        Workload("llama-8b-trl", "llama-8b", 16384, systems=_TRL),
        Workload("llama-8b-trl-qlora", "llama-8b", 16384, systems=_TRL, method="qlora"),
        Workload("llama-1b-r64", "llama-1b", 16384, systems=("pronghorn", "dropin", "unsloth"), rank=64),
        Workload("llama-1b-full", "llama-1b", 16384, systems=("pronghorn", "dropin", "unsloth", "liger"), method="full"),
        Workload("qwen3-0.6b-full", "qwen3-0.6b", 16384, systems=("pronghorn", "dropin", "unsloth", "liger"), method="full"),
        # Peers pad both answers of 8 pairs, each behind its prompt; we pack as many with their prompt once.
        Workload("dpo-1b", "llama-1b", 6144, systems=_PAIRS, pairs=True),
        Workload("dpo-8b-24gb", "llama-8b", 6144, systems=_PAIRS, pairs=True, method="qlora", budget="24GB"),
        Workload("tiny-dpo", "tiny", 1024, systems=("pronghorn", "dropin", "trl"), pairs=True),
        Workload("tiny-trl", "tiny", 512, systems=("pronghorn", "dropin", "dropin-true"), rank=8),
        Workload("tiny-full", "tiny", 512, systems=("pronghorn", "packed"), method="full"),
        Workload("tiny-delta", "tiny-delta", 512, systems=("pronghorn", "padded")),
        Workload("tiny-moe", "tiny-moe", 512, systems=("pronghorn", "packed"), adapters="experts"),
        Workload("tiny-fp8", "tiny", 512, systems=("pronghorn", "packed"), ours="fp8"),
        Workload("tiny", "tiny", 512, document=0, systems=("pronghorn", "packed", "packed-ckpt", "padded")),
    )
}
DEFAULT_WORKLOADS = tuple(name for name in WORKLOADS if not name.startswith("tiny"))  # tiny: for machines without a GPU


def pick(names: str, table: Sequence[str], what: str) -> list[str]:
    """`a,b` as a list, refused if one is unknown."""
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in table]
    if unknown:
        raise CommandError(what=f"unknown {what} {', '.join(unknown)}", fix=f"choose from {', '.join(table)}")
    return chosen


def instruction_lengths(count: int) -> npt.NDArray[np.int64]:
    """Log-normal: mean 207, median 166, 95 % below 500 tokens, as instruction data has them."""
    return np.random.default_rng(0).lognormal(np.log(166), 0.67, count).clip(32, 1412).astype(np.int64)


def documents(workload: Workload, steps: int, lengths: Path | None = None) -> list[npt.NDArray[np.int32]]:
    """Token ids for `steps` steps and a little more, so that no system meets the end of the data.

    `lengths`: a file with a JSON list of lengths to draw from, instead of the built-in distribution.
    """
    random = np.random.default_rng(SEED)
    wanted = (steps + 2) * workload.tokens
    count = wanted // 32 + 1  # more than enough: no document is shorter than 32
    if workload.document:
        sizes = np.full(count, workload.document)
    elif lengths is not None:
        sizes = random.choice(np.array(json.loads(lengths.read_text(encoding="utf-8")), dtype=np.int64), count)
    else:
        sizes = instruction_lengths(count)
    sizes = sizes.clip(2, workload.row)
    sizes = sizes[: int(np.searchsorted(np.cumsum(sizes), wanted)) + 1]
    ids = random.integers(FIRST_ID, min(LAST_ID, workload.config["vocab_size"]), int(sizes.sum()), dtype=np.int32)
    return np.split(ids, np.cumsum(sizes)[:-1])


class DocumentTable:
    """Documents as our loader reads them; every token is trained on."""

    def __init__(self, rows: list[npt.NDArray[np.int32]]) -> None:
        self.rows = rows
        self.lengths = np.array([len(row) for row in rows], dtype=np.int32)
        self.loss_counts = self.lengths - 1

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, i: int) -> npt.NDArray[np.int32]:
        return self.rows[i]

    def loss(self, i: int) -> npt.NDArray[np.bool_]:
        return np.ones(len(self.rows[i]), dtype=np.bool_)
