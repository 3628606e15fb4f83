"""Log-probabilities of a batch's labels, for losses made of them.

`packed_log_probs`: of a packed batch, for our own training. `token_log_probs`: rows of another library's trainer in, rows out,
the same way as a forward with labels takes (hf_forward.py). Both end in the head of linear_log_probs.py.
T = packed tokens, N = rows with labels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.loss.linear_log_probs import linear_log_probs
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.final_norm import final_norm
from pronghorn.model.hf_forward import _covered, _has_labels, _head_and_backbone_as_made, _pack, _plain_loss, _run, _targets
from pronghorn.model.layers.types import GradBuffer
from pronghorn.model.text_stack import head_of


class PackedLogProbs(NamedTuple):
    log_probs_N: Tensor  # float32, differentiable; 0 where a row is padding
    balance: Tensor | None = None  # the routers' auxiliary loss times its coefficient, where the config asks for it


def packed_log_probs(engine: FastCausalLM, *pack: Any, **options: Any) -> PackedLogProbs:
    """For any objective; arguments as of `FastCausalLM.packed_rows`."""
    rows = engine.packed_rows(*pack, **options)
    with torch.autocast(rows.h_ND.device.type, enabled=False):
        x_ND, weight, bias = engine.head_inputs(rows.h_ND, rows.grad_buffer)
        found = linear_log_probs(x_ND, weight, rows.labels_N, bias_V=bias, **engine.head_terms)
    balance = None if rows.load is None else rows.load.loss
    return PackedLogProbs(found.log_probs, None if balance is None else engine.balance * balance)


class TokenLogProbs(NamedTuple):
    """A value for each token of each row, of the label that it predicts; 0 where it has none."""

    log_probs: Tensor
    mask: Tensor  # which have one
    entropy: Tensor | None
    top: Tensor | None  # whether no other token is likelier


def token_log_probs(
    engine: FastCausalLM, inputs: dict[str, Any], *, entropy: bool = False, top: bool = False
) -> TokenLogProbs | None:
    """`inputs`: of the model's forward. None: the model's own layers must compute logits."""
    model, head = engine.model, head_of(engine.model)
    if not _has_labels(inputs) or not _plain_loss(model) or engine.expert_layers or engine.head_terms["softcap"]:
        return None
    if head.weight.requires_grad or head.bias is not None or not _covered(engine, inputs):
        return None
    pack = _pack(engine, inputs) if _head_and_backbone_as_made(engine) else None
    targets = None if pack is None else _targets(inputs, pack)
    if pack is None or targets is None:
        return None
    rows = (targets != IGNORED).nonzero().flatten()  # synchronizes while the device is idle
    h = _run(engine, inputs, pack).index_select(0, rows)
    with torch.autocast(h.device.type, enabled=False):
        x = final_norm(h, engine.norm, GradBuffer(), engine.layers[-1].extra)
        weight = head.weight if head.weight.dtype == x.dtype else head.weight.to(x.dtype)
        found = linear_log_probs(x, weight, targets[rows], entropy=entropy, top=top, **engine.head_terms)
    places = rows if pack.real is None else pack.real[rows]

    def spread(values: Tensor) -> Tensor:
        flat = values.new_zeros(pack.shape[0] * pack.shape[1]).index_copy(0, places, values)
        return flat.view(pack.shape)

    return TokenLogProbs(
        spread(found.log_probs),
        spread(torch.ones_like(rows, dtype=torch.bool)),
        None if found.entropy is None else spread(found.entropy),
        None if found.top is None else spread(found.top),
    )
