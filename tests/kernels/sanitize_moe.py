"""The checks of sanitize.py for the kernels of mixtures of experts. An expert has no tokens, last tiles are partial."""

from __future__ import annotations

import torch
from launches import BF16, FP32, leaf_of, near, rows_of, space_of, untouched

from pronghorn.kernels.moe.grouped_fp8 import fp8_cast_grad_rows
from pronghorn.kernels.moe.grouped_gemm import (
    grouped_linear_backward_bias,
    grouped_linear_backward_input,
    grouped_linear_backward_weight,
    grouped_linear_forward,
    grouped_linear_reference,
)
from pronghorn.kernels.moe.grouped_quantized import QuantizedStack, grouped_quantized_backward, grouped_quantized_forward
from pronghorn.kernels.moe.load_balance import add_load_balancing_grad, add_router_statistics, load_balancing_loss_reference
from pronghorn.kernels.moe.moe_combine import combine, combine_reference
from pronghorn.kernels.moe.moe_gated import (
    ExpertActivation,
    expert_gated_backward,
    expert_gated_forward,
    expert_gated_reference,
)
from pronghorn.kernels.moe.moe_gather import gather_rows, gather_rows_reference
from pronghorn.kernels.moe.routing import (
    route_backward,
    route_forward,
    route_reference,
    sort_by_expert,
    sort_by_expert_reference,
)
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_dequantize, fp8_quantize
from pronghorn.kernels.quant.mxfp4 import mxfp4_dequantize, mxfp4_dequantize_reference, mxfp4_quantize
from pronghorn.kernels.quant.nf4 import nf4_quantize
from pronghorn.kernels.quant.nvfp4 import nvfp4_quantize


def check_routing(device: str) -> None:
    for T, E, K, normalise in ((37, 5, 2, True), (301, 60, 4, False)):
        logits, dweights = rows_of(T, E, 3, FP32, device), torch.randn(T, K)
        leaf = leaf_of(logits)
        expected, their_ids = route_reference(leaf, K, normalise=normalise)
        weights, ids = route_forward(logits, K, normalise=normalise)
        near("routing weights", weights, expected)
        assert torch.equal(ids.cpu(), their_ids)
        space = space_of(T, E, 5, FP32, device)
        dlogits = route_backward(dweights.to(device), logits, weights, ids, normalise=normalise, out=space[:, :E])
        near("routing's gradient", dlogits, torch.autograd.grad(expected, leaf, dweights)[0])
        untouched("routing's gradient", space, E)
        for ours, theirs in zip(sort_by_expert(ids, E), sort_by_expert_reference(their_ids, E), strict=True):
            assert torch.equal(ours.cpu(), theirs)


def check_load_balance(device: str) -> None:
    T, E, K = 41, 6, 2
    logits, real = rows_of(T, E, 3, FP32, device), (torch.arange(T) < 33).int()
    leaf = leaf_of(logits)
    ids = route_reference(leaf, K, normalise=True)[1]
    loss = load_balancing_loss_reference([(leaf, ids)], real)
    totals, space = torch.zeros(2, E).to(device), space_of(T, E, 5, FP32, device)
    space[:, :E] = 0.0
    add_router_statistics(totals, logits, ids.to(device), real.to(device))
    grad = add_load_balancing_grad(space[:, :E], logits, totals, 33, 1.0, real.to(device))
    near("load balance", grad, torch.autograd.grad(loss, leaf)[0])
    untouched("load balance", space, E)


