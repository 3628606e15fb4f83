"""What a captured forward and backward depend on: addresses, and choices made from the modules' state.

Graphs read weights, adapters and norms in place, so they see new values; they do not see another tensor, adapter or scale, or a
changed `requires_grad`. Before every replay these are compared, in the modules' dictionaries: about 2 us a linear layer with
its adapter.
"""

from __future__ import annotations

import copy
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.linears import LinearGroup

_OF_AN_ADAPTER = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling", "training")


class Watched:
    def __init__(self, engine: FastCausalLM) -> None:
        """The current state, right after `engine.prepare`. Holds references, so that no address is reused."""
        self._same: list[tuple[dict[str, Any], str, Any]] = []  # (dictionary, key, the very object that is there)
        self._equal: list[tuple[dict[str, Any], str, Any]] = []  # (dictionary, key, a copy of the value)
        self._tensors: list[tuple[Tensor, int, bool]] = []  # (tensor, address, whether it trains)
        self._is(vars(engine), "_adapters")
        for name, module in engine.backbone._modules.items():
            for part in module.modules() if name.startswith(engine.names.rotary) else ():
                self._module(part)
        for layer in engine.layers:
            for group in layer.groups:
                assert isinstance(group, LinearGroup)
                self._group(group)
            for module, name in (bare for part in layer.parts for bare in part.bare_names):
                self._is(module._parameters, name)
                self._module(module)
            for norm in layer.norms:
                self._is(vars(norm), "module")
                self._module(norm.module)
                self._is_equal(vars(norm.module), "variance_epsilon", "eps")

    def unchanged(self) -> bool:
        return (
            all(place.get(key) is found for place, key, found in self._same)
            and all(place.get(key) == found for place, key, found in self._equal)
            and all(tensor.data_ptr() == at and tensor.requires_grad is trains for tensor, at, trains in self._tensors)
        )

    def _is(self, place: dict[str, Any], *keys: str) -> None:
        self._same += [(place, key, place.get(key)) for key in keys]

    def _is_equal(self, place: dict[str, Any], *keys: str) -> None:
        self._equal += [(place, key, copy.copy(place[key])) for key in keys if key in place]

    def _group(self, group: LinearGroup) -> None:
        self._is(vars(group.gemms), "matrix")
        if group.gemms.matrix is not None:
            self._is(vars(group.gemms.matrix), "M")
        children = group.parent._modules
        for name in group.names:
            self._is(children, name)
            module: Any = children[name]
            if isinstance(module, LoraLinear):
                self._adapter(module)
                self._is(module._modules, "base_layer")
                module = module.get_base_layer()
            self._module(module)

    def _adapter(self, module: LoraLinear) -> None:
        self._is_equal(vars(module), *_OF_AN_ADAPTER)
        for name in module.active_adapters:
            for half in (module.lora_A, module.lora_B):
                self._is(half._modules, name)
                self._module(half._modules[name])
            if isinstance(dropout := module.lora_dropout[name], nn.Module):
                self._is(module.lora_dropout._modules, name)
                self._is_equal(vars(dropout), "p")

    def _module(self, module: nn.Module) -> None:
        """Its own parameters and buffers."""
        for places in (module._parameters, module._buffers):
            for name, tensor in places.items():
                self._is(places, name)  # type: ignore[arg-type]
                if tensor is not None:
                    self._tensors.append((tensor, tensor.data_ptr(), tensor.requires_grad))
