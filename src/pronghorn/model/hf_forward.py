"""The `forward` of a Hugging Face model instance, served by fast layers where they apply.

Trainers call the model with a batch of rows, padded or packed, and labels; here such a batch becomes packed documents.
What is not covered (a cache, attention outputs, masks of four dimensions) goes to the model's own forward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.decoder_layer import Documents

IGNORED = -100
NOT_COVERED = ("past_key_values", "output_attentions", "output_hidden_states", "encoder_hidden_states", "head_mask")


def set_forwards(model: Any, engine: FastCausalLM) -> None:
    """On this instance only. `functools.wraps` keeps the signature, which generation and trainers read."""
    own_backbone, own_model = engine.backbone.forward, model.forward

    @functools.wraps(own_backbone)
    def backbone_forward(*args: Any, **kwargs: Any) -> Any:
        inputs = _bind(args, kwargs)
        if not _covered(inputs, model):
            return own_backbone(*args, **kwargs)
        h, shape = _run(engine, inputs)
        normed = engine_norm(engine, h)
        return BaseModelOutputWithPast(last_hidden_state=normed.view(*shape, -1))

    @functools.wraps(own_model)
    def model_forward(*args: Any, **kwargs: Any) -> Any:
        inputs = _bind(args, kwargs)
        labels, shifted = inputs.get("labels"), inputs.get("shift_labels")
        if (labels is None and shifted is None) or not _covered(inputs, model) or getattr(model, "loss_type", "") != LOSS:
            return own_model(*args, **kwargs)
        h, shape = _run(engine, inputs)
        targets = (_shifted(labels) if shifted is None else shifted).reshape(-1)
        rows = (targets != IGNORED).nonzero().flatten()
        loss_sum, _ = engine.loss(h, rows, targets[rows])
        count = inputs.get("num_items_in_batch")
        loss = loss_sum / (len(rows) if count is None else count)
        return _Output(loss, engine, h, shape)

    engine.backbone.forward = backbone_forward
    model.forward = model_forward


LOSS = "ForCausalLM"


class _Output(CausalLMOutputWithPast):
    """Loss only. Logits are computed if somebody looks at them: most training loops do not."""

    def __init__(self, loss: Tensor, engine: FastCausalLM, h: Tensor, shape: torch.Size) -> None:
        super().__init__(loss=loss)
        object.__setattr__(self, "_late", (engine, h.detach(), shape))

    def __getattribute__(self, name: str) -> Any:
        if name == "logits":
            engine, h, shape = object.__getattribute__(self, "_late")
            with torch.no_grad():
                return _logits(engine, h).view(*shape, -1)
        return super().__getattribute__(name)


def _logits(engine: FastCausalLM, h: Tensor) -> Tensor:
    logits: Tensor = engine.model.get_output_embeddings()(engine_norm(engine, h)) * engine.head_terms["logit_scale"]
    cap = engine.head_terms["softcap"]
    return torch.tanh(logits / cap) * cap if cap else logits


def engine_norm(engine: FastCausalLM, h: Tensor) -> Tensor:
    from pronghorn.kernels.rms_norm import rms_norm

    return rms_norm(h, engine.norm.weight, engine.norm.eps, one_plus=engine.norm.one_plus)[0]


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformers' order of positional arguments is the same for all covered families."""
    names = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")
    return dict(zip(names, args, strict=False)) | kwargs


def _covered(inputs: dict[str, Any], model: Any) -> bool:
    mask = inputs.get("attention_mask")
    plain_mask = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
    asks_more = any(inputs.get(name) is not None and inputs.get(name) is not False for name in NOT_COVERED)
    wants_cache = inputs.get("use_cache") and not model.training
    return plain_mask and not asks_more and not wants_cache and (model.training or inputs.get("use_cache") is False)


def _shifted(labels: Tensor) -> Tensor:
    """The label of each token is the next token's, within a row."""
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], dim=1)


def _run(engine: FastCausalLM, inputs: dict[str, Any]) -> tuple[Tensor, torch.Size]:
    ids, embeds = inputs.get("input_ids"), inputs.get("inputs_embeds")
    shape = ids.shape if ids is not None else embeds.shape[:2]
    h = engine.embed(ids.reshape(-1)) if embeds is None else embeds.flatten(0, 1)
    positions, documents = _documents(engine, inputs, shape, h.device)
    return engine.hidden(h, Documents(*documents, rotary=engine.rotary(positions))), shape


def _documents(engine: FastCausalLM, inputs: dict[str, Any], shape: torch.Size, device: torch.device
               ) -> tuple[Tensor, tuple[Tensor, int]]:
    """Positions, and (cu_seqlens, longest). One wait for the device per batch, not one per layer."""
    rows, length = shape
    mask, positions, given = inputs.get("attention_mask"), inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    flat = torch.arange(length, device=device).repeat(rows) if positions is None else positions.expand(rows, -1).reshape(-1)
    if given is not None and inputs.get("max_length_q") is not None:
        return flat, (given.to(torch.int32), int(inputs["max_length_q"]))
    starts = torch.zeros(rows, length, dtype=torch.bool, device=device)
    starts[:, 0] = True
    if mask is not None:
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]  # padding is a document of its own
    elif positions is not None:
        steps = flat.view(rows, length)
        starts[:, 1:] |= steps[:, 1:] - steps[:, :-1] != 1  # a packed row: positions start again
    bounds = torch.cat([starts.view(-1).nonzero().flatten(), torch.tensor([rows * length], device=device)])
    return flat, (bounds.to(torch.int32), int(bounds.diff().max()))
