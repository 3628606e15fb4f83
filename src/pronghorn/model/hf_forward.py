"""`forward` and `state_dict` of a Hugging Face model instance on fast layers.

Trainers call the model with rows, padded or packed, and labels; here they become packed documents: padding is removed before
the first layer, so it costs nothing, and returns as zeros in hidden states. Calls that are not covered (a cache, attention
outputs, masks with holes or four dimensions) go to the model's own forward.

Forwards are bound methods on the instance, so `copy.deepcopy` gives an independent copy.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MoeModelOutputWithPast

from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.norm.rms_norm import rms_norm
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.changes import ENGINE, OURS, inner_of, is_plain_table, why_called
from pronghorn.model.router_stats import RouterStats
from pronghorn.model.text_stack import INNER, head_of, in_use, is_classifier

if TYPE_CHECKING:
    from pronghorn.model.causal_lm import FastCausalLM

LOSSES = ("ForCausalLM", "ForConditionalGeneration")  # transformers' names for the shifted cross-entropy
# What the fast path reads, and what has no effect on it; any other argument with a value goes to the model's own forward.
READ = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "use_cache",
    "return_dict",
}
WITHOUT_EFFECT = {"cache_position", "seq_idx", "token_type_ids", "vision_feature_layer", "margin"}  # of TRL's RewardTrainer
OF_THE_OWN_FORWARD = {"past_key_values", "output_attentions", "output_hidden_states", "logits_to_keep"}  # no notice


def set_forwards(model: Any, engine: FastCausalLM) -> None:
    """On this instance only."""
    around = [] if model.model is engine.backbone else [(model.model, _around_forward)]
    own = [] if is_classifier(model.config) else [(model, _model_forward)]  # its forward calls the backbone
    object.__setattr__(model, ENGINE, engine)
    for module, forward in ((engine.backbone, _backbone_forward), *around, *own):
        object.__setattr__(module, ENGINE, engine)
        module.forward = types.MethodType(_in_place_of(type(module).forward, forward), module)
    if _separate_weights not in model._state_dict_pre_hooks.values():  # as in a model that was pickled
        model.register_state_dict_pre_hook(_separate_weights)


def _in_place_of(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Has the signature of the model's own forward, which generation and trainers read, but not `__wrapped__`: accelerate
    unwraps forwards to the innermost when it removes mixed precision, and that must be ours."""
    signature = inspect.signature(own)
    names = list(signature.parameters)[1:]
    ours = torch.compiler.disable(ours)  # torch.compile must not trace it: that takes minutes and gains nothing

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        if torch.is_inference_mode_enabled():  # tensors that stay must not be inference tensors: training uses them
            with torch.inference_mode(False), torch.no_grad():
                result = ours(self, getattr(self, ENGINE), inputs)
        else:
            result = ours(self, getattr(self, ENGINE), inputs)
        return own(self, *args, **kwargs) if result is None else result

    forward.__signature__ = signature  # type: ignore[attr-defined]
    del forward.__wrapped__  # type: ignore[attr-defined]
    setattr(forward, OURS, True)
    return forward


def _separate_weights(model: Any, prefix: str, keep_vars: bool) -> None:
    """Before `state_dict` of the model itself: saving needs each weight in its own memory, not as views of one buffer.

    Inside a PEFT model (`prefix` is not empty) it does nothing: checkpoints hold only the adapter. One group of linears is
    copied at a time, so the peak rises by the largest (0.24 GB of an 8B model); the next training step joins them again.
    """
    engine: FastCausalLM | None = getattr(model, ENGINE, None)
    if prefix or engine is None:
        return
    engine.separate()


# ---- the two forwards: None means "run your own" ---------------------------------------------------------------------


def _backbone_forward(backbone: Any, engine: FastCausalLM, inputs: dict[str, Any]) -> Any:
    pack = _pack(engine, inputs) if _covered(engine, inputs) and not engine.balance else None
    if pack is None:
        return None  # also where the experts' auxiliary loss needs the router logits
    normed = _normed(engine, _run(engine, inputs, pack))
    output = MoeModelOutputWithPast if engine.expert_layers else BaseModelOutputWithPast
    return output(last_hidden_state=pack.unpacked(normed))


def _around_forward(around: Any, engine: FastCausalLM, inputs: dict[str, Any]) -> Any:
    """For the module that merges images into the embeddings, called without images."""
    inner = engine.backbone
    if getattr(around, INNER, None) is not inner or why_called(INNER, inner) or not hasattr(vars(inner).get("forward"), OURS):
        return None  # it must be called itself
    found = _backbone_forward(around, engine, inputs)
    if found is not None:
        found.image_hidden_states = found.rope_deltas = None  # as the families' outputs have them
    return found


