"""Which module of ours answers to which name that scripts import, and a finder that says so to Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from pronghorn import __version__
from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError

STOOD_IN_FOR = ("unsloth", "unsloth_zoo")
OURS = {
    "unsloth": "pronghorn",
    "unsloth.chat_templates": "pronghorn.chat_templates",
    "unsloth.trainer": "pronghorn.trainer",
    "unsloth.tokenizer_utils": "pronghorn.compat.dropin.internals",
    "unsloth.models": "pronghorn",
    "unsloth.models.loader": "pronghorn",
    "unsloth.models.llama": "pronghorn",
    "unsloth.models.rl": "pronghorn",
    "unsloth.models.vision": "pronghorn",
    "unsloth_zoo": "",
}
# vLLM's, where it is not installed. Only the script finds them: TRL and transformers look for vLLM, too, and would use it.
IN_PLACE_OF_VLLM = dict.fromkeys(("vllm", "vllm.sampling_params"), "pronghorn.compat.dropin.sampling_params")
INSIDES = "it is internal to the other library"
LENT_BY = ("trl", "transformers")  # editors also import their classes from modules that happen to hold them
WHY = {
    "vllm": (
        "Pronghorn generates on its own layers, and vLLM is not installed",
        "call model.fast_generate(prompts, sampling_params=SamplingParams(...)), which returns what LLM.generate returns",
    ),
    "unsloth.save": (INSIDES, "call the model's methods: save_pretrained_merged, save_pretrained_gguf, save_lora"),
    "unsloth.kernels": (INSIDES, "use FastLanguageModel, which runs Pronghorn's kernels"),
    "unsloth.ollama_template_mappers": (INSIDES, "export a run with pronghorn export --to ollama"),
    "unsloth_zoo.dataset_utils": (
        INSIDES,
        "import train_on_responses_only and standardize_data_formats from unsloth.chat_templates",
    ),
    "unsloth.dataprep": ("it generates data with its own server", "generate the data beforehand and load it from a file"),
    "unsloth_zoo.vision_utils": (
        "Pronghorn trains on text only",
        "use FastModel: it trains the text model of a vision-language model",
    ),
}


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


class NotHere(CommandError, ImportError):
    """A name that we do not have. An ImportError too: a script may ask for it and go on without."""


def not_here(name: str) -> NotHere:
    why, fix = next((WHY[part] for part in _with_parents(name) if part in WHY), (INSIDES, "remove it"))
    return NotHere(what=f"{name} is not in Pronghorn", why=why, fix=fix)


def find_name(module: str, name: str) -> Any:
    """What `from module import name` gives a script. Raises `NotHere` with a sentence."""
    if module in IN_PLACE_OF_VLLM:
        if name == "SamplingParams":
            return getattr(import_module(IN_PLACE_OF_VLLM[module]), name)
        raise not_here(f"{module}.{name}")
    if OURS.get(module):
        try:
            return getattr(import_module(OURS[module]), name)
        except AttributeError as error:
            if error.name not in (name, None) or module.startswith("pronghorn"):
                raise
        for package in LENT_BY if name[:1].isupper() and not name.startswith(("Fast", "Unsloth")) else ():
            if find_spec(package) is not None and hasattr(import_module(package), name):
                return getattr(import_module(package), name)
    raise not_here(f"{module}.{name}")


class StandIn(ModuleType):
    """A module under another library's name, whose names are ours."""

    def __init__(self, name: str, offered: Callable[[Any], Any]) -> None:
        super().__init__(name, f"Pronghorn's names for scripts that import {name}")
        self.__path__: list[str] = []
        self.__version__ = __version__
        self._offered = offered

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in OURS:  # `import unsloth` and then unsloth.chat_templates.get_chat_template
            return import_module(f"{self.__name__}.{name}")
        if f"{self.__name__}.{name}" in IN_PLACE_OF_VLLM:
            return StandIn(f"{self.__name__}.{name}", self._offered)
        return self._offered(find_name(self.__name__, name))

    def __dir__(self) -> list[str]:
        target = OURS.get(self.__name__)
        return sorted(dir(import_module(target))) if target else []


def vllm_for(name: str, fromlist: Sequence[str] | None, offered: Callable[[Any], Any], notes: Notes) -> StandIn:
    """What `import vllm...` gives the script where vLLM is not installed."""
    if name not in IN_PLACE_OF_VLLM:
        raise not_here(name)
    notes.say(f"import {name} gives SamplingParams of Pronghorn, which generates in vLLM's place")
    return StandIn(name if fromlist else "vllm", offered)


class Finder(MetaPathFinder, Loader):
    """Stands at the head of `sys.meta_path`: also where the other library is installed, ours is what a script gets."""

    def __init__(self, offered: Callable[[Any], Any], notes: Notes) -> None:
        self._offered, self._notes = offered, notes

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in STOOD_IN_FOR:
            return None
        if name == top and PathFinder.find_spec(top) is not None:
            self._notes.say(f"{top} is installed but not used: `import {top}` gives Pronghorn in this script")
        if name not in OURS:
            raise not_here(name)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if OURS[spec.name]:
            self._notes.say(f"import {spec.name} gives {OURS[spec.name]}")
        return StandIn(spec.name, self._offered)

    def exec_module(self, module: ModuleType) -> None:
        """It is filled by being asked."""


def already_imported() -> list[str]:
    """Modules of the real library in this process: what it patched on import is patched."""
    return sorted(
        name for name in sys.modules if name.partition(".")[0] in STOOD_IN_FOR and not isinstance(sys.modules[name], StandIn)
    )


def forget_stand_ins() -> None:
    for name in [name for name, module in sys.modules.items() if isinstance(module, StandIn)]:
        del sys.modules[name]
