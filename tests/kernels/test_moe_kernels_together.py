"""All the kernels of a layer of experts, called as a hand-written layer calls them: transformers' outputs and gradients.

`our_layer` is also the shortest description of how they go together."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_bias, grouped_linear_backward_weight
from pronghorn.kernels.moe.grouped_lora import ExpertAdapter, ExpertGroup
from pronghorn.kernels.moe.moe_combine import combine
from pronghorn.kernels.moe.moe_gated import ExpertActivation, expert_gated_backward, expert_gated_forward
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import route_backward, route_reference, routing_forward
from pronghorn.kernels.runtime.dispatch import use_triton

T, D, F, E, K, RANK = 17, 48, 40, 5, 2, 8
GPT_OSS, SILU = ExpertActivation("clamped", limit=1.5), ExpertActivation("silu")
# normalise, activation, whether experts and router have biases
FAMILIES = {"gpt_oss": (True, GPT_OSS, True), "qwen3_moe": (False, SILU, False), "mixtral": (True, SILU, False)}
SCALES = {"gate_up": 0.5, "down": 2.0}


def our_layer(x: Tensor, dout: Tensor, parts: dict[str, Tensor], family: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(output, dx, gradients by name). Stacks are [E, O, D]; adapters as PEFT keeps them; a residual is not part of it."""
    normalise, activation, biased = FAMILIES[family]
    first, second = (
        ExpertGroup(parts[name], ExpertAdapter(parts[f"A {name}"], parts[f"B {name}"], E, SCALES[name])) for name in SCALES
    )
    assert first.adapters is not None
    assert second.adapters is not None
    bias1, bias2 = parts.get("bias gate_up"), parts.get("bias down")
    logits = nn.functional.linear(x, parts["router"], parts.get("bias router"))

    routing = routing_forward(logits, K, normalise=normalise)
    order, offsets, S = routing.order_S, routing.offsets_E1, T * K
    given: dict[str, Any] = {"bias_EG": bias1, "ids_TK": routing.ids_TK}
    x_ext = gather_rows(x, order, K, offsets, first.A_ERD)
    gu = first.forward(x_ext, offsets)
    a_ext = torch.empty(S, second.input_width, dtype=x.dtype, device=x.device)
    expert_gated_forward(gu, activation, order_S=order, out=a_ext[:, :F], **given)
    aa = second.extend(a_ext, offsets)
    out = combine(second.forward(a_ext, offsets), routing.inverse_TK, routing.weights_TK, bias_ED=bias2, ids_TK=routing.ids_TK)

    dy_ext = gather_rows(dout, order, K, offsets, second.sB_EOR.transpose(1, 2))
    da = second.backward_input(dy_ext, offsets)
    dgu_ext = torch.empty(S, first.grad_width, dtype=x.dtype, device=x.device)
    _, dweights, wa = expert_gated_backward(da, gu, activation, order, weights_TK=routing.weights_TK,
                                            out=dgu_ext[:, : 2 * F], **given)  # fmt: skip
    assert dweights is not None
    assert wa is not None
    dy, dgu = dy_ext[:, :D], dgu_ext[:, : 2 * F]
    w_S1 = routing.weights_TK.view(-1)[order.long()][:, None]
    second.adapters.add_grads(dy, dy_ext[:, D:], wa, (aa * w_S1).to(x.dtype), offsets)
    first.adapters.add_grads(dgu, first.extend_grad(dgu_ext, offsets), x_ext[:, :D], x_ext[:, D:], offsets)
    if bias2 is not None:
        dweights += (dout @ bias2.T).gather(1, routing.ids_TK.long())
    dlogits = route_backward(dweights, logits, routing.weights_TK, routing.ids_TK, normalise=normalise)
    dx = combine(first.backward_input(dgu_ext, offsets), routing.inverse_TK, add_TD=dlogits @ parts["router"])

    grads = {"router": dlogits.T @ x, "gate_up": grouped_linear_backward_weight(dgu, x_ext[:, :D], offsets),
             "down": grouped_linear_backward_weight(dy, wa, offsets)}  # fmt: skip
    for name, group in (("gate_up", first), ("down", second)):
        assert group.adapters is not None
        grads[f"A {name}"], grads[f"B {name}"] = group.adapters.grads()
    if biased:
        grads["bias router"] = dlogits.sum(0)
        grads["bias gate_up"] = grouped_linear_backward_bias(dgu, offsets)
        grads["bias down"] = grouped_linear_backward_bias(dy, offsets, weights_TK=routing.weights_TK, order_S=order)
    return out, dx, grads


def plain_layer(x: Tensor, parts: dict[str, Tensor], family: str) -> Tensor:
    """Every expert for every token, and no sort: nothing in common with the kernels."""
    normalise, activation, _ = FAMILIES[family]
    logits = nn.functional.linear(x, parts["router"], parts.get("bias router"))
    weights, ids = route_reference(logits, K, normalise=normalise)
    dense = torch.zeros_like(logits).scatter(1, ids.long(), weights)
    out = torch.zeros_like(x)
    for expert in range(E):
        gate_up, down = (
            parts[name][expert] + SCALES[name] * parts[f"B {name}"].view(-1, RANK, E)[..., expert]
            @ parts[f"A {name}"].view(E, RANK, -1)[expert] for name in SCALES
        )  # fmt: skip
        gu = x @ gate_up.T + (parts["bias gate_up"][expert] if "bias gate_up" in parts else 0)
        if activation.kind == "clamped":
            gate, up = gu[:, ::2].clamp(max=activation.limit), gu[:, 1::2].clamp(-activation.limit, activation.limit)
            a = (up + 1) * gate * torch.sigmoid(gate * activation.alpha)
        else:
            gate, up = gu.chunk(2, dim=-1)
            a = nn.functional.silu(gate) * up
        y = a @ down.T + (parts["bias down"][expert] if "bias down" in parts else 0)
        out = out + dense[:, expert, None] * y
    return out