def _model_forward(model: Any, engine: FastCausalLM, inputs: dict[str, Any]) -> Any:
    if not _has_labels(inputs) or not _plain_loss(model) or not _covered(engine, inputs):
        return None
    if not _head_and_backbone_as_made(engine):
        return None
    pack = _pack(engine, inputs)
    if pack is None:
        return None
    targets = _targets(inputs, pack)
    if targets is None:
        say_once(
            "labels are set on padding: such batches run on the transformers layers (slower); set labels to -100 on "
            "padding and on the first token after left padding"
        )
        with paused(engine):
            return type(model).forward(model, **inputs)
    load = engine.load_of()
    rows = (targets != IGNORED).nonzero().flatten()  # synchronizes while the device is still idle
    h = _run(engine, inputs, pack, load)
    loss_sum, _ = engine.loss(h.index_select(0, rows), targets[rows])
    count = inputs.get("num_items_in_batch")
    count = len(rows) if count is None else count.to(loss_sum.device) if isinstance(count, Tensor) else count
    output = Output(loss=loss_sum / count, logits=LateLogits(engine, h, pack))
    if load is not None and load.loss is not None:
        output.loss = output.loss + engine.balance * load.loss
        output.aux_loss = load.loss
    return output


def _has_labels(inputs: dict[str, Any]) -> bool:
    return inputs.get("labels") is not None or inputs.get("shift_labels") is not None


def _targets(inputs: dict[str, Any], pack: Pack) -> Tensor | None:
    """Each token's target; None: padding has targets."""
    targets = inputs.get("shift_labels")
    targets = (_shifted(inputs["labels"]) if targets is None else targets).reshape(-1).to(pack.positions.device)
    if pack.real is None:
        return targets
    return None if _counts_padding(targets, pack.real) else targets[pack.real]


def _shifted(labels: Tensor) -> Tensor:
    """The label of each token is the next token's, within a row."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _counts_padding(targets: Tensor, real: Tensor) -> bool:
    return bool((targets != IGNORED).sum() > (targets[real] != IGNORED).sum())


@contextmanager
def paused(engine: FastCausalLM) -> Iterator[None]:
    """The model runs on its own layers."""
    engine.paused = True
    try:
        yield
    finally:
        engine.paused = False


def _look_at_norms(engine: FastCausalLM) -> None:
    """Uses the current norm modules: PEFT's modules_to_save may have replaced them since installation."""
    for norm in (engine.norm, *(norm for layer in engine.layers for norm in layer.norms)):
        norm.module = in_use(getattr(norm.parent, norm.name))


def _run(engine: FastCausalLM, inputs: dict[str, Any], pack: Pack, load: RouterStats | None = None) -> Tensor:
    _look_at_norms(engine)
    embedded, table = inputs.get("inputs_embeds"), engine.embeddings
    if embedded is None and not is_plain_table(table):
        embedded = table(inputs["input_ids"])  # a hook (NEFTune's noise) needs rows of sequences, padding included
    if embedded is None:
        ids = inputs["input_ids"].reshape(-1)
        h = engine.embed(ids if pack.real is None else ids[pack.real])
    else:
        h = embedded.flatten(0, 1)  # backward reads it, and the program may change its own
        h = engine.scaled(h.clone() if pack.real is None else h[pack.real])
    chooser = engine.chooser if torch.is_grad_enabled() else None
    if chooser is not None:
        chooser.before(len(h))
    while True:
        try:
            return _hidden(engine, h, pack, load)
        except torch.OutOfMemoryError:  # the forward is repeated and saves less; it has had no effect yet
            if not (engine.captured.give_back() or (chooser is not None and chooser.lower())):
                raise


def _hidden(engine: FastCausalLM, h: Tensor, pack: Pack, load: RouterStats | None) -> Tensor:
    out = engine.captured.hidden(h, pack.cu_seqlens, pack.longest, pack.positions)
    if out is not None:
        return out
    documents = engine.documents(pack.cu_seqlens, pack.longest, pack.positions)
    return engine.hidden(h, replace(documents, load=load, guarded=True))


def _normed(engine: FastCausalLM, h: Tensor) -> Tensor:
    return rms_norm(h, engine.norm.weight, engine.norm.eps, one_plus=engine.norm.one_plus)[0]


