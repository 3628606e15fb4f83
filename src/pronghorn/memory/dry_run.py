"""Bytes and work of a training step, counted by running it: a layer of each kind and the head, on torch's `meta` device.

A dry run takes the path of the target's chip and launches nothing (kernels/runtime/dispatch.py), so each tensor that a GPU
would allocate is allocated here without memory, and given back at the same moment; what kernels would compute and move is
counted (kernels/runtime/work.py). Layers of a kind are alike (model/one_layer.py): one is run for each choice that a plan has
(what backward recomputes, in how many pieces the MLP is done) and counts for all. The peak of a step is at one of three moments
(levels.py): in the head, when every layer has saved its share; in the forward of a layer; or in
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
from pronghorn.kernels.runtime.work import Work, count_mm, counting, launched
from pronghorn.memory.job import FP32, Job, head_share, moment_bytes
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of, install
from pronghorn.model.experts import ExpertStack
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.saved import Level, leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora_grad_buffer import ALIGNMENT, LoraGradBuffer
from pronghorn.model.one_layer import one_layer_of_each_kind
from pronghorn.model.text_stack import head_of
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora

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
    """`alive` and `peak`: bytes of storages that were made while this was active. Torch's own kernels are counted as work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.peak = 0
        self._known: dict[int, Any] = {}  # storages by their number: a reference to one that is counted, or None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _IN_PLACE or (kwargs and "out" in kwargs):
            result = args[0] if func in _IN_PLACE else kwargs["out"]
            _count(func, args, result)
            return result
        result = func(*args, **(kwargs or {}))
        found = [x for x in (result if isinstance(result, list | tuple) else (result,)) if isinstance(x, Tensor)]
        new = [self._add(x.untyped_storage(), args) for x in found]
        if any(new) and not func._schema.name.endswith(("empty", "empty_strided", "empty_like")):
            _count(func, args, result)
        return result

    def _add(self, storage: Any, args: Any) -> bool:
        """Whether it was made just now."""
        if (number := storage._cdata) in self._known:
            return False
        if any(isinstance(x, Tensor) and x.untyped_storage()._cdata == number for x in args):  # a view of what was there before
            self._known[number] = None
            return False
        size = storage.nbytes()
        self._known[number] = weakref.ref(storage, partial(self._gone, number, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)
        return True

    def _gone(self, number: int, size: int, _: object) -> None:
        del self._known[number]
        self.alive -= size


def _count(func: Any, args: Any, result: Any) -> None:
    """A kernel of torch's."""
    factors = [x for x in args if isinstance(x, Tensor)][-2:]
    if func._schema.name.startswith(("aten::mm", "aten::addmm")):
        count_mm(*factors, result)
    else:
        launched((*args, *(result if isinstance(result, list | tuple) else (result,))))


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


# ---- a model with one layer of each kind -------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """One layer, as it lies in memory."""

    layer: DecoderLayer
    stored: int  # bytes of frozen weights, or of all if they are trained
    trained: int  # parameters
    sums: int  # bytes in which its adapters' gradients are added up
    experts: int  # weights of experts
    experts_trained: int  # parameters of their adapters


@dataclass
class _Model:
    """An engine with one layer of each kind, and the bytes of what is there all the time."""

    engine: FastCausalLM
    dtype: torch.dtype  # of activations
    sums: LoraGradBuffer
    kinds: list[Kind]
    rest_bytes: int  # of what is not in a layer: embeddings, head, the last norm, a vision tower
    embedding_bytes: int
    tied: bool  # whether the head is the embeddings
    rest_trained: int
    shared_bytes: int = 0  # where layers make weights ready to multiply


def _key(job: Job) -> tuple[Any, ...]:
    """What of a job its layers depend on."""
    lora = None if job.method == "full" else (job.rank, job.targets)
    return job.shape.config, job.stored_as, lora, job.element, job.fp8, job.head, job.target


def _model(job: Job) -> _Model:
    return _built(*_key(job))


@lru_cache(maxsize=8)
def _built(config: str, storage: str, lora: Any, element: int, fp8: bool, head: str, target: Any) -> _Model:
    dtype = DTYPES[element]
    with dry_run(target):
        model = one_layer_of_each_kind(config, storage, dtype, lora and Lora(r=lora[0], targets=lora[1]), head)
        refused, engine = install(model, fp8=fp8), engine_of(model)
        if engine is None or (refused := next((why for layer in engine.layers if (why := layer.why_not_fused())), "")):
            raise ModelError(
                what="the memory plan does not support this model",
                why=refused,
                fix="remove memory.budget to train without a plan",
            )
        engine.prepare(dtype)
        base, embeddings = base_of(model), engine.embeddings.weight
        for parameter in base.parameters():
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        adapters = set() if lora is None else set(_storages(p for p in base.parameters() if p.requires_grad))
        own = [
            {number: size for number, size in _held_by(layer, engine).items() if number not in adapters}
            for layer in engine.layers
        ]
        sums = LoraGradBuffer(engine, dtype)
        kinds = [_kind(layer, sum(sizes.values()), sums) for layer, sizes in zip(engine.layers, own, strict=True)]
        frozen = _storages(p for p in base.parameters() if lora is None or not p.requires_grad)
        elsewhere = set(frozen).difference(*own)
        found = _Model(
            engine,
            dtype,
            sums,
            kinds,
            sum(frozen[number] for number in elsewhere),
            embeddings.nbytes,
            getattr(head_of(base), "weight", None) is embeddings,
            sum(p.numel() for p in base.parameters() if p.requires_grad) - sum(kind.trained for kind in kinds),
        )
        for number in range(len(kinds)):
            _run(found, number, _SMALL, "nothing")
        found.shared_bytes = engine.buffers.nbytes
    return found


def _held_by(layer: DecoderLayer, engine: FastCausalLM) -> dict[int, int]:
    """Bytes by storage; without those of other layers, which it may know."""
    return _storages(_tensors(layer, {id(other) for other in engine.layers if other is not layer}))


def _kind(layer: DecoderLayer, stored: int, sums: LoraGradBuffer) -> Kind:
    shapes = [shape for group in layer.groups for shape in group.grad_shapes or ()]
    places = sum(-(-rows * columns // ALIGNMENT) * ALIGNMENT for rows, columns in shapes)
    stacks = [group for group in layer.groups if isinstance(group, ExpertStack)]
    return Kind(
        layer,
        stored,
        sum(p.numel() for p in layer.parameters() if p.requires_grad),
        places * sums.buffer.element_size(),
        sum(stack.experts * stack.group.D * stack.group.outputs for stack in stacks),
        sum(p.numel() for stack in stacks for p in stack.parameters if p.requires_grad),
    )


def kinds_of(job: Job) -> list[Kind]:
    return _model(job).kinds


def layers_of(job: Job) -> list[Kind]:
    """The kind of each layer."""
    kinds = kinds_of(job)
    return [kinds[number] for number in job.shape.kinds]


def trained_parameters(job: Job) -> int:
    return sum(layer.trained for layer in layers_of(job)) + _model(job).rest_trained


def embedding_bytes(job: Job) -> int:
    return _model(job).embedding_bytes


def static_parts(job: Job) -> dict[str, int]:
    """Bytes that do not come and go within a step, by what they are for."""
    one, layers, trained = _model(job), layers_of(job), trained_parameters(job)
    weights = sum(layer.stored for layer in layers) + one.rest_bytes - job.host_bytes
    weights += (one.tied and not job.shape.tied) * one.embedding_bytes  # files may have a head of its own
    full = job.method == "full"
    tuned = trained * (1 if full else 2) * FP32 + moment_bytes(job.optimizer, trained)[0]
    if job.only_experts:
        weights -= expert_bytes(job) * (job.ranks - 1) // job.ranks
    elif job.ranks > 1 and full:  # FSDP2: a layer computes, one arrives and is copied, gradients leave in fp32; all else waits
        most, rest = max(layer.trained for layer in layers), one.rest_trained
        weights = FP32 * trained // job.ranks + 2 * job.element * rest + max((4 * job.element + FP32) * most, FP32 * rest)
        tuned //= job.ranks
    elif job.ranks > 1:  # two units arrive and compute; the one that computes lies beside its adapters
        stored = max(layer.stored for layer in layers)
        weights = weights // job.ranks + 2 * max(stored, one.embedding_bytes) + (0 if one.shared_bytes else stored)
    parts = {
        "weights": weights,
        "gradients and optimizer" if full else "adapters and optimizer": tuned,
        "rope and libraries": job.capacity * job.shape.rope_columns * FP32 + LIBRARY_BYTES,
    }
    if job.graphed and not full:
        parts["adapter sums"] = sum(layer.sums for layer in layers)
    if job.shape.inputs[1]:
        parts["inputs of layers"] = _input_bytes(_key(job), job.capacity)
    if lending := {kind for kind in job.shape.kinds if one.kinds[kind].layer.lends}:
        parts["gradients of shared keys and values"] = sum(held(job, "nothing", kind=kind).lent for kind in lending)
    return parts


@lru_cache(maxsize=64)
def _input_bytes(key: Any, tokens: int) -> int:
    """What the layers read beside the residual stream, what autograd saved of its making, and its gradient: there while layers
    run."""
    one = _built(*key)
    by_layer, width = one.engine.embed.by_layer, one.engine.config.hidden_size
    assert by_layer is not None
    with dry_run(key[-1]), torch.device("meta"), torch.enable_grad():
        ids, h = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens, width, dtype=one.dtype)
        with Allocations() as counted:
            e = by_layer(ids, h, on_host=False)
            return int(counted.alive + e.nbytes * e.requires_grad)


def expert_bytes(job: Job) -> int:
    """Bytes of all layers' experts, as they are stored."""
    row = FORMATS[job.stored_as]
    each = job.element if row.quantize is None else row.bytes_each
    return int(sum(layer.experts for layer in layers_of(job)) * each)


def host_moments(job: Job) -> int:
    return moment_bytes(job.optimizer, trained_parameters(job))[1]


def shared_bytes(job: Job) -> int:
    """Where layers make weights ready to multiply, one after the other."""
    return _model(job).shared_bytes


# ---- runs --------------------------------------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """What of a job a run depends on."""

    tokens: int
    rows: int  # with a loss
    entries: int
    typical: int
    graphed: bool
    context: int = 1


_SMALL = _Batch(64, 64, 2, 32, graphed=False)


class Held(NamedTuple):
    """A layer's run: bytes that it saves, the most that its forward and its backward hold, that included, and their work."""

    saved: int
    forward: int
    backward: int
    forward_work: Work
    backward_work: Work  # with what is computed again
    lent: int  # bytes of keys and values that later layers read, which are among those that it saves


class _Others:
    """Ranks that share packs, without bytes. The first has the last piece, and so gradients of all keys and values."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, whole: Tensor, part: Tensor) -> _Others:
        return self

    def scatter_sum(self, part: Tensor, whole: Tensor) -> _Others:
        return self

    def wait(self) -> None: ...


def _documents(engine: FastCausalLM, batch: _Batch) -> Documents:
    with torch.device("meta"):
        sizes, others = {"T": batch.tokens, "E": batch.entries}, _Others(batch.context)
        facts: dict[str, Any] = {"longest": batch.tokens * batch.context, "typical": batch.typical}
        pack = PackedDocuments.blank(sizes, "meta", part=(others.rank, others.size), **facts)
        return Documents.of(pack, engine.positions, others)


@torch.no_grad()
def _run(one: _Model, kind: int, batch: _Batch, level: Level, pieces: int = 1, *, last: bool = False) -> Held:
    """`last`: of the last layer, which goes on with some rows only."""
    layer, documents = one.kinds[kind].layer, _documents(one.engine, batch)
    layer.mlp_chunks, rows = pieces, torch.empty(batch.rows, dtype=torch.int64, device="meta") if last else None
    one.sums.attach() if batch.graphed else one.sums.release()
    one.engine.accumulate_weights(batch.graphed)
    h = torch.empty(batch.tokens, one.engine.config.hidden_size, dtype=one.dtype, device="meta")
    documents = layer.alone(h, documents)
    done = Work(), Work()
    with Allocations() as counted:
        _forget_weights(layer)
        with counting(done[0]):
            out, saved = layer.forward_at(level, h, documents, rows)
        lent = _storages(saved.lent.values())
        forward, size = counted.peak, sum((_storages(saved.values()) | lent).values())
        left = leave(saved, 0, None)
        del saved
        documents.grad_buffer.buffer = buffer = out.new_empty(len(out), out.shape[1] + layer.extra)
        dh = buffer[:, : h.shape[1]]
        del buffer, out
        counted.peak = counted.alive
        _forget_weights(layer)
        with counting(done[1]):
            restored = layer.restored(left, documents, rows)
            del left
            layer.backward(dh, restored, documents, rows)
    layer.mlp_chunks = 1
    return Held(size, forward + h.nbytes, counted.peak + h.nbytes, *done, sum(lent.values()))


def _forget_weights(layer: DecoderLayer) -> None:
    """Other layers have used what is shared since."""
    for group in layer.groups:
        group.forget_weights()


def held(job: Job, level: Level, pieces: int = 1, *, kind: int = 0, last: bool = False) -> Held:
    batch = _Batch(job.capacity, job.rows, job.entries, job.attended, job.graphed, job.context)
    return _held(_key(job), kind, batch, level, pieces if level != "nothing" else 1, last)


@lru_cache(maxsize=4096)
def _held(key: Any, kind: int, batch: _Batch, level: Level, pieces: int, last: bool) -> Held:
    with dry_run(key[-1]):
        return _run(_built(*key), kind, batch, level, pieces, last=last)


class Head(NamedTuple):
    held: int  # the most bytes, forward and backward
    work: Work


def head(job: Job, pieces: int = 1) -> Head:
    """The norm before the head, the head and the loss, forward and backward: the residual stream, its norm and its gradient,
    and a chunk of logits. More rows than four chunks are more of the same."""
    key, one, rows, share = _key(job), _model(job), job.rows, head_share(pieces)
    chunk = one.engine.head.chunk_rows(rows, one.dtype, share)
    if rows <= 4 * chunk:
        return _head_of(key, rows, share)
    two, four = (_head_of(key, chunks * chunk, share) for chunks in (2, 4))
    more = (rows - 4 * chunk) / (2 * chunk)
    return Head(four.held + int((four.held - two.held) * more), four.work + (four.work - two.work) * more)


@lru_cache(maxsize=512)
def _head_of(key: Any, rows: int, share: int) -> Head:
    """Trained embeddings get a gradient of their size after all layers, which hold nothing by then; counted as if it came here,
    it is at most too much."""
    one = _built(*key)
    head, embeddings = one.engine.head, one.engine.embeddings.weight
    with dry_run(key[-1]), torch.device("meta"), torch.enable_grad():
        h = torch.empty(rows, one.engine.config.hidden_size, dtype=one.dtype, requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64)
        head.set_chunk_share(share)
        with Allocations() as counted, counting(Work()) as done:
            torch.autograd.backward(head.sample_loss(h, labels))
    return Head(max(int(counted.peak + h.nbytes), embeddings.nbytes if embeddings.requires_grad else 0), done)


def kept_bytes(job: Job, level: Level, kind: int = 0) -> int:
    return held(job, level, kind=kind).saved


def forward_bytes(job: Job, level: Level, pieces: int = 1, kind: int = 0) -> int:
    """The most that a layer's forward holds beside what it saves."""
    found = held(job, level, pieces, kind=kind)
    return found.forward - found.saved + shared_bytes(job)


def working_bytes(job: Job, level: Level, pieces: int = 1, kind: int = 0) -> int:
    """The most that a layer's backward holds beside what is saved."""
    found = held(job, level, pieces, kind=kind)
    return found.backward - found.saved + shared_bytes(job)


def top_bytes(job: Job, level: Level, pieces: int = 1, kind: int = 0) -> int:
    """What the last layer's backward holds more than another's, where only some rows have a loss: copies of those."""
    if job.rows == job.capacity:
        return 0
    more = held(job, level, pieces, kind=kind, last=True).backward - held(job, level, pieces, kind=kind).backward
    return max(0, more)


def head_bytes(job: Job, pieces: int = 1) -> int:
    return head(job, pieces).held + shared_bytes(job)


def evaluation_bytes(job: Job, tokens: int) -> int:
    """The most that the loss of a pack of so many tokens takes without gradients, beside the weights."""
    small = replace(job.with_capacity(tokens), loss_rows=0)
    layers = max(held(small, "layer", kind=kind).forward for kind in set(job.shape.kinds))
    return max(layers + shared_bytes(job), head_bytes(small))
