"""What is done to the model instance: fast layers, recomputation, the check against its own layers."""

from __future__ import annotations

import functools
from typing import Any

from pronghorn.dropin import saving
from pronghorn.dropin.arguments import Recompute
from pronghorn.dropin.recompute import set_recompute
from pronghorn.kernels.dispatch import say_once
from pronghorn.model.causal_lm import base_of, install


def make_fast(model: Any, recompute: Recompute | None) -> None:
    if why := install(model):
        say_once(f"{base_of(model).config.model_type} trains on transformers' own layers: {why}")
    set_recompute(model, recompute)
    model.save_pretrained_merged = functools.partial(saving.save_pretrained_merged, model)  # a pickle takes it along


def verify_loaded(model: Any, full: bool) -> None:
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
