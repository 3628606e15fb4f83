"""Supervised fine-tuning: the cross-entropy of every label, its mean over the step's labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.data.pack.loader import StepBatch
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.heads.lm import own_logits
from pronghorn.packs import PackedBatch
from pronghorn.train.dist.world import World
from pronghorn.train.objectives.objective import Objective, Sums


class Supervised(Objective):
    has_rows = True

    def loss(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        return -log_probs_N.sum()

    def sums(self, model: HFModel, batch: PackedBatch) -> Sums:
        """Fused: the loss and its gradient in one pass over the logits, since every row's weight is known to be one."""
        engine = engine_of(model)
        if engine is not None:
            total, rows_N = engine.packed_loss(batch)
            return Sums(total, rows_N=rows_N)
        logits, balance = own_logits(base_of(model), batch)
        loss = F.cross_entropy(logits, batch.row_labels, reduction="sum")
        each_N = None if torch.is_grad_enabled() else F.cross_entropy(logits, batch.row_labels, reduction="none")
        return Sums(loss if balance is None else loss + balance * batch.loss_tokens, rows_N=each_N)

    def divisor(self, step_batch: StepBatch, world: World) -> float:
        return step_batch.loss_tokens  # as the loader counted them, of all ranks
