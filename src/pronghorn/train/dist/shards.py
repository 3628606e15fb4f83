"""Weights that are spread over the ranks of a run (`world.shard`), gathered a layer ahead in both directions.

    forward     enter(k): waits for k ── compute k ───────────── enter(k+1): its weights are there
    network               └─ gather k+1, into the buffer that k-1 has left
    backward    enter(k): waits for k ── compute k ── enter(k-1)
    network               └─ gather k-1

A rank holds its part of every unit (model/shards.py) and two buffers of the largest unit's size; a unit has its buffer, so its
weights have one address for good, as stored bytes and their scales need it. Trained weights are sharded by torch (fsdp.py).

All ranks gather the same units in the same order: they run the model together, also where only the writer needs the result
(answers to held-out rows).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.errors import RecipeError
from pronghorn.model.causal_lm import FastCausalLM, engine_of
from pronghorn.model.config import read_config
from pronghorn.model.families import FAMILIES, num_experts, text_config, why_not_fast
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers.types import Shards
from pronghorn.model.load import ModelFacts
from pronghorn.model.shards import Unit, facts_of, tensors_of
from pronghorn.model.text_stack import decoder_layers, head_of
from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import Pending, World

T = TypeVar("T")
BUFFERS = 2  # one unit computes while the next one arrives
ROOM = 0.7  # of a GPU's memory, which weights may take before they are spread by themselves
MASTER_BYTES = 16  # of a trained parameter: itself, its gradient and two moments, in float32
MOMENTS = ("optimizer/exp_avg/", "optimizer/exp_avg_sq/")  # as optim.py names them, before the parameter's name


class Shares:
    """The parts of a model's weights that this rank keeps, taken while the model loads."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.layers: list[Unit] = []
        self.ends: list[Unit] = []
        self._digest = hashlib.sha256()

    def experts(self, count: int) -> slice:
        """Those of so many in a layer that `keep` needs."""
        return slice(count)

    def keep(self, name: str, module: nn.Module) -> None:
        self.layers.append(self._unit(name, module))

    def keep_ends(self, model: HFModel) -> None:
        """Embeddings, and the LM head where it has weights of its own."""
        modules = [model.get_input_embeddings()]
        if head_of(model).weight is not modules[0].weight:
            modules.append(head_of(model))
        names = {module: name for name, module in model.named_modules()}
        self.ends = [self._unit(names[module], module) for module in modules]

    def engine_of(self, model: HFModel) -> FastCausalLM:
        """Or why its weights cannot be spread."""
        engine = engine_of(model)
        why = "the model uses the transformers layers" if engine is None else ""
        why = why or next((why for layer in engine.layers if (why := layer.why_not_fused())), "")  # type: ignore[union-attr]
        if engine is not None and engine.embed.by_layer is not None:
            why = "its layers have inputs of their own, whose table is not spread"
        if why:
            raise _not_sharded(why)
        assert engine is not None
        return engine

    def _unit(self, name: str, module: nn.Module) -> Unit:
        found = list(tensors_of(module, name))
        for one in found:
            self.look_at(one.name, one.tensor)
        return Unit(name, found, self.world.rank, self.world.size, self.device)

    def look_at(self, name: str, tensor: Tensor) -> None:
        """Before it is cut: for the key."""
        self._digest.update(facts_of(name, tensor))

    @property
    def key(self) -> str:
        """Digest of the loaded weights: the same on all ranks."""
        return self._digest.hexdigest()[:12]


