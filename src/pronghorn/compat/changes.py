"""Detects changes to a model that its fast layers do not follow, before every forward of a trainer or script.

A program may change a loaded model: hook modules, wrap, remove or replace layers, set `forward` on an instance, change a number
that a layer uses. The model's own layers follow all of it. The fast ones follow what they look up at each forward: weights,
adapters, what trains, norms and their eps, linears replaced by equal ones. With any other change, the model runs on its own
layers, and one notice names the reason.

The check must be cheap. `_look` walks the module tree, compares it with the initial one, and remembers each module's state.
Each forward compares every module with that, and walks again only after a difference: 14 us a layer, 65 us with seven adapters,
on a core where `prepare` takes 231 and 696 us.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from peft.tuners.lora import ParamWrapper
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pronghorn.model.causal_lm import FastCausalLM, is_known
from pronghorn.model.experts import Adapted
from pronghorn.model.families import INPUT_NORM, keys_by_layer
from pronghorn.model.formats.linear import dequantizes
from pronghorn.model.formats.table import storage_of
from pronghorn.model.layers.mixers.attention import Attention
from pronghorn.model.text_stack import inner_of

# What may replace a module later:
#   linear      one of the same kind and size, or PEFT's wrapper around one: looked up at each forward (linears.py)
#   norm        one of the same kind, or PEFT's trained copy of it: looked up at each forward
#   stack       the same experts or router, or PEFT's wrapper around their parameters (experts.py)
#   stateless   one of the same kind: an activation function
#   fixed       itself
Kind = Literal["linear", "norm", "stack", "stateless", "fixed"]
WITHOUT_EFFECT = {"training", "gradient_checkpointing"}  # numbers of a module that change no result, or are looked up
# Config values that a family's own forward or its masks read at every call; most others are read once, when it is built.
CONFIG = (
    "num_hidden_layers",
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "attention_dropout",
    "is_causal",
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logits_scaling",
    "embedding_multiplier",
    "mup_enabled",
    "output_multiplier",
    "logit_scale",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "output_router_logits",
    "num_experts_per_tok",
    "top_k_experts",
    "norm_topk_prob",
    "clip_qkv",
    "layer_rope_theta",
    "rope_parameters",
    "rope_interleave",
    "original_max_position_embeddings",
)
OURS = "of_pronghorn"  # attribute of a forward that hf_forward.py set
CAPTURING = "transformers.utils.output_capturing"  # its hooks stay after one `output_hidden_states`, and do nothing
WEIGHTS = {nn.Parameter, type(None)}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}") for name in HOOKS)


class Place(NamedTuple):
    """A module of the initial model, without PEFT's wrappers."""

    path: str
    kind: Kind
    module: nn.Module
    type: type[nn.Module]
    numbers: dict[str, Any]
    children: dict[str, Place]


class Seen(NamedTuple):
    """What the latest look found."""

    path: str
    module: nn.Module
    type: type[nn.Module]
    children: tuple[nn.Module | None, ...]
    read: itemgetter[Any] | None  # its numbers
    numbers: Any


