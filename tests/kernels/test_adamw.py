"""AdamW: twenty steps against torch.optim.AdamW in float64, with torch's own fp32 result as the yardstick."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.optim.adamw import CONFIG, AdamWTensors, adamw_step
from pronghorn.train.step.fused_adamw import FusedAdamW
from tables import table

pytestmark = pytest.mark.usefixtures("casts_as_a_gpu")
CUDA = torch.cuda.is_available()
# One element, vectors, matrices, sizes around one block (1,024; 8,192 for the norm) and over several, odd rows.
SHAPES = [(1,), (3, 5), (65, 129), (1025,), (1023,), (64, 16), (4, 2, 9)]
SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8}


def parameters(device: str, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """As in a LoRA+ run: matrices decay, and a third group learns sixteen times faster."""
    return [
        {"params": [p for p in params[:-2] if p.ndim >= 2], "lr": 2e-3, "weight_decay": 0.1},
        {"params": [p for p in params[:-2] if p.ndim < 2], "lr": 2e-3, "weight_decay": 0.0},
        {"params": params[-2:], "lr": 3.2e-2, "weight_decay": 0.1},
    ]


def gradients(step: int, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Small ones at first, then large enough to be clipped."""
    generator = torch.Generator().manual_seed(step)
    size = 0.001 if step < 5 else 1.0
    return [(torch.randn(p.shape, generator=generator) * size).to(p.dtype) for p in params]


def run_torch(start: list[torch.Tensor], dtype: torch.dtype, steps: int, clip: float | None) -> list[torch.nn.Parameter]:
    """torch's AdamW on the CPU, its gradients clipped by torch as well."""
    params = [torch.nn.Parameter(p.detach().cpu().to(dtype, copy=True)) for p in start]
    optimizer = torch.optim.AdamW(groups(params), foreach=False, fused=False, **SETTINGS)
    like = [torch.nn.Parameter(p.detach().cpu()) for p in start]
    for step in range(steps):
        for param, grad in zip(params, gradients(step, like), strict=True):
            param.grad = grad.to(dtype)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip, foreach=False)
        optimizer.step()
    return params


def run_ours(params: list[torch.nn.Parameter], steps: int, clip: float | None, **options: Any) -> FusedAdamW:
    optimizer = FusedAdamW(groups(params), clip_norm=clip, **SETTINGS, **options)
    for step in range(steps):
        for param, grad in zip(params, gradients(step, params), strict=True):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(grad)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("steps", "clip"), [(6, None), (20, 1.0)])
def test_steps_are_as_good_as_torch(device: str, judge: Judge, steps: int, clip: float | None) -> None:
    params = parameters(device)
    start = [p.detach().clone() for p in params]
    run_ours(params, steps, clip)
    truth, plain = run_torch(start, torch.float64, steps, clip), run_torch(start, torch.float32, steps, clip)
    for got, reference, true, before in zip(params, plain, truth, start, strict=True):
        judge(got.detach(), reference.detach(), true.detach(), f"{tuple(got.shape)}")
        assert (got.detach() != before).all(), "every element moved"


def test_bf16_parameters_follow_torch(device: str, judge: Judge) -> None:
    """torch keeps bf16 moments for bf16 parameters and rounds in between; one rounding at the end is no worse."""
    params = parameters(device, torch.bfloat16)
    start = [p.detach().clone() for p in params]
    run_ours(params, 6, 1.0)
    truth, plain = run_torch(start, torch.float64, 6, 1.0), run_torch(start, torch.bfloat16, 6, 1.0)
    for got, reference, true in zip(params, plain, truth, strict=True):
        judge(got.detach(), reference.detach(), true.detach(), f"{tuple(got.shape)}")


def test_dtypes_may_be_mixed(device: str, judge: Judge) -> None:
    """Parameters of two dtypes and bf16 gradients of fp32 parameters share one norm."""
    params = [*parameters(device, torch.float32, [(9, 31), (5,)]), *parameters(device, torch.bfloat16, [(8, 16)])]
    grads = [torch.randn_like(p).to(torch.bfloat16) for p in params]
    results = []
    for kind in (torch.float64, None, "ours"):  # None: plain torch in the tensors' own dtypes, on the CPU
        where = device if kind == "ours" else "cpu"
        dtypes = [kind if isinstance(kind, torch.dtype) else p.dtype for p in params]
        moved = [p.detach().to(where, dtype, copy=True) for p, dtype in zip(params, dtypes, strict=True)]
        given = [g.to(where, dtype if kind == torch.float64 else g.dtype) for g, dtype in zip(grads, dtypes, strict=True)]
        zeros = [[torch.zeros_like(p) for p in moved] for _ in range(2)]
        tensors = AdamWTensors(moved, given, *zeros, [torch.zeros((), device=where) for _ in params], weight_decays=[0.0] * 3)
        tensors.on_device = kind == "ours" and tensors.on_device
        norm = adamw_step(tensors, lr=0.01, clip_norm=1.0)
        results.append([norm.clone(), *moved, *zeros[0], *zeros[1]])
    truth, plain, ours = results
    for got, reference, true in zip(ours, plain, truth, strict=True):
        judge(got, reference, true, f"{got.dtype} {tuple(got.shape)}")


