"""GRPO and its relatives against TRL's own trainers: loss and gradients, on plain, shared and split packs."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from trl import GRPOTrainer, RLOOTrainer
from trl_losses import bare, padded

from pronghorn.data.pack.batches import build_batch
from pronghorn.data.preference.pair_rows import PairRows
from pronghorn.model.causal_lm import install
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.objectives.objective import outputs_of
from pronghorn.train.objectives.policy import Policy
from samples import ListTable

LONGEST = 20
# ours, and TRL's names of the same
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"}, {"loss_type": "grpo"}),
    "bnpo": ({"loss": "bnpo"}, {"loss_type": "bnpo"}),
    "dr_grpo": ({"loss": "dr_grpo", "longest": LONGEST}, {"loss_type": "dr_grpo"}),
    "dapo": ({}, {"loss_type": "dapo"}),
    "cispo": ({"loss": "cispo", "high": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    "two clips": ({"low": 0.05, "high": 0.28}, {"loss_type": "dapo", "epsilon_low": 0.05, "epsilon_high": 0.28}),
    "delta": ({"delta": 1.15}, {"loss_type": "dapo", "delta": 1.15}),
    "gspo": ({"loss": "grpo", "level": "sequence", "low": 0.01, "high": 0.02},
             {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02}),
    "divergence": ({"beta": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    "plain divergence": ({"beta": 0.3, "correct_divergence": False},
                         {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": False}),
    "gspo with divergence": ({"level": "sequence", "beta": 0.1},
                             {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1}),
    "rloo": ({"loss": "rloo", "low": 0.1, "high": 0.1}, {}),
}  # fmt: skip


class Rollouts:
    """Prompts with answers, advantages, and log-probabilities of the sampler and of a reference."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.prompts, self.answers, self.groups = [], [], []
        for group in range(4):
            prompt = random.integers(3, 120, int(random.integers(1, 12))).tolist()
            for _ in range(int(random.integers(2, 5))):
                self.prompts.append(prompt)
                self.answers.append(random.integers(3, 120, int(random.integers(1, 15))).tolist())
                self.groups.append(group)
        self.advantages = torch.tensor(random.normal(size=len(self.answers)), dtype=torch.float32)
        self.sampled: list[torch.Tensor] = []
        self.reference: list[torch.Tensor] = []

    def look(self, model: Any) -> None:
        """The sampler's weights and the reference's are near the model's."""
        found = log_probs(model, self.prompts, self.answers).detach()
        chance = torch.Generator().manual_seed(1)
        for row, answer in enumerate(self.answers):
            for target, size in ((self.sampled, 0.15), (self.reference, 0.3)):
                target.append(found[row, : len(answer)] + size * torch.randn(len(answer), generator=chance))

    def batches(self, shared: bool, split: bool) -> list[PackedBatch]:
        rows = [prompt + answer for prompt, answer in zip(self.prompts, self.answers, strict=True)]
        marks = [[False] * len(p) + [True] * len(a) for p, a in zip(self.prompts, self.answers, strict=True)]
        groups = np.array(self.groups)
        roles = np.concatenate([np.arange(n) for n in np.bincount(groups)]).astype(np.int32)
        prefixes = np.array([len(prompt) for prompt in self.prompts], np.int32)
        table = ListTable(rows, marks, PairRows(groups, roles, prefixes, np.zeros(len(rows), np.float32), shared=shared))
        parts = [np.arange(len(rows))]
        if split:  # in the middle of a group, too
            parts = [np.arange(0, 3), np.arange(3, 6), np.arange(6, len(rows))]
        return [self._given(build_batch(table, part, 512), part) for part in parts]

    def _given(self, batch: PackedBatch, part: Any) -> PackedBatch:
        given = torch.zeros(3, len(batch.loss_rows))
        values = [
            torch.stack([self.advantages[i].expand(len(self.answers[i])), self.sampled[i], self.reference[i]]) for i in part
        ]
        assert batch.document_N is not None
        for place, value in enumerate(values):
            given[:, (batch.document_N == place) & (batch.row_labels != IGNORED)] = value
        return PackedBatch(**{**vars(batch), "given_KN": given})


