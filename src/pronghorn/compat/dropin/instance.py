"""What is done to the model instance: fast layers, recomputation, modes, methods, the check against its own layers."""

from __future__ import annotations

import functools
from typing import Any

from pronghorn.compat.dropin import saving
from pronghorn.compat.dropin.arguments import Recompute, check_recompute
from pronghorn.compat.dropin.fast_generate import TOKENIZER, fast_generate, load_lora
from pronghorn.compat.dropin.module_walk import remember_walks
from pronghorn.compat.dropin.recompute import set_recompute
from pronghorn.compat.fused_head import answer_fused_heads
from pronghorn.compat.hf_forward import install
from pronghorn.compat.hf_generate import install_generate
from pronghorn.compat.outer_loop import loop_of
from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.text_stack import set_cache


def make_fast(model: HFModel, recompute: Recompute | None) -> None:
    if why := install(model):
        say_once(f"{base_of(model).config.model_type} uses the transformers layers (slower): {why}")
    elif (engine := engine_of(model)) is not None and engine.head.generates:
        install_generate(base_of(model))
    set_recompute(model, recompute)
    answer_fused_heads(model)
    for method in (*saving.METHODS_OF_A_MODEL, load_lora, fast_generate, for_inference, for_training, train):
        setattr(model, method.__name__, functools.partial(method, model))  # a pickle takes it along
    remember_walks(model)
    remember_walks(base_of(model))  # the FLOP count walks the model inside PEFT's


def train(model: HFModel, mode: bool = True) -> Any:
    """`model.train(mode)` that changes nothing if all modules are in this mode. A trainer calls it before every step, while
    the GPU is idle: setting the 1,300 modules of an adapted model takes 11 ms of an ARM core, reading them 0.6."""
    if any(module.training is not mode for module in model.modules()):
        type(model).train(model, mode)
    return model


def for_inference(model: HFModel) -> Any:
    """Ready to generate: no dropout, and a cache."""
    model.eval()
    set_cache(base_of(model), True)
    return model


def for_training(model: HFModel, use_gradient_checkpointing: Recompute | None = None) -> Any:
    """`use_gradient_checkpointing` None: as it was asked for before."""
    check_recompute(use_gradient_checkpointing)
    model.train()
    set_cache(base_of(model), False)
    make_fast(model, use_gradient_checkpointing)
    return model


def set_generation(model: HFModel, tokenizer: Tokenizer, fast: bool, share: float | None) -> None:
    """What `fast_generate` reads, and how much memory answers may take. `fast`: a model without fast layers is refused."""
    setattr(base_of(model), TOKENIZER, tokenizer)
    if engine_of(model) is None:
        if fast:
            raise CommandError(
                what="fast_inference=True is not supported for this model",
                why=f"{base_of(model).config.model_type} has no fast layers",
                fix="fast_inference=False, and model.generate(...)",
            )
    elif share is not None:
        loop_of(base_of(model)).generator.share = share


def verify_loaded(model: HFModel, full: bool) -> None:
    """A frozen model has no gradients to compare: its norms get them for the moment, since they stand in every layer and
    cost next to no memory."""
    from pronghorn.model.verify import verify

    norms = [] if full else [parameter for name, parameter in model.named_parameters() if "norm" in name]
    for parameter in norms:
        parameter.requires_grad_(True)
    try:
        verify(model)
    finally:
        for parameter in norms:
            parameter.requires_grad_(False)