def random_parts(family: str, device: str) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "router": (E, D), "gate_up": (E, 2 * F, D), "down": (E, D, F), "A gate_up": (E * RANK, D),
        "B gate_up": (2 * F, RANK * E), "A down": (E * RANK, F), "B down": (D, RANK * E),
    }  # fmt: skip
    if FAMILIES[family][2]:
        shapes |= {"bias router": (E,), "bias gate_up": (E, 2 * F), "bias down": (E, D)}
    return {name: torch.randn(shape, device=device) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def assert_same(
    found: tuple[Tensor, Tensor, dict[str, Tensor]], expected: Tensor, dx: Tensor, grads: dict[str, Tensor]
) -> None:
    pairs = {"output": (found[0], expected), "dx": (found[1], dx)} | {name: (found[2][name], grads[name]) for name in grads}
    for name, (ours, true) in pairs.items():
        error = float((ours.double() - true.double()).abs().max() / true.double().abs().max())
        assert error <= 5e-6, f"{name}: off by {error:.1e} of the largest value"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_together_make_autograds_gradients(device: str, family: str) -> None:
    parts = random_parts(family, device)
    if "bias router" in parts:
        parts["bias router"][2] = -100.0  # nobody goes there
    x, dout = torch.randn(T, D, device=device), torch.randn(T, D, device=device)
    leaves = {name: part.double().requires_grad_() for name, part in parts.items()}
    leaf = x.double().requires_grad_()
    expected = plain_layer(leaf, leaves, family)
    dx, *true = torch.autograd.grad(expected, [leaf, *leaves.values()], dout.double())
    found = our_layer(x, dout, parts, family)
    assert set(found[2]) == set(leaves), "a parameter without a gradient"
    assert_same(found, expected.detach(), dx, dict(zip(leaves, true, strict=True)))


def transformers_block(family: str, device: str) -> Any:
    """One layer's mixture of experts, as the model has it."""
    if family == "gpt_oss":
        from transformers.models.gpt_oss import modeling_gpt_oss as module
        from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

        config: Any = GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
        block: Any = module.GptOssMLP(config)
        block.experts.limit = GPT_OSS.limit
    elif family == "qwen3_moe":
        from transformers.models.qwen3_moe import modeling_qwen3_moe as module
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

        config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K,
                                norm_topk_prob=False)  # fmt: skip
        block = module.Qwen3MoeSparseMoeBlock(config)
    else:
        from transformers.models.mixtral import modeling_mixtral as module
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig

        config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
        block = module.MixtralSparseMoeBlock(config)
    config._experts_implementation = "eager"
    return block.to(device)


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("peft") is None, reason="needs transformers and peft")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_and_peft_agree(device: str, family: str) -> None:
    if device == "cpu" and use_triton(torch.empty(1)):
        pytest.skip("the interpreter is slow, and the test above compares its gradients")
    from peft import LoraConfig, get_peft_model

    parts, turned = random_parts(family, device), family == "gpt_oss"
    block = transformers_block(family, device)
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    router = block.router if turned else block.gate
    values = {router.weight: parts["router"]}
    for name, attribute in names.items():
        values[getattr(block.experts, attribute)] = parts[name].transpose(1, 2) if turned else parts[name]
        if turned:
            values[getattr(block.experts, f"{attribute}_bias")] = parts[f"bias {name}"]
    if turned:
        values[router.bias] = parts["bias router"]
    with torch.no_grad():
        for parameter, value in values.items():
            parameter.copy_(value)
    model = nn.Sequential()
    model.add_module("mlp", block)
    targets = [f"mlp.experts.{attribute}" for attribute in names.values()]
    peft_model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=targets))  # type: ignore[arg-type]
    adapters: dict[str, Any] = {}
    for _, wrapper in peft_model.named_modules():
        if (which := getattr(wrapper, "parameter_name", None)) is not None:
            name = next(name for name, attribute in names.items() if attribute == which)
            wrapper.scaling["default"] = SCALES[name]
            adapters |= {f"A {name}": wrapper.lora_A["default"].weight, f"B {name}": wrapper.lora_B["default"].weight}
    assert set(adapters) == {"A gate_up", "B gate_up", "A down", "B down"}
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(parts[name])
    x, dout = torch.randn(T, D, device=device, requires_grad=True), torch.randn(T, D, device=device)
    theirs = peft_model(x[None])
    output = (theirs[0] if isinstance(theirs, tuple) else theirs)[0]
    dx, *true = torch.autograd.grad(output, [x, *adapters.values()], dout)
    assert_same(our_layer(x.detach(), dout, parts, family), output.detach(), dx, dict(zip(adapters, true, strict=True)))
