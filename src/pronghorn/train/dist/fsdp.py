"""Full fine-tuning with weights, gradients and moments sharded over ranks (`world.shard: full`), by torch's FSDP2.

A unit is what is gathered together: each decoder layer, and the rest of the model (embeddings, last norm, LM head), which stays
gathered from forward to backward. A rank keeps rows r/R of each weight and trains those: the optimizer sees plain tensors that
share the memory of FSDP2's shards. Vectors are sharded, too, and do not decay.

    forward     gather k+1 while k computes; in bf16 where the run computes in bf16
    backward    gather k-1 while k computes; reduce-scatter of k's gradients in float32, summed, since the loss is already
                divided by the count of all ranks
    replicate   with `world.replicate` there are several groups that shard, and gradients are summed over groups as well

Our layers run in one autograd node, which FSDP2 sees as a forward of the decoder layer's module under another name. All ranks
run the model together, also where only the writer needs the result (answers to held-out rows). Gathers and reduce-scatters go
through `World`, which notices ranks that are gone, and goes by way of the host for ranks that share a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.layer import DecoderLayer
from pronghorn.model.layers.types import Shards
from pronghorn.model.rank_files import Part
from pronghorn.train.dist.shards import MOMENTS, Shares, norm_over_ranks
from pronghorn.train.dist.world import World

T = TypeVar("T")
LAYER, MODEL = "pronghorn_layer", "pronghorn_model"  # methods that FSDP2 takes for forwards


class FsdpShares(Shares):
    """Shards each layer as soon as it is loaded: its host memory is free again, and the device has this rank's part."""

    def __init__(self, world: World, device: torch.device, replicate: int, dtype: torch.dtype) -> None:
        """`dtype`: in which weights are gathered, and multiplied."""
        super().__init__(world, device)
        self.replicate, self.group = replicate, world.neighbours(world.size // replicate)
        shape = (world.size,) if replicate == 1 else (replicate, self.group.size)
        self._options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]),
            "mp_policy": MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        }

    def keep(self, name: str, module: nn.Module) -> None:
        self._shard(name, module, set())

    def keep_ends(self, model: HFModel) -> None:
        self._shard("", model, {p for p in model.parameters() if not p.requires_grad})

    def _shard(self, name: str, module: nn.Module, ignored: set[nn.Parameter]) -> None:
        for leaf, parameter in module.named_parameters(prefix=name):
            if not isinstance(parameter, DTensor):
                self.look_at(leaf, parameter)
        unit = fully_shard(module, ignored_params=ignored, **self._options)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(_Gather(self.group))  # type: ignore[arg-type]  # torch 2.11 has their class elsewhere
        unit.set_custom_reduce_scatter(_ReduceScatter(self.group))  # type: ignore[arg-type]


class _Gather:
    def __init__(self, world: World) -> None:
        self._world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self._world.gather(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)).wait()


class _ReduceScatter(_Gather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: object) -> None:
        self._world.scatter_sum(output_tensor, input_tensor).wait()


class Fsdp(Shards):
    """`engine.shards` of a model that FSDP2 shards."""

    def __init__(self, shares: FsdpShares, engine: FastCausalLM) -> None:
        self.world, self.key = shares.world, shares.key
        self._group, self._replicate, self._model = shares.group, shares.replicate, engine.model
        model: Any = engine.model
        for layer in engine.layers:
            setattr(layer.layer, LAYER, MethodType(_forward_of(layer), layer.layer))
            register_fsdp_forward_method(layer.layer, LAYER)
            layer.gathered = getattr(layer.layer, LAYER)
        setattr(model, MODEL, MethodType(lambda _, work: work(), model))
        register_fsdp_forward_method(model, MODEL)
        engine.shards = self
        with torch.no_grad():
            self.around(lambda: None)  # FSDP2 may replace its shards before the first forward
            self.sharded: dict[str, DTensor] = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}  # type: ignore[misc]
            locals_ = {name: parameter.to_local() for name, parameter in self.sharded.items()}
        self.trained = {name: nn.Parameter(part) for name, part in locals_.items() if part.numel()}

    @property
    def ranks(self) -> int:
        """How many share one copy of the weights: the first of them."""
        return self._group.size

    def spreads(self, tensor: Tensor) -> bool:
        return isinstance(tensor, DTensor)

    # ---- as the model and the run call it ------------------------------------------------------------------------------------

    def prepare(self, dtype: torch.dtype) -> bool:
        return True  # each layer prepares itself when its weights are there

    def around(self, work: Callable[[], T]) -> T:
        """Runs the model: what is in no layer is gathered."""
        result: T = getattr(self._model, MODEL)(work)
        if not torch.is_grad_enabled():
            self._model.reshard()  # no backward will
        return result

    # ---- gradients -----------------------------------------------------------------------------------------------------------

    def before_backward(self, *, last: bool) -> None:
        self._model.set_requires_all_reduce(last)  # copies of a shard are summed once a step

    def drop_gradients(self) -> None:
        for parameter in (*self.sharded.values(), *self.trained.values()):
            parameter.grad = None

    def sum_up(self, beside: Sequence[Tensor]) -> Tensor:
        """After the last backward of a step, which has summed gradients: sums what is `beside` them. Returns the norm."""
        for name, parameter in self.trained.items():
            gradient = self.sharded[name].grad
            parameter.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
            self.sharded[name].grad = None
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        return norm_over_ranks(self.world, gradients, (), beside) / sqrt(self._replicate)

    # ---- checkpoints ---------------------------------------------------------------------------------------------------------

    def parts(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Part], dict[str, Part]]:
        """The rows of weights and moments that this rank has to save, by their names in a checkpoint: none, if its group is a
        copy of the first. `state`: this rank's; empty before the first update."""
        if self.world.rank >= self.ranks:
            return {}, {}
        weights = {name: Part(part.detach(), self._first(name)) for name, part in self.trained.items()}
        moments = {key: name for name in self.trained for key in (moment + name for moment in MOMENTS) if key in state}
        return weights, {key: Part(state[key], self._first(name)) for key, name in moments.items()}

    def _first(self, name: str) -> int:
        """The first row that this rank has of a weight."""
        rows = int(self.sharded[name].shape[0])
        return min(rows, -(-rows // self._group.size) * self._group.rank)

    def cut(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's of a checkpoint's state, of which no more is read."""
        found = dict(tensors)
        for name, part in self.trained.items():
            first = self._first(name)
            for key in (moment + name for moment in MOMENTS):
                if key in tensors and tensors[key].shape == self.sharded[name].shape:
                    found[key] = tensors[key][first : first + len(part)].clone()
        return found


def _forward_of(layer: DecoderLayer) -> Callable[..., Tensor]:
    def forward(_: nn.Module, h_TD: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """`run` has all else: FSDP2 copies whatever it finds a differentiable tensor in."""
        layer.prepare(h_TD.dtype)
        return run(h_TD)

    return forward
