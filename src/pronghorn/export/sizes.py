"""How large each export of a run would be, from the shapes of its weights; nothing is loaded, downloaded or written."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from pronghorn.errors import CommandError, PronghornError
from pronghorn.export.gguf_mixture import BITS, MIXTURES, WIDE, Model, Shape, choose
from pronghorn.export.job import Job
from pronghorn.export.run import place_of
from pronghorn.export.targets import TARGETS, AskedTarget
from pronghorn.model.config import empty_model, read_config
from pronghorn.model.export import NOT_EXPORTED
from pronghorn.model.families import text_config
from pronghorn.train.run.trained_run import TrainedRun

# llama.cpp's names of what its mixtures treat in a way of their own.
NAMES = {"embed_tokens": "token_embd", "lm_head": "output", "v_proj": "attn_v", "k_proj": "attn_k", "o_proj": "attn_output",
         "down_proj": "ffn_down", r"gate(?=\.weight)": "ffn_gate_inp"}  # fmt: skip


def sizes(run: Path, which: str) -> list[dict[str, Any]]:
    """Each target: what --to calls it, its folder, bytes of the export, the disk space that writing it takes, or why it
    cannot be."""
    trained, found = TrainedRun(run, which), []
    weights = Weights(trained.recipe.model if trained.recipe.method != "full" else str(trained.path))
    for name, target in TARGETS.items():
        for variant in target.variants or ("",):
            asked = AskedTarget(target, variant)
            place = place_of(run, None, asked, 1)
            job = Job(trained, place, place, variant=variant)
            row: dict[str, Any] = {
                "to": f"{name}:{variant}" if variant else name,
                "folder": str(place),
                "there": place.exists(),
            }
            try:
                if not trained.head.generates and not target.any_head:
                    raise CommandError(f"it does not support {trained.head.title}")
                target.refuse(job)
                size = weights.written(job, name)
                found.append(row | {"bytes": size, "needs": max(size, target.size(job)), "refused": ""})
            except PronghornError as error:
                why = "; ".join(part for part in (error.what, error.fix) if part)
                found.append(row | {"bytes": None, "needs": None, "refused": why})
    return found


class Weights:
    """Shapes of the whole model, by the family's names."""

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Shared ones once."""
        return dict(empty_model(self.model, read_config(self.model)).named_parameters())

    def written(self, job: Job, target: str) -> int:
        """Bytes of weights and tokenizer; a card, a record and what a file says of itself come on top."""
        small = [file for file in job.checkpoint.iterdir() if file.is_file() and file.name not in NOT_EXPORTED]
        adapter = sum(file.stat().st_size for file in small)
        others = sum(file.stat().st_size for file in small if not file.name.startswith(("adapter_", "model")))
        if target in ("adapter", "vllm"):
            return adapter
        if job.variant == "adapter":
            return TARGETS[target].size(job)
        if target in ("gguf", "ollama"):
            return self._gguf(job.variant) + others
        return TARGETS[target].size(job) + others + (job.variant == "base") * adapter

    def _gguf(self, variant: str) -> int:
        text = text_config(read_config(self.model))
        named = {_llama_name(name, one.dim()): one for name, one in self.parameters.items()}
        chosen: dict[str, str] = {}
        if variant in MIXTURES:
            heads = int(getattr(text, "num_attention_heads", 1) or 1)
            shared = int(getattr(text, "num_key_value_heads", heads) or heads)
            model = Model(int(getattr(text, "num_hidden_layers", 1)), heads, shared)
            shapes = [Shape(name, int(one.shape[-1]), one.dim()) for name, one in named.items()]
            chosen, _ = choose(shapes, MIXTURES[variant], model)
        wide = variant if variant in WIDE else "f16"
        kinds = {name: chosen.get(name, wide if one.dim() > 1 else "f32") for name, one in named.items()}
        return int(sum(one.numel() * BITS[kinds[name]] for name, one in named.items()) / 8)


def _llama_name(name: str, dimensions: int) -> str:
    name = re.sub(r".*\blayers\.", "blk.", name)
    for theirs, ours in NAMES.items():
        name = re.sub(rf"(?:(?:model|self_attn|mlp)\.)*\b{theirs}\b", ours, name)
    return name if name.endswith("weight") or dimensions < 3 else f"{name}.weight"  # stacked experts
