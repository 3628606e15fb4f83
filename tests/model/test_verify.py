from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.errors import ModelError
from pronghorn.model import causal_lm
from pronghorn.model.layers import norms, wide_gemms
from pronghorn.model.layers.mixers import attention
from pronghorn.model.lora import add_adapter
from pronghorn.model.verify import TOLERANCES, Gradient, Verdict, verify
from pronghorn.recipe_parts import Lora
from samples import make_model
from tables import table


def test_a_sound_model_passes_and_is_left_as_it_was() -> None:
    model = add_adapter(make_model(), Lora(r=4), seed=0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    verdict = verify(model)
    assert verdict.loss_difference < 1e-6
    assert verdict.gradients[0].cosine > 0.999999
    assert len(verdict.gradients) == 2 * 7 * 2  # A and B of seven linears in two layers
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


@table(
    ("cosine", "norm_ratio", "sound"),
    [
        (1.0, 0.99977, True),  # SmolLM2-135M, layer 0, float32: rounding of both sides, told by float64
        (0.999995, 1.0, True),
        (1.0, 0.99, False),
        (1.0, 1.01, False),
        (0.9999, 1.0, False),
        (float("nan"), 1.0, False),
    ],
)
def test_an_error_counts_the_same_along_a_gradient_and_across_it(cosine: float, norm_ratio: float, sound: bool) -> None:
    verdict = Verdict("float32", 1.0, 1.0, (Gradient("a", cosine, norm_ratio),), *TOLERANCES[torch.float32])
    assert (verdict.wrong() == []) is sound


def test_full_fine_tuning_is_verified_too() -> None:
    assert verify(make_model()).gradients[0].cosine > 0.999999


@pytest.mark.parametrize("broken", ["rms_norm_backward", "qk_rope_backward", "gated_activation_backward", "attention_backward"])
def test_a_gradient_broken_in_one_kernel_is_found_and_named(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = next(module for module in (attention, wide_gemms, norms) if hasattr(module, broken))
    real: Any = getattr(where, broken)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        with torch.no_grad():
            out[0].mul_(1.1)
        return out

    monkeypatch.setattr(where, broken, wrong)
    with pytest.raises(ModelError, match="the fast layers differ from the transformers layers") as caught:
        verify(add_adapter(make_model(), Lora(r=4), seed=0))
    assert "lora_" in str(caught.value)
    assert "layers: own" in caught.value.fix


def test_a_wrong_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = attention.attention_forward
    monkeypatch.setattr(attention, "attention_forward", lambda q, *a, **k: real(q * 30, *a, **k))
    with pytest.raises(ModelError, match="loss differs"):
        verify(add_adapter(make_model(), Lora(r=4), seed=0))


def test_a_family_without_fast_layers_has_nothing_to_verify() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ModelError, match="nothing to verify"):
        verify(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50)))


def test_windows_are_narrow_for_the_moment_only() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=4096,
        )
    )
    verify(model)
    engine = causal_lm.engine_of(model)
    assert model.config.sliding_window == engine.layers[0].mixer.options["window"] == 4096
    model.config.sliding_window = 2048
    with pytest.raises(ModelError, match="has the window 4096, but the config says 2048"):
        verify(model)
