"""Full fine-tuning with weights, gradients and moments spread over ranks (`world.shard: full`): shards.py for trained weights.

A rank trains its part of each unit, as slices of the parameters that lie in it. AdamW works on each number by itself, so slices
are updated as whole parameters would be. After a layer's backward its gradients go into the buffer that has its weights, which
nobody needs any more, and their sum over ranks is scattered while the next layer's backward runs, straight to where a rank has
its part of the gradients. With several packs a step, each rank adds what it has so far to its part before the sum. The loss
was divided by the token count of all ranks, so nothing is averaged. What is in no unit (the last norm) every rank has and sums
up.

A checkpoint is that of one rank: unit by unit, weights and moments are gathered, and the writer keeps them in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.types import Grads
from pronghorn.model.shards import Place
from pronghorn.train.dist.shards import BUFFERS, MOMENTS, STATE, Shards, Shares, norm_over_ranks, shards_of
from pronghorn.train.dist.world import Pending

FP32 = torch.float32


class TrainedShards(Shards):
    trains = True

    def __init__(self, shares: Shares, engine: FastCausalLM) -> None:
        super().__init__(shares, engine)
        named = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
        self._places: dict[int, Place] = {}  # by a parameter's id
        self.slices: dict[str, nn.Parameter] = {}  # of this rank, by the parameter's name
        for unit in self.units:
            for place in unit.places:
                self._places[id(named.pop(place.name))] = place
                if (mine := unit.mine(place)) is not None:
                    part = unit.part.view(FP32)[mine[0]]
                    self.slices[place.name] = nn.Parameter(part[None] if len(place.shape) > 1 else part)  # matrices decay
        self.everywhere = named
        self._gradients = [torch.zeros_like(unit.part).view(FP32) for unit in self.units]  # of this rank's parts
        self._summed: dict[int, Pending] = {}  # units that have gradients in this step, and the last sum of each
        for number in {0, self._head}:
            for parameter in self._of(number):
                parameter.register_post_accumulate_grad_hook(self._reduce_end(number))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What the optimizer sees."""
        return {**self.slices, **self.everywhere}

    def _of(self, number: int) -> list[nn.Parameter]:
        names = {place.name for place in self.units[number].places}
        return [p for name, p in self._engine.model.named_parameters() if name in names]

    # ---- gradients -----------------------------------------------------------------------------------------------------------

    def take(self, layer: int, parameters: Sequence[Tensor], gradients: Grads) -> Grads:
        return self._reduce(1 + layer, parameters, gradients)

    def _reduce_end(self, number: int) -> Any:
        """A hook that reduces the gradients of embeddings and head, which come by autograd. Autograd holds it out of sight of
        Python's garbage collector, so it keeps no reference to the shards."""
        me = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            if (shards := me()) is not None:
                (parameter.grad,) = shards._reduce(number, [parameter], [parameter.grad])

        return hook

    def _reduce(self, number: int, parameters: Sequence[Tensor], gradients: Grads) -> Grads:
        """Begins the sum over ranks. Of a rank that leads, others have no part: it looks for what is not finite."""
        if self._leads:
            return [None if g is None or bool(torch.isfinite(g).all()) else g for g in gradients]
        unit, left, mine = self.units[number], list(gradients), self._gradients[number]
        buffer = number % BUFFERS
        self._settle(buffer)
        self._held[buffer] = None
        whole = self._buffer(number).zero_()
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            place = self._places.get(id(parameter))
            if place is not None and gradient is not None:
                place.of(whole).copy_(gradient)
                left[i] = None
        if number in self._summed:
            self._summed[number].wait()
            unit.part_of(whole).view(FP32).add_(mine)
        self._pending[buffer] = self._summed[number] = self.world.scatter_sum(mine, whole.view(FP32))
        return left

    def drop_gradients(self) -> None:
        """Before a step: whoever looked at a gradient of the layers before it left theirs here."""
        for sum_under_way in self._summed.values():
            sum_under_way.wait()
        self._summed.clear()

    def sum_up(self, beside: Sequence[Tensor]) -> Tensor:
        """After the last backward of a step: gradients, and what is `beside` them, are those of all ranks. Returns the norm."""
        for number, (unit, gradients) in enumerate(zip(self.units, self._gradients, strict=True)):
            self._summed[number].wait() if number in self._summed else gradients.zero_()
            for place in unit.places:
                if (mine := unit.mine(place)) is not None:
                    parameter = self.slices[place.name]
                    parameter.grad = gradients[mine[0]].view(parameter.shape)
        for parameter in self.everywhere.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        shared = [p.grad for p in self.everywhere.values()]
        return norm_over_ranks(self.world, self._gradients, shared, beside)  # type: ignore[arg-type]

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and moments as one rank would have them, by name, in host memory: on the writer. `tensors`: this rank's
        moments. All ranks call it."""
        weights = self._gathered({name: p.detach() for name, p in self.trained.items()})
        if not tensors:  # no update yet
            return weights, {}
        state: dict[str, Tensor] = {}
        for key in MOMENTS:
            found = self._gathered({name: tensors[STATE.format(key, name)] for name in self.trained})
            state |= {STATE.format(key, name): tensor for name, tensor in found.items()}
        step = next(tensor for name, tensor in tensors.items() if name.startswith(STATE.format("step", "")))
        return weights, state | {STATE.format("step", name): step.cpu() for name in weights}

    def _gathered(self, slices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.forget()
        found = {name: slices[name].cpu() for name in self.everywhere}
        for number, unit in enumerate(self.units):
            part = torch.zeros_like(unit.part)
            for place in unit.places:
                if (mine := unit.mine(place)) is not None:
                    part.view(FP32)[mine[0]] = slices[place.name].reshape(-1)
            buffer = self._buffer(number)
            self.world.gather(buffer, part).wait()
            if self.world.writes:
                found |= {place.name: place.of(buffer).to("cpu", copy=True) for place in unit.places}
        return found if self.world.writes else {}

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's of a checkpoint's moments."""
        found = dict(tensors)
        for unit in self.units:
            for place in unit.places:
                mine = unit.mine(place)
                for name in (STATE.format(key, place.name) for key in MOMENTS):
                    if mine is not None and name in tensors and tuple(tensors[name].shape) == place.shape:
                        found[name] = tensors[name].reshape(-1)[mine[1]].view(self.slices[place.name].shape)
        return found


def trained_shards_of(model: HFModel) -> TrainedShards | None:
    """Or `ExpertShards`, which has the same methods for what is trained."""
    found = shards_of(model)
    return found if found is not None and found.trains else None  # type: ignore[return-value]