def log_probs(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """[answers, their longest]: each row by itself."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(logits.float().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def of_trl(model: Any, rollouts: Rollouts, name: str) -> torch.Tensor:
    settings = CASES[name][1]
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x
    )
    kind = RLOOTrainer if name == "rloo" else GRPOTrainer
    options = {"delta": None, "use_bias_correction_kl": True, "steps_per_generation": 1} | settings
    if name == "rloo":
        options |= {"epsilon_low": 0.1, "epsilon_high": 0.1}
    trainer = bare(
        kind, model,
        **{"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "loss_type": "dapo",
           "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False, "max_completion_length": LONGEST,
           "current_gradient_accumulation_steps": 1, "accelerator": accelerator, "args": SimpleNamespace(**options),
           "_entropy_bonus_enabled": False, "entropy_coef": 0.0, "_metrics": defaultdict(lambda: defaultdict(list))} | options
    )  # fmt: skip

    def found(*_: Any, **__: Any) -> Any:
        each = log_probs(model, rollouts.prompts, rollouts.answers)
        return each, torch.zeros_like(each), None

    trainer._get_per_token_logps_and_entropies = found
    mask = padded([[1] * len(answer) for answer in rollouts.answers])
    sampled = torch.nn.utils.rnn.pad_sequence(rollouts.sampled, batch_first=True)
    return trainer._compute_loss(
        model,
        {
            "prompt_ids": padded(rollouts.prompts),
            "prompt_mask": padded([[1] * len(prompt) for prompt in rollouts.prompts]),
            "completion_ids": padded(rollouts.answers),
            "completion_mask": mask,
            "advantages": rollouts.advantages,
            "old_per_token_logps": sampled,
            "old_logps": (sampled * mask).sum(1),
            "ref_per_token_logps": torch.nn.utils.rnn.pad_sequence(rollouts.reference, batch_first=True),
            "num_items_in_batch": mask.sum().float(),
        },
    )


def of_ours(model: Any, batches: list[PackedBatch], objective: Policy) -> torch.Tensor:
    total = sum(objective.loss(outputs_of(model, batch).values_N, batch) for batch in batches)
    return total / sum(int(objective.count(batch)) for batch in batches)


@pytest.fixture(scope="module")
def given() -> tuple[Any, Rollouts]:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, initializer_range=0.15, pad_token_id=0)  # fmt: skip
    model, rollouts = AutoModelForCausalLM.from_config(config), Rollouts()
    rollouts.look(model)
    return model, rollouts


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_trl(name: str, given: tuple[Any, Rollouts]) -> None:
    model, rollouts = given
    true = of_trl(model, rollouts, name)
    wanted = gradients(model, true)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert largest > 1e-3
    fast = copy.deepcopy(model)
    install(fast)
    for shared, split in ((False, False), (True, False), (False, True), (True, True)):
        loss = of_ours(fast, rollouts.batches(shared, split), Policy(**CASES[name][0], updates=2))
        assert abs(float(loss.detach()) - float(true.detach())) < 1e-5, (shared, split)
        for parameter, gradient in gradients(fast, loss).items():
            torch.testing.assert_close(
                gradient, wanted[parameter], rtol=1e-4, atol=1e-5 * largest, msg=f"{parameter} {shared} {split}"
            )


def test_the_ratio_of_the_first_update_is_one_to_the_bit(given: tuple[Any, Rollouts]) -> None:
    model, rollouts = given
    (batch,) = rollouts.batches(shared=False, split=False)
    for options, _ in CASES.values():
        objective = Policy(**options)
        values = outputs_of(model, batch).values_N
        ratio = objective._ratio(values, batch)
        assert (ratio.detach() == 1).all()
        assert torch.autograd.grad(ratio.sum(), values)[0].abs().sum() > 0
