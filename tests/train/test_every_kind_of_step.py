"""Steps with weights in few bits, with experts and with their auxiliary loss: replayed as graphs where there is a GPU, they are
eager ones, also with looks at the model in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import test_fp8_runs
import test_moe_steps
import torch
from test_graphed_step import DEVICE, SMALL, eager, graphed, mixed_table, steps_of
from transformers import AutoModelForCausalLM, Qwen3Config

from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.objectives import Supervised
from tables import first_of

GPU = DEVICE.type == "cuda"
FP8_DTYPE = torch.bfloat16 if GPU else torch.float32  # FP8 GEMMs of a GPU give bf16


class Kind(NamedTuple):
    make: Callable[[], Any]
    apart: float = 1e-5
    looks: bool = False  # at the model between its steps
    precision: str = "fp32"


def in_4_bits(lora: Lora, *, recompute: bool) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL)).to(DEVICE)
    store_linears_(model, FORMATS["nf4"])
    model = add_adapter(model, lora, seed=1).to(DEVICE)
    assert install(model) == ""
    for layer in engine_of(model).layers:
        layer.recompute = recompute
    return model.train()


def some_in_4_bits() -> Any:
    return in_4_bits(Lora(r=4, targets=("q_proj", "down_proj")), recompute=False)


def in_fp8(kind: str) -> Kind:
    """Sums in another order flip a rounding to e4m3 here and there: 5e-5 seen in fp32."""
    return Kind(lambda: test_fp8_runs.model_of(kind), 2e-3 if GPU else 5e-4, True, test_fp8_runs.PRECISION)


def experts(family: str, **options: Any) -> Kind:
    return Kind(lambda: test_moe_steps.model_of(family, "experts", **options))


def experts_in_fp8(family: str, method: str) -> Kind:
    """On a GPU in bf16; there, sums in attention have no fixed order."""
    return Kind(lambda: test_moe_steps.model_of(family, method, FP8_DTYPE, bits=8), 5e-3 if GPU else 1e-5)


KINDS: dict[str, Kind] = {
    "nf4": Kind(lambda: in_4_bits(Lora(r=4), recompute=True), looks=True),
    "nf4, adapters on some": Kind(some_in_4_bits, looks=True),
    "fp8": in_fp8("fp8"),
    "auxiliary loss": experts("qwen3_moe", balance=True),
    "experts in nf4": experts("gpt_oss", bits=4),
    "experts in fp8": experts_in_fp8("qwen2_moe", "experts"),
    # the same of a further family or method
    "nf4 in fp8": in_fp8("qlora"),
    "full in fp8": in_fp8("full"),
    **{f"auxiliary loss, {family}": experts(family, balance=True) for family in ("gpt_oss", "mixtral")},
    **{f"experts in nf4, {family}": experts(family, bits=4) for family in ("qwen3_moe", "mixtral")},
    "experts in fp8, adapters on attention": experts_in_fp8("qwen2_moe", "attention"),
    **{f"experts in fp8, gpt-oss, {method}": experts_in_fp8("gpt_oss", method) for method in ("attention", "experts")},
}


@pytest.mark.parametrize("name", first_of(KINDS, 6))
def test_graphed_steps_equal_eager_ones(name: str) -> None:
    kind, said = KINDS[name], list[str]()
    batches = steps_of(mixed_table(300), 20 if GPU else 3)
    assert len({batch.shape for step in batches for batch in step.batches}) > 1  # several graphs
    held_out, curves = steps_of(mixed_table(40), 1)[0].batches[0].to(DEVICE), []
    for make, options in ((graphed, {"said": said}), (eager, {})):
        model = kind.make()
        step, losses = make(model, kind.precision, **options), []
        for batch in batches:
            step.begin(batch)
            losses.append([step.finish().loss])
            if kind.looks:
                with torch.no_grad(), step.autocast():
                    losses[-1].append(float(Supervised().loss_sum(model.eval(), held_out)))
                model.train()
        curves.append(losses)
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=kind.apart)
    assert curves[0][-1][0] < curves[0][0][0]
    assert len({losses[-1] for losses in curves[0]}) == len(batches)  # each update reaches the next look
    assert not any("eagerly" in line for line in said)


def test_the_bytes_never_change() -> None:
    model = in_4_bits(Lora(r=4), recompute=False)
    before = {name: module.weight.clone() for name, module in model.named_modules() if isinstance(module, StoredLinear)}
    assert len(before) == 14
    step = graphed(model)
    for batch in steps_of(mixed_table(100), 3):
        step.begin(batch)
        step.finish()
    assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in before.items())
