"""`max_seq_length`: up to the model's positions as it is, beyond them with scaled RoPE."""

from __future__ import annotations

import copy
from typing import Any

import torch

from pronghorn.compat.dropin.arguments import DEFAULT_LENGTH
from pronghorn.errors import CommandError, ModelError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.text_stack import backbone

STRETCHED = ("default", "linear")  # types of RoPE whose frequencies are divided by the factor
KEPT = ("llama3", "yarn")  # made for long texts: they go on behind their last position as they are


def set_length(model: HFModel, tokenizer: Tokenizer, length: int | None, name: str) -> None:
    """None: as long as the model was made for."""
    if length is not None and length < 1:
        raise CommandError(what=f"max_seq_length={length}", fix="set the maximum sequence length in tokens, such as 2048")
    made_for = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    if length is None:
        length = made_for or DEFAULT_LENGTH
    if made_for and length > made_for:
        if length == DEFAULT_LENGTH:
            length = made_for
            say_once(f"max_seq_length: {made_for}, the model's positions, not the default of {DEFAULT_LENGTH}")
        else:
            _scale_rope(model, length, made_for, name)
    model.max_seq_length = tokenizer.model_max_length = length


def _scale_rope(model: HFModel, length: int, made_for: int, name: str) -> None:
    """RoPE for `length` positions, in the model's config, which exports write, and in its module. The module is built by the
    family's own class, and its frequencies must be those of before, divided by the factor: a family that computes them in
    another way is refused."""
    inner: Any = backbone(model) if hasattr(model, "model") else None  # GPT-2 has none
    text: Any = model.config.get_text_config()
    rotary: Any = getattr(inner, "rotary_emb", None)
    parameters = getattr(text, "rope_parameters", None) or {}
    kind = parameters.get("rope_type")
    before: Any = getattr(rotary, "inv_freq", None)
    factor = length / made_for if kind in STRETCHED else 1.0
    changed = copy.deepcopy(text)
    changed.max_position_embeddings = length
    if kind in STRETCHED:
        changed.rope_parameters = {**parameters, "rope_type": "linear", "factor": parameters.get("factor", 1.0) * factor}
    scaled = type(rotary)(config=changed) if kind in (*STRETCHED, *KEPT) and before is not None else None
    if scaled is None or not _divided(before, scaled.inv_freq, factor) or scaled.attention_scaling != rotary.attention_scaling:
        raise ModelError(
            what=f"max_seq_length={length:,} exceeds the model's {made_for:,} positions",
            where=name,
            why=f"the positions of this model ({kind or 'learned, or several kinds of RoPE'}) cannot be scaled linearly",
            fix=f"max_seq_length={made_for}",
        )
    text.max_position_embeddings, text.rope_parameters = length, changed.rope_parameters
    scaled.config = text
    inner.rotary_emb = scaled.to(before.device)
    how = f"RoPE is scaled linearly by {factor:g}" if kind in STRETCHED else f"its {kind} RoPE is used beyond them as it is"
    say_once(
        f"max_seq_length={length:,} exceeds the model's {made_for:,} positions: {how}; load the adapter with the same "
        "max_seq_length"
    )


def _divided(before: Any, after: torch.Tensor, factor: float) -> bool:
    return before.shape == after.shape and torch.allclose(before.cpu().float(), after.cpu().float() * factor, rtol=1e-5, atol=0)