class Ring(Shards):
    """The units of a model in the order of its forward: embeddings, layers, head. `engine.shards` and `layer.shards`."""

    def __init__(self, shares: Shares, engine: FastCausalLM) -> None:
        self.world, self.key, self._engine = shares.world, shares.key, engine
        self.units = [shares.ends[0], *shares.layers, *shares.ends[1:]]
        self._buffers = [
            torch.zeros(max(unit.size for unit in self.units[i::BUFFERS]), dtype=torch.uint8, device=shares.device)
            for i in range(min(BUFFERS, len(self.units)))
        ]
        self._held: list[int | None] = [None] * len(self._buffers)  # the unit in each buffer, or on its way there
        self._pending: list[Pending | None] = [None] * len(self._buffers)
        self._dtype = torch.float32
        self._entered: int | None = None  # the layer whose turn it is
        for number, unit in enumerate(self.units):
            unit.show_in(self._buffer(number))
        self._install()

    def spreads(self, tensor: Tensor) -> bool:
        """Whether it is a view of a buffer here."""
        return any(tensor.untyped_storage().data_ptr() == buffer.data_ptr() for buffer in self._buffers)

    def _install(self) -> None:
        engine = self._engine
        engine.shards = self
        for layer in engine.layers:
            layer.shards = self
            for group in layer.groups:
                group.borrow()
        # What runs the model's own modules (generation) finds the weights in their places as well.
        for number, module in enumerate(decoder_layers(engine.model).values()):
            module.register_forward_pre_hook(self._before(1 + number))
        engine.model.get_input_embeddings().register_forward_pre_hook(lambda *_: self._turn(0, 1))
        head_of(engine.model).register_forward_pre_hook(self._before(self._head))

    def _before(self, unit: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if torch.is_grad_enabled():
                raise RuntimeError("the transformers layers cannot train sharded weights")
            self._turn(unit, 0)

        return hook

    # ---- as the model calls it -----------------------------------------------------------------------------------------------

    @property
    def _head(self) -> int:
        """The LM head's unit; tied to the embeddings, theirs."""
        return len(self.units) - 1 if len(self.units) > 1 + len(self._engine.layers) else 0

    def prepare(self, dtype: torch.dtype) -> bool:
        self._dtype = dtype
        return True

    def enter(self, layer: int, step: int) -> None:
        if self._entered not in (None, layer):
            self._engine.layers[self._entered].let_go()
        self._turn(1 + layer, step)
        self._engine.layers[layer].prepare(self._dtype)
        self._entered = layer

    def head(self) -> None:
        self._turn(self._head, 0)

    # ---- the ring ------------------------------------------------------------------------------------------------------------

    def _turn(self, unit: int, step: int) -> None:
        """Its weights are there until the turn after the next one; those of the unit `step` further begin to arrive."""
        self._arrive(unit)
        following = unit + step
        if step and 0 < following < len(self.units):
            self._start(following)

    def _start(self, unit: int) -> None:
        buffer = unit % BUFFERS
        if self._held[buffer] != unit:
            if not self.world.ordered:
                self._settle(buffer)
            self._pending[buffer] = self.world.gather(self._buffer(unit), self.units[unit].part)
            self._held[buffer] = unit

    def _arrive(self, unit: int) -> None:
        self._start(unit)
        self._settle(unit % BUFFERS)

    def _settle(self, buffer: int) -> None:
        pending, self._pending[buffer] = self._pending[buffer], None
        if pending is not None:
            pending.wait()

    def _buffer(self, unit: int) -> Tensor:
        return self._buffers[unit % BUFFERS][: self.units[unit].size]


def norm_over_ranks(world: World, mine: Sequence[Tensor], shared: Sequence[Tensor], beside: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients. Those that are `shared` by all ranks, and what is `beside` them, are summed up; others are whole."""
    squares = torch.nn.utils.get_total_norm(mine).square() if mine else torch.zeros_like(beside[0])
    world.add_up([*beside, squares, *shared])
    return (squares + torch.nn.utils.get_total_norm(shared).square()).sqrt() if shared else squares.sqrt()


def in_turns(mine: Sequence[T], world: World) -> Iterator[T | None]:
    """Pieces of work that all ranks do together: those of all ranks in turn, None for another's."""
    for rank in range(world.size):
        count = world.sent_by(rank, lambda: len(mine))
        yield from mine if rank == world.rank else [None] * count


def shards_of(model: HFModel) -> Shards | None:
    engine = engine_of(model)
    return None if engine is None else engine.shards


# ---- whether ----------------------------------------------------------------------------------------------------------------


def shard_of(
    recipe: Recipe, world: World, device: torch.device, facts: ModelFacts
) -> Literal["none", "base", "full", "experts"]:
    """What this run spreads. Refuses what cannot be, before anything is read. One rank has nothing to spread."""
    asked, kind = recipe.world.shard, "full" if recipe.method == "full" else "base"
    if world.size == 1 or asked == "none":
        return "none"
    copies = recipe.world.replicate
    config = read_config(recipe.model)
    why = recipe.why_not_sharded or why_not_fast(config)
    if recipe.train.graph == "on":
        why = why or "train.graph: on is set, and steps that gather weights cannot be captured; set train.graph: auto"
    if asked == "experts":
        kind, why = "experts", why or _why_not_experts(text_config(config), world.size)
    if asked == "auto" and copies == 1:
        return "none" if why or _fits(recipe, device, facts) else kind  # type: ignore[return-value]
    if why:
        raise _not_sharded(why)
    return kind  # type: ignore[return-value]


def told_of(shard: str, world: World, recipe: Recipe) -> list[str]:
    """What the run says about it."""
    what = {"base": "frozen weights", "full": "weights, gradients and moments", "experts": "experts"}.get(shard)
    if what is None:
        asked = f"world.shard: {recipe.world.shard}" if recipe.world.replicate == 1 else f"world.replicate: {recipe.world.replicate}"
        alone = world.size == 1 and asked not in ("world.shard: auto", "world.shard: none")
        return [f"{asked} has no effect on one rank"] if alone else []
    parts = world.size // recipe.world.replicate
    return [f"world.shard: {shard}: each rank keeps 1/{parts} of the {what}; steps are not captured as CUDA graphs"]


def _why_not_experts(config: HFConfig, ranks: int) -> str:
    if not (experts := num_experts(config)):
        return "the model has no experts"
    return f"the model has {experts} experts, too few for {ranks} ranks" if experts < ranks else ""


def _fits(recipe: Recipe, device: torch.device, facts: ModelFacts) -> bool:
    """Whether a rank has room for all weights and what is trained of them, beside activations. The host's memory always has."""
    if device.type != "cuda":
        return True
    each = MASTER_BYTES if recipe.method == "full" else FORMATS[recipe.stored_as].bytes_each
    return facts.parameters * each < ROOM * torch.cuda.get_device_properties(device).total_memory


def _not_sharded(why: str) -> RecipeError:
    return RecipeError(
        what="world.shard: the weights of this run cannot be sharded over ranks", why=why, fix="set world.shard: none"
    )
