"""The experts' activation with bias and routing weights, and combining a token's rows: bound by memory."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.moe_sizes import layer_of, moe_cases
from benchmarks.ops import Line, compare, compiled
from pronghorn.kernels.moe.moe_combine import combine, combine_reference
from pronghorn.kernels.moe.moe_gated import (
    ExpertActivation,
    expert_gated_backward,
    expert_gated_forward,
    expert_gated_reference,
)


def cases() -> list[dict[str, Any]]:
    return moe_cases(**{"pass": ["forward", "backward", "combine"]})


def run(case: dict[str, Any]) -> list[Line]:
    layer = layer_of(case)
    routing, name = layer.routing, f"{layer.name} {case['pass']}"
    if case["pass"] == "combine":
        y, residual = layer.random(layer.rows, layer.D), layer.random(layer.T, layer.D)
        arguments = (y, routing.inverse_TK, routing.weights_TK)
        plain = compiled(combine_reference)
        calls: dict[str, Any] = {
            "ours": lambda: combine(*arguments, add_TD=residual),
            "torch": lambda: combine_reference(*arguments, add_TD=residual),
            "torch.compile": None if plain is None else lambda: plain(*arguments, add_TD=residual),
        }
        truth = combine_reference(y.float(), *arguments[1:], add_TD=residual.float())
        return compare("moe_combine", name, calls, lambda: truth, moved_bytes=y.nbytes + 2 * residual.nbytes)
    clamped = case["model"].startswith("gpt-oss")
    activation = ExpertActivation("clamped" if clamped else "silu")
    gu, da = layer.random(layer.rows, 2 * layer.F), layer.random(layer.rows, layer.F)
    given: dict[str, Any] = {"order_S": routing.order_S, "ids_TK": routing.ids_TK}
    given["bias_EG"] = layer.random(layer.E, 2 * layer.F) if clamped else None
    if case["pass"] == "forward":
        bias = None if given["bias_EG"] is None else given["bias_EG"].float()
        true = expert_gated_reference(gu.float(), activation, bias, routing.ids_TK, routing.order_S)
        rest = (given["bias_EG"], routing.ids_TK, routing.order_S)
        calls = {
            "ours": lambda: expert_gated_forward(gu, activation, **given),
            "torch": lambda: expert_gated_reference(gu, activation, *rest),
        }
        return compare("moe_gated", name, calls, lambda: true, moved_bytes=3 * da.nbytes)

    def backward(wide: bool = False) -> list[torch.Tensor | None]:
        numbers = dict(given)
        if wide and clamped:
            numbers["bias_EG"] = given["bias_EG"].float()
        rows = (da.float(), gu.float()) if wide else (da, gu)
        return list(expert_gated_backward(*rows, activation, weights_TK=routing.weights_TK, **numbers))

    wide = backward(wide=True)
    calls = {"ours": backward}
    return compare("moe_gated", name, calls, lambda: wide, moved_bytes=6 * da.nbytes)
