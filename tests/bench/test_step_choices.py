"""What of `benchmarks.step_choices` needs no GPU: which choices there are, how they are made and undone, who is timed when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import step_choices
from benchmarks.step_choices import AS_IT_IS, NotOffered, _choose, choices, in_turns
from pronghorn.bench.workloads import WORKLOADS
from pronghorn.kernels.attention import attention_short
from pronghorn.kernels.gemm import cublaslt, hopper_gemm
from pronghorn.kernels.gemm.cublaslt import LONG, NARROW, WIDE
from pronghorn.kernels.lora import gated_lora, lora_grad_gemm, lora_linear
from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.loss import cross_entropy_powers, cross_entropy_rows, linear_cross_entropy
from pronghorn.kernels.norm import rms_norm
from pronghorn.model.layers import linears
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.mixers import attention as mixer


def test_a_choice_is_made_and_undone() -> None:
    modules = (attention_short, cross_entropy_rows, cublaslt, gated_lora, linear_cross_entropy, lora_linear, rms_norm,
               lora_grad_gemm, mixer, LoraGroup, linears, LinearGroup, cross_entropy_powers, hopper_gemm)  # fmt: skip
    before = [dict(vars(module)) for module in modules]
    found = choices(WORKLOADS["llama-1b"], [])
    for name, choice in found.items():
        with choice():
            pairs = zip(modules, before, strict=True)
            changed = [key for module, was in pairs for key in was if vars(module)[key] is not was[key]]
            if name == "without all of these":
                assert set(changed) == {"extend", "extend_grad", "_beside", "gated_mm", "rope_mm"}
            elif name == "all three apart":
                assert set(changed) == {"gated_mm", "rope_mm", "covered"}
            else:
                assert len(changed) == (0 if name.startswith(AS_IT_IS) else 1), name
    assert [dict(vars(module)) for module in modules] == before


def test_an_algorithm_is_for_one_product_alone() -> None:
    found = choices(WORKLOADS["llama-1b"], ["down by 29/3/1"])
    assert list(found) == [AS_IT_IS, "down by 29/3/1", f"{AS_IT_IS}, captured again"]
    with found["down by 29/3/1"]():
        forced = cublaslt.favoured(16384, 8192 + 16, 2048, weight_by_rows=True)
        others = cublaslt.favoured(16384, 2048 + 64, 16384, weight_by_rows=True)
    assert forced == (NARROW,)
    assert others == (WIDE, NARROW)
    assert _choose([LONG, NARROW], forced, any_will_do=True) == 1
    with pytest.raises(NotOffered):
        _choose([LONG, WIDE], forced, any_will_do=True)
    assert _choose([LONG], others, any_will_do=False) is None


def test_turns_go_both_ways_and_the_step_as_it_is_comes_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    graphs: dict[str, Any] = {name: name for name in (AS_IT_IS, *"abcdef")}

    def of_calls(name: Any, count: int) -> float:
        if count == step_choices.REPLAYS:
            order.append(name)
        return 100.0 + (name == "c") + 0.1 * len(order)

    monkeypatch.setattr(step_choices, "of_calls", of_calls)
    usual, more = in_turns(graphs, 2)
    assert order == [AS_IT_IS, *"abcde", AS_IT_IS, "f", AS_IT_IS, *"fedcb", AS_IT_IS, "a"]
    assert len(usual) == 4
    assert more.keys() == set("abcdef")
    assert more["c"] == pytest.approx([1.3, 1.4])
    assert more["a"] == pytest.approx([0.1, 0.1])


def test_what_is_left_out_is_of_one_group_alone() -> None:
    """Its extra columns stay what they were; another group's are filled as ever."""
    workload = WORKLOADS["llama-1b"]
    shapes = {"out": (2048, 2048), "small": (32, 48)}
    groups = {
        name: LoraGroup([torch.randn(outer, inner)], [Adapter(0, torch.randn(16, inner), torch.randn(outer, 16), 1.0)])
        for name, (outer, inner) in shapes.items()
    }
    x = {name: torch.full((3, inner + 16), 7.0) for name, (_, inner) in shapes.items()}
    dy = {name: torch.full((3, outer + 16), 7.0) for name, (outer, _) in shapes.items()}
    with choices(workload, ["without x A^T of out"])["without x A^T of out"]():
        left = {name: bool((group.extend(x[name]) == 7.0).all()) for name, group in groups.items()}
    assert left == {"out": True, "small": False}
    with choices(workload, ["without dy sB of out"])["without dy sB of out"]():
        left = {name: bool((group.extend_grad(dy[name]) == 7.0).all()) for name, group in groups.items()}
    assert left == {"out": True, "small": False}
    assert not (groups["out"].extend(x["out"]) == 7.0).any()
    assert not (groups["out"].extend_grad(dy["out"]) == 7.0).any()


def test_without_the_terms_behind_it_a_product_is_that_of_x_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(linears, "gated_mm", lambda *parts, **options: bool(given.append((*parts, options))) or True)
    x, weight = torch.randn(3, 4), torch.randn(6, 7)
    name = "without LoRA's columns in gate_up"
    with choices(WORKLOADS["llama-1b"], [name])[name]():
        assert linears.gated_mm(x, weight, "silu", gu_out=x, a_out=x, lora_TR=torch.randn(3, 3))
    assert given[0][0] is x
    assert torch.equal(given[0][1], weight[:, :4])
    assert given[0][3] == {"gu_out": x, "a_out": x}
