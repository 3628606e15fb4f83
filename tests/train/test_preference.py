"""Every preference objective against TRL's own trainers: loss, gradients and what people watch, on plain and shared packs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import trl_losses as theirs
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3Config,
)

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import StepBatch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.data.preference.pair_rows import PairRows
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.model.shared_prefix import why_not_shared
from pronghorn.packs import PackedBatch
from pronghorn.recipe_parts import Lora
from pronghorn.train.dist.world import World
from pronghorn.train.objectives.cpo import Cpo, SimPo
from pronghorn.train.objectives.dpo import Dpo
from pronghorn.train.objectives.kto import Kto
from pronghorn.train.objectives.objective import Objective, mean_of
from pronghorn.train.objectives.orpo import Orpo
from pronghorn.train.objectives.preference import Answers
from pronghorn.train.objectives.reference import Reference
from samples import ListTable, small
from tables import covering
from trl_on_a_cpu import TorchLogProbs

CPU = torch.device("cpu")
SIZES = small(
    vocab_size=128, intermediate_size=48, initializer_range=0.15, max_position_embeddings=128, attn_implementation="eager"
)
WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 8}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "gemma2": Gemma2Config(**SIZES, **WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma4, as E2B": Gemma4TextConfig(
        **SIZES | WINDOW | {"num_hidden_layers": 4, "layer_types": WINDOW["layer_types"] * 2},
        num_kv_shared_layers=2,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
    ),
    "gpt-oss": GptOssConfig(
        **SIZES,
        **WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
BESIDE = {"cohere2": Cohere2Config(**SIZES, **{key: WINDOW[key] for key in ("layer_types", "sliding_window")})}
# ours, and TRL's settings of the same
OBJECTIVES: dict[str, tuple[Any, Any]] = {
    "dpo": (lambda r: Dpo(r, beta=0.3), lambda m, p: theirs.dpo(m, p, beta=0.3)),
    "ipo": (lambda r: Dpo(r, loss="ipo"), lambda m, p: theirs.dpo(m, p, loss_types=["ipo"])),
    "hinge": (lambda r: Dpo(r, loss="hinge"), lambda m, p: theirs.dpo(m, p, loss_types=["hinge"])),
    "normalized": (lambda r: Dpo(r, length_normalized=True), lambda m, p: theirs.dpo(m, p, loss_types=["sigmoid_norm"])),
    "rpo": (
        lambda r: Dpo(r, sft_weight=0.5),
        lambda m, p: theirs.dpo(m, p, loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    ),
    "simpo": (
        lambda r: SimPo(gamma=0.7),
        lambda m, p: theirs.cpo(m, p, loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=0.0),
    ),
    "cpo": (lambda r: Cpo(sft_weight=0.8), lambda m, p: theirs.cpo(m, p, cpo_alpha=0.8)),
    "cpo, smoothed": (
        lambda r: Cpo(label_smoothing=0.2, sft_weight=0.0),
        lambda m, p: theirs.cpo(m, p, label_smoothing=0.2, cpo_alpha=0.0),
    ),
    "cpo, ipo": (lambda r: Cpo(loss="ipo"), lambda m, p: theirs.cpo(m, p, loss_type="ipo")),
    "orpo": (lambda r: Orpo(beta=0.2), lambda m, p: theirs.orpo(m, p, beta=0.2)),
}
WATCHED = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.fixture(autouse=True)
def _trl_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)


def models(family: str) -> tuple[Any, Any]:
    """(of stock transformers and PEFT, the same with fast layers); the adapters do something."""
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config((FAMILIES | BESIDE)[family])
    for name, parameter in base.named_parameters():
        if "norm" in name or "sinks" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name and family != "gemma2"), std=0.2)
    stock = add_adapter(base, Lora(r=4, targets=("q_proj", "k_proj", "v_proj", "o_proj")), seed=1)
    for name, parameter in stock.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    fast = copy.deepcopy(stock)
    assert install(fast) == ""
    return stock.train(), fast.train()


def pairs_of(count: int, seed: int = 0) -> list[theirs.Pair]:
    random = np.random.default_rng(seed)
    return [
        tuple(random.integers(3, 128, int(random.integers(low, high))).tolist() for low, high in ((1, 14), (2, 9), (2, 9)))
        for _ in range(count)
    ]


def table_of(pairs: list[theirs.Pair], *, shared: bool) -> ListTable:
    rows = [prompt + answer for prompt, *answers in pairs for answer in answers]
    marks = [[False] * len(prompt) + [True] * len(answer) for prompt, *answers in pairs for answer in answers]
    groups, roles = np.repeat(np.arange(len(pairs)), 2), np.tile(np.array([0, 1], np.int32), len(pairs))
    prefixes = np.repeat(np.array([len(prompt) for prompt, *_ in pairs], np.int32), 2)
    return ListTable(rows, marks, PairRows(groups, roles, prefixes, np.zeros(len(rows), np.float32), shared=shared))


def batches_of(table: ListTable, capacity: int, padded: bool = False) -> tuple[PackedBatch, ...]:
    packs = pack_in_order(groups_of(table), capacity)
    shapes = Shapes.planned(table, packs, capacity) if padded else None
    return tuple(build_batch(table, rows, capacity, shapes=shapes) for rows in packs)


def stepped(model: Any, objective: Objective, table: ListTable, capacity: int, padded: bool = False) -> tuple[Any, ...]:
    """(loss, gradients, figures) of one step over the whole table."""
    objective.prepare(model, table, CPU, nullcontext)
    step = StepBatch(tuple(objective.complete(batch, table) for batch in batches_of(table, capacity, padded)), table, {}, 0.0)
    model.zero_grad(set_to_none=True)
    objective.before_step(model, step, CPU, nullcontext, World())
    divisor, total, watched = objective.divisor(step, World()), 0.0, torch.zeros(len(objective.watched))
    for batch in step.batches:
        sums = objective.sums(model, batch)
        loss = mean_of(sums.loss, divisor)
        loss.backward()
        total, watched = total + float(loss.detach()), watched + sums.watched
    return total, gradients(model), objective.figures(watched.tolist())


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize(("name", "family", "shared"), covering(OBJECTIVES, FAMILIES, (False, True), together=(0, 2)))
def test_loss_gradients_and_figures_are_those_of_trl(name: str, family: str, shared: bool) -> None:
    (stock, fast), (ours, trl) = models(family), OBJECTIVES[name]
    pairs = pairs_of(5)
    assert why_not_shared(FAMILIES[family], CPU, torch.float32) == ""
    expected, figures = trl(stock, pairs)
    expected.backward()
    capacity, padded = (128, True) if shared else (48, False)  # in one pack, padded to a run's shapes; or in several
    loss, found, watched = stepped(fast, ours(Reference(64)), table_of(pairs, shared=shared), capacity, padded)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_near(found, gradients(stock), 1e-5)
    assert {key: watched[key] for key in WATCHED} == pytest.approx({key: figures[key] for key in WATCHED}, rel=1e-4)


@pytest.mark.parametrize(("loss", "family"), [("kto", "llama"), ("apo_zero", "gemma2")])
def test_kto_is_trls(loss: str, family: str) -> None:
    stock, fast = models(family)
    marked = [(prompt, answer, i % 3 != 1) for i, (prompt, answer, _) in enumerate(pairs_of(7))]
    rows = [prompt + answer for prompt, answer, _ in marked]
    marks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer, _ in marked]
    roles = np.array([0 if good else 1 for *_, good in marked], np.int32)
    nothing = np.zeros(len(rows), np.int32)
    table = ListTable(rows, marks, PairRows(np.arange(len(rows)), roles, nothing, nothing.astype(np.float32)))
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
    kind = {"kto": "kto", "apo_zero": "apo_zero_unpaired"}[loss]
    expected, figures = theirs.kto(stock, marked, loss_type=kind, beta=0.2, **weights)
    expected.backward()
    for capacity in (128, 32):
        objective = Kto(Reference(64), 64, beta=0.2, loss=loss, **weights)
        found_loss, found, watched = stepped(fast, objective, table, capacity)
        assert found_loss == pytest.approx(float(expected.detach()), rel=1e-5)
        assert_near(found, gradients(stock), 1e-5)
        assert watched == pytest.approx({key: figures[key] for key in watched}, rel=1e-4)
        assert (watched["kl"] > 0) == (loss == "kto")


def test_several_rejected_answers_are_compared_with_the_chosen_one() -> None:
    """A group of three is two pairs that have the chosen answer in common."""
    _, fast = models("llama")
    prompt, chosen, *rejected = [5, 6, 7], [8, 9, 10], [11, 12], [13, 14, 15, 16]
    rows = [prompt + answer for answer in (chosen, *rejected)]
    marks = [[False] * 3 + [True] * (len(row) - 3) for row in rows]
    columns = np.zeros(3, np.int64), np.arange(3, dtype=np.int32), np.full(3, 3, np.int32), np.zeros(3, np.float32)
    three = ListTable(rows, marks, PairRows(*columns, shared=True))
    two = table_of([(prompt, chosen, answer) for answer in rejected], shared=False)
    found, expected = (stepped(fast, Dpo(Reference(64)), table, 64) for table in (three, two))
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_near(found[1], expected[1], 1e-5)
    assert found[2] == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "cohere2", "gemma4, as E2B"])
def test_shared_prompts_in_float64_are_the_unshared_computation(family: str) -> None:
    """Through windows, soft-caps, sinks, experts, an MLP beside attention, keys of earlier layers and inputs of layers."""
    model, pairs = models(family)[0].double(), pairs_of(4, seed=2)
    assert install(model) == ""
    plain, shared = (stepped(model, SimPo(), table_of(pairs, shared=shared), 128) for shared in (False, True))
    assert shared[0] == pytest.approx(plain[0], rel=1e-12)
    assert_near(shared[1], plain[1], 1e-10)


@pytest.mark.parametrize("of", [lambda **o: Dpo(Reference(64), **o), Cpo])
def test_hinge_with_label_smoothing_is_its_formula(of: Any) -> None:
    """TRL's hinge ignores label smoothing; here it is the share of pairs the wrong way round, as with sigmoid."""
    deltas = torch.linspace(-30, 30, 13, dtype=torch.float64)
    answers = Answers(torch.stack([deltas, torch.zeros_like(deltas)]).T.flatten(), *(torch.zeros(26) for _ in range(3)))
    objective = of(beta=0.1, loss="hinge", label_smoothing=0.2)
    found = objective.compared(answers, torch.arange(26) // 2 * 2)[1::2]
    expected = 0.8 * (1 - 0.1 * deltas).clamp(min=0) + 0.2 * (1 + 0.1 * deltas).clamp(min=0)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
