"""TRL's fused head, computed by ours: `model(..., labels=..., fused_lm_head=True)`.

TRL's trainers set a forward on the model that takes `fused_lm_head=True`: it calls the backbone and computes the labels'
log-probabilities from the hidden states, with three GEMMs over the head (one recomputed in backward). Ours are two
(kernels/loss/linear_log_probs.py). We answer such calls on PEFT's wrapper around the model that TRL writes to, if everything
TRL asks for is computed here; other calls go to TRL's own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import LoraModel

from pronghorn.compat.changes import OURS, why_called
from pronghorn.model.causal_lm import FastCausalLM, engine_of
from pronghorn.model.token_log_probs import token_log_probs

COMPUTED = {"log_probs", "entropy", "is_top1"}
OF_PEFT = {"adapter_names", "alora_offsets"}  # arguments that its wrapper takes for itself
TRLS = ("trl.trainer.utils", "_fused_forward")


class Asked(NamedTuple):
    """What TRL's head was set up with."""

    outputs: tuple[str, ...]
    output_class: Any


def answer_fused_heads(model: Any) -> None:
    """On this instance only."""
    if isinstance(model, PeftModel) and "forward" not in vars(model):
        model.forward = types.MethodType(_in_place_of(type(model).forward), model)


@functools.cache
def _in_place_of(own: Callable[..., Any]) -> Callable[..., Any]:

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("fused_lm_head") and not args:
            found = _answer(self, {name: value for name, value in kwargs.items() if name != "fused_lm_head"})
            if found is not None:
                return found
        return own(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return forward


def _answer(model: Any, inputs: dict[str, Any]) -> Any:
    """None: TRL computes it."""
    engine = engine_of(model)
    if engine is None or not torch.is_grad_enabled() or inputs.keys() & OF_PEFT:
        return None
    if not isinstance(model.base_model, LoraModel) or why_called("", model.base_model):
        return None
    asked = _asked(engine)
    if asked is None or inputs.get("output_router_logits"):
        return None
    count = inputs.get("num_items_in_batch")
    found = token_log_probs(
        engine, inputs | {"use_cache": False}, entropy="entropy" in asked.outputs, top="is_top1" in asked.outputs
    )
    if found is None:
        return None
    shown = slice(None) if inputs.get("shift_labels") is not None else slice(None, -1)  # the last token predicts nothing
    log_probs, mask, entropy, top = (None if value is None else value[:, shown] for value in found)
    assert log_probs is not None
    assert mask is not None
    total = mask.sum().clamp(min=1) if count is None else count
    return asked.output_class(loss=-log_probs.sum() / total, log_probs=log_probs, entropy=entropy, is_top1=top, label_mask=mask)


def _asked(engine: FastCausalLM) -> Asked | None:
    """None: the model's forward is not TRL's, or needs what is not computed here."""
    function = getattr(vars(engine.model).get("forward"), "__func__", None)
    if function is None or (function.__globals__.get("__name__"), function.__code__.co_name) != TRLS:
        return None
    names = function.__code__.co_freevars
    given = {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}
    usual = {
        "temperature": 1.0,
        "cast_lm_head_to_fp32": False,
        "final_logit_softcapping": None,
        "logit_scale": engine.lm.terms["logit_scale"],
    }
    if any(name not in given or given[name] != value for name, value in usual.items()):
        return None
    outputs, original = given.get("outputs"), getattr(given.get("original_forward"), "__func__", None)
    if not isinstance(outputs, tuple) or not COMPUTED.issuperset(outputs) or not hasattr(original, OURS):
        return None
    return Asked(outputs, function.__globals__["FusedCausalLMOutput"])
