"""A loop of another library, which calls the model itself: what the fast layers cover, and how they run then.

Rows, padded or packed, become packed documents (rows_to_documents.py): padding is removed before the first layer, so it costs
nothing. Other code may run between forward and backward (same_weights.py), change the model at any time (changes.py) and take
all memory that is left (`Chooser`). Calls that are not covered go to the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import PreTrainedModel

from pronghorn.compat.captured_layers import CapturedLayers
from pronghorn.compat.changes import OURS, Changes, is_plain_table, why_called
from pronghorn.compat.kept_generator import KeptGenerator, Look
from pronghorn.compat.rows_to_documents import Inputs, Pack, packed, targets_of
from pronghorn.compat.same_weights import SameWeights
from pronghorn.generation.generator import Completion, Request
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.causal_lm import FastCausalLM, engine_of
from pronghorn.model.layers.types import Documents
from pronghorn.model.router_stats import RouterStats
from pronghorn.model.text_stack import INNER, head_of, in_use, inner_of
from pronghorn.packs import PackedDocuments

Adapters = tuple[bool, tuple[str, ...]] | tuple[()]  # whether they are off, which are active; () without any
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


class Chooser(Protocol):
    """dropin.recompute.KeptByMemory, as used here."""

    @property
    def planned_bytes(self) -> int: ...  # the peak, answers included; 0: not planned

    def before(self, tokens: int) -> None: ...  # a batch that trains
    def lower(self) -> bool: ...  # after its forward ran out of memory: whether the layers save less now


class OuterLoop:
    """What a loop of another library needs beside the engine, of one model."""

    def __init__(self, engine: FastCausalLM) -> None:
        self.engine = engine
        self.changes = Changes(engine)
        self.captured = CapturedLayers(engine)
        self.generator = KeptGenerator(engine)
        self.chooser: Chooser | None = None  # of what the layers save
        self.paused = False  # calls run on the model's own layers
        self._trained_with: Adapters | None = None  # by the latest forward that recorded gradients

    @contextmanager
    def own_layers(self) -> Iterator[None]:
        """Calls run on the model's own layers."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def forget_graphs(self) -> None:
        self.captured.forget()

    def run(self, inputs: Inputs, pack: Pack, load: RouterStats | None = None) -> Tensor:
        """The residual stream after the last layer."""
        engine = self.engine
        look_at_norms(engine)
        embedded, table = inputs.get("inputs_embeds"), engine.embeddings
        if embedded is None and not is_plain_table(table):
            embedded = table(inputs["input_ids"])  # a hook (NEFTune's noise) needs rows of sequences, padding included
        if embedded is None:
            ids = inputs["input_ids"].reshape(-1)
            h = engine.embed(ids if pack.real is None else ids[pack.real])
        else:
            h = embedded.flatten(0, 1)  # backward reads it, and the program may change its own
            ids = inputs.get("input_ids")
            of_rows = None if ids is None else ids.reshape(-1) if pack.real is None else ids.reshape(-1)[pack.real]
            h = engine.embed.scaled(h.clone() if pack.real is None else h[pack.real], of_rows)
        chooser = self.chooser if torch.is_grad_enabled() else None
        if chooser is not None:
            chooser.before(len(h))
        while True:
            try:
                with self._with_adapters():
                    return self._hidden(h, pack, load)
            except torch.OutOfMemoryError:  # the forward is repeated and saves less; it has had no effect yet
                given = self.captured.give_back() or self.generator.give_back()
                if not (given or (chooser is not None and chooser.lower())):
                    raise

    def answers(self, requests: Sequence[Request], dtype: torch.dtype, look: Look | None = None) -> list[list[Completion]]:
        """`dtype`: of the layers. Outside of autocast and inference mode. `look`: at answers while they grow."""
        look_at_norms(self.engine)
        with self._with_adapters():
            try:
                return self.generator.answers(requests, dtype, look)
            except torch.OutOfMemoryError:
                if look or not self.captured.give_back():
                    raise
            return self.generator.answers(requests, dtype)

    def _hidden(self, h: Tensor, pack: Pack, load: RouterStats | None) -> Tensor:
        out = self.captured.hidden(h, pack.cu_seqlens, pack.longest, pack.positions)
        if out is not None:
            return out
        packed = PackedDocuments(cu_seqlens=pack.cu_seqlens, longest=pack.longest, positions_T=pack.positions)
        documents = Documents.of(packed, self.engine.positions)
        return self.engine.hidden(h, replace(documents, load=load, guard=SameWeights(self.engine, h.dtype)))

    # ---- what is covered -----------------------------------------------------------------------------------------

    def covers(self, inputs: Inputs) -> bool:
        """Whether the fast layers compute what the model's own forward would, as far as the host can tell."""
        model, config = self.engine.model, self.engine.config
        given = {name for name, value in inputs.items() if not _is_absent(value)} - WITHOUT_EFFECT
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
        if "inputs_embeds" in given and self.engine.embed.by_layer is not None:
            return False  # the inputs of layers depend on ids
        mask = inputs.get("attention_mask")
        if self.paused or not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            return False
        if (positions := inputs.get("position_ids")) is not None and positions.ndim != 2:
            return False  # of images: a row for each direction
        if self.engine.balance and not torch.is_grad_enabled():
            return False  # the model adds other losses
        as_tuple = inputs.get("return_dict") is False or not getattr(config, "return_dict", True)
        if as_tuple or getattr(config, "output_attentions", False) or getattr(config, "output_hidden_states", False):
            return False
        has_labels = "labels" in given or "shift_labels" in given
        caches = inputs.get("use_cache")
        caches = (bool(getattr(config, "use_cache", False)) and not has_labels) if caches is None else bool(caches)
        if caches and not model.training:
            return False
        return self._as_made() and self._same_precision() and self._same_adapters()

    def _same_adapters(self) -> bool:
        """A forward with other adapters (the reference of DPO: adapters off, or TRL's "ref") may come between a forward and its
        backward, which reads the layers' state; such forwards run on the own layers, unless the weights that train can have
        their values meanwhile."""
        now = self._adapters_in_use()
        if self._trained_with not in (None, now):
            if not torch.is_grad_enabled():
                return self._in_place_of_trained(now) is not None
            if any(layer.waiting for layer in self.engine.layers):
                say_once(
                    "a forward with other adapters has not run its backward yet: this forward runs on the transformers "
                    "layers (slower)"
                )
                return False
        if torch.is_grad_enabled():
            self._trained_with = now
        return True

    def _in_place_of_trained(self, now: Adapters) -> list[tuple[Tensor, Tensor | None]] | None:
        """Pairs of the weights that train and of those in use, or nothing. None: they are not of the same kind."""
        if not now or not self._trained_with or self._trained_with[0] or not self.engine.adapters_are_fused:
            return None
        (off, mine), (_, trained) = now, self._trained_with
        if len(trained) != 1 or (len(mine) != 1 and not off):
            return None
        found: list[tuple[Tensor, Tensor | None]] = []
        for module in self._lora():
            if trained[0] not in module.lora_A or (not off and mine[0] not in module.lora_A):
                return None
            if off:
                found.append((module.lora_B[trained[0]].weight, None))
                continue
            for half in (module.lora_A, module.lora_B):
                own, other = half[trained[0]].weight, half[mine[0]].weight
                if own.shape != other.shape or module.scaling[mine[0]] != module.scaling[trained[0]]:
                    return None
                found.append((own, other))
        return found

    @contextmanager
    def _with_adapters(self) -> Iterator[None]:
        """Inside, PEFT's modules say what they say in training, and the weights that train have the values of those in use."""
        now = self._adapters_in_use()
        pairs = None if torch.is_grad_enabled() or self._trained_with in (None, now) else self._in_place_of_trained(now)
        if pairs is None:
            yield
            return
        assert self._trained_with
        states = [(module, module._disable_adapters, module._active_adapter) for module in self._lora()]
        for module, *_ in states:
            module._disable_adapters, module._active_adapter = False, list(self._trained_with[1])
        try:
            with self.engine.adapters_from(pairs):
                yield
        finally:
            for module, off, active in states:
                module._disable_adapters, module._active_adapter = off, active

    def _lora(self) -> Iterator[LoraLayer]:
        linears = [module for layer in self.engine.layers for group in layer.groups for module in group.modules()]
        yield from (module for module in (*linears, *self.engine.called) if isinstance(module, LoraLayer))

    def why_not_generating(self, dtype: torch.dtype) -> str:
        """Why answers must be generated by calling the model; empty if the fast layers generate the same. `dtype`: of autocast,
        or of the weights."""
        model, backbone = self.engine.model, self.engine.backbone
        around, table, head = model.model, self.engine.embeddings, model.get_output_embeddings()
        if self.paused or not all(hasattr(vars(module).get("forward"), OURS) for module in (around, backbone)):
            return "the forward of the backbone was replaced"
        if type(head_of(model)) is not torch.nn.Linear:
            return "the LM head is not a linear layer"
        if why := self.changes.why_not_now():
            return why
        named = {"the backbone": backbone, "its wrapper": around, "the embeddings": table, "the head": head}
        if why := next((why for name, module in named.items() if (why := why_called(name, module))), ""):
            return why
        now = self._adapters_in_use()
        if now and dtype != inner_of(table).weight.dtype:
            return f"autocast to {dtype} over {inner_of(table).weight.dtype} weights with an adapter"
        other = self._trained_with not in (None, now) and self._in_place_of_trained(now) is None
        if other and any(layer.waiting for layer in self.engine.layers):
            return "a forward with other adapters has not run its backward yet"
        return ""

    def _same_precision(self) -> bool:
        """Autocast over frozen weights of another dtype: the buffers of weights and adapters have one dtype only."""
        weight = inner_of(self.engine.embeddings).weight
        kind = weight.device.type
        asked = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        if asked == weight.dtype or not self._adapters_in_use():
            return True
        say_once(
            f"autocast to {asked} over {weight.dtype} weights with an adapter: such calls run on the transformers layers "
            f"(slower); load the model in that dtype"
        )
        return False

    def _adapters_in_use(self) -> Adapters:
        module = next(self._lora(), None)
        return () if module is None else (bool(module.disable_adapters), tuple(module.active_adapters))

    def _as_made(self) -> bool:
        """Whether the modules are still those that the fast layers compute."""
        if why := self.changes.why_not_now():
            say_once(f"{why}: the model runs on the transformers layers (slower) until this is undone")
        return not why

    def with_labels(self, inputs: Inputs) -> tuple[Pack, Tensor | None] | None:
        """A batch whose loss depends on the layers' output, and its targets (None: padding has targets). None: the model's own
        forward must run."""
        model = self.engine.model
        usual = getattr(model, "loss_type", "") in LOSSES and "_loss_function" not in vars(model)
        if not usual or type(head_of(model)) is not torch.nn.Linear:
            return None
        if inputs.get("labels") is None and inputs.get("shift_labels") is None:
            return None
        pack = packed(self.engine, inputs) if self.covers(inputs) and self._needs_no_call() else None
        return None if pack is None else (pack, targets_of(inputs, pack))

    def _needs_no_call(self) -> bool:
        """Whether backbone and head need not be called: the loss is computed from the layers' output, without them."""
        model, backbone = self.engine.model, self.engine.backbone
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


def _is_absent(value: object) -> bool:
    return value is None or value is False or (isinstance(value, dict) and not value)  # outputs of no image


def loop_of(model: PreTrainedModel) -> OuterLoop:
    """The outer loop of a model whose calls the fast layers answer."""
    engine = engine_of(model)
    assert engine is not None
    assert isinstance(engine.outer_loop, OuterLoop)
    return engine.outer_loop


def look_at_norms(engine: FastCausalLM) -> None:
    """Uses the current norm modules: PEFT's modules_to_save may have replaced them since installation."""
    for norm in (engine.norm, *(norm for layer in engine.layers for norm in layer.norms)):
        norm.module = in_use(getattr(norm.parent, norm.name))
