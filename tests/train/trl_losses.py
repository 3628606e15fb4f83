"""Losses of TRL's own trainers on given pairs of token rows: their methods, without data sets, accelerators and steps.

A pair is (prompt, chosen, rejected); a marked answer is (prompt, answer, whether it is good).
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.trainer.utils import add_fused_lm_head

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

Pair = tuple[list[int], list[int], list[int]]
CPU = torch.device("cpu")


def padded(rows: list[list[int]], fill: int = 0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def bare(kind: Any, model: Any, **settings: Any) -> Any:
    """A trainer of which only these settings are read."""
    trainer = object.__new__(kind)
    accelerator = SimpleNamespace(device=CPU, gather=lambda x: x, gather_for_metrics=lambda x: x, unwrap_model=lambda x, **_: x)
    common: dict[str, Any] = {
        "model": model,
        "ref_model": None,
        "accelerator": accelerator,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "precompute_ref_logps": False,
        "label_smoothing": 0.0,
    }
    vars(trainer).update(common | settings)
    return trainer


def _completions(rows: list[tuple[list[int], list[int]]], prefix: str = "") -> dict[str, Tensor]:
    return {
        f"{prefix}input_ids": padded([prompt + answer for prompt, answer in rows]),
        f"{prefix}attention_mask": padded([[1] * (len(prompt) + len(answer)) for prompt, answer in rows]),
        f"{prefix}completion_mask": padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in rows]),
    }


def with_head(model: Any) -> Any:
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    return model


def dpo(model: Any, pairs: list[Pair], **settings: Any) -> tuple[Tensor, dict[str, float]]:
    usual = {
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "use_weighting": False,
        "loss_types": ["sigmoid"],
        "loss_weights": [1.0],
        "beta": 0.1,
    }
    trainer = bare(DPOTrainer, with_head(model), **(usual | settings))
    rows = [(prompt, chosen) for prompt, chosen, _ in pairs] + [(prompt, rejected) for prompt, _, rejected in pairs]
    loss = trainer._compute_loss(model, _completions(rows), return_outputs=False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def kto(model: Any, marked: list[tuple[list[int], list[int], bool]], **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """The divergence is of each prompt with the answer of the row before, as TRL's data set has it."""
    usual = {"calculate_KL": settings.get("loss_type") != "apo_zero_unpaired", "loss_type": "kto", "beta": 0.1}
    trainer = bare(KTOTrainer, with_head(model), **(usual | settings))
    rows = [(prompt, answer) for prompt, answer, _ in marked]
    others = [(prompt, rows[i - 1][1]) for i, (prompt, _) in enumerate(rows)]
    inputs: dict[str, Any] = _completions(rows) | _completions(others, "KL_")
    inputs["label"] = torch.tensor([good for _, _, good in marked])
    loss = trainer._compute_loss(model, inputs, return_outputs=False)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def reward(
    model: Any, pairs: list[Pair], margins: list[float] | None = None, center: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    trainer = bare(RewardTrainer, model, args=SimpleNamespace(center_rewards_coefficient=center))
    rows = [prompt + answer for place in (1, 2) for prompt, answer in ((pair[0], pair[place]) for pair in pairs)]
    inputs = {"input_ids": padded(rows), "attention_mask": padded([[1] * len(row) for row in rows])}
    if margins is not None:
        inputs["margin"] = torch.tensor(margins)
    loss = trainer.compute_loss(model, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["train"].items()}


def _sides(pairs: list[Pair]) -> dict[str, Tensor]:
    found = {}
    for name, place in (("chosen", 1), ("rejected", 2)):
        rows = [(pair[0], pair[place]) for pair in pairs]
        found[f"{name}_input_ids"] = padded([prompt + answer for prompt, answer in rows])
        found[f"{name}_attention_mask"] = padded([[1] * (len(prompt) + len(answer)) for prompt, answer in rows])
        found[f"{name}_labels"] = padded([[-100] * len(prompt) + answer for prompt, answer in rows], -100)
    return found


def cpo(model: Any, pairs: list[Pair], **settings: Any) -> tuple[Tensor, dict[str, float]]:
    usual = {"loss_type": "sigmoid", "beta": 0.1, "alpha": 0.0, "cpo_alpha": 1.0, "simpo_gamma": 0.5}
    fixed = {"is_encoder_decoder": False, "pad_token_id": 0}
    trainer = bare(CPOTrainer, model, **(usual | fixed | settings))
    return trainer.get_batch_loss_metrics(model, _sides(pairs))


def orpo(model: Any, pairs: list[Pair], beta: float) -> tuple[Tensor, dict[str, float]]:
    """TRL's supervised part includes the prompt, ours does not, as the paper has it: so this one is the answer's."""
    trainer = bare(ORPOTrainer, model, beta=beta, is_encoder_decoder=False, padding_value=0)
    batch = _sides(pairs)
    full, metrics = trainer.get_batch_loss_metrics(model, batch)
    chosen_logps, _, logits, _, with_prompt = trainer.concatenated_forward(model, batch)[:5]
    labels = batch["chosen_labels"][:, 1:]
    answer = torch.nn.functional.cross_entropy(logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten())
    assert len(chosen_logps) == len(pairs)
    return full - with_prompt + answer, metrics