class Changes:
    def __init__(self, engine: FastCausalLM) -> None:
        self.backbone, self.config = engine.backbone, engine.backbone.config
        self.layers = [layer.layer for layer in engine.layers]
        mixers = [layer.mixer for layer in engine.layers if isinstance(layer.mixer, Attention)]
        self.pairs = [(mixer.q_norm, mixer.k_norm) for mixer in mixers if mixer.q_norm and mixer.k_norm]
        norms = {id(norm.module) for layer in engine.layers for norm in layer.norms}
        stacks = {id(group.module()) for layer in engine.layers for group in layer.groups if isinstance(group, Adapted)}
        self.places = [_place(f"layers.{i}", layer, norms, stacks) for i, layer in enumerate(self.layers)]
        self.names, modules = engine.names, self.backbone._modules
        ends = {name: module for name in (self.names.last_norm, INPUT_NORM) if (module := modules.get(name)) is not None}
        self.norms = [_place(name, module, {id(module)}, set()) for name, module in ends.items()]
        self.rotary = self._rotary_now()
        by_layer = keys_by_layer(self.config)  # read once, when the layers are built, and refused as a key of the model
        self.watched = [name for name in CONFIG if name not in by_layer]
        self.values = copy.deepcopy(self._values())
        self.why = ""  # of the latest look
        self.seen: list[Seen] = []
        self.first_forwards: dict[type[nn.Module], Any] = {}  # of every class, when it was first seen
        self._look()

    def why_not_now(self) -> str:
        """Why the model's own layers must run now; empty if the fast ones compute the same."""
        if any(GLOBAL_HOOKS):
            return "global module hooks are registered in this process"
        called = self._as_seen()
        if called is None:
            self._look()
            called = self._as_seen() or []
        if why := self.why or self._why_config():
            return why
        return next((why for seen in called if (why := why_called(seen.path, seen.module))), "")

    def _as_seen(self) -> list[Seen] | None:
        """None: something is not as the latest look saw it. Else whatever has hooks, or a forward of its own."""
        modules, called = self.backbone._modules, []
        if (
            list(modules["layers"]._modules.values()) != self._stack
            or any(modules.get(place.path) is not norm for place, norm in zip(self.norms, self._norms, strict=True))
            or any(modules.get(name) is not module for name, module in self._rotary.items())
        ):
            return None
        if any(cls.forward is not forward for cls, forward in self.forwards.items()):
            return None
        try:
            for seen in self.seen:
                _, module, kind, children, read, numbers = seen
                state = module.__dict__
                if (
                    state["_forward_hooks"]
                    or state["_forward_pre_hooks"]
                    or state["_backward_hooks"]
                    or state["_backward_pre_hooks"]
                    or "forward" in state
                    or ((own := state["_parameters"]) and not WEIGHTS.issuperset(map(type, own.values())))
                ):
                    called.append(seen)
                if type(module) is not kind or (read is not None and read(state) != numbers):
                    return None
                if ((inside := state["_modules"]) or children) and tuple(inside.values()) != children:
                    return None
        except KeyError:  # a number has become a parameter, or is gone
            return None
        return called

    def _why_config(self) -> str:
        if self.backbone.config is not self.config:
            return "the model's config was replaced"
        if (now := self._values()) != self.values:
            return next(
                f"config.{name} is {value!r}, but was {was!r} when the layers were built"
                for name, value, was in zip(self.watched, now, self.values, strict=True)
                if value != was
            )
        name = self.config._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS.get(name, None) if isinstance(name, str) and "/" not in name else None
        return "" if function is None or is_known(function) else f"attention is {name}, a custom attention function"

    def _values(self) -> list[Any]:
        return [getattr(self.config, name, None) for name in self.watched]

    # ---- looking -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        modules = self.backbone._modules
        self._stack = list(modules["layers"]._modules.values())
        self._norms, self._rotary = [modules.get(place.path) for place in self.norms], self._rotary_now()
        self.seen = []
        whys = [
            self._why_layers(),
            *(self._at(place, place.module) for place in self.places),
            *map(self._at, self.norms, self._norms),
            self._why_rotary(),
        ]
        whys += [f"the norms of q and k have different eps ({q.eps} and {k.eps})" for q, k in self.pairs if q.eps != k.eps]
        self.forwards = {seen.type: seen.type.forward for seen in self.seen}
        self.first_forwards = self.forwards | self.first_forwards
        whys += [
            f"{cls.__name__}.forward is replaced by {_name(forward)}"
            for cls, forward in self.forwards.items()
            if forward is not self.first_forwards[cls] or not is_known(forward)
        ]
        self.why = next(filter(None, whys), "")

    def _rotary_now(self) -> dict[str, nn.Module]:
        return {name: module for name, module in self.backbone._modules.items() if name.startswith(self.names.rotary)}

    def _why_layers(self) -> str:
        if self._stack == self.layers:
            return ""
        if len(self._stack) != len(self.layers):
            return f"the model has {len(self._stack)} decoder layers now, but had {len(self.layers)}"
        number = next(i for i, (now, then) in enumerate(zip(self._stack, self.layers, strict=True)) if now is not then)
        return f"layers.{number} was replaced"

    def _why_rotary(self) -> str:
        """Called as it is, so its numbers count as they are."""
        for name, module in self._rotary.items():
            self.seen += _whole(name, module)
        kinds, were = (
            [type(part) for module in rotary.values() for part in module.modules()] for rotary in (self._rotary, self.rotary)
        )
        return "" if kinds == were else "the RoPE modules were replaced"

    def _at(self, place: Place, now: nn.Module | None) -> str:
        """Why what stands in this place is not what the fast layers know."""
        if now is None:
            return f"{place.path} was removed"
        inner = inner_of(now)
        if place.kind != "fixed":
            self.seen += _whole(place.path, now, inner)
        elif now is place.module:
            self.seen.append(_seen(place.path, now, with_numbers=True))
        else:
            self.seen.append(_seen(place.path, now))
        if not _fits(place, now, inner):
            return f"{place.path} is not a {place.type.__name__} any more, but a {type(now).__name__}"
        if place.kind in ("fixed", "stack", "stateless") and (numbers := _numbers(inner)) != place.numbers:
            name = next(name for name in {**place.numbers, **numbers} if numbers.get(name) != place.numbers.get(name))
            return f"{place.path}.{name} is {numbers.get(name)}, but was {place.numbers.get(name)} when the layers were built"
        if place.kind != "fixed":
            return ""
        return next(filter(None, (self._at(child, now._modules.get(name)) for name, child in place.children.items())), "")


