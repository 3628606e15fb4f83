"""Experts that are spread over the ranks of a run (`world.shard: experts`), frozen, with or without adapters.

Rank r of R has experts r E/R to (r + 1) E/R of every layer, and what is trained of them. Every rank has everything else.
Tokens' rows, sorted by expert, go to the rank of their expert and come back (model/layers/mlps/experts.py):

    forward     counts, x and routing weights there ── gate, up, down ── y back
    backward    dy there ── x there again, where an adapter needs it ── dx and dweights back

An expert's adapter is trained where the expert is: the rows of all ranks come there, so its gradient is whole and is not summed
over ranks. A checkpoint is that of one rank: parts of adapters and moments are gathered, and the writer keeps them in host
memory. All ranks run the model together; none can answer, or look for a broken row, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pronghorn.hf_types import HFModel
from pronghorn.kernels.moe.grouped_quantized import QuantizedStack
from pronghorn.kernels.moe.routing import Routing, sort_by_expert
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.experts import OwnExperts
from pronghorn.model.formats.experts import StoredExperts, stacks_in
from pronghorn.model.layers.mlps.experts import ExpertsMlp
from pronghorn.model.layers.types import Shards
from pronghorn.train.dist.fsdp import Fsdp, FsdpShares
from pronghorn.train.dist.shards import MOMENTS, Ring, Shares, norm_over_ranks, shards_of
from pronghorn.train.dist.world import World

T = TypeVar("T")


def experts_of(rank: int, ranks: int, experts: int) -> slice:
    return slice(rank * experts // ranks, (rank + 1) * experts // ranks)


class ExpertRows:
    """Rows of one layer's experts, sent to their ranks and back: R ranks, E experts, S rows of this rank, N rows that this rank's experts get."""

    def __init__(self, world: World, experts: int) -> None:
        self._world = world
        self._own = [experts_of(rank, world.size, experts) for rank in range(world.size)]

    def counts(self, offsets_E1: Tensor) -> Tensor:
        mine = (offsets_E1[1:] - offsets_E1[:-1]).contiguous()
        whole = torch.empty(self._world.size * len(mine), dtype=mine.dtype, device=mine.device)
        self._world.gather(whole, mine).wait()
        return whole.view(self._world.size, len(mine))

    def _sizes(self, counts_RE: Tensor) -> tuple[list[int], list[int]]:
        """(rows that go to each rank, rows that come from each)"""
        rows = counts_RE.tolist()  # waits for the device
        own = self._own[self._world.rank]
        return [sum(rows[self._world.rank][there]) for there in self._own], [sum(row[own]) for row in rows]

    def out(self, rows_S: Tensor, counts_RE: Tensor) -> Tensor:
        sent, received = self._sizes(counts_RE)
        rows_N = self._world.exchange(rows_S, sent, received)
        return rows_N if len(rows_N) else rows_N.new_zeros(1, rows_S.shape[1])

    def back(self, rows_N: Tensor, counts_RE: Tensor) -> Tensor:
        sent, received = self._sizes(counts_RE)
        return self._world.exchange(rows_N[: sum(received)], received, sent)

    def routing(self, counts_RE: Tensor, weights_N1: Tensor) -> Routing:
        own = self._own[self._world.rank]
        counts = counts_RE[:, own]
        ids = torch.arange(counts.shape[1], dtype=torch.int32, device=counts.device).expand(counts.shape)
        ids_N1 = ids.reshape(-1).repeat_interleave(counts.reshape(-1)).view(-1, 1)
        if not len(ids_N1):  # kernels know no work without rows: one of zeros, for the first expert
            ids_N1 = torch.zeros(1, 1, dtype=torch.int32, device=counts.device)
        return Routing(ids_N1, weights_N1, *sort_by_expert(ids_N1, counts.shape[1]))


class ExpertShares(Shares):
    """This rank's experts, taken while the model loads."""

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world, device)
        self.own: dict[tuple[nn.Module, str], OwnExperts] = {}

    def experts(self, count: int) -> slice:
        return experts_of(self.world.rank, self.world.size, count)

    def keep(self, name: str, module: nn.Module) -> None:
        for inner_name, inner in module.named_modules(prefix=name):
            for stack in stacks_in(inner):
                self.own[inner, stack] = self._cut(f"{inner_name}.{stack}", inner, stack)

    def keep_ends(self, model: HFModel) -> None:
        """They are everybody's."""

    def _cut(self, name: str, module: nn.Module, stack: str) -> OwnExperts:
        parameter = getattr(module, stack)
        experts = self.experts(len(parameter))
        if isinstance(module, StoredExperts):
            stored = module.stacks[stack].stored
            own = QuantizedStack.of(stored.experts(experts, len(parameter)).to(self.device), experts.stop - experts.start)
            self.look_at(name, next(iter(stored.tensors().values())))
            nothing: dict[str, Any] = {part: self._empty(tensor) for part, tensor in stored.tensors().items()}
            module.stacks[stack] = module.stacks[stack]._replace(stored=replace(stored, **nothing))  # type: ignore[type-var]
            return OwnExperts(experts, own)
        self.look_at(name, parameter)
        weight = parameter.detach()[experts].to(self.device, copy=True)
        parameter.data = self._empty(parameter)
        return OwnExperts(experts, weight)

    def _empty(self, tensor: Tensor) -> Tensor:
        """As large as this one, without memory."""
        return torch.zeros((), dtype=tensor.dtype, device=self.device).expand(tensor.shape)


