"""Steps of mixtures of experts: on a GPU replayed as graphs, and nothing in them waits for the device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_graphed_step import DEVICE, ON_GPU, SMALL, eager, graphed, losses, mixed_table, steps_of
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from pronghorn.model.causal_lm import base_of, engine_of, install
from pronghorn.model.formats.store import store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora
from pronghorn.train.objectives import Supervised
from tables import gpu_rows

QWEN: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}
FAMILIES: dict[str, Any] = {
    "gpt_oss": lambda: GptOssConfig(**SMALL, **GPT_OSS),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, **QWEN, norm_topk_prob=True),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SMALL, **QWEN, shared_expert_intermediate_size=64),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}
TARGETS: dict[str, Any] = {"attention": "all-linear", "experts": ("all-linear", "experts"), "experts alone": ("experts",)}


def model_of(
    family: str, method: str, dtype: torch.dtype = torch.float32, *, balance: bool = False, bits: int | None = None
) -> Any:
    """`bits`: of the experts and, where they are 8, of the linears."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype)
    base_of(model).config.output_router_logits = balance
    if bits == 8:
        store_linears_(model, FORMATS["fp8"])
    if bits:
        store_experts_(model, FORMATS["fp8" if bits == 8 else "nf4"])
    if method != "full":
        model = add_adapter(model, Lora(r=4, targets=TARGETS[method]), seed=1)
    model = model.to(DEVICE)
    assert install(model) == ""
    return model.train()


# On a CPU, where nothing is captured, each family and each method.
WITHOUT_CAPTURE = [("gpt_oss", "experts"), ("qwen3_moe", "attention"), ("qwen2_moe", "experts"), ("mixtral", "full")]
EVERY = [(family, method) for family in FAMILIES for method in ("attention", "experts", "full")]


@pytest.mark.parametrize(("family", "method"), EVERY if DEVICE.type == "cuda" else WITHOUT_CAPTURE)
def test_graphed_steps_equal_eager_ones(family: str, method: str) -> None:
    batches = steps_of(mixed_table(120), 12 if DEVICE.type == "cuda" else 2)
    said: list[str] = []
    model = model_of(family, method)
    ours = losses(graphed(model, said=said), batches)
    theirs = losses(eager(model_of(family, method)), batches)
    for (loss, norm), (eager_loss, eager_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(eager_loss, rel=1e-5)
        assert norm == pytest.approx(eager_norm, rel=1e-3)
    assert ours[-1][0] < ours[0][0]
    assert not any("eagerly" in line for line in said)
    counts = engine_of(model).expert_counts.read()  # type: ignore[union-attr]
    assert sum(counts[0]) == 2 * sum(batch.tokens for batch in batches)  # trial runs before a capture do not count


@ON_GPU
@pytest.mark.parametrize(
    ("family", "method", "bits"), gpu_rows(itertools.product(FAMILIES, ["attention", "experts", "full"], [None, 4, 8]))
)
def test_nothing_in_a_step_waits_for_the_device(family: str, method: str, bits: int | None) -> None:
    if bits and method == "full":
        pytest.skip("weights in few bits are not trained")
    model = model_of(family, method, torch.bfloat16, balance=True, bits=bits)
    batch = steps_of(mixed_table(60), 1)[0].batches[0].to(DEVICE)
    Supervised().loss_sum(model, batch).backward()  # kernels are compiled
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        Supervised().loss_sum(model, batch).backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@ON_GPU
@pytest.mark.parametrize(
    ("family", "method", "dtype"),
    gpu_rows(itertools.product(FAMILIES, ["attention", "experts", "full"], [torch.bfloat16, torch.float32])),
)
def test_on_a_gpu_the_layers_compute_what_the_family_computes(family: str, method: str, dtype: torch.dtype) -> None:
    verify(model_of(family, method, dtype))