# ---- what is covered -------------------------------------------------------------------------------------------------


def _covered(engine: FastCausalLM, inputs: dict[str, Any]) -> bool:
    """Whether the fast layers compute what the model's own forward would, as far as the host can tell."""
    model, config = engine.model, engine.config
    given = {name for name, value in inputs.items() if not (value is None or value is False or _empty(value))} - WITHOUT_EFFECT
    if not isinstance(inputs.get("logits_to_keep", 0), Tensor) and not inputs.get("logits_to_keep", 0):
        given.discard("logits_to_keep")
    if not given <= READ:
        if odd := given - READ - OF_THE_OWN_FORWARD:
            hint = "; set SFTConfig(router_aux_loss_coef=0.0) to avoid it" if "output_router_logits" in odd else ""
            say_once(
                f"{', '.join(sorted(odd))}: not supported by the fast layers; such calls run on the transformers layers "
                f"(slower){hint}"
            )
        return False
    if ("input_ids" in given) == ("inputs_embeds" in given):
        return False  # the own forward raises its error
    mask = inputs.get("attention_mask")
    if engine.paused or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
        return False
    if (positions := inputs.get("position_ids")) is not None and positions.ndim != 2:
        return False  # of images: a row for each direction
    if engine.balance and not torch.is_grad_enabled():
        return False  # the model adds other losses
    as_tuple = inputs.get("return_dict") is False or not getattr(config, "return_dict", True)
    if as_tuple or getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
        return False
    has_labels = "labels" in given or "shift_labels" in given
    caches = inputs.get("use_cache")
    caches = (bool(getattr(config, "use_cache", False)) and not has_labels) if caches is None else bool(caches)
    if caches and not model.training:
        return False
    return _as_made(engine) and _same_precision(engine) and _same_adapters(engine)


def _empty(value: Any) -> bool:
    """Outputs of no image."""
    return isinstance(value, dict) and not value


def _plain_loss(model: Any) -> bool:
    """The usual loss, on a head that is one linear layer."""
    usual = getattr(model, "loss_type", "") in LOSSES and "_loss_function" not in vars(model)
    return usual and type(head_of(model)) is torch.nn.Linear


def _same_adapters(engine: FastCausalLM) -> bool:
    """A forward with other adapters (the reference of DPO: same weights, adapter off) may come between a forward and its
    backward, which reads the layers' state; such forwards run on the own layers."""
    now = _adapters_in_use(engine)
    if engine.trained_with not in (None, now):
        if not torch.is_grad_enabled():
            return False
        if any(layer.waiting for layer in engine.layers):
            say_once(
                "a forward with other adapters has not run its backward yet: this forward runs on the transformers "
                "layers (slower)"
            )
            return False
    if torch.is_grad_enabled():
        engine.trained_with = now
    return True


def _same_precision(engine: FastCausalLM) -> bool:
    """Autocast over frozen weights of another dtype: the buffers of weights and adapters have one dtype only."""
    weight = inner_of(engine.embeddings).weight
    kind = weight.device.type
    asked = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if asked == weight.dtype or not _adapters_in_use(engine):
        return True
    say_once(
        f"autocast to {asked} over {weight.dtype} weights with an adapter: such calls run on the transformers layers "
        f"(slower); load the model in that dtype"
    )
    return False


def _adapters_in_use(engine: FastCausalLM) -> tuple[Any, ...]:
    for layer in engine.layers:
        for group in layer.groups:
            for module in group.modules():
                if isinstance(module, LoraLayer):
                    return bool(module.disable_adapters), tuple(module.active_adapters)
    return ()


def _as_made(engine: FastCausalLM) -> bool:
    """Whether the modules are still those that the fast layers compute."""
    if why := engine.changes.why_not_now():
        say_once(f"{why}: the model runs on the transformers layers (slower) until this is undone")
    return not why


def _head_and_backbone_as_made(engine: FastCausalLM) -> bool:
    """Whether backbone and head need not be called: the loss is computed from the layers' output, without them."""
    model, backbone = engine.model, engine.backbone
    around = vars(model)["_modules"].get("model")  # the backbone itself, or what has it inside
    if backbone not in (around, getattr(around, INNER, None)):
        return False  # wrapped: it must be called
    if not all(hasattr(vars(module).get("forward"), OURS) for module in (around, backbone)):
        return False  # a forward was removed or replaced
    head = model.get_output_embeddings()
    named = {
        "the backbone": backbone,
        "the wrapper of the backbone": around,
        "the head": head,
        "the head's trained copy": head_of(model),
    }
    if why := next((why for name, module in named.items() if (why := why_called(name, module))), ""):
        say_once(f"{why}: the head is called separately, so training computes full logits")
    return not why


