"""The LM head: a linear layer over the vocabulary. N = rows with labels, D = model width, V = vocabulary.

Neither the loss nor the log-probabilities of labels need all logits at a time: `losses` computes the loss and its gradient in
one pass (linear_cross_entropy.py), `outputs` keeps log-probabilities differentiable (linear_log_probs.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED
from pronghorn.kernels.loss.linear_cross_entropy import chunk_rows, linear_cross_entropy
from pronghorn.kernels.loss.linear_log_probs import linear_log_probs, sampled_entropy
from pronghorn.model.families import family_of
from pronghorn.model.head import Head, Outputs, PackedRows, Stack
from pronghorn.model.layers.types import GradBuffer
from pronghorn.model.text_stack import head_of
from pronghorn.packs import PackedBatch


class LmHead(Head):
    name, title, gives, generates = "lm", "a language model", "answers", True
    task, pipeline = "CAUSAL_LM", "text-generation"

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack)
        times = family_of(stack.config).logits_times
        scaling = float(getattr(stack.config, times or "logits_scaling", None) or 1.0)
        self.terms: dict[str, Any] = {
            "softcap": float(getattr(stack.config, "final_logit_softcapping", None) or 0.0),
            "logit_scale": scaling if times else 1.0 / scaling,
        }

    @classmethod
    def fits(cls, architecture: str) -> bool:
        return architecture.endswith(("ForCausalLM", "ForConditionalGeneration"))

    @classmethod
    def auto_class(cls, config: HFConfig) -> Any:
        only_with_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        only_with_images &= type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        return AutoModelForImageTextToText if only_with_images else AutoModelForCausalLM

    def inputs(self, h_ND: Tensor, grad_buffer: GradBuffer | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What is multiplied: normed rows, the weight in their dtype, the bias. Outside of autocast."""
        x_ND = self.normed(h_ND, grad_buffer)
        if self.stack.shards is not None:
            self.stack.shards.head()
        head = head_of(self.stack.model)
        if type(head) is not torch.nn.Linear:
            raise ModelError(
                what=f"the LM head is {type(head).__name__}, not a linear layer",
                why="the fused loss needs a plain linear LM head",
                fix="remove lm_head from lora.targets and modules_to_save",
            )
        return x_ND, head.weight if head.weight.dtype == x_ND.dtype else head.weight.to(x_ND.dtype), head.bias

    def loss(self, h_ND: Tensor, labels_N: Tensor, grad_buffer: GradBuffer | None = None) -> tuple[Tensor, Tensor]:
        """(sum of the losses, loss of each row, detached), of rows out of the last layer. `grad_buffer`: the layers'."""
        with torch.autocast(h_ND.device.type, enabled=False):
            return self._loss(h_ND, labels_N, grad_buffer)

    def _loss(self, h_ND: Tensor, labels_N: Tensor, grad_buffer: GradBuffer | None = None) -> tuple[Tensor, Tensor]:
        x_ND, weight, bias = self.inputs(h_ND, grad_buffer)
        return linear_cross_entropy(x_ND, weight, labels_N, bias_V=bias, **self.terms)

    def losses(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """(sum of the losses, loss of each row, detached): supervised training."""
        total, each = self.loss(rows.h_ND, rows.labels_N, rows.grad_buffer)
        if rows.load is not None and rows.load.loss is not None:  # transformers adds it to the mean over the labels
            total = total + self.stack.balance * rows.load.loss * (rows.labels_N != IGNORED).sum()
        return total, each

    def outputs(self, rows: PackedRows, *, temperature: float = 1.0, entropy: bool = False) -> Outputs:
        """Log-probabilities of the labels, where logits are divided by the temperature."""
        terms = self.terms
        if temperature != 1.0:  # a soft-cap comes before it: so both are divided
            terms = terms | {name: terms[name] / temperature for name in ("softcap", "logit_scale")}
        with torch.autocast(rows.h_ND.device.type, enabled=False):
            x_ND, weight, bias = self.inputs(rows.h_ND, rows.grad_buffer)
            free = bias is None and not weight.requires_grad and not terms["softcap"]
            found = linear_log_probs(x_ND, weight, rows.labels_N, bias_V=bias, entropy=entropy and free, **terms)
            entropy_N = sampled_entropy(x_ND, weight, bias_V=bias, **terms) if entropy and not free else found.entropy
        balance = None if rows.load is None else rows.load.loss
        return Outputs(found.log_probs, None if balance is None else self.stack.balance * balance, entropy_N)

    @classmethod
    def own_outputs(cls, base: HFModel, pack: PackedBatch) -> Outputs:
        logits, balance = own_logits(base, pack)
        return Outputs(-F.cross_entropy(logits, pack.row_labels, reduction="none"), balance)

    def sample_loss(self, h_ND: Tensor, labels_N: Tensor) -> Tensor:
        return self._loss(h_ND, labels_N)[0]

    def set_chunk_share(self, share: int) -> None:
        self.terms["chunk_share"] = share

    def chunk_rows(self, rows: int, dtype: torch.dtype, share: int) -> int:
        return chunk_rows(rows, int(self.stack.config.vocab_size), dtype, torch.device("cuda"), share)


def own_logits(base: HFModel, pack: PackedBatch) -> tuple[Tensor, Tensor | None]:
    """A model on transformers' layers: float32 logits of the loss rows, and the routers' auxiliary loss times its
    coefficient, where the config asks for it (that of our layers leaves padding out)."""
    output = base(input_ids=pack.ids_T[None], position_ids=pack.position_ids, use_cache=False, logits_to_keep=pack.loss_rows)
    balance = getattr(output, "aux_loss", None)
    trains = balance is not None and torch.is_grad_enabled()
    return output.logits[0].float(), base.router_aux_loss_coef * balance if trains else None


HEAD = LmHead
