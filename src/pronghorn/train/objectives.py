"""The loss of a packed batch: a sum over the tokens that are trained on, to be divided once per optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pronghorn.data.batches import PackedBatch
from pronghorn.model.causal_lm import base_of, engine_of


def finish_backward(model: Any) -> None:
    """After a micro-batch's backward, also one that was broken off: nothing waits in host memory any more."""
    engine = engine_of(model)
    if engine is not None and engine.offload is not None:
        engine.offload.finish()


def loss_sum(model: Any, batch: PackedBatch) -> torch.Tensor:
    """Cross-entropy summed over `batch.loss_rows`, in float32. The head is computed for those rows only."""
    engine = engine_of(model)
    if engine is not None:
        return engine.packed_loss(batch.ids_T, batch.positions_T, batch.cu_seqlens, batch.longest, labels_T=batch.labels_T,
                                  loss_rows=None if batch.every_row else batch.loss_rows, typical=batch.typical)[0]
    output = model(
        input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False, logits_to_keep=batch.loss_rows
    )
    loss = F.cross_entropy(output.logits[0].float(), batch.labels_T[batch.loss_rows], reduction="sum")
    balance = getattr(output, "aux_loss", None)  # of routers, where the config asks for it; ours leaves padding out
    if balance is not None and torch.is_grad_enabled():
        loss = loss + base_of(model).router_aux_loss_coef * balance * batch.loss_tokens
    return loss