# ---- rows to documents -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pack:
    """The documents of a batch of rows, one after another, without its padding."""

    shape: tuple[int, int]  # rows, tokens a row with padding
    real: Tensor | None  # places of the real tokens in the flattened rows; None: all of them
    positions: Tensor
    cu_seqlens: Tensor
    longest: int

    def unpacked(self, x_TD: Tensor) -> Tensor:
        """Back to rows, with zeros for padding."""
        if self.real is None:
            return x_TD.view(*self.shape, -1)
        rows = x_TD.new_zeros(self.shape[0] * self.shape[1], x_TD.shape[1])
        return rows.index_copy(0, self.real, x_TD).view(*self.shape, -1)


def _pack(engine: FastCausalLM, inputs: dict[str, Any]) -> Pack | None:
    """None: a mask with holes, or image tokens, which see each other. Synchronizes twice a batch if a mask or positions must be
    read."""
    types = inputs.get("token_type_ids")
    if types is not None and engine.backbone is not engine.model.model and bool(types.any()):
        return None
    ids = inputs.get("input_ids")
    tokens = inputs["inputs_embeds"] if ids is None else ids
    rows, length = int(tokens.shape[0]), int(tokens.shape[1])
    device, mask, positions = tokens.device, inputs.get("attention_mask"), inputs.get("position_ids")
    in_row = torch.arange(length, device=device)[None] if positions is None else positions
    flat = in_row.expand(rows, -1).reshape(-1)
    if mask is not None:
        return _without_padding((rows, length), mask.to(device) != 0, flat)
    given = inputs.get("cu_seq_lens_q")
    if given is not None and inputs.get("max_length_q") is not None:
        return Pack((rows, length), None, flat, given.to(torch.int32), int(inputs["max_length_q"]))
    if positions is None:
        return _whole_rows((rows, length), flat)
    starts = torch.ones(rows, length, dtype=torch.bool, device=device)
    starts[:, 1:] = flat.view(rows, length).diff(dim=1) != 1  # a packed row: positions restart
    return Pack((rows, length), None, flat, *_bounds(starts.view(-1)))


def _bounds(starts_T: Tensor) -> tuple[Tensor, int]:
    cu_seqlens = torch.nn.functional.pad(starts_T.nonzero().flatten(), (0, 1), value=starts_T.shape[0])
    return cu_seqlens.to(torch.int32), int(cu_seqlens.diff().max())


def _whole_rows(shape: tuple[int, int], flat: Tensor) -> Pack:
    rows, length = shape
    cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=flat.device)
    return Pack(shape, None, flat, cu_seqlens, length)


def _without_padding(shape: tuple[int, int], mask: Tensor, flat: Tensor) -> Pack | None:
    if tuple(mask.shape) != shape:
        return None
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    runs, lengths = begins.sum(1), mask.sum(1)
    most_runs, fewest_runs, shortest = torch.stack([runs.max(), runs.min(), lengths.min()]).tolist()
    if most_runs > 1 or fewest_runs < 1:
        return None
    if shortest == shape[1]:
        return _whole_rows(shape, flat)
    real = mask.reshape(-1).nonzero().flatten()
    return Pack(shape, real, flat[real], *_bounds(begins.reshape(-1)[real]))


# ---- what comes back -------------------------------------------------------------------------------------------------


class LateLogits:
    """Logits computed on access: most training loops do not read them, and they are the largest tensor of a step."""

    def __init__(self, engine: FastCausalLM, h: Tensor, pack: Pack) -> None:
        self._engine, self._h, self._pack = engine, h, pack

    def compute(self) -> Tensor:
        """Differentiable while gradients are recorded, so an additional loss on logits trains, too."""
        engine = self._engine
        logits: Tensor = engine.model.get_output_embeddings()(self._pack.unpacked(_normed(engine, self._h)))
        logits = logits * engine.head_terms["logit_scale"]
        cap = engine.head_terms["softcap"]
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

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.logits if key == "logits" and "logits" in self else dict(super().items())[key]
        return self.to_tuple()[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (this is `get`)

    def items(self) -> Any:
        if not torch.is_grad_enabled():
            _ = self.logits
        return super().items()

    def values(self) -> Any:
        return dict(self.items()).values()
