"""`forward` of a Hugging Face model instance on fast layers.

Trainers call the model with rows and labels; the fast layers answer where they cover the call (outer_loop.py). Everything else
(a cache, attention outputs, masks with holes or four dimensions) goes to the model's own forward.

Forwards are bound methods on the instance, so `copy.deepcopy` gives an independent copy.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import ModelOutput

from pronghorn.compat.changes import OURS, why_called
from pronghorn.compat.outer_loop import OuterLoop
from pronghorn.compat.rows_to_documents import Inputs, Pack, packed
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.norm.rms_norm import rms_norm
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model import causal_lm
from pronghorn.model.causal_lm import ENGINE, FastCausalLM, base_of
from pronghorn.model.text_stack import INNER, backbone

# What heads of some families read of the backbone's output, for themselves or to hand it on.
BESIDE = ("image_hidden_states", "audio_hidden_states", "rope_deltas", "shared_kv_states", "router_logits")
Answer = Callable[[PreTrainedModel, OuterLoop, Inputs], ModelOutput | None]


def install(model: PreTrainedModel, *, fp8: bool = False) -> str:
    """`causal_lm.install`, and fast layers for calls of the model. On this instance only."""
    base = base_of(model)
    for part in (base, base.model, backbone(base)) if getattr(base, ENGINE, base) is None else ():
        if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
            del part.forward  # its own: a pickle leaves it so
    if why := causal_lm.install(base, fp8=fp8):
        return why
    engine: FastCausalLM = getattr(base, ENGINE)
    if engine.outer_loop is not None:
        return ""
    engine.outer_loop = OuterLoop(engine)
    around = [] if base.model is engine.backbone else [(base.model, _around_forward)]
    own = [(base, _model_forward)] if engine.head.generates else []  # the forward of another head calls the backbone
    for module, forward in ((engine.backbone, _backbone_forward), *around, *own):
        object.__setattr__(module, ENGINE, engine)
        module.forward = types.MethodType(_in_place_of(type(module).forward, forward), module)
    return ""


def _in_place_of(own: Callable[..., Any], ours: Answer) -> Callable[..., Any]:
    """Has the signature of the model's own forward, which generation and trainers read, but not `__wrapped__`: accelerate
    unwraps forwards to the innermost when it removes mixed precision, and that must be ours."""
    signature = inspect.signature(own)
    names = list(signature.parameters)[1:]
    answer: Answer = torch.compiler.disable(ours)  # torch.compile must not trace it: that takes minutes and gains nothing

    @functools.wraps(own)
    def forward(self: PreTrainedModel, *args: object, **kwargs: object) -> Any:
        inputs, loop = dict(zip(names, args, strict=False)) | kwargs, getattr(self, ENGINE).outer_loop
        if torch.is_inference_mode_enabled():  # tensors that stay must not be inference tensors: training uses them
            with torch.inference_mode(False), torch.no_grad():
                result = answer(self, loop, inputs)
        else:
            result = answer(self, loop, inputs)
        return own(self, *args, **kwargs) if result is None else result

    forward.__signature__ = signature  # type: ignore[attr-defined]
    del forward.__wrapped__  # type: ignore[attr-defined]
    setattr(forward, OURS, True)
    return forward


# ---- the forwards: None means "run your own" -------------------------------------------------------------------------


def _backbone_forward(module: PreTrainedModel, loop: OuterLoop, inputs: Inputs) -> ModelOutput | None:
    engine = loop.engine
    pack = packed(engine, inputs) if loop.covers(inputs) and not engine.balance else None
    if pack is None:
        return None  # also where the experts' auxiliary loss needs the router logits
    output = MoeModelOutputWithPast if engine.expert_layers else BaseModelOutputWithPast
    found = output(last_hidden_state=pack.unpacked(_normed(engine, loop.run(inputs, pack))))
    for name in BESIDE:
        if not hasattr(found, name):
            setattr(found, name, None)
    return found


def _around_forward(around: PreTrainedModel, loop: OuterLoop, inputs: Inputs) -> ModelOutput | None:
    """For the module that merges images into the embeddings, called without images."""
    inner = loop.engine.backbone
    if why_called(INNER, inner) or getattr(around, INNER, None) is not inner or not hasattr(vars(inner).get("forward"), OURS):
        return None  # it must be called itself
    return _backbone_forward(around, loop, inputs)


def _model_forward(model: PreTrainedModel, loop: OuterLoop, inputs: Inputs) -> ModelOutput | None:
    engine, batch = loop.engine, loop.with_labels(inputs)
    if batch is None:
        return None
    pack, targets = batch
    if targets is None:
        say_once(
            "labels are set on padding: such batches run on the transformers layers (slower); set labels to -100 on "
            "padding and on the first token after left padding"
        )
        with loop.own_layers():
            return type(model).forward(model, **inputs)
    load = engine.load_of()
    rows = (targets != IGNORED).nonzero().flatten()  # synchronizes while the device is still idle
    h = loop.run(inputs, pack, load)
    loss_sum, _ = engine.lm.loss(h.index_select(0, rows), targets[rows])
    count = inputs.get("num_items_in_batch")
    count = len(rows) if count is None else count.to(loss_sum.device) if isinstance(count, Tensor) else count
    output = Output(loss=loss_sum / count, logits=LateLogits(engine, h, pack))
    if load is not None and load.loss is not None:
        output.loss = output.loss + engine.balance * load.loss
        output.aux_loss = load.loss
    return output


def _normed(engine: FastCausalLM, h: Tensor) -> Tensor:
    return rms_norm(h, engine.norm.weight, engine.norm.eps, **engine.norm.form)[0]


# ---- what comes back -------------------------------------------------------------------------------------------------


class LateLogits:
    """Logits computed on access: most training loops do not read them, and they are the largest tensor of a step."""

    def __init__(self, engine: FastCausalLM, h: Tensor, pack: Pack) -> None:
        self._engine, self._h, self._pack = engine, h, pack

    def compute(self) -> Tensor:
        """Differentiable while gradients are recorded, so an additional loss on logits trains, too."""
        engine = self._engine
        logits: Tensor = engine.model.get_output_embeddings()(self._pack.unpacked(_normed(engine, self._h)))
        logits = logits * engine.lm.terms["logit_scale"]
        cap = engine.lm.terms["softcap"]
        return torch.tanh(logits / cap) * cap if cap else logits


class Output(CausalLMOutputWithPast):  # type: ignore[misc]
    """Loss, and logits by any of the ways in which a `ModelOutput` is read.

    While gradients are recorded, going through all items leaves the logits uncomputed: accelerate and DDP do so in every
    training step.
    """

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "logits" and isinstance(value, LateLogits):
            value = self["logits"] = value.compute()  # stored, so that changes and retained gradients persist
        return value

    def __getitem__(self, key: object) -> Any:
        if isinstance(key, str):
            return self.logits if key == "logits" and "logits" in self else dict(super().items())[key]
        return self.to_tuple()[key]

    def get(self, key: object, default: object = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (this is `get`)

    def items(self) -> Any:
        if not torch.is_grad_enabled():
            _ = self.logits
        return super().items()

    def values(self) -> Any:
        return dict(self.items()).values()