@table("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(device: str, bad: float) -> None:
    params = parameters(device)
    optimizer = run_ours(params, 2, 1.0)
    state = [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq", "step")]
    before = [tensor.detach().clone() for tensor in (*params, *state)]
    params[2].grad[3, 100] = bad
    optimizer.step()
    assert optimizer.skipped == 1
    assert not optimizer.grad_norm.isfinite()
    for tensor, old in zip((*params, *state), before, strict=True):
        assert torch.equal(tensor.detach(), old)
    params[2].grad[3, 100] = 0.5
    optimizer.step()
    assert optimizer.skipped == 1
    assert all((optimizer.state[p]["step"] == 3).all() for p in params)
    assert not torch.equal(params[0].detach(), before[0])


def test_results_repeat_bit_for_bit(device: str) -> None:
    params = parameters(device)
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    first, second = run_ours(params, 3, 0.5), run_ours(again, 3, 0.5)
    assert first.grad_norm is not None
    assert second.grad_norm is not None
    assert torch.equal(first.grad_norm, second.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


def test_unaligned_tensors(device: str) -> None:
    """Views that start off a 16-byte boundary take element loads and give the same result."""
    flat = torch.randn(4, 1 + CONFIG[0] * 2 + 5, device=device)
    results = []
    for offset in (0, 1):
        views = [torch.zeros(flat.shape[1], device=device)[offset:][: CONFIG[0] * 2 + 3] for _ in range(4)]
        for view, row in zip(views, flat, strict=True):
            view.copy_(row[: len(view)].abs())
        steps = [torch.zeros((), device=device)]
        adamw_step(AdamWTensors(*([view] for view in views), steps, weight_decays=[0.1]), lr=0.1, clip_norm=1.0)
        results.append(views)
    for aligned, off in zip(*results, strict=True):
        torch.testing.assert_close(aligned, off, rtol=1e-6, atol=1e-7)


def test_state_dicts_go_both_ways(device: str) -> None:
    """Five steps of torch, then five of ours on its state and five of torch on the state ours handed back."""
    start = [p.detach().clone() for p in parameters(device)]
    params = [torch.nn.Parameter(p.to(device)) for p in run_torch(start, torch.float32, 5, None)]
    theirs = [torch.nn.Parameter(p.clone()) for p in start]
    reference = torch.optim.AdamW(groups(theirs), **SETTINGS)
    for step in range(5):
        for param, grad in zip(theirs, gradients(step, theirs), strict=True):
            param.grad = grad.to(device)
        reference.step()
    ours = FusedAdamW(groups(params), **SETTINGS)
    ours.load_state_dict(deepcopy(reference.state_dict()))  # torch would share the tensors
    back = torch.optim.AdamW(groups(theirs), **SETTINGS)
    back.load_state_dict(deepcopy(ours.state_dict()))
    for step in range(5, 10):
        for optimizer, members in ((ours, params), (back, theirs)):
            for param, grad in zip(members, gradients(step, members), strict=True):
                param.grad = grad.to(device)
            optimizer.step()
    for param, their in zip(params, theirs, strict=True):
        torch.testing.assert_close(param, their, rtol=1e-5, atol=1e-6)
        assert ours.state[param]["step"] == 10
        assert ours.state[param].keys() == reference.state[their].keys()


def test_parameters_without_a_gradient_are_left_alone(device: str) -> None:
    params = parameters(device, shapes=[(3, 4), (5,)])
    optimizer = FusedAdamW(params)
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0].detach(), before)
    assert params[0] not in optimizer.state or not optimizer.state[params[0]]
    assert optimizer.state[params[1]]["step"] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="captures a CUDA graph")
def test_a_captured_step_follows_schedule_and_gradients() -> None:
    params = parameters("cuda")
    again = [torch.nn.Parameter(p.detach().clone()) for p in params]
    eager, graphed = run_ours(again, 1, 1.0), run_ours(params, 1, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for step in range(1, 5):
        for optimizer, members in ((eager, again), (graphed, params)):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / step
            for param, grad in zip(members, gradients(step, members), strict=True):
                param.grad.copy_(grad)
        eager.step()
        graphed.refresh_lr()
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


@table("broken", ["loss", "norm", "zero"])
def test_a_watched_loss_refuses_the_step_and_all_after_it(device: str, broken: str) -> None:
    params = parameters(device, shapes=[(3, 4), (5,)])
    optimizer = FusedAdamW(params, lr=0.1, weight_decay=0.1)
    optimizer.watched_loss = loss = torch.ones((), device=device)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    values = {"loss": (float("nan"), 1.0), "norm": (1.0, float("inf")), "zero": (1.0, 0.0)}[broken]
    for loss_value, grad in (values, (1.0, 1.0)):  # the second is sound by itself
        loss.fill_(loss_value)
        for param in params:
            param.grad.fill_(grad)
        optimizer.step()
    assert all(torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True))
    assert optimizer.skipped == 2
    assert all(optimizer.state[p]["step"] == 1 for p in params)
    optimizer.skipped.zero_()
    optimizer.step()
    assert not torch.equal(params[0].detach(), before[0])