def _place(path: str, module: nn.Module, norms: set[int], stacks: set[int]) -> Place:
    """`norms`, `stacks`: ids of norms, and of routers and stacks of experts."""
    inner = inner_of(module)
    kind: Kind = "fixed"
    if id(module) in norms or id(inner) in norms:
        kind = "norm"
    elif isinstance(inner, nn.Linear):
        kind = "linear"
    elif id(inner) in stacks:
        kind = "stack"
    elif not any(True for _ in inner.parameters()) and not inner._modules:
        kind = "stateless"
    children = (
        {name: _place(f"{path}.{name}", child, norms, stacks) for name, child in inner._modules.items() if child is not None}
        if kind == "fixed"
        else {}
    )
    return Place(path, kind, inner, type(inner), _numbers(inner), children)


def _fits(place: Place, now: Any, inner: Any) -> bool:
    then = place.module
    if place.kind == "fixed":
        return now is then and type(now) is place.type
    if place.kind == "stack":
        while isinstance(now, ParamWrapper):
            now = now.base_layer
        return now is then and type(now) is place.type
    if place.kind == "linear":
        either = dequantizes(inner) and dequantizes(then)  # a layer takes the one for the other
        alike = type(inner) is place.type and storage_of(inner) is storage_of(then)
        return (alike or either) and (inner.in_features, inner.out_features) == (then.in_features, then.out_features)
    if place.kind == "norm" and type(now) is ModulesToSaveWrapper:
        return all(type(module) is place.type for module in (inner, *now.modules_to_save.values()))
    return type(now) is place.type


def _numbers(module: nn.Module) -> dict[str, Any]:
    """A module's public numbers beside its tensors."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and not name.startswith("_") and name not in WITHOUT_EFFECT
    }


def _seen(path: str, module: nn.Module, *, with_numbers: bool = False) -> Seen:
    names = list(_numbers(module)) if with_numbers else []
    read: itemgetter[Any] | None = itemgetter(*names) if names else None
    return Seen(path, module, type(module), tuple(module._modules.values()), read, read(vars(module)) if read else None)


def _whole(path: str, module: nn.Module, numbers_of: nn.Module | None = None) -> Iterator[Seen]:
    """All of a module, but for PEFT's empty containers."""
    for name, part in module.named_modules():
        if part._modules or not isinstance(part, nn.ModuleDict | nn.ParameterDict):
            with_numbers = part is numbers_of and not isinstance(part, nn.Linear)
            yield _seen(f"{path}.{name}".rstrip("."), part, with_numbers=with_numbers)


# ---- what is called --------------------------------------------------------------------------------------------------


def why_called(path: str, module: nn.Module) -> str:
    """Why a module must be called and cannot be replaced by its computation; empty if it can."""
    state = module.__dict__
    if "forward" in state and not hasattr(state["forward"], OURS):
        by = "accelerate, which moves its weights" if "_hf_hook" in state else _name(state["forward"])
        return f"the forward of {path} was replaced on the instance by {by}"
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return _why_hooked(path, (state[kind] for kind in HOOKS))
    if any(not isinstance(p, nn.Parameter | None) for p in state["_parameters"].values()):
        return f"{path} has temporary weights (functional_call)"
    return ""


def is_plain_table(module: nn.Module) -> bool:
    """Embeddings without hooks that treat a flat list of tokens like rows of tokens."""
    return isinstance(module, nn.Embedding) and is_known(type(module).forward) and not why_called("", module)


def _why_hooked(path: str, hooks: Iterable[Mapping[int, Any]]) -> str:
    for one in hooks:
        for hook in one.values():
            source = getattr(hook, "func", hook)  # of a partial
            name = getattr(source, "__name__", type(source).__name__)
            if name == "_adapter_names_pre_forward_hook":
                return "adapter_names: PEFT selects an adapter per row"
            if getattr(source, "__module__", "") != CAPTURING:
                return f"{path} has a hook ({name})"
    return ""


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}".lstrip(".")
