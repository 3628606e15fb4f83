"""TRL's fused head without a GPU, for stock and fast models alike."""

from __future__ import annotations

from typing import Any

import torch


class TorchLogProbs:
    """What TRL's fused head computes, in plain torch: TRL 1.15 has it as a Triton kernel only, which needs a GPU."""

    @staticmethod
    def apply(
        hidden: Any,
        weight: Any,
        bias: Any,
        targets: Any,
        temperature: float,
        chunk: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        logits = (torch.tanh(logits / softcap) * softcap if softcap else logits) / temperature
        everything = logits.log_softmax(-1)
        beside = {
            "entropy": -(everything.exp() * everything).sum(-1).detach(),
            "log_sum_sq_probs": (2 * everything).logsumexp(-1).detach(),
            "mean_logits": logits.mean(-1).detach(),
            "is_top1": logits.argmax(-1) == targets,
        }
        return everything.gather(1, targets[:, None])[:, 0], *(x if name in outputs else None for name, x in beside.items())
