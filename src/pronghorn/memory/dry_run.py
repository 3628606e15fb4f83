"""Bytes of a training step, counted by running it: one layer and the head, on torch's `meta` device, as on a given GPU.

A dry run takes the path of the target's chip and launches nothing (kernels/runtime/dispatch.py), so each tensor that a GPU
would allocate is allocated here without memory, and given back at the same moment. Layers are alike: one is run for each choice
that a plan has (what backward recomputes, in how many pieces the MLP is done) and counts for all. The peak of a step is at one
of three moments (levels.py: `evaluate`): in the head, when every layer has saved its share; in the forward of a layer; or in
the backward of one, when the layers above it have given theirs back:

    static + sum of saved over the layers up to this one + the most that this one's backward holds beside

What libraries allocate that have no dry run, flash attention's sums, is written down where they are called.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pronghorn.errors import ModelError
from pronghorn.kernels.runtime.dispatch import dry_run
from pronghorn.memory.job import FP32, Job, head_share, moment_bytes
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of, install
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.saved import Level, leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.model.one_layer import one_layer_model
from pronghorn.model.text_stack import head_of
from pronghorn.packs import PackedDocuments
from pronghorn.recipe import Lora

LIBRARY_BYTES = 96 << 20  # cuBLAS workspaces, tables of addresses, batches waiting for their turn
DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by the bytes of an activation


_aten = torch.ops.aten
_IN_PLACE = {
    _aten.add_.Tensor,
    _aten.mul_.Tensor,
    _aten.mul_.Scalar,
    _aten.copy_.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.addmm_.default,
    _aten.index_copy_.default,
}  # allocate nothing; on `meta` they take long


class Allocations(TorchDispatchMode):
    """`alive` and `peak`: bytes of storages that were made while this was active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known: dict[int, Any] = {}  # storages by their number: a reference to one that is counted, or None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE:
            return args[0]
        if kwargs and "out" in kwargs:
            return kwargs["out"]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if (number := storage._cdata) not in self._known:
                    self._add(number, storage, args)
        return result

    def _add(self, number: int, storage: Any, args: Any) -> None:
        if any(isinstance(x, Tensor) and x.untyped_storage()._cdata == number for x in args):  # a view of what was there before
            self._known[number] = None
            return
        size = storage.nbytes()
        self._known[number] = weakref.ref(storage, partial(self._gone, number, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _gone(self, number: int, size: int, _: Any) -> None:
        del self._known[number]
        self.alive -= size


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All that an object of ours, or a module, holds, but for tables of addresses, which are in LIBRARY_BYTES."""
    if id(thing) in seen or type(thing).__name__.endswith("Table"):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    inside: Any = ()
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, list | tuple | set):
        inside = thing
    elif isinstance(thing, torch.nn.Module) or type(thing).__module__.startswith("pronghorn."):
        inside = vars(thing).values() if hasattr(thing, "__dict__") else [getattr(thing, name) for name in thing.__slots__]
    for part in inside:
        yield from _tensors(part, seen)


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by storage: views are counted once."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


# ---- a model of one layer ----------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Linears that share an input, as one product; or all experts' gate and up, or down."""

    inputs: int
    outputs: tuple[int, ...]  # of each linear
    adapters: int
    extra: int  # columns that carry them
    rank: int = 0  # of an expert's adapter
    experts: int = 1

    @property
    def weights(self) -> int:
        return self.experts * self.inputs * sum(self.outputs)


@dataclass
class _OneLayer:
    """An engine with one layer, and the bytes of what is there all the time."""

    engine: FastCausalLM
    dtype: torch.dtype  # of activations
    sums: LoraGradBuffer
    layer_bytes: int  # of a layer's frozen weights, or of all if they are trained
    rest_bytes: int  # of what is not in a layer: embeddings, head, the last norm, a vision tower
    embedding_bytes: int
    tied: bool  # whether the head is the embeddings
    layer_trained: int  # parameters
    rest_trained: int
    shared_bytes: int = 0  # where layers make weights ready to multiply

    @property
    def layer(self) -> DecoderLayer:
        return self.engine.layers[0]


def _key(job: Job) -> tuple[Any, ...]:
    """What of a job its layers depend on."""
    lora = None if job.method == "full" else (job.rank, job.targets)
    return job.shape.config, job.stored_as, lora, job.element, job.fp8, job.head, job.target


def _one_layer(job: Job) -> _OneLayer:
    return _built(*_key(job))


@lru_cache(maxsize=8)
def _built(config: str, storage: str, lora: Any, element: int, fp8: bool, head: str, target: Any) -> _OneLayer:
    dtype = DTYPES[element]
    with dry_run(target):
        model = one_layer_model(config, storage, dtype, lora and Lora(r=lora[0], targets=lora[1]), head)
        refused, engine = install(model, fp8=fp8), engine_of(model)
        if engine is None or (refused := engine.layers[0].why_not_fused()):
            raise ModelError(
                what="the memory plan does not support this model",
                why=refused,
                fix="remove memory.budget to train without a plan",
            )
        engine.prepare(dtype)
        layer, base = engine.layers[0], base_of(model)
        trains = [p for p in layer.parameters() if p.requires_grad]
        adapters = set() if lora is None else {p.untyped_storage()._cdata for p in trains}
        own = {number: size for number, size in _storages(_tensors(layer, set())).items() if number not in adapters}
        frozen = [p for p in base.parameters() if lora is None or not p.requires_grad]
        elsewhere = {number: size for number, size in _storages(frozen).items() if number not in own}
        rest_trained = sum(p.numel() for p in base.parameters() if p.requires_grad) - sum(p.numel() for p in trains)
        embeddings = engine.embeddings.weight
        for parameter in base.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        found = _OneLayer(
            engine,
            dtype,
            LoraGradBuffer(engine, dtype),
            sum(own.values()),
            sum(elsewhere.values()),
            embeddings.nbytes,
            getattr(head_of(base), "weight", None) is embeddings,
            sum(p.numel() for p in trains),
            rest_trained,
        )
        before = _storages(_tensors(layer, set()))
        _run(found, _SMALL, "nothing")
        found.shared_bytes = sum(size for number, size in _storages(_tensors(layer, set())).items() if number not in before)
    return found


def groups(job: Job) -> dict[str, Group]:
    """Of linears; of a mixture of experts, the expert's that all tokens share."""
    layer: Any = _one_layer(job).layer
    named: dict[str, Any] = {
        "qkv": layer.mixer.into,
        "out": layer.mixer.out,
        "gate_up": layer.mlp.gate_up,
        "down": layer.mlp.down,
        "shared_gate": getattr(layer.mlp, "shared_gate", None),
    }
    return {name: _group(group) for name, group in named.items() if group is not None and group.names}


def _group(group: Any) -> Group:
    extra = group._group.R if group._group else 0
    return Group(group.linears[0].in_features, tuple(group.widths), len(group.adapters), extra)


def stacks(job: Job) -> tuple[Group, ...]:
    """Gate and up, and down, of all experts."""
    mlp: Any = _one_layer(job).layer.mlp
    if job.shape.mixture is None:
        return ()
    found = []
    for stack in (mlp.expert_gate_up, mlp.expert_down):
        group, rank = stack.group, sum(len(adapter.A_RD) // stack.experts for adapter in stack.adapters)
        found.append(Group(group.D, (group.outputs,), len(stack.adapters), group.R, rank, stack.experts))
    return tuple(found)


def attends_itself(job: Job) -> bool:
    """Whether attention is our own kernel's."""
    mixer: Any = _one_layer(job).layer.mixer
    with dry_run(job.target):
        return bool(mixer.backend(torch.device("meta"), DTYPES[job.element], job.attended) == "short")


def trained_parameters(job: Job) -> int:
    one = _one_layer(job)
    return job.shape.layers * one.layer_trained + one.rest_trained


class LayerParts(NamedTuple):
    """Of one layer, as it lies in memory."""

    stored: int  # bytes of frozen weights, or of all if they are trained
    trained: int  # parameters
    table: int  # bytes of the embeddings, for comparison


def layer_parts(job: Job) -> LayerParts:
    one = _one_layer(job)
    return LayerParts(one.layer_bytes, one.layer_trained, one.embedding_bytes)


def static_parts(job: Job) -> dict[str, int]:
    """Bytes that do not come and go within a step, by what they are for."""
    one, s, trained = _one_layer(job), job.shape, trained_parameters(job)
    tables = (one.tied and not s.tied) - job.host_embeddings  # files may have a head of its own (families.ties_embeddings)
    weights = s.layers * one.layer_bytes + one.rest_bytes + tables * one.embedding_bytes
    full = job.method == "full"
    tuned = trained * (1 if full else 2) * FP32 + moment_bytes(job.optimizer, trained)[0]
    if job.only_experts:
        weights -= expert_bytes(job) * (job.ranks - 1) // job.ranks
    elif job.ranks > 1:  # two units arrive and compute; the one that computes lies beside its adapters, or its copy in 16 bits
        each, spread = (FP32 * one.layer_trained, FP32 * trained) if full else (one.layer_bytes, weights)
        beside = one.layer_bytes - each if full else 0 if one.shared_bytes else one.layer_bytes
        weights = spread // job.ranks + 2 * max(each, one.embedding_bytes) + beside
        tuned = tuned // job.ranks if full else tuned
    parts = {
        "weights": weights,
        "gradients and optimizer" if full else "adapters and optimizer": tuned,
        "rope and libraries": job.capacity * s.head_width * s.rope_tables * FP32 + LIBRARY_BYTES,
    }
    if job.graphed and not full:
        parts["adapter sums"] = s.layers * one.sums.buffer.nbytes
    return parts


def expert_bytes(job: Job) -> int:
    """Of all layers' experts, as they are stored."""
    row = FORMATS[job.stored_as]
    each = job.element if row.quantize is None else row.bytes_each
    return int(job.shape.layers * sum(stack.weights for stack in stacks(job)) * each)


def host_moments(job: Job) -> int:
    return moment_bytes(job.optimizer, trained_parameters(job))[1]


def shared_bytes(job: Job) -> int:
    """Where layers make weights ready to multiply, one after the other."""
    return _one_layer(job).shared_bytes


# ---- runs --------------------------------------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """What of a job a run depends on."""

    tokens: int
    rows: int  # with a loss
    entries: int
    typical: int
    graphed: bool


_SMALL = _Batch(64, 64, 2, 32, graphed=False)


class Held(NamedTuple):
    """Bytes of a layer: what it saves, and the most that its forward and its backward hold, that included."""

    saved: int
    forward: int
    backward: int


def _documents(engine: FastCausalLM, batch: _Batch) -> Documents:
    with torch.device("meta"):
        sizes = {"T": batch.tokens, "E": batch.entries}
        pack = PackedDocuments.blank(sizes, "meta", longest=batch.tokens, typical=batch.typical)
        return Documents.of(pack, engine.positions)


@torch.no_grad()
def _run(one: _OneLayer, batch: _Batch, level: Level, pieces: int = 1, *, last: bool = False) -> Held:
    """`last`: of the last layer, which goes on with some rows only."""
    layer, documents = one.layer, _documents(one.engine, batch)
    layer.mlp_chunks, rows = pieces, torch.empty(batch.rows, dtype=torch.int64, device="meta") if last else None
    one.sums.attach() if batch.graphed else one.sums.release()
    one.engine.accumulate_weights(batch.graphed)
    h = torch.empty(batch.tokens, one.engine.config.hidden_size, dtype=one.dtype, device="meta")
    with Allocations() as counted:
        out, saved = layer.forward_at(level, h, documents, rows)
        forward, size = counted.peak, sum(_storages(saved.values()).values())
        left = leave(saved, 0, None)
        del saved
        documents.grad_buffer.buffer = buffer = out.new_empty(len(out), out.shape[1] + layer.extra)
        dh = buffer[:, : h.shape[1]]
        del buffer, out
        counted.peak = counted.alive
        restored = layer.restored(left, documents, rows)
        del left
        layer.backward(dh, restored, documents, rows)
    layer.mlp_chunks = 1
    return Held(size, forward + h.nbytes, counted.peak + h.nbytes)


def held(job: Job, level: Level, pieces: int = 1, *, last: bool = False) -> Held:
    batch = _Batch(job.capacity, job.rows, job.entries, job.attended, job.graphed)
    return _held(_key(job), batch, level, pieces if level != "nothing" else 1, last)


@lru_cache(maxsize=4096)
def _held(key: Any, batch: _Batch, level: Level, pieces: int, last: bool) -> Held:
    with dry_run(key[-1]):
        return _run(_built(*key), batch, level, pieces, last=last)


def _head(key: Any, rows: int, share: int) -> int:
    """The most that the norm before the head, the head and the loss hold, forward and backward: the residual stream, its norm
    and its gradient, and a chunk of logits. More rows than four chunks are more of the same."""
    one = _built(*key)
    chunk = one.engine.head.chunk_rows(rows, one.dtype, share)
    if rows <= 4 * chunk:
        return _head_of(key, rows, share)
    two, four = (_head_of(key, chunks * chunk, share) for chunks in (2, 4))
    return four + (four - two) * (rows - 4 * chunk) // (2 * chunk)


@lru_cache(maxsize=512)
def _head_of(key: Any, rows: int, share: int) -> int:
    """Trained embeddings get a gradient of their size after all layers, which hold nothing by then; counted as if it came here,
    it is at most too much."""
    one = _built(*key)
    head, embeddings = one.engine.head, one.engine.embeddings.weight
    with dry_run(key[-1]), torch.device("meta"), torch.enable_grad():
        h = torch.empty(rows, one.engine.config.hidden_size, dtype=one.dtype, requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64)
        head.set_chunk_share(share)
        with Allocations() as counted:
            torch.autograd.backward(head.sample_loss(h, labels))
    return max(int(counted.peak + h.nbytes), embeddings.nbytes if embeddings.requires_grad else 0)


def kept_bytes(job: Job, recompute: Level) -> int:
    return held(job, recompute).saved


def forward_bytes(job: Job, recompute: Level, pieces: int = 1) -> int:
    """The most that a layer's forward holds beside what it saves."""
    found = held(job, recompute, pieces)
    return found.forward - found.saved + shared_bytes(job)


def working_bytes(job: Job, recompute: Level, pieces: int = 1) -> int:
    """The most that a layer's backward holds beside what is saved."""
    found = held(job, recompute, pieces)
    return found.backward - found.saved + shared_bytes(job)


def top_bytes(job: Job, recompute: Level, pieces: int = 1) -> int:
    """What the last layer's backward holds more than another's, where only some rows have a loss: copies of those."""
    if job.rows == job.capacity:
        return 0
    return max(0, held(job, recompute, pieces, last=True).backward - held(job, recompute, pieces).backward)


def head_bytes(job: Job, pieces: int = 1) -> int:
    return _head(_key(job), job.rows, head_share(pieces)) + shared_bytes(job)


def evaluation_bytes(job: Job, tokens: int) -> int:
    """The most that the loss of a pack of so many tokens takes without gradients, beside the weights."""
    small = replace(job.with_capacity(tokens), loss_rows=0)
    return max(held(small, "layer").forward + shared_bytes(job), head_bytes(small))
