"""The bytes of mixtures of experts: the formulas against what real layers hold and store, and against what a GPU measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from pronghorn.bench.workloads import MODELS
from pronghorn.errors import ModelError
from pronghorn.memory.calibrate import calibrate, layer_work
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.forecast import problem_of
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.levels import KEEP, Problem, evaluate
from pronghorn.memory.moe_sizes import stored
from pronghorn.memory.offload import bytes_needed
from pronghorn.memory.plan import make_plan, smallest_budget
from pronghorn.memory.sizes import RECOMPUTES, Job, kept_bytes, kept_parts, shape_of, static_parts, unpacked_bytes
from pronghorn.memory.working import pieces_worth_trying, working_bytes
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.experts import StoredExperts
from pronghorn.model.formats.store import store_experts_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers.saved import Level, Saved, leave
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora
from tables import covering, table

SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
QWEN: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
FAMILIES: dict[str, Any] = {
    "gpt_oss": GptOssConfig(**SMALL, head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=16),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **QWEN, head_dim=16),
    "qwen2_moe": Qwen2MoeConfig(**SMALL, **QWEN, shared_expert_intermediate_size=48),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
    "olmoe": AutoConfig.for_model("olmoe", **SMALL, num_experts=8, num_experts_per_tok=3),
    "minimax_m2": AutoConfig.for_model("minimax_m2", **SMALL, head_dim=16, num_local_experts=8, num_experts_per_tok=3),
    "dots1": AutoConfig.for_model("dots1", **SMALL, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3,
                                  n_shared_experts=2, head_dim=16, sliding_window=None),
    "hy_v3": AutoConfig.for_model("hy_v3", **SMALL, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3,
                                  num_shared_experts=2, head_dim=16, mlp_layer_types=["sparse", "sparse"]),
}
TARGETS: dict[str, Any] = {"attention": ("q_proj", "o_proj"), "linears": "all-linear", "experts": ("all-linear", "experts")}
# A family decides which tensors there are, the adapters which of them are wider: each family once, the one with the most
# tensors with all adapters.
PAIRS = sorted({*covering(FAMILIES, TARGETS), *(("qwen2_moe", adapters) for adapters in TARGETS)})
TOKENS = 48


def model_of(family: str, targets: Any, *, four_bit: bool = False) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    if four_bit:
        store_experts_(model, FORMATS["nf4"])
    model = add_adapter(model, Lora(r=4, targets=targets), seed=1)
    assert not install(model)
    return model


def job_of(family: str, **changes: Any) -> Job:
    return replace(Job(shape_of(FAMILIES[family]), TOKENS, rank=4, element=4), **changes)


def forward(model: Any) -> tuple[Any, Saved]:
    engine = engine_of(model)
    assert engine is not None
    engine.prepare(torch.float32)
    documents = engine.documents(torch.tensor([0, 20, TOKENS], dtype=torch.int32), 28, torch.arange(TOKENS))
    with torch.no_grad():
        return engine, engine.layers[0].forward_at("nothing", torch.randn(TOKENS, 64), documents)[1]


def storages(*values: Any) -> dict[int, int]:
    """Bytes by storage: views are counted once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values if isinstance(t, torch.Tensor)}


@table(("family", "adapters"), PAIRS)
def test_a_layer_keeps_what_the_formula_says(family: str, adapters: str) -> None:
    _, kept = forward(model_of(family, TARGETS[adapters]))
    job = job_of(family, targets=TARGETS[adapters])
    held = sum(storages(*kept.values()).values())
    assert kept["gu"] is not None
    assert held == kept_bytes(job, "nothing")
    assert kept_bytes(job, "gate_up") == held - kept["gu"].nbytes
    assert kept_bytes(job, "layer") == kept["h"].nbytes
    assert ("shared_gu" in kept_parts(job)) == (family in ("qwen2_moe", "dots1", "hy_v3"))


def bytes_that_leave(kept: Any, level: Level) -> int:
    class Place:
        needed = 0

        def leave(self, layer: int, tensors: Any) -> None:
            self.needed = bytes_needed(tensors)

        def back(self, layer: int) -> Any:
            raise AssertionError

    place = Place()
    leave(kept.at(level), 0, place)
    return place.needed


