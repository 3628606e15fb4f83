"""The script's view of trl and transformers: the packages as they are, but trainers and their arguments take what they took.

A trainer in that view is a class derived from the real one, of the same name. Arguments are made by a class of the same name,
too, which gives objects of the real class: trainers save them, by the name of their class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from pronghorn.compat.scripts.modules import NotHere
from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.renames import (
    STOPS,
    by_name,
    is_arguments,
    is_trainer,
    remember,
    translate_arguments,
    translate_trainer,
)
from pronghorn.compat.scripts.trainer_data import translate_data

SEEN_THROUGH = ("trl", "transformers")
# What `from trl import ...` gave before, and where it is now.
MOVED = {name: home for home, names in {
    "trl.experimental.orpo": ("ORPOConfig", "ORPOTrainer"), "trl.experimental.cpo": ("CPOConfig", "CPOTrainer"),
    "trl.experimental.gkd": ("GKDConfig", "GKDTrainer"),
    "trl.experimental.online_dpo": ("OnlineDPOConfig", "OnlineDPOTrainer"),
    "trl.data_utils": ("apply_chat_template", "extract_prompt", "is_conversational", "maybe_apply_chat_template",
                       "maybe_extract_prompt", "pack_dataset", "unpair_preference_dataset"),
    "pronghorn.compat.scripts.completion_only": ("DataCollatorForCompletionOnlyLM",),
}.items() for name in names}  # fmt: skip
_NO_PPO = ("TRL no longer has PPO", "use GRPOTrainer, RLOOTrainer or DPOTrainer")
_OWN_COLLATOR = ("TRL's trainers supply their own", "remove data_collator=")
# What it gave before, and no longer does.
GONE = {
    "PPOTrainer": _NO_PPO, "PPOConfig": _NO_PPO, "PPOv2Trainer": _NO_PPO, "PPOv2Config": _NO_PPO,
    "AutoModelForCausalLMWithValueHead": _NO_PPO, "AutoModelForSeq2SeqLMWithValueHead": _NO_PPO,
    "create_reference_model": ("DPOTrainer makes the reference itself", "pass ref_model=None"),
    "DPODataCollatorWithPadding": _OWN_COLLATOR, "RewardDataCollatorWithPadding": _OWN_COLLATOR,
    "ConstantLengthDataset": ("SFTTrainer packs by itself", "SFTTrainer(packing=True)"),
    "setup_chat_format": ("it resized the embeddings",
                          'tokenizer = get_chat_template(tokenizer, "chatml"), from unsloth.chat_templates'),
}  # fmt: skip
GIVES_TOKENIZER = ("AutoTokenizer", "AutoProcessor")


class View(ModuleType):
    """A package as a script sees it."""

    def __init__(self, real: ModuleType, fronts: Fronts) -> None:
        super().__init__(real.__name__, real.__doc__)
        names = ("__file__", "__path__", "__spec__", "__loader__", "__package__")
        vars(self).update({name: getattr(real, name) for name in names if hasattr(real, name)}, _real=real, _fronts=fronts)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # `from trl import *`
            return getattr(self._real, "__all__", [name for name in dir(self._real) if not name.startswith("_")])
        try:
            value = getattr(self._real, name)
        except AttributeError:
            top = self.__name__.partition(".")[0]
            if top == "trl" and name in GONE:
                why, fix = GONE[name]
                raise NotHere(what=f"{self.__name__}.{name} is not in this TRL", why=why, fix=fix) from None
            home = MOVED.get(name) if top == "trl" else None
            if home is None:
                raise
            self._fronts.notes.say(f"from trl import {name}: imported from {home}")
            value = getattr(import_module(home), name)
        return self._fronts.offered(value)

    def __setattr__(self, name: str, value: object) -> None:
        """What a script sets in a package, it sets there: as without us."""
        setattr(self._real, name, value)

    def __dir__(self) -> list[str]:
        return dir(self._real)

    def __reduce__(self) -> Any:
        return import_module, (self.__name__,)  # data sets are mapped by functions that use it


class Fronts:
    """What a script gets for a module or a class; the same for the same."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self._made: dict[int, tuple[Any, Any]] = {}  # id -> (what it stands for, which is held, and what stands for it)

    def offered(self, value: object) -> Any:
        if not isinstance(value, (type, ModuleType)) and getattr(value, "__name__", "") != "get_chat_template":
            return value
        if id(value) not in self._made:
            self._made[id(value)] = (value, self._make(value))
        return self._made[id(value)][1]

    def _make(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            return View(value, self) if value.__name__.partition(".")[0] in SEEN_THROUGH else value
        if is_trainer(value):
            return trainer_front(value, self.notes)
        if is_arguments(value):
            return arguments_front(value, self.notes)
        if value.__module__.startswith("pronghorn.") and hasattr(value, "from_pretrained"):
            return with_plain_ids(value, first=1)
        if value.__name__ in GIVES_TOKENIZER and value.__module__.startswith("transformers."):
            return with_plain_ids(value, first=None)
        if value.__name__ == "get_chat_template" and value.__module__.startswith("pronghorn."):
            return returning_ids(value)
        return value


def trainer_front(real: type, notes: Notes) -> type:
    def __init__(self: object, *given: object, **named: object) -> None:  # noqa: N807 - it becomes the method
        arguments = translate_trainer(real, by_name(real, given, named), notes)
        real.__init__(self, **translate_data(real, arguments, notes))  # type: ignore[misc]

    return _derived(real, type(real), {"__init__": functools.wraps(real.__init__)(__init__)})  # type: ignore[misc]


def arguments_front(real: type, notes: Notes) -> type:
    """Calling it makes an object of the real class; a class that the script derives from it is its own."""

    class Arguments(type(real)):  # type: ignore[misc]
        def __call__(cls, *given: object, **named: object) -> Any:
            maker: Any = real if cls is front else super().__call__
            arguments = translate_arguments(cls, by_name(cls, given, named), notes)
            stops = arguments.pop(STOPS, ())
            settings = remember(maker(**arguments), arguments)
            if stops:
                setattr(settings, STOPS, stops)
            return settings

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real) if cls is front else super().__instancecheck__(instance)

    front = _derived(real, Arguments, {})
    return front


def with_plain_ids(real: type, first: int | None) -> type:
    """`from_pretrained`, whose tokenizer gives ids. `first`: its place in what is returned; None: it is what is returned."""

    def from_pretrained(*given: object, **named: object) -> Any:
        from pronghorn.compat.scripts.chat_ids import with_ids

        result = real.from_pretrained(*given, **named)  # type: ignore[attr-defined]
        with_ids(result if first is None else result[first])
        return result

    wrapped = functools.wraps(real.from_pretrained)(from_pretrained)  # type: ignore[attr-defined]
    return _derived(real, type(real), {"from_pretrained": staticmethod(wrapped)})


def returning_ids(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def wrapped(*given: object, **named: object) -> Any:
        from pronghorn.compat.scripts.chat_ids import with_ids

        return with_ids(function(*given, **named))

    return wrapped


def _derived(real: type, kind: Any, members: dict[str, Any]) -> type:
    named = {"__module__": real.__module__, "__qualname__": real.__qualname__, "__doc__": real.__doc__}
    derived: type = kind(real.__name__, (real,), named | members)
    return derived
