"""The dry run against the allocator of a GPU: layers of real width, their own kernels, short documents."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from real_layers import METHODS, TARGETS, model_of
from transformers import AutoConfig

from benchmarks.bench.workloads import MODELS
from pronghorn.kernels.moe.grouped_fp8 import fp8_grouped_supported
from pronghorn.kernels.quant.fp8_cast import fp8_supported
from pronghorn.memory.dry_run import held
from pronghorn.memory.job import Job, local_target, shape_of
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.layers.saved import Level, leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora
from tables import gpu_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LEVELS: list[Level] = ["nothing", "gate_up", "around_attention", "layer"]
CASES: list[tuple[Level, int]] = [
    ("nothing", 1),
    ("gate_up", 1),
    ("gate_up", 2),
    ("gate_up", 4),
    *((what, pieces) for what in LEVELS[2:] for pieces in (1, 2, 4, 8)),
]
# As published, cut to two layers; Qwen1.5-MoE has an expert that all tokens share.
SIZES: dict[str, dict[str, Any]] = {
    "llama": MODELS["llama-1b"],
    "gpt_oss": MODELS["gpt-oss-20b-4layers"],
    "qwen3_moe": MODELS["qwen3-30b-a3b-4layers"],
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
}


def agree(family: str, method: str, adapters: str, recompute: Level, pieces: int, tokens: int, *, tolerance: float) -> None:
    gc.collect()  # models of earlier tests, which would be counted as freed in the middle of this one
    config = AutoConfig.for_model(**(SIZES[family] | {"num_hidden_layers": 2, "vocab_size": 512, "pad_token_id": 0}))
    targets = TARGETS[adapters]
    with torch.device("cuda"):
        model = model_of(
            config,
            method,
            Lora(r=16, targets=targets if isinstance(targets, str) else list(targets)),
            torch.float32 if method.startswith("full") else torch.bfloat16,
        )
    engine = engine_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    sums = LoraGradBuffer(engine, torch.bfloat16)
    engine.accumulate_weights(True)
    bounds = torch.arange(0, tokens + 1, 256, dtype=torch.int32, device="cuda")
    positions = torch.arange(tokens, device="cuda") % 256
    pack = PackedDocuments(cu_seqlens=bounds, positions_T=positions, longest=256, typical=256)
    shared = Documents.of(pack, engine.positions)
    layer, D = engine.layers[0], int(config.hidden_size)
    job = Job(
        shape_of(config),
        tokens,
        targets=targets,
        documents=len(bounds),
        attended=256,
        target=local_target(torch.device("cuda")),
        **METHODS[method],
    )
    layer.mlp_chunks = pieces
    h, found = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16), {}
    with torch.no_grad():
        for _ in range(2):  # kernels are compiled, and what layers and libraries share is made, in the first round
            shared.grad_buffer.buffer = torch.empty(tokens, D + layer.extra, device="cuda", dtype=torch.bfloat16).normal_()
            dh = shared.grad_buffer.buffer[:, :D]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - h.nbytes
            kept = layer.forward_at(recompute, h, shared)[1]
            found["forward"] = torch.cuda.max_memory_allocated() - before
            left = leave(kept, 0, None)
            del kept
            found["saved"] = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            again = layer.restored(left, shared, None)
            del left
            layer.backward(dh, again, shared)
            found["backward"] = torch.cuda.max_memory_allocated() - before + dh.untyped_storage().nbytes()
            del again, dh
    sums.release()
    said = held(job, recompute, pieces)
    assert found["saved"] == pytest.approx(said.saved, rel=0.01)
    assert found["forward"] == pytest.approx(said.forward, rel=0.01)
    assert found["backward"] == pytest.approx(said.backward, rel=tolerance)


@pytest.mark.parametrize(("recompute", "pieces"), gpu_rows(CASES))
def test_of_a_dense_layer(recompute: Level, pieces: int) -> None:
    agree("llama", "lora", "linears", recompute, pieces, 16384, tolerance=0.01)


@pytest.mark.parametrize(
    ("family", "method", "recompute", "pieces"),
    gpu_rows(
        [
            *(
                (family, method, *case)
                for family, method in (("llama", "qlora"), ("llama", "full"), ("gemma2", "lora"))
                for case in (("nothing", 1), ("gate_up", 4), ("layer", 4))
            ),
            *(
                ("llama", method, *case)
                for method in ("fp8", "qlora, fp8", "full, fp8")
                for case in (("nothing", 1), ("layer", 1))
            ),
            *(("llama", "fp8", *case) for case in (("gate_up", 4), ("layer", 4))),
        ]
    ),
)
def test_of_other_methods_and_norms_after_a_branch(family: str, method: str, recompute: Level, pieces: int) -> None:
    if "fp8" in method and (why := fp8_supported("cuda")):
        pytest.skip(why)
    agree(family, method, "linears", recompute, pieces, 16384, tolerance=0.02)


@pytest.mark.parametrize(
    ("family", "adapters", "recompute"),
    gpu_rows(itertools.product(["gpt_oss", "qwen3_moe", "qwen2_moe"], ["linears", "experts"], LEVELS)),
)
def test_of_experts(family: str, adapters: str, recompute: Level) -> None:
    agree(family, "lora", adapters, recompute, 1, 8192, tolerance=0.03)


@pytest.mark.parametrize(
    ("family", "adapters", "recompute"),
    gpu_rows(itertools.product(["gpt_oss", "qwen3_moe", "qwen2_moe", "mixtral"], ["linears", "experts"], LEVELS)),
)
def test_of_experts_in_fp8(family: str, adapters: str, recompute: Level) -> None:
    if why := fp8_supported("cuda") or fp8_grouped_supported("cuda"):
        pytest.skip(why)
    agree(family, "fp8", adapters, recompute, 1, 8192, tolerance=0.03)
