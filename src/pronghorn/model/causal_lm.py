"""A causal language model on fast layers: hidden states and loss of packed documents, beside the model's own forward.

`FastCausalLM` is an object beside the Hugging Face model, whose classes, modules and forward stay untouched. Training and
generation/ call the engine. Loops of other libraries call the model: compat/hf_forward.py sets forwards on the instance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor

from pronghorn.hf_types import HFModel
from pronghorn.kernels.lora.fp8_lora import SplitTable
from pronghorn.kernels.lora.multi_copy import CopyTable
from pronghorn.kernels.lora.nf4_rows import reading_bits
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.families import family_of, input_width, num_experts, why_not_fast
from pronghorn.model.head import PackedRows
from pronghorn.model.heads import head_in
from pronghorn.model.heads.lm import LmHead
from pronghorn.model.inputs.by_layer import LayerInputs
from pronghorn.model.inputs.embed import Embed
from pronghorn.model.layers.build import build_layer
from pronghorn.model.layers.fp8_gemms import trains_whole
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.lora_modules import why_only_peft
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.saved import Elsewhere
from pronghorn.model.layers.shared_pack import Group
from pronghorn.model.layers.types import Beside, Documents, Shards
from pronghorn.model.positions import Positions
from pronghorn.model.router_stats import ExpertCounts, RouterStats, padding_mask
from pronghorn.model.text_stack import backbone, inner_of
from pronghorn.packs import WHOLE, PackedBatch

T = TypeVar("T")
ENGINE = "_pronghorn_engine"  # attribute of a model instance: its fast layers
KNOWN_PACKAGES = ("torch", "transformers", "peft", "pronghorn")


class Offload(Elsewhere, Protocol):
    """memory.offload.OffloadPool, as the model uses it."""

    def start_prefetch(self) -> None: ...
    def finish(self) -> None: ...


class OuterLoop(Protocol):
    """compat.outer_loop.OuterLoop, as the model uses it: a loop of another library, which calls the model itself."""

    def own_layers(self) -> AbstractContextManager[None]: ...  # calls of the model run on its own layers
    def forget_graphs(self) -> None: ...  # which read buffers that are replaced now


class FastCausalLM:
    def __init__(self, model: HFModel, *, fp8: bool = False) -> None:
        """`fp8`: layers stored in 4 bits, and trained ones, multiply in FP8, as those stored in FP8 always do."""
        config = model.config.get_text_config()
        family = family_of(config)
        self.model, self.config, self.backbone, self.names = model, config, backbone(model), family.names
        self.buffers = SharedBuffers()
        self.layers: list[DecoderLayer] = []
        self.expert_layers: list[int] = []  # indices of layers with experts
        for i, layer in enumerate(self.backbone.layers):
            slot = None if family.holder_of_experts(layer) is None else len(self.expert_layers)
            below = self.layers[-1] if self.layers else None
            self.layers.append(build_layer(layer, family, config, i, self.buffers, below, slot=slot, fp8=fp8))
            self.expert_layers += [i] if slot is not None else []
        self.expert_counts: ExpertCounts | None = None  # made by the first step
        asked = self.expert_layers and getattr(config, "output_router_logits", False)
        # weight of the routers' auxiliary loss, which a classifier has not
        self.balance = float(getattr(model, "router_aux_loss_coef", 0.0)) if asked else 0.0
        one_plus = family.one_plus and family.last_one_plus
        width, last = int(config.hidden_size), family.names.last_norm
        self.norm = Norm(self.backbone, last, one_plus, width=width, centered=family.centered)
        normed = self.norm if family.norm_first else None
        by_root = bool(family.root_width) and bool(getattr(config, family.root_width))
        multiplier = width**0.5 if by_root else float(getattr(config, "embedding_multiplier", 1.0))
        by_layer = LayerInputs(self.backbone, config) if input_width(config) else None
        self.embed = Embed(model, self.backbone, family.names.embeddings, multiplier, normed, by_layer)
        self.head = head_in(model.config)(self)
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        head_widths = {mixer.rope: mixer.head_width for mixer in mixers if mixer.rope is not None}
        in_chunks = any(mixer.in_chunks for mixer in mixers)
        self.positions = Positions(self.backbone, config, head_widths, in_chunks=in_chunks)
        self._adapters: CopyTable | None = None
        self._adapters_fp8 = SplitTable([])
        self.offload: Offload | None = None  # shared by the layers that offload
        self.context: Group | None = None  # ranks that share packs
        self.shards: Shards | None = None  # of weights that are spread over ranks; the layers have it, too
        self.prepared = 0  # how often
        self.rebuilt = 0  # how often buffers that the layers read were rebuilt: a graph captured before reads freed ones
        self.outer_loop: OuterLoop | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FastCausalLM:
        """Belongs to the copied model."""
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for layer in twin.layers:
            layer.waiting = WeakSet()  # a copied one never forgets: its callbacks belong to the original
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model (`torch.save(model)`) is the plain Hugging Face one: instance attributes are not pickled."""
        return left_behind, ()

    @property
    def can_chunk_mlp(self) -> bool:
        """Whether the layers can run their MLP in chunks (layers/mlps/dense.py): not mixtures of experts, nor FP8 with trained
        weights, which has not been tried."""
        trained = any(group.fp8 and any(map(trains_whole, group.modules())) for layer in self.layers for group in layer.groups)
        return not trained and not self.expert_layers

    @property
    def can_run_dry(self) -> bool:
        """Whether a step can run without our kernels (compile_ahead.py). Not with experts, whose rows kernels index; not in
        FP8, which keeps weights that kernels cast; not with offloading, which holds whole batches only."""
        groups = [group for layer in self.layers for group in layer.groups]
        fp8 = any(group.fp8 for group in groups)
        return not (self.expert_layers or fp8 or self.offload or self.embed.on_host)

    def accumulate_weights(self, on: bool) -> None:
        """Whether GEMMs accumulate weight gradients in `.grad` themselves, without autograd."""
        for layer in self.layers:
            for group in layer.groups:
                group.accumulate_weights = on

    @property
    def embeddings(self) -> Any:
        """The table's module, or PEFT's wrapper around it."""
        return self.embed.table

    @property
    def lm(self) -> LmHead:
        """The head, of a language model."""
        assert isinstance(self.head, LmHead)
        return self.head

    @property
    def extra(self) -> int:
        """Columns that the last layer adds to the gradient of the head's rows."""
        return self.layers[-1].extra

    def hidden(self, h_TD: Tensor, documents: Documents, rows: Tensor | None = None) -> Tensor:
        """The residual stream after the last layer, before the final norm: of all tokens, or of `rows`."""
        self.prepare(h_TD.dtype)
        return self.prepared_hidden(h_TD, documents, rows)

    def prepared_hidden(self, h_TD: Tensor, documents: Documents, rows: Tensor | None = None) -> Tensor:
        """The same after `prepare`, while weights and adapters stay as they are."""
        load = documents.load
        late = rows is not None and load is not None and load.coefficient != 0.0  # the auxiliary loss counts all tokens
        # The layers choose their precision themselves.
        with torch.autocast(h_TD.device.type, enabled=False), reading_bits(documents.cache is not None):
            h_TD, *inputs_TE = self.embed.parts(h_TD)
            beside = Beside(inputs_TE) if inputs_TE or any(layer.lends for layer in self.layers) else None
            for layer in self.layers[:-1]:
                h_TD = layer(h_TD, documents, beside=beside)
            h_TD = self.layers[-1](h_TD, documents, None if late else rows, beside)
            if load is not None:
                h_TD = self._counted(load, h_TD)
            if late and rows is not None:
                h_TD = h_TD.index_select(0, rows)
        if self.offload is not None and torch.is_grad_enabled():
            self.offload.start_prefetch()  # while the head runs
        return h_TD

    def _counted(self, load: RouterStats, h_TD: Tensor) -> Tensor:
        if self.expert_counts is None:
            self.expert_counts = ExpertCounts(self.expert_layers, load.stats_L2E.shape[2], h_TD.device)
        self.expert_counts.add(load)
        return load.balanced(h_TD)

    def load_of(
        self,
        labels_N: Tensor | None = None,
        spans_2T: Tensor | None = None,
        rows: Tensor | None = None,
        tokens: int | None = None,
    ) -> RouterStats | None:
        """Router statistics of a training forward. `labels_N` (of all tokens or of `rows`), `spans_2T`: of a pack with padding
        at its end. `tokens`: how many come before it, where others have some of the labels."""
        if not self.expert_layers or not torch.is_grad_enabled():
            return None
        real_T = real_rows = None
        if labels_N is not None and spans_2T is not None:
            if tokens is None:
                real_T = padding_mask(labels_N, rows, spans_2T, IGNORED)
            else:
                real_T = (torch.arange(spans_2T.shape[1], device=labels_N.device) < tokens).float()
            real_rows = None if rows is None else (labels_N != IGNORED).float()
        return RouterStats(
            len(self.expert_layers),
            num_experts(self.config),
            inner_of(self.embeddings).weight.device,
            coefficient=self.balance,
            real_T=real_T,
            real_rows=real_rows,
        )

    def prepare(self, dtype: torch.dtype) -> None:
        """Refreshes the weights and adapters that the layers read. On every forward: nothing reliably signals an optimizer
        step."""
        self.prepared += 1
        if self.shards is not None and self.shards.prepare(dtype):
            return
        moved = [layer.prepare(dtype) for layer in self.layers]  # all of them, not up to the first
        if any(moved) or self._adapters is None:
            self.rebuilt += 1
            groups = [group for layer in self.layers for group in layer.groups]
            self._adapters = CopyTable([job for group in groups for job in group.copy_jobs])
            self._adapters_fp8 = SplitTable([job for group in groups for job in group.split_jobs])
        self._adapters.run()
        self._adapters_fp8.run()

    @property
    def adapters_are_fused(self) -> bool:
        """Whether all adapters are plain LoRA of linears whose weights are read anew each time: by GEMMs of ours, or called."""
        tuned = self._tuned()
        groups = [group for layer in self.layers for group in layer.groups if isinstance(group, LinearGroup)]
        linears = [*self.called, *(module for group in groups for module in group.modules())]
        plain = {id(module) for module in linears if not why_only_peft(module)}
        fused = self.shards is None and not any(layer.why_not_fused() for layer in self.layers)
        # Asked of the modules: while PEFT has its adapters off, a group of linears sees none.
        whole = any(group.trains_weights and any(module in tuned for module in group.modules()) for group in groups)
        return fused and not whole and plain.issuperset(map(id, tuned))

    @property
    def called(self) -> list[Any]:
        """Linears of the text model outside its layers, which run as modules."""
        return [] if self.embed.by_layer is None else [self.embed.by_layer.projection]

    def _tuned(self) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Forwards inside are those of the base model. Nothing is rebuilt where adapters are fused, else PEFT's modules are
        switched off."""
        on = [module for module in self._tuned() if not module.disable_adapters]
        if self.adapters_are_fused:
            halves = [module.lora_B[name].weight for module in on for name in module.active_adapters if name in module.lora_B]
            with self.adapters_from([(half, None) for half in halves]):
                yield
            return
        try:
            for module in on:
                module.enable_adapters(False)
            yield
        finally:
            for module in on:
                module.enable_adapters(True)

    @contextmanager
    def adapters_from(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
        """Inside, the first of each pair has the values of the second, or zeros, at its place and without a new version: where
        adapters are fused nothing is rebuilt, captured graphs stay valid, and a backward may follow that waits since before."""
        if not pairs:
            yield
            return
        own, before = [one.data for one, _ in pairs], (self.prepared, self.rebuilt)
        saved = [torch.empty_like(one) for one in own]
        torch._foreach_copy_(saved, own)
        try:
            for one, (_, other) in zip(own, pairs, strict=True):
                _ = one.zero_() if other is None else one.copy_(other.data)
            yield
        finally:
            torch._foreach_copy_(own, saved)
            if before[1] == self.rebuilt and self._adapters is not None:  # the same bits are where they were
                self._adapters.run()
                self._adapters_fp8.run()
                for layer in self.layers:
                    for group in layer.groups:
                        group.forget_weights()
                self.prepared = before[0]

    def separate(self) -> None:
        """Gives weights that are views of one buffer their own memory, until the next `prepare`."""
        moved = [group.separate() for layer in self.layers for group in layer.groups]  # all of them, not up to the first
        if any(moved):
            self.rebuilt += 1
            self._adapters = None  # holds the buffers, too
            if self.outer_loop is not None:
                self.outer_loop.forget_graphs()

    def packed_rows(self, pack: PackedBatch) -> PackedRows:
        """One packed batch through the layers, metadata built by the loader."""
        documents, labels_N = Documents.of(pack, self.positions, self.context), pack.row_labels
        loss_rows = None if pack.every_row else pack.loss_rows
        load = self.load_of(labels_N, documents.spans_2T, loss_rows, None if pack.part == WHOLE else pack.tokens)
        h_ND = self.hidden(self.embed(pack.ids_T), replace(documents, load=load), loss_rows)
        return PackedRows(h_ND, labels_N, documents.grad_buffer, load)

    def packed_loss(self, pack: PackedBatch) -> tuple[Tensor, Tensor]:
        """(sum of the losses, loss of each row, detached): supervised training."""
        return self.lm.losses(self.packed_rows(pack))


def left_behind() -> None:
    """Replaces the fast layers of an unpickled model."""
    say_once(
        "a model loaded from a pickle uses the transformers layers (slower); call FastLanguageModel.for_training(model) "
        "to install the fast layers"
    )


def install(model: HFModel, *, fp8: bool = False) -> str:
    """Gives a Hugging Face causal LM instance an engine. Returns the reason if it cannot, else an empty string; the model
    trains either way. `fp8`: as in `FastCausalLM`."""
    base = base_of(model)
    if why := why_not_fast(base.config):
        return why
    if getattr(base, ENGINE, None) is None:
        parts = (base, base.model, backbone(base))
        if any("forward" in vars(part) for part in parts):
            return "its forward is already replaced on the instance"
        if others := next((type(module) for module in parts if not is_known(type(module).forward)), None):
            return f"{others.__name__} defines its own forward"
        object.__setattr__(base, ENGINE, FastCausalLM(base, fp8=fp8))
        if _separate_weights not in base._state_dict_pre_hooks.values():  # as in a model that was pickled
            base.register_state_dict_pre_hook(_separate_weights)
    return ""


def is_known(function: object) -> bool:
    """Whether a known library defines it, with which the fast layers were compared."""
    return str(getattr(function, "__module__", "")).split(".")[0] in KNOWN_PACKAGES


def _separate_weights(model: HFModel, prefix: str, keep_vars: bool) -> None:
    """Before `state_dict` of the model itself: saving needs each weight in its own memory, not as views of one buffer.

    Inside a PEFT model (`prefix` is not empty) it does nothing: checkpoints hold only the adapter. One group of linears is
    copied at a time, so the peak rises by the largest (0.24 GB of an 8B model); the next training step joins them again.
    """
    engine = engine_of(model)
    if not prefix and engine is not None:
        engine.separate()


def base_of(model: HFModel) -> Any:
    """The Hugging Face model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def engine_of(model: HFModel) -> FastCausalLM | None:
    return getattr(base_of(model), ENGINE, None)


def running(model: HFModel, work: Callable[[], T]) -> T:
    """Around whatever runs the model: weights that are sharded over ranks are gathered for it."""
    engine = engine_of(model)
    return work() if engine is None or engine.shards is None else engine.shards.around(work)


def without_adapters(model: HFModel) -> AbstractContextManager[None]:
    """The base model inside. Where the fast layers can, nothing is rebuilt, so captured graphs stay valid."""
    if (engine := engine_of(model)) is not None:
        return engine.adapters_off()
    return model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext()
