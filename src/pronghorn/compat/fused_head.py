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
from torch import Tensor

from pronghorn.compat.changes import OURS, why_called
from pronghorn.compat.outer_loop import loop_of
from pronghorn.compat.rows_to_documents import Inputs
from pronghorn.hf_types import HFModel
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.loss.linear_log_probs import linear_log_probs
from pronghorn.model.causal_lm import FastCausalLM, engine_of
from pronghorn.model.text_stack import head_of

COMPUTED = {"log_probs", "entropy", "is_top1"}
OF_PEFT = {"adapter_names", "alora_offsets"}  # arguments that its wrapper takes for itself
TRLS = ("trl.trainer.utils", "_fused_forward")


class HeadSettings(NamedTuple):
    """What TRL's head was set up with."""

    outputs: tuple[str, ...]
    output_class: Any
    temperature: float  # logits are divided by it


def answer_fused_heads(model: HFModel) -> None:
    """On this instance only."""
    if isinstance(model, PeftModel) and "forward" not in vars(model):
        model.forward = types.MethodType(_in_place_of(type(model).forward), model)


@functools.cache
def _in_place_of(own: Callable[..., Any]) -> Callable[..., Any]:

    def forward(self: object, *args: object, **kwargs: object) -> Any:
        if kwargs.get("fused_lm_head") and not args:
            found = _answer(self, {name: value for name, value in kwargs.items() if name != "fused_lm_head"})
            if found is not None:
                return found
        return own(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return forward


def _answer(model: HFModel, inputs: dict[str, Any]) -> Any:
    """None: TRL computes it."""
    engine = engine_of(model)
    if engine is None or not torch.is_grad_enabled() or inputs.keys() & OF_PEFT:
        return None
    if not isinstance(model.base_model, LoraModel) or why_called("", model.base_model):
        return None
    asked = _asked(engine)
    if asked is None or inputs.get("output_router_logits"):
        return None
    found = _token_log_probs(engine, inputs | {"use_cache": False}, asked)
    if found is None:
        return None
    shown = slice(None) if inputs.get("shift_labels") is not None else slice(None, -1)  # the last token predicts nothing
    values = {name: value[:, shown] for name, value in found.items()}
    count = inputs.get("num_items_in_batch")
    total = values["label_mask"].sum().clamp(min=1) if count is None else count
    return asked.output_class(loss=-values["log_probs"].sum() / total, **values)


def _token_log_probs(engine: FastCausalLM, inputs: Inputs, asked: HeadSettings) -> dict[str, Tensor] | None:
    """A value for each token of each row, of the label that it predicts; 0 where it has none. None: the model's own layers must
    compute logits."""
    loop, head = loop_of(engine.model), head_of(engine.model)
    if type(head) is not torch.nn.Linear or head.bias is not None or head.weight.requires_grad:
        return None
    if engine.expert_layers or engine.lm.terms["softcap"]:
        return None
    pack, targets = loop.with_labels(inputs) or (None, None)
    if pack is None or targets is None:
        return None
    rows = (targets != IGNORED).nonzero().flatten()  # synchronizes while the device is idle
    h = loop.run(inputs, pack).index_select(0, rows)
    with torch.autocast(h.device.type, enabled=False):
        x, weight, _ = engine.lm.inputs(h)
        terms = engine.lm.terms | {"logit_scale": engine.lm.terms["logit_scale"] / asked.temperature}
        beside = {"entropy": "entropy" in asked.outputs, "top": "is_top1" in asked.outputs}
        found = linear_log_probs(x, weight, targets[rows], **beside, **terms)
    places, shape = rows if pack.real is None else pack.real[rows], pack.shape
    values = {
        "log_probs": found.log_probs,
        "label_mask": torch.ones_like(rows, dtype=torch.bool),
        "entropy": found.entropy,
        "is_top1": found.top,
    }
    return {
        name: value.new_zeros(shape[0] * shape[1]).index_copy(0, places, value).view(shape)
        for name, value in values.items()
        if value is not None
    }


def _asked(engine: FastCausalLM) -> HeadSettings | None:
    """None: the model's forward is not TRL's, or needs what is not computed here."""
    function = getattr(vars(engine.model).get("forward"), "__func__", None)
    if function is None or (function.__globals__.get("__name__"), function.__code__.co_name) != TRLS:
        return None
    names = function.__code__.co_freevars
    given = {name: cell.cell_contents for name, cell in zip(names, function.__closure__ or (), strict=True)}
    usual = {"cast_lm_head_to_fp32": False, "final_logit_softcapping": None, "logit_scale": engine.lm.terms["logit_scale"]}
    if any(name not in given or given[name] != value for name, value in usual.items()):
        return None
    outputs, original = given.get("outputs"), getattr(given.get("original_forward"), "__func__", None)
    temperature = given.get("temperature")
    if not isinstance(temperature, float | int) or temperature <= 0:
        return None
    if not isinstance(outputs, tuple) or not COMPUTED.issuperset(outputs) or not hasattr(original, OURS):
        return None
    return HeadSettings(outputs, function.__globals__["FusedCausalLMOutput"], float(temperature))
