"""Which linears get an adapter, by `target_modules` and by the switches of `FastModel.get_peft_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronghorn.errors import CommandError
from pronghorn.kernels.dispatch import say_once
from pronghorn.model.lora import text_linears
from pronghorn.model.text_stack import beside_text

SWITCHES = ("finetune_vision_layers", "finetune_audio_layers", "finetune_language_layers", "finetune_attention_modules",
            "finetune_mlp_modules")
SENSES = {"finetune_vision_layers": "images", "finetune_audio_layers": "sound"}
ATTENTION = ("attn", "attention", "self_attn", "self_attention", "linear_attn", "temporal_block")  # names of their parents
MLP_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts")


def chosen_targets(model: Any, asked: Sequence[str] | str | None, switches: dict[str, Any]) -> Sequence[str] | str:
    """`switches`: those that were given. The text model is what trains, whatever else there is."""
    beside = beside_text(model)
    for name, what in SENSES.items():
        if switches.get(name) and beside:
            raise CommandError(what=f"{name}=True", why=f"what reads {what} stays as it was loaded; the text model is trained",
                               fix=f"{name}=False")
        if switches.get(name):
            say_once(f"{name}: nothing in this model reads {what}")
    if switches.get("finetune_language_layers") is False:
        raise CommandError(what="finetune_language_layers=False", why="the text model is what trains, so nothing would",
                           fix="finetune_language_layers=True")
    attention, mlp = (switches.get(name) is not False for name in SWITCHES[3:])
    if not attention and not mlp:
        raise CommandError(what="finetune_attention_modules=False and finetune_mlp_modules=False",
                           why="nothing would be trained", fix="set one of them to True")
    if attention and mlp:
        return "all-linear" if asked is None else asked
    parts = {path.split(".")[-1]: any(part in ATTENTION for part in path.split(".")) for path in text_linears(model)}
    names = [name for name in parts if name != "lm_head"] if asked in (None, "all-linear") else _names(asked)
    kept = [name for name in names if (parts.get(name, name not in MLP_NAMES)) == attention]
    if not kept:
        raise CommandError(what=f"target_modules: none of {', '.join(names)} is left", why="the switches leave them all out",
                           fix="drop target_modules, or the switches")
    return kept


def _names(asked: Sequence[str] | str | None) -> list[str]:
    return [asked] if isinstance(asked, str) else list(asked or ())