@pytest.mark.parametrize("level", ["nothing", "gate_up", "around_attention", "layer"])
def test_what_leaves_fits_into_its_slot(level: Level) -> None:
    """The family with the most tensors."""
    leave_for_a_slot(model_of("qwen2_moe", TARGETS["experts"]), job_of("qwen2_moe", targets=TARGETS["experts"]), level)


def leave_for_a_slot(model: Any, job: Job, level: Level) -> None:
    _, kept = forward(model)
    slot = problem_of(job, predicted_costs(job, GPUS["h200"]), 10**9, 10**9).slot(level)
    assert slot - 2 * 16 * 256 <= bytes_that_leave(kept, level) <= slot


@pytest.mark.parametrize(("family", "adapters"), PAIRS)
def test_weights_and_adapters_are_counted_as_they_are_stored(family: str, adapters: str) -> None:
    model = model_of(family, TARGETS[adapters])
    engine, _ = forward(model)
    job, few = job_of(family, targets=TARGETS[adapters]), ("bias", "sinks")
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = static_parts(job)
    for p in trained:
        p.grad = torch.zeros_like(p)
    sums = LoraGradBuffer(engine, torch.float32)
    assert parts["adapter sums"] == pytest.approx(sums.buffer.nbytes, abs=256 * 14 * 2)  # each is padded
    assert parts["weights"] == sum(storages(*(p for n, p in model.named_parameters()
                                              if not p.requires_grad and not n.endswith(few))).values())
    assert parts["adapters and optimizer"] == 4 * sum(p.nbytes for p in trained)
    assert job.parameters() == sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n and not n.endswith(few))
    full = static_parts(replace(job, method="full", element=2))
    norms = sum(p.numel() for n, p in model.named_parameters() if "layers" in n and "norm" in n and "lora_" not in n)
    rest = 2 * 259 * 64 + 64 + norms
    assert full["weights"] == 4 * job.parameters() + 2 * (job.parameters() - rest)


@pytest.mark.parametrize("adapters", ["linears", "experts"])
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_experts_in_4_bits_are_counted_as_they_are_stored(family: str, adapters: str) -> None:
    engine, _ = forward(model_of(family, TARGETS[adapters], four_bit=True))
    job, found = job_of(family, targets=TARGETS[adapters], method="qlora"), 0
    for stack in (engine.layers[0].mlp.expert_gate_up, engine.layers[0].mlp.expert_down):
        own = stack.module()
        assert isinstance(own, StoredExperts)
        found += own.stacks[stack.parameter].nbytes + stack.group.A_ERD.nbytes + stack.group.sB_EOR.nbytes
    router = engine.layers[0].mlp.router.weight_ED.nbytes
    assert stored(job) == pytest.approx(found + router, rel=0.02)  # without NF4's tables

    assert job.shape.mixture is not None
    published = replace(job, shape=replace(job.shape, mixture=replace(job.shape.mixture, linears_in_16_bits=True)))
    in_16_bits = replace(job, method="lora")
    besides = [static_parts(one)["weights"] - 2 * stored(one) for one in (published, in_16_bits, job)]
    assert besides[0] == besides[1] > besides[2]  # as gpt-oss is published, only the experts are in 4 bits
    assert [unpacked_bytes(one) > 0 for one in (published, in_16_bits, job)] == [False, False, True]


def test_the_checkpoint_says_what_is_in_4_bits() -> None:
    published, cut = shape_of(MODELS["gpt-oss-20b"]).mixture, shape_of(MODELS["gpt-oss-20b-4layers"]).mixture
    assert published is not None
    assert cut is not None
    assert (published.experts, published.chosen, published.width, published.four_bit) == (32, 4, 2880, "mxfp4")
    assert published.linears_in_16_bits
    assert not cut.linears_in_16_bits
    qwen = shape_of(MODELS["qwen3-30b-a3b-4layers"])
    assert qwen.mixture is not None
    assert (qwen.mixture.experts, qwen.mixture.width, qwen.mixture.four_bit, qwen.mlp_width) == (128, 768, "nf4", 0)


