"""Log-probabilities of a packed batch's labels, for losses made of them. N = rows with labels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.loss.linear_log_probs import linear_log_probs
from pronghorn.model.causal_lm import FastCausalLM


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
