"""Steps of every kind of layer on a GPU: replayed graphs give what eager steps give, in the precision in which people train."""

from __future__ import annotations

from typing import Any

import pytest
import small_models
from test_graphed_step import DEVICE, ON_GPU, eager, graphed, losses, mixed_table, steps_of

from image_text_models import make_image_text_model
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora

KINDS = (
    "gemma4_text, as E2B",
    "gemma4_text, experts",
    "cohere2",
    "muse_glimmer",
    "afmoe",
    "hunyuan_v1_moe",
    "deepseek_v3, narrow values",
    "apertus",
    "nanochat",
    "lfm2",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "nemotron_h",
    "nemotron_h, experts",
    "granitemoehybrid, experts",
    "falcon_h1",
)
WITH_IMAGES = ("glm4v", "glm4v_moe", "glm_ocr", "qwen3_vl_moe")  # their text models have rows of their own


def model_of(kind: str, precision: str) -> Any:
    if kind in WITH_IMAGES:
        model = add_adapter(make_image_text_model(kind), Lora(r=4), seed=0).to(DEVICE)
    else:
        model = small_models.model_of(kind).to(DEVICE)
    for parameter in model.parameters():
        if precision == "bf16" and not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    assert install(model) == ""
    return model.train()


@ON_GPU
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [*KINDS, *WITH_IMAGES])
def test_graphed_steps_equal_eager_ones(kind: str, precision: str) -> None:
    """Three steps: rounding grows from step to step, most in Gemma 4's E2B, where adapters changed by 6e-8 move gradients by
    4e-5, in transformers' own layers in float64, too. In bf16, half a unit in the last place of its adapters moves its norms by
    up to 63 %; between graphs and eager steps 11 % were seen on an H200. On a CPU, where nothing is captured, losses differ by
    at most 1.7e-7 and norms by 6.6e-5."""
    batches = steps_of(mixed_table(80), 3)
    said: list[str] = []
    ours = losses(graphed(model_of(kind, precision), precision, said=said), batches)
    theirs = losses(eager(model_of(kind, precision), precision), batches)
    near, of_norm = (1e-6, 2e-4) if precision == "fp32" else (1e-2, 0.33 if kind.endswith("E2B") else 0.1)
    for (loss, norm), (eager_loss, eager_norm) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(eager_loss, rel=near)
        assert norm == pytest.approx(eager_norm, rel=of_norm)
        assert norm > 0
    assert [line for line in said if "eagerly" in line] == []