def check_grouped_gemm(device: str) -> None:
    """A dense and a thin product, the weight's and the bias' gradient, gathered rows."""
    dtype = BF16 if device == "cuda" else FP32  # the interpreter cannot multiply bf16
    offsets = torch.tensor([0, 0, 35, 101], dtype=torch.int32)
    for width, outputs in ((72, 130), (40, 16)):
        x, dy = rows_of(101, width, 8, dtype, device), rows_of(101, outputs, 8, dtype, device)
        weight, bias = torch.randn(3, outputs, width).to(dtype).to(device), torch.randn(3, outputs).to(dtype).to(device)
        leaves = [leaf_of(part) for part in (x, weight, bias)]
        expected = grouped_linear_reference(leaves[0], leaves[1], offsets, leaves[2])
        true = torch.autograd.grad(expected, leaves, dy.cpu().float())
        on_device, out = offsets.to(device), space_of(101, outputs, 3, dtype, device)
        near("grouped", grouped_linear_forward(x, weight, on_device, bias, out=out[:, :outputs]), expected)
        untouched("grouped", out, outputs)
        space = space_of(101, width, 3, dtype, device)
        near("grouped dx", grouped_linear_backward_input(dy, weight, on_device, out=space[:, :width]), true[0])
        untouched("grouped dx", space, width)
        sums = torch.zeros(3, width, outputs).to(device)
        grouped_linear_backward_weight(dy, x, on_device, out=sums.transpose(1, 2), add=True)
        near("grouped dW", sums.transpose(1, 2), true[1], dtype)
        near("grouped db", grouped_linear_backward_bias(dy, on_device), true[2])
        order = torch.randperm(202)[:101].int()
        expected = grouped_linear_reference(leaves[0][(order // 2).long()], leaves[1], offsets)
        near("gathered", grouped_linear_forward(x, weight, on_device, order_S=order.to(device), K=2), expected)


def check_moe_rows(device: str) -> None:
    """Gather, with and without an adapter; combine with everything."""
    dtype = BF16 if device == "cuda" else FP32
    T, K, E, width, rank = 29, 2, 3, 136, 16
    ids = torch.randint(0, 2, (T, K), dtype=torch.int32) * 2
    order, inverse, offsets = sort_by_expert_reference(ids, E)
    x, A = rows_of(T, width, 8, dtype, device), torch.randn(E, rank, width).to(dtype)
    expected = gather_rows_reference(x.cpu().float(), order, K, offsets, A.float())
    out = space_of(T * K, width + rank, 8, dtype, device)
    gather_rows(x, order.to(device), K, offsets.to(device), A.to(device), out=out[:, : width + rank])
    near("gather", out[:, : width + rank], expected)
    untouched("gather", out, width + rank)
    near("plain gather", gather_rows(x, order.to(device), K), expected[:, :width])
    weights, bias, added = torch.rand(T, K), torch.randn(E, width).to(dtype), rows_of(T, width, 3, dtype, device)
    space = space_of(T, width, 5, dtype, device)
    combine(out[:, :width], inverse.to(device), weights.to(device), bias_ED=bias.to(device), ids_TK=ids.to(device),
            add_TD=added, out=space[:, :width])  # fmt: skip
    near("combine", space[:, :width], combine_reference(out.cpu().float()[:, :width], inverse, weights, bias_ED=bias.float(),
                                                        ids_TK=ids, add_TD=added.cpu().float()))  # fmt: skip
    untouched("combine", space, width)


def check_moe_gated(device: str) -> None:
    T, K, E = 3, 2, 4
    ids, order, weights = torch.randint(0, E, (T, K)).int(), torch.randperm(T * K).int(), torch.rand(T, K)
    for activation, width, dtype in ((ExpertActivation("clamped", limit=1.0), 1025, BF16), (ExpertActivation(), 70, FP32)):
        gu, da = rows_of(T * K, 2 * width, 4, dtype, device), rows_of(T * K, width, 5, dtype, device)
        bias = torch.randn(E, 2 * width).to(dtype)
        leaf, leaf_w = leaf_of(gu), leaf_of(weights)
        a = expert_gated_reference(leaf, activation, bias.float(), ids, order)
        weighted = a * leaf_w.view(-1)[order.long()][:, None]
        true = torch.autograd.grad(weighted, (leaf, leaf_w), da.cpu().float())
        out, space = space_of(T * K, width, 1, dtype, device), space_of(T * K, 2 * width, 7, dtype, device)
        parts = {"bias_EG": bias.to(device), "ids_TK": ids.to(device)}
        near(activation.kind, expert_gated_forward(gu, activation, order_S=order.to(device), out=out[:, :width], **parts), a)
        untouched(activation.kind, out, width)
        dgu, dweights, again = expert_gated_backward(
            da, gu, activation, order.to(device), weights_TK=weights.to(device), bias_EG=parts["bias_EG"],
            ids_TK=parts["ids_TK"], out=space[:, : 2 * width],
        )  # fmt: skip
        near(activation.kind, dgu, true[0])
        near(activation.kind, dweights, true[1], dtype)
        near(activation.kind, again, weighted)
        untouched(activation.kind, space, 2 * width)


def check_mxfp4(device: str) -> None:
    q = mxfp4_quantize(torch.randn(7, 96 * 32).to(BF16))
    out = space_of(7, 96 * 32, 8, BF16, device)
    near("mxfp4", mxfp4_dequantize(q.to(device), out[:, : 96 * 32]), mxfp4_dequantize_reference(q))
    untouched("mxfp4", out, 96 * 32)


def check_grouped_quantized(device: str) -> None:
    """All formats, with an adapter; the last tiles of outputs and of columns are partial."""
    dtype = BF16 if device == "cuda" else FP32
    (E, outputs, width), rank, offsets = (3, 72, 192), 16, torch.tensor([0, 0, 35, 101], dtype=torch.int32)
    weight = torch.randn(E, outputs, width) / 8
    mx = mxfp4_quantize(weight)
    stacks = [
        QuantizedStack.of(nf4_quantize(weight.flatten(0, 1).to(device)), E),
        QuantizedStack.of(nvfp4_quantize(weight.flatten(0, 1).to(device)), E),
        QuantizedStack.of(mx.to(device), E),
        QuantizedStack.of(fp8_quantize(weight.to(device)), E),
    ]
    x, dy = rows_of(101, width + rank, 8, dtype, device), rows_of(101, outputs + rank, 8, dtype, device)
    A, sB = torch.randn(E, rank, width).to(dtype), torch.randn(E, outputs, rank).to(dtype)
    for stack in stacks:
        whole = stack.dequantized(FP32).cpu()
        wide_x, wide_dy = x.cpu().float(), dy.cpu().float()
        expected = grouped_linear_reference(wide_x, torch.cat([whole, sB.float()], dim=2), offsets)
        out, space = space_of(101, outputs, 3, dtype, device), space_of(101, width, 3, dtype, device)
        grouped_quantized_forward(x, stack, offsets.to(device), sB.to(device), out=out[:, :outputs])
        near(f"{stack.stored.name} experts", out[:, :outputs], expected)
        untouched(f"{stack.stored.name} experts", out, outputs)
        turned = torch.cat([whole, A.float()], dim=1).transpose(1, 2)
        grouped_quantized_backward(dy, stack, offsets.to(device), A.to(device), out=space[:, :width])
        near(f"{stack.stored.name} experts' gradient", space[:, :width], grouped_linear_reference(wide_dy, turned, offsets))
        untouched(f"{stack.stored.name} experts' gradient", space, width)


def check_grouped_fp8(device: str) -> None:
    T, K, E = 4, 2, 3
    ids, order = torch.randint(0, E, (T, K)).int(), torch.randperm(T * K).int()
    for width, gather in ((97, True), (2100, False)):
        dy, scale = rows_of(T if gather else T * K, width, 3, BF16, device), torch.rand(E, width) + 0.1
        found, row_scale = fp8_cast_grad_rows(dy, scale.to(device), ids.to(device), order.to(device), gather=gather)
        rows = dy.cpu().float()[(order // K).long()] if gather else dy.cpu().float()
        expected = rows * scale[ids.view(-1)[order.long()].long()]
        near("experts' gradient in FP8", fp8_dequantize(found.cpu(), row_scale.cpu()), expected, E4M3)