class ExpertShards(Shards):
    """`engine.shards` of a model whose experts are spread."""

    def __init__(self, shares: ExpertShares, engine: FastCausalLM, model: nn.Module) -> None:
        """`model`: with its adapters, by whose names checkpoints go."""
        self.world, self.key = shares.world, shares.key
        self._own = shares.own
        named = {id(p): name for name, p in model.named_parameters()}
        self.everywhere = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.slices: dict[str, nn.Parameter] = {}  # of this rank, by the parameter's name
        self._whole: dict[str, tuple[tuple[int, ...], int]] = {}  # its shape, and how many experts it has
        for layer in engine.layers:
            if not isinstance(layer.mlp, ExpertsMlp):
                continue
            stacks = layer.mlp.expert_gate_up, layer.mlp.expert_down
            experts = len(getattr(stacks[0].module(), stacks[0].parameter))
            layer.mlp.spread = ExpertRows(self.world, experts)
            for stack in stacks:
                own = stack.own = shares.own[stack.module(), stack.parameter]
                if (adapter := stack.adapter(stack.parameter)) is not None:
                    own.adapter = self._cut_adapter(adapter.A_RD, adapter.B_OR, named, experts, own.experts, shares)
                assert not stack.why_not_fused()
        engine.shards = self

    def _cut_adapter(
        self, A: Any, B: Any, named: Mapping[int, str], experts: int, own: slice, shares: ExpertShares
    ) -> tuple[nn.Parameter, nn.Parameter]:
        parts = []
        for parameter in (A, B):
            name = named[id(parameter)]
            self._whole[name] = tuple(parameter.shape), experts
            part = nn.Parameter(self._part(name, parameter.detach(), own))
            self.slices[name] = part
            del self.everywhere[name]
            parameter.data = shares._empty(parameter)
            parts.append(part)
        return parts[0], parts[1]

    # ---- PEFT's layouts: A is [E r, D], B is [O, r E] ------------------------------------------------------------------------

    def _by_expert(self, name: str, tensor: Tensor, experts: int) -> Tensor:
        """[E, ...]"""
        shape = (experts, -1)
        found: Tensor = tensor.unflatten(0, shape) if ".lora_A." in name else tensor.unflatten(1, shape[::-1]).permute(2, 0, 1)
        return found

    def _part(self, name: str, tensor: Tensor, own: slice) -> Tensor:
        """This rank's part, in the same layout."""
        found = self._by_expert(name, tensor, self._whole[name][1])[own]
        return self._joined(name, found)

    def _joined(self, name: str, by_expert: Tensor) -> Tensor:
        """From [E, ...] to PEFT's layout, in memory of its own."""
        if ".lora_A." in name:
            return by_expert.flatten(0, 1).clone()
        return by_expert.permute(1, 2, 0).flatten(1).clone()

    # ---- as the model and the run call it ------------------------------------------------------------------------------------

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer sees."""
        return {**self.slices, **self.everywhere}

    @property
    def nbytes(self) -> int:
        """Bytes of experts' weights on this rank."""
        found = (own.weight for own in self._own.values())
        return sum(weight.nbytes if isinstance(weight, Tensor) else weight.stored.nbytes for weight in found)

    def spreads(self, tensor: Tensor) -> bool:
        """Whether its memory is elsewhere."""
        return tensor.numel() > 1 and not any(tensor.stride())

    # ---- gradients -----------------------------------------------------------------------------------------------------------

    def before_backward(self, *, last: bool) -> None: ...

    def drop_gradients(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    def sum_up(self, beside: Sequence[Tensor]) -> Tensor:
        """After the last backward of a step: gradients, and what is `beside` them, are those of all ranks. Returns the norm."""
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine, shared = ([p.grad for p in part.values()] for part in (self.slices, self.everywhere))
        return norm_over_ranks(self.world, mine, shared, beside)  # type: ignore[arg-type]

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and moments as one rank would have them, by name: on the writer. `tensors`: this rank's moments. All ranks
        call it."""
        weights = {name: p.detach() for name, p in self.everywhere.items()}
        weights |= {name: self._gathered(name, p.detach()) for name, p in self.slices.items()}
        state = dict(tensors)
        for name in self.slices if tensors else ():
            for key in MOMENTS:
                place = key + name
                state[place] = self._gathered(name, tensors[place])
        return weights, state

    def _gathered(self, name: str, part: Tensor) -> Tensor:
        """In host memory. Ranks may have one expert more or less than others."""
        experts, ranks = self._whole[name][1], self.world.size
        each = [experts_of(rank, ranks, experts) for rank in range(ranks)]
        most = max(own.stop - own.start for own in each)
        own = each[self.world.rank]
        mine = self._by_expert(name, part, own.stop - own.start)
        padded = mine.new_zeros(most, *mine.shape[1:])
        padded[: len(mine)] = mine
        found = padded.new_empty(ranks * most, *mine.shape[1:])
        self.world.gather(found, padded).wait()
        parts = [rows[: own.stop - own.start] for rows, own in zip(found.cpu().split(most), each, strict=True)]
        return self._joined(name, torch.cat(parts))

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's of a checkpoint's moments."""
        found = dict(tensors)
        for name, (shape, experts) in self._whole.items():
            for key in MOMENTS:
                place = key + name
                if place in tensors and tuple(tensors[place].shape) == shape:
                    own = experts_of(self.world.rank, self.world.size, experts)
                    found[place] = self._part(name, tensors[place], own)
        return found


# ---- each way to spread ------------------------------------------------------------------------------------------------------


def shares_of(
    shard: str, world: World, device: torch.device, dtype: torch.dtype, replicate: int, plan: object
) -> Shares | None:
    """`dtype`: of a step's products. `plan`: what layers recompute, and with experts elsewhere send again, so all ranks must do
    the same."""
    if shard == "experts":
        world.require_same(lambda: {"memory plan": str(plan)})
        return ExpertShares(world, device)
    if shard == "full":
        return FsdpShares(world, device, replicate, dtype)
    return None if shard == "none" else Shares(world.neighbours(world.size // replicate), device)


def spread(shares: Shares, model: HFModel) -> Shards:
    engine = shares.engine_of(model)
    if isinstance(shares, ExpertShares):
        return ExpertShards(shares, engine, model)
    return Fsdp(shares, engine) if isinstance(shares, FsdpShares) else Ring(shares, engine)


def trained_shards_of(model: HFModel) -> Fsdp | ExpertShards | None:
    found = shards_of(model)
    return found if isinstance(found, Fsdp | ExpertShards) else None
