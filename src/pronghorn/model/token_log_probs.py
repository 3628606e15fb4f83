"""Log-probabilities of labels for another library's trainer: rows in, rows out, the same way as a forward with labels takes
(hf_forward.py). It ends in the head of linear_log_probs.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.compat.hf_forward import _covered, _has_labels, _head_and_backbone_as_made, _pack, _plain_loss, _run, _targets
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.loss.linear_log_probs import linear_log_probs
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.text_stack import head_of


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
    if not _has_labels(inputs) or not _plain_loss(model) or engine.expert_layers or engine.lm.terms["softcap"]:
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
        x = engine.head.normed(h)
        weight = head.weight if head.weight.dtype == x.dtype else head.weight.to(x.dtype)
        found = linear_log_probs(x, weight, targets[rows], entropy=entropy, top=top, **engine.lm.terms)
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
