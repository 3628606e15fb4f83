"""DPO and GRPO of models with states or convolutions: packs with shared prompts give loss and gradients of those without, which
other tests compare with transformers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import test_gated_delta_mixer as gated_delta
import test_mamba_mixer as mamba
import test_short_conv_mixer as short_conv
import torch
from test_policy import Rollouts, of_ours
from test_preference import assert_near, gradients, stepped, table_of

from pronghorn.model.causal_lm import install
from pronghorn.model.shared_prefix import why_not_shared
from pronghorn.train.objectives.dpo import Dpo
from pronghorn.train.objectives.policy import Policy
from pronghorn.train.objectives.reference import Reference
from tables import first_of

KINDS = [
    (gated_delta, "qwen3_5_text", "full"),
    (mamba, "nemotron_h", "full"),
    (short_conv, "lfm2", "full"),
    (gated_delta, "qwen3_5_text", "dora"),  # layers of separate ops
    (short_conv, "lfm2_moe", "lora"),
    (mamba, "granitemoehybrid, experts", "lora"),
    (gated_delta, "qwen3_5_moe_text", "lora"),
    (gated_delta, "qwen3_next", "full"),
]


def model_of(room: ModuleType, kind: str, method: str) -> Any:
    config = room.CONFIGS[kind]
    assert why_not_shared(config, torch.device("cpu"), torch.float32) == ""
    model = room.model_of(kind, method)
    assert install(model) == ""
    return model


def pairs() -> list[Any]:
    """Prompts of more than a chunk, of fewer tokens than a convolution has taps, and of some."""
    random, lengths = np.random.default_rng(1), [(70, 5, 66), (1, 3, 1), (2, 9, 4), (20, 1, 12)]
    return [tuple(random.integers(3, 128, length).tolist() for length in group) for group in lengths]


@pytest.mark.parametrize(("room", "kind", "method"), first_of(KINDS, 4))
def test_dpo_and_grpo(room: ModuleType, kind: str, method: str) -> None:
    """In float64, whatever is in float32 in there, and in float32."""
    model = model_of(room, kind, method)
    rollouts = Rollouts()
    rollouts.look(model)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model.to(dtype)
        plain, shared = (stepped(model, Dpo(Reference(512)), table_of(pairs(), shared=s), 512, padded=s) for s in (False, True))
        assert shared[0] == pytest.approx(plain[0], rel=tolerance)
        assert_near(shared[1], plain[1], tolerance)
        losses, found = [], []
        for options in ((False, False), (True, False), (True, True)):
            model.zero_grad(set_to_none=True)
            loss = of_ours(model, rollouts.batches(*options), Policy(beta=0.3, updates=2))
            loss.backward()
            losses.append(float(loss.detach()))
            found.append(gradients(model))
        assert losses[1:] == pytest.approx(losses[:1] * 2, rel=tolerance, abs=tolerance)
        for other in found[1:]:
            assert_near(other, found[0], tolerance)
