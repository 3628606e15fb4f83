"""A small model of each row of the table of families, by the name of its case."""

from __future__ import annotations

from typing import Any

import test_decoder_layer
import test_experts
import test_gated_delta_mixer
import test_mamba_mixer
import test_short_conv_mixer
import torch

DENSE = dict.fromkeys(test_decoder_layer.FAMILIES, test_decoder_layer.model_of)
EXPERTS = dict.fromkeys(test_experts.ROWS, test_experts.model_of)
MODELS: dict[str, Any] = DENSE | EXPERTS
WITH_STATES = [*test_short_conv_mixer.CONFIGS, *test_gated_delta_mixer.CONFIGS, *test_mamba_mixer.CONFIGS]


def model_of(family: str, method: str = "lora") -> Any:
    for kind in (test_short_conv_mixer, test_gated_delta_mixer, test_mamba_mixer):
        if family in kind.CONFIGS:
            return kind.model_of(family, method)
    method = "lora on experts" if family in EXPERTS and method == "lora" else method
    return MODELS[family](family, method, torch.float32)
