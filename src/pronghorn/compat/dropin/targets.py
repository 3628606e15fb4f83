"""Which linears get an adapter, by `target_modules` and by the switches of `FastModel.get_peft_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.hf_adapter import FUSED, TRAINED_WHOLE, ends_one_of, last_name
from pronghorn.model.lora import text_linears
from pronghorn.model.text_stack import beside_text

SWITCHES = (
    "finetune_vision_layers",
    "finetune_audio_layers",
    "finetune_language_layers",
    "finetune_attention_modules",
    "finetune_mlp_modules",
)
SENSES = {"finetune_vision_layers": "images", "finetune_audio_layers": "sound"}
# Names of their parents; Nemotron-H calls its MLPs `mixer`, too.
ATTENTION = ("attn", "attention", "self_attn", "self_attention", "linear_attn", "temporal_block", "mamba", "mixer")
MLP_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts")


def chosen_targets(model: HFModel, asked: Sequence[str] | str | None, switches: dict[str, Any]) -> Sequence[str] | str:
    """`switches`: those that were given. The text model is what trains, whatever else there is."""
    beside = beside_text(model)
    for name, what in SENSES.items():
        if switches.get(name) and beside:
            raise CommandError(
                what=f"{name}=True",
                why=f"Pronghorn trains the text model only; layers that read {what} stay frozen",
                fix=f"{name}=False",
            )
        if switches.get(name):
            say_once(f"{name} is ignored: the model has no layers that read {what}")
    if switches.get("finetune_language_layers") is False:
        raise CommandError(
            what="finetune_language_layers=False",
            why="Pronghorn trains the text model only, so nothing would be trained",
            fix="finetune_language_layers=True",
        )
    attention, mlp = (switches.get(name) is not False for name in SWITCHES[3:])
    if not attention and not mlp:
        raise CommandError(
            what="finetune_attention_modules=False and finetune_mlp_modules=False",
            why="nothing would be trained",
            fix="set one of them to True",
        )
    if attention and mlp:
        return "all-linear" if asked is None else asked
    if isinstance(asked, str) and asked != "all-linear":
        raise CommandError(
            what=f"target_modules={asked!r} and finetune_* switches", fix="write what they leave into the pattern"
        )
    paths = {last_name(path): path.split(".") for path in text_linears(model)}
    parts = {name: name not in MLP_NAMES and any(part in ATTENTION for part in path) for name, path in paths.items()}
    names = [name for name in parts if name != "lm_head"] if asked in (None, "all-linear") else _names(asked)
    kept = [name for name in names if (parts.get(last_name(name), last_name(name) not in MLP_NAMES)) == attention]
    if not kept:
        raise CommandError(
            what=f"target_modules: none of {', '.join(names)} remain",
            why="finetune_attention_modules or finetune_mlp_modules excludes all of them",
            fix="remove target_modules or the finetune_* switches",
        )
    return kept


def require_same_adapter(
    model: HFModel,
    targets: Sequence[str] | str,
    modules_to_save: Sequence[str] | None,
    layers: Sequence[int] | None,
    **asked: object,
) -> None:
    """For a model that has an adapter: refuses another one than it has."""
    config = model.peft_config[model.active_adapter]
    differs = [
        f"{name}={getattr(config, name)!r}, not {value!r}" for name, value in asked.items() if getattr(config, name) != value
    ]
    whole = {last_name(name) for name in _names(targets) if last_name(name) in TRAINED_WHOLE} | set(modules_to_save or ())
    if whole != set(config.modules_to_save or ()):
        differs.append(f"modules_to_save={sorted(config.modules_to_save or ())}")
    linears = [name for name in _names(targets) if last_name(name) not in TRAINED_WHOLE]
    if not _same_names(model, _names(config.target_modules), linears):
        differs.append(f"target_modules={sorted(_names(config.target_modules))}")
    had = config.layers_to_transform
    if (None if had is None else [had] if isinstance(had, int) else list(had)) != layers:
        differs.append(f"layers_to_transform={had}")
    if differs:
        raise CommandError(
            what=f"the model already has a different adapter: {differs[0]}",
            fix="pass the model that from_pretrained returned, or the arguments of the existing adapter",
        )
    say_once("get_peft_model: the model already has this adapter; training continues with it")


def _same_names(model: HFModel, has: list[str], asked: list[str]) -> bool:
    if asked == ["all-linear"]:
        adapted = {"base_layer", "lora_A", "lora_B", "lm_head"}  # what stands inside an adapter, and the head
        return all(adapted & set(path.split(".")) for path in text_linears(model))
    if asked == has:
        return True
    paths = [path for path, _ in model.named_modules()]
    names = {FUSED[name] if FUSED.get(name) in has else name for name in asked}
    return {name for name in names if ends_one_of(paths, name)} == set(has)


def _names(asked: Sequence[str] | str | None) -> list[str]:
    return [asked] if isinstance(asked, str) else list(asked or ())
