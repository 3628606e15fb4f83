"""The same use of a model of stock transformers and PEFT and of a fast one, compared number by number."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig, LlamaConfig, Qwen3Config

from api_parts import LINEARS
from pronghorn import FastLanguageModel
from pronghorn.compat.captured_layers import CapturedLayers
from pronghorn.compat.outer_loop import loop_of
from pronghorn.model.causal_lm import FastCausalLM, engine_of
from samples import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
    "initializer_range": 0.15,
    "max_position_embeddings": 512,
}
WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 8}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW, query_pre_attn_scalar=8),
    "gpt-oss": GptOssConfig(
        **SIZES,
        **WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
# All cases held to 1e-5 on an ARM core, three of them above 5e-6; another kind of core adds in another order.
TOLERANCE = 3e-5


@functools.cache
def written(folder: Path, family: str) -> Path:
    """A model of the family, as a folder there."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for name, parameter in model.named_parameters():
        if "norm" in name or "sinks" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and family != "gemma3"), std=0.2)
    model.save_pretrained(folder / family)
    make_tokenizer().save_pretrained(folder / family)
    return folder / family


_loaded: dict[Any, Any] = {}


def _copy_of(load: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """A case has a copy: loading and adapting both models takes three times as long."""
    key = (load, folder, repr(sorted(options.items())))
    if key not in _loaded:
        _loaded[key] = load(folder, **options)
    return copy.deepcopy(_loaded[key])


def stock_model(folder: Path, *, adapter: bool = True, **options: Any) -> Any:
    """As stock libraries load it; `options` are of the adapter."""
    return _copy_of(_stock_model, folder, adapter=adapter, **options)


def _stock_model(folder: Path, *, adapter: bool, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **_with_defaults(model, options)))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros would hide what goes wrong with A
                torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def fast_model(folder: Path, plain: Any, *, adapter: bool = True, recompute: bool = False, **options: Any) -> Any:
    """The same as ours load it, from the same weights."""
    model = _copy_of(_fast_model, folder, adapter=adapter, recompute=recompute, **options)
    model.load_state_dict(plain.state_dict())
    return model


def _fast_model(folder: Path, *, adapter: bool, recompute: bool, **options: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=512,
        load_in_4bit=False,
        dtype=torch.float32,
        full_finetuning=not adapter,
        use_gradient_checkpointing=recompute,
    )
    if adapter:
        options = _with_defaults(model, options)
        model = FastLanguageModel.get_peft_model(model, use_gradient_checkpointing=recompute, **options)
    return model.train()


def with_captured_layers(fast: Any) -> Any:
    """From the first batch on; there is no GPU here, so what would be graphs is run."""
    engine = engine_of(fast)
    loop_of(fast).captured = CapturedLayers(engine, simulated=True)
    return fast


def _with_defaults(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    names = LINEARS[:4] if model.config.model_type == "gpt_oss" else LINEARS
    return {"r": 4, "lora_alpha": 16, "target_modules": names} | options


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(use: Callable[[Any], Any], plain: Any, fast: Any) -> None:
    torch.manual_seed(5)
    expected = use(plain)
    torch.manual_seed(5)
    same(expected, use(fast), "seen:")
    same(gradients(plain), gradients(fast), "gradient:")
    same(dict(plain.named_parameters()), dict(fast.named_parameters()), "weight:")


def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled with True each time fast layers run: a comparison must not hold because they never do."""
    ran: list[bool] = []
    own = FastCausalLM.hidden
    monkeypatch.setattr(FastCausalLM, "hidden", lambda *args: ran.append(True) or own(*args))
    return ran


def same(expected: Any, found: Any, where: str) -> None:
    """Numbers within TOLERANCE of the largest beside them."""
    if isinstance(expected, dict):
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            same(value, found[key], f"{where} {key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(found), where
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            same(one, other, f"{where} {number}")
    elif isinstance(expected, Tensor) and expected.is_floating_point():
        assert expected.shape == found.shape, where
        if not torch.equal(expected, found):  # among them: none at all
            apart, size = float((expected - found).abs().max()), float(expected.abs().max())
            assert apart <= TOLERANCE * size + 1e-8, f"{where}: {apart:.2g} of {size:.2g}"
    elif isinstance(expected, Tensor):
        assert torch.equal(expected, found), where
    elif isinstance(expected, float):
        assert abs(expected - found) <= TOLERANCE * max(1.0, abs(expected)), (where, expected, found)
    else:
        assert expected == found, where