def test_the_whole_of_gpt_oss_in_4_bits_takes_what_was_measured() -> None:
    """20.6 GiB on an H200, 4,096 tokens, everything kept, adapters on attention."""
    job = Job(shape_of(MODELS["gpt-oss-20b"]), 4096, method="qlora")
    problem = problem_of(job, predicted_costs(job, GPUS["h200"]), GPUS["h200"].memory, 0)
    assert evaluate(problem, [KEEP] * 24).peak / 2**30 == pytest.approx(20.6, rel=0.01)


def test_layers_that_are_not_alike_are_refused() -> None:
    for changes in ({"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        with pytest.raises(ModelError, match="does not support this model") as refused:
            shape_of(Qwen3MoeConfig(**SMALL, **QWEN, **changes))
        assert "some do not" in str(refused.value)


@pytest.mark.parametrize(("model", "targets"), [("gpt-oss-20b-4layers", "all-linear"),
                                                ("qwen3-30b-a3b-4layers", ("all-linear", "experts"))])
def test_less_memory_takes_more_time(model: str, targets: Any) -> None:
    problem = slower_with_less(Job(replace(shape_of(MODELS[model]), layers=8), 8192, targets=targets))
    with pytest.raises(Exception, match="smallest that works"):
        make_plan(replace(problem, budget=int(0.98 * smallest_budget(problem))))


def slower_with_less(job: Job) -> Problem:
    work = [working_bytes(job, what) for what in reversed(RECOMPUTES)]
    assert work == sorted(work)
    assert pieces_worth_trying(job) == (1,)
    costs = predicted_costs(job, GPUS["h200"])
    assert 0 < costs.recompute_gate_up < costs.recompute_around < costs.recompute_layer < costs.forward < costs.backward
    problem = problem_of(job, costs, 10**12, 64 * 10**9)
    least, most, times = smallest_budget(problem), make_plan(problem), []
    for share in (0.0, 0.3, 0.6, 1.0):
        budget = int(least + share * (problem.budget_for(most.needed_bytes) - least))
        plan = make_plan(replace(problem, budget=budget))
        assert plan.needed_bytes <= budget
        times.append(plan.ms)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == pytest.approx(most.ms)
    return problem


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe", "dots1"])
def test_a_layer_can_be_timed(family: str) -> None:
    time_a_layer(model_of(family, TARGETS["experts"]))


def time_a_layer(model: Any) -> None:
    """And what is timed leaves the model as it was."""
    engine, _ = forward(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def documents(tokens: int) -> Any:
        return engine.documents(torch.tensor([0, 20, tokens], dtype=torch.int32), 28, torch.arange(tokens))

    costs = calibrate(engine, documents, tokens=TOKENS, rows=TOKENS // 2, dtype=torch.float32, device=torch.device("cpu"))
    assert costs.measured
    again = (costs.recompute_gate_up, costs.recompute_around, costs.recompute_layer)
    assert min(costs.forward, costs.backward, *again, costs.rest) > 0
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
        assert p.grad is None


def test_a_backward_that_is_timed_finds_the_same_numbers_each_time() -> None:
    """Gradients take the place of gate and up, also of the shared expert's: zeros would be multiplied faster."""
    engine, _ = forward(model_of("qwen2_moe", TARGETS["experts"]))
    documents = engine.documents(torch.tensor([0, 20, TOKENS], dtype=torch.int32), 28, torch.arange(TOKENS))
    layer = engine.layers[1]
    with torch.no_grad():
        work, found, real = layer_work(engine, documents, TOKENS, TOKENS, torch.float32), [], layer.backward
        layer.backward = lambda dh, kept, shared: (found.append((kept["gu"].sum(), kept["shared_gu"].sum(), kept["qkv"])),
                                                   real(dh, kept, shared))
        for _ in range(3):
            work.gate_up_and_backward()
    assert len(found) == 3
    assert len({(float(own), float(shared)) for own, shared, _ in found}) == 1
    assert all(qkv is None for _, _, qkv in found)
