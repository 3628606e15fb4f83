"""A causal language model on fast layers: hidden states and loss of packed documents, beside the model's own forward.

`FastCausalLM` is an object beside the Hugging Face model. `install` makes the model *instance* use it where it applies
(training without a cache), by setting `forward` on the instance and on its backbone; classes and modules stay untouched, and
everything else (generation, output of attentions, unusual masks) runs the family's own forward.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.kernels.attention.attention_shared import shared_spans
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.embedding.host_embedding import host_embedding
from pronghorn.kernels.lora.fp8_lora import SplitTable
from pronghorn.kernels.lora.multi_copy import CopyTable
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.loss.linear_cross_entropy import linear_cross_entropy
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.captured_layers import CapturedLayers
from pronghorn.model.changes import ENGINE, Changes, inner_of, is_known
from pronghorn.model.families import family_of, num_experts, why_not_fast
from pronghorn.model.final_norm import final_norm
from pronghorn.model.hf_forward import set_forwards
from pronghorn.model.layers.build import build_layer
from pronghorn.model.layers.fp8_linears import Fp8Workspace, trains_whole
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.saved import Elsewhere
from pronghorn.model.layers.types import Documents, GradBuffer, Shards
from pronghorn.model.positions import Positions
from pronghorn.model.router_stats import ExpertCounts, RouterStats, padding_mask
from pronghorn.model.same_weights import Weights
from pronghorn.model.text_stack import backbone, head_of, in_mode, is_classifier


class Offload(Elsewhere, Protocol):
    """memory.offload.OffloadPool, as the model uses it."""

    def start_prefetch(self) -> None: ...
    def finish(self) -> None: ...


class Chooser(Protocol):
    """dropin.recompute.KeptByMemory, as the model uses it."""

    def before(self, tokens: int) -> None: ...  # a batch that trains
    def lower(self) -> bool: ...  # after its forward ran out of memory: whether the layers save less now


class FastCausalLM:
    def __init__(self, model: Any, *, fp8: bool = False) -> None:
        """`fp8`: layers stored in 4 bits, and trained ones, multiply in FP8, as those stored in FP8 always do."""
        config = model.config.get_text_config()
        family = family_of(config)
        self.model, self.config, self.backbone, self.names = model, config, backbone(model), family.names
        shared = Fp8Workspace()
        self.layers: list[DecoderLayer] = []
        self.expert_layers: list[int] = []  # indices of layers with experts
        for i, layer in enumerate(self.backbone.layers):
            slot = len(self.expert_layers) if family.experts and hasattr(getattr(layer, family.names.mlp), "experts") else None
            below = self.layers[-1] if self.layers else None
            self.layers.append(build_layer(layer, family, config, i, shared, below, slot=slot, fp8=fp8))
            self.expert_layers += [i] if slot is not None else []
        self.expert_counts: ExpertCounts | None = None  # made by the first step
        asked = self.expert_layers and getattr(config, "output_router_logits", False)
        # weight of the routers' auxiliary loss, which a classifier has not
        self.balance = float(getattr(model, "router_aux_loss_coef", 0.0)) if asked else 0.0
        self.norm = Norm(self.backbone, family.names.last_norm, family.one_plus)
        mixers = [layer.mixer for layer in self.layers if layer.mixer is not None]
        self.positions = Positions(self.backbone, config, {m.rope: m.head_width for m in mixers if m.rope is not None})
        self._adapters: CopyTable | None = None
        self._adapters_fp8 = SplitTable([])
        self.offload: Offload | None = None  # shared by the layers that offload
        self.shards: Shards | None = None  # of weights that are spread over ranks; the layers have it, too
        self.host_embeddings = False  # whether they are in pinned host memory (memory/host_embeddings.py)
        self.prepared = 0  # how often
        self.rebuilt = 0  # how often buffers that the layers read were rebuilt: a graph captured before reads freed ones
        self.paused = False  # use the model's own layers, for one call
        self.changes = Changes(self)
        # For other libraries' training loops:
        self.captured = CapturedLayers(self)
        self.chooser: Chooser | None = None  # of what the layers save
        self.trained_with: tuple[Any, ...] | None = None  # adapters of the latest forward that recorded gradients
        scaling = float(getattr(config, "logits_scaling", None) or 1.0)
        self.head_terms: dict[str, Any] = {
            "softcap": float(getattr(config, "final_logit_softcapping", None) or 0.0),
            "logit_scale": scaling if family.logits_times else 1.0 / scaling,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> FastCausalLM:
        """Belongs to the copied model."""
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
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
        return not (self.expert_layers or fp8 or self.offload or self.host_embeddings)

    def accumulate_weights(self, on: bool) -> None:
        """Whether GEMMs accumulate weight gradients in `.grad` themselves, without autograd."""
        for layer in self.layers:
            for group in layer.groups:
                if isinstance(group, LinearGroup):
                    group.accumulate_weights = on

    @property
    def embeddings(self) -> Any:
        return getattr(self.backbone, self.names.embeddings)

    def embed(self, ids_T: Tensor) -> Tensor:
        if self.host_embeddings:
            return self.scaled(host_embedding(self.embeddings.weight.detach(), ids_T))
        return self.scaled(self.embeddings(ids_T))

    def scaled(self, h_TD: Tensor) -> Tensor:
        """Embeddings as the first layer gets them."""
        if torch.is_autocast_enabled(h_TD.device.type):
            h_TD = h_TD.to(torch.get_autocast_dtype(h_TD.device.type))
        multiplier = float(getattr(self.config, "embedding_multiplier", 1.0))
        return h_TD if multiplier == 1.0 else h_TD * multiplier

    def hidden(self, h_TD: Tensor, documents: Documents, rows: Tensor | None = None) -> Tensor:
        """The residual stream after the last layer, before the final norm: of all tokens, or of `rows`."""
        self.prepare(h_TD.dtype)
        if documents.guarded and torch.is_grad_enabled():
            documents = replace(documents, weights=Weights(self, h_TD.dtype))
        load = documents.load
        late = rows is not None and load is not None and load.coefficient != 0.0  # the auxiliary loss counts all tokens
        with torch.autocast(h_TD.device.type, enabled=False):  # the layers choose their precision themselves
            for layer in self.layers[:-1]:
                h_TD = layer(h_TD, documents)
            h_TD = self.layers[-1](h_TD, documents, None if late else rows)
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
        self, labels_N: Tensor | None = None, spans_2T: Tensor | None = None, rows: Tensor | None = None
    ) -> RouterStats | None:
        """Router statistics of a training forward. `labels_N` (of all tokens or of `rows`), `spans_2T`: of a pack with padding
        at its end."""
        if not self.expert_layers or not torch.is_grad_enabled():
            return None
        real_T = real_rows = None
        if labels_N is not None and spans_2T is not None:
            real_T = padding_mask(labels_N, rows, spans_2T, IGNORED)
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
        if self._adapters.jobs:
            self._adapters.run()
        self._adapters_fp8.run()

    def separate(self) -> None:
        """Gives weights that are views of one buffer their own memory, until the next `prepare`."""
        moved = [group.separate() for layer in self.layers for group in layer.groups]  # all of them, not up to the first
        if any(moved):
            self.rebuilt += 1
            self._adapters = None  # holds the buffers, too
            self.captured.forget()

    def loss(self, h_ND: Tensor, labels_N: Tensor, grad_buffer: GradBuffer | None = None) -> tuple[Tensor, Tensor]:
        """(sum of the losses, loss of each row, detached), of rows out of `hidden`. `grad_buffer`: the layers'."""
        with torch.autocast(h_ND.device.type, enabled=False):
            x_ND, weight, bias = self.head_inputs(h_ND, grad_buffer)
            return linear_cross_entropy(x_ND, weight, labels_N, bias_V=bias, **self.head_terms)

    def head_inputs(self, h_ND: Tensor, grad_buffer: GradBuffer | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the LM head multiplies: normed rows, its weight in their dtype, its bias. Outside of autocast."""
        x_ND = final_norm(h_ND, self.norm, GradBuffer() if grad_buffer is None else grad_buffer, self.layers[-1].extra)
        if self.shards is not None:
            self.shards.head()
        head = head_of(self.model)
        if type(head) is not torch.nn.Linear:
            raise ModelError(
                what=f"the LM head is {type(head).__name__}, not a linear layer",
                why="the fused loss needs a plain linear LM head",
                fix="remove lm_head from lora.targets and modules_to_save",
            )
        return x_ND, head.weight if head.weight.dtype == x_ND.dtype else head.weight.to(x_ND.dtype), head.bias

    def documents(
        self,
        cu_seqlens: Tensor,
        longest: int,
        positions_T: Tensor,
        typical: int | None = None,
        prompt_of_S: Tensor | None = None,
    ) -> Documents:
        """What the layers share about a pack. `typical`: mean document length, weighted by tokens; default: tokens divided by
        the number of boundaries. `prompt_of_S`: of each segment that of the prompt it shares with others (shared_prefix.py)."""
        tokens, prefix_2T = len(positions_T), None
        if prompt_of_S is None:
            spans_2T = spans(cu_seqlens, tokens)
        else:
            spans_2T, prefix_2T = shared_spans(cu_seqlens, prompt_of_S, tokens)
        return Documents(
            cu_seqlens,
            longest,
            self.positions.rotary(positions_T, spans_2T),
            spans_2T,
            tokens // max(1, len(cu_seqlens) - 1) if typical is None else typical,
            prefix_2T=prefix_2T,
            query_scale_T=self.positions.query_scale(positions_T),
        )

    def packed_rows(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor,
        longest: int,
        *,
        labels_T: Tensor,
        loss_rows: Tensor | None = None,
        typical: int | None = None,
        labels_N: Tensor | None = None,
        prompt_of_S: Tensor | None = None,
    ) -> PackedRows:
        """One packed batch through the layers, metadata built by the loader. `loss_rows`: only these have labels. `labels_N`:
        theirs, if not those of `labels_T`."""
        documents = self.documents(cu_seqlens, longest, positions_T, typical, prompt_of_S)
        if labels_N is None:
            labels_N = labels_T if loss_rows is None else labels_T.index_select(0, loss_rows)
        load = self.load_of(labels_N, documents.spans_2T, loss_rows)
        h_ND = self.hidden(self.embed(ids_T), replace(documents, load=load), loss_rows)
        return PackedRows(h_ND, labels_N, documents.grad_buffer, load)

    def packed_loss(self, *pack: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """(sum of the losses, loss of each row, detached): supervised training. Arguments as of `packed_rows`."""
        rows = self.packed_rows(*pack, **options)
        total, each = self.loss(rows.h_ND, rows.labels_N, rows.grad_buffer)
        if rows.load is not None and rows.load.loss is not None:  # transformers adds it to the mean over the labels
            total = total + self.balance * rows.load.loss * (rows.labels_N != IGNORED).sum()
        return total, each


class PackedRows(NamedTuple):
    """The rows of a packed batch that have labels, after the last layer."""

    h_ND: Tensor
    labels_N: Tensor
    grad_buffer: GradBuffer  # the layers'
    load: RouterStats | None  # of a mixture in training


def left_behind() -> None:
    """Replaces the fast layers of an unpickled model."""
    say_once(
        "a model loaded from a pickle uses the transformers layers (slower); call FastLanguageModel.for_training(model) "
        "to install the fast layers"
    )


def install(model: Any, *, fp8: bool = False) -> str:
    """Gives a Hugging Face causal LM instance fast layers. Returns the reason if it cannot, else an empty string; the model
    trains either way. `fp8`: as in `FastCausalLM`."""
    base = base_of(model)
    if why := why_not_fast(base.config):
        return why
    if getattr(base, ENGINE, None) is None:
        parts = (base, base.model, backbone(base))
        for part in parts if hasattr(base, ENGINE) else ():
            if getattr(vars(part).get("forward"), "__func__", None) is type(part).forward:
                del part.forward  # its own: a pickle leaves it so
        if any("forward" in vars(part) for part in parts):
            return "its forward is already replaced on the instance"
        if others := next((type(module) for module in parts if not is_known(type(module).forward)), None):
            return f"{others.__name__} defines its own forward"
        object.__setattr__(base, ENGINE, FastCausalLM(base, fp8=fp8))
        set_forwards(base, getattr(base, ENGINE))
    return ""


def base_of(model: Any) -> Any:
    """The Hugging Face model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def engine_of(model: Any) -> FastCausalLM | None:
    return getattr(base_of(model), ENGINE, None)


def require_isolated_documents(model: Any, device: torch.device, vocabulary: int) -> None:
    """With two documents in one pack, changing the first must not change the second. Takes milliseconds, before training, on
    the layers that will train.

    Equal bits pass. Different bits are a leak, or sums in another order (experts multiply the tokens of all documents
    together). The gradient decides: what a document does not depend on has a gradient of exactly zero.
    """
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]], device=device)
    bounds = torch.tensor([0, 5, 11], dtype=torch.int32, device=device)
    ids = torch.arange(11, device=device)[None] % vocabulary
    changed = ids.clone()
    changed[0, :5] = (ids[0, :5] + 7) % vocabulary
    engine = engine_of(model)

    def second(x: Tensor, embedded: list[Tensor]) -> Tensor:
        """The second document's result; the embeddings of both documents are appended to the list."""

        def leaf(_module: Any, _inputs: Any, h: Tensor) -> Tensor:
            embedded.append(h.detach().requires_grad_())
            return embedded[0]

        if engine is not None:
            return engine.hidden(leaf(None, None, engine.embed(x[0])), engine.documents(bounds, 6, positions[0]))[5:]
        hook = model.get_input_embeddings().register_forward_hook(leaf)
        try:
            if is_classifier(base_of(model).config):  # its own forward gives one number
                found: Tensor = base_of(model).model(input_ids=x, position_ids=positions, use_cache=False).last_hidden_state
            else:
                found = model(input_ids=x, position_ids=positions, use_cache=False).logits
        finally:
            hook.remove()
        return found[0, 5:]

    def leaked() -> bool:
        embedded: list[Tensor] = []
        (gradient,) = torch.autograd.grad(second(ids, embedded).float().sum(), embedded[:1])
        return bool(gradient.view(11, -1)[:5].any())  # NaN counts

    with in_mode(model, training=False):
        with torch.no_grad():
            one, other = second(ids, []), second(changed, [])
        apart = float((one - other).abs().max())
        mixed = apart != 0.0 and leaked()
    if mixed:
        raise ModelError(
            what=f"packed documents attend to each other in this model (results differ by {apart:.2g})",
            why="its layers do not separate documents by position ids, so packing would mix documents",
            fix="use a model type whose transformers layers do: Llama, Qwen, Gemma, Mistral, Phi-3, ...",
        )
