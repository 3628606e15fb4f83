"""AdamW with moments in 8 bits: the levels are bitsandbytes', every byte is the nearest one, and the step is the true one for
the moments as they were stored, in float64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.optim.adamw import adamw_step
from pronghorn.kernels.optim.adamw8bit import (
    BLOCK,
    CONFIG,
    SMALL,
    AdamW8bitTensors,
    blocks_of,
    dequantize_moment,
    quantize_moment,
)
from pronghorn.kernels.quant.nf4 import dynamic_code
from pronghorn.train.step.fused_adamw import FusedAdamW
from tables import table

CUDA = torch.cuda.is_available()
# Part of one block, one and a bit more, a program's elements and around them, several programs, a matrix with odd rows.
SHAPES = [(1,), (255,), (256,), (257,), (CONFIG[0],), (CONFIG[0] - 1,), (2 * CONFIG[0] + 300,), (67, 129)]


def spread(shape: Any, seed: int = 0, decades: float = 9.0) -> torch.Tensor:
    """Both signs, magnitudes over so many decades."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (-decades * torch.rand(shape, generator=generator))
    return sizes * torch.randn(shape, generator=generator).sign()


def tensors_of(
    device: str, shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, grad_dtype: torch.dtype | None = None, **options: Any
) -> AdamW8bitTensors:
    """With moments as after some steps; the same for every dtype and device."""
    params, grads, absmaxes = [], [], []
    moments: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for i, shape in enumerate(shapes):
        params.append(torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device, dtype))
        grads.append(spread(shape, 10 + i, 3.0).to(device, grad_dtype or dtype))
        stored = [quantize_moment(spread(shape, 20 + i, 3.0) * 0.1, signed=True),
                  quantize_moment(spread(shape, 30 + i, 5.0).abs() * 0.01, signed=False)]  # fmt: skip
        for column, (codes, _) in zip(moments, stored, strict=True):
            column.append(codes.to(device))
        absmaxes.append((stored[0][1].to(device), stored[1][1].to(device)))
    steps = [torch.full((), 3.0, device=device) for _ in shapes]
    settings = {"weight_decays": [0.1] * len(params)} | options
    return AdamW8bitTensors(params, grads, *moments, steps, absmaxes=absmaxes, **settings)


def values(tensors: AdamW8bitTensors) -> list[torch.Tensor]:
    """All that a step may change."""
    absmaxes = [one for absmax in tensors.absmaxes for one in absmax or ()]
    return [*tensors.params, *tensors.exp_avgs, *tensors.exp_avg_sqs, *absmaxes, *tensors.steps]


def agree(codes: torch.Tensor, absmax: torch.Tensor, moment: torch.Tensor, *, signed: bool) -> None:
    """The bytes are the nearest levels, but for numbers that lie half way between two within rounding."""
    expected, largest = quantize_moment(moment.double().cpu(), signed=signed)
    torch.testing.assert_close(absmax.cpu(), largest, rtol=1e-6, atol=0)
    x = moment.double().cpu().flatten() / largest.double().repeat_interleave(BLOCK)[: moment.numel()].clamp_min(1e-37)
    got, wanted = codes.cpu().flatten().int(), expected.flatten().int()
    assert int((got - wanted).abs().max()) <= 1
    levels = dynamic_code(signed=signed).double()
    lower = torch.minimum(got, wanted).clamp(max=254)
    middle = (levels[lower] + levels[lower + 1]) / 2
    off = (got != wanted) & ((x - middle).abs() > 3e-6 * middle.abs())
    assert not off.any(), f"{int(off.sum())} of {len(x)}, such as {x[off][:3].tolist()}: {got[off][:3]} for {wanted[off][:3]}"


# The format -----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_those_of_bitsandbytes(signed: bool) -> None:
    from bitsandbytes import functional

    assert torch.equal(dynamic_code(signed=signed), functional.create_dynamic_map(signed))
    codes, absmax = quantize_moment(spread(1000) if signed else spread(1000).abs(), signed=signed)
    theirs = functional.dequantize_blockwise(codes, absmax=absmax, code=dynamic_code(signed=signed), blocksize=BLOCK)
    assert torch.equal(theirs, dequantize_moment(codes, absmax, signed=signed))


@pytest.mark.parametrize("signed", [True, False])
def test_every_byte_is_the_nearest_level(signed: bool) -> None:
    x = spread((7, 100)) if signed else spread((7, 100)).abs()
    codes, absmax = quantize_moment(x, signed=signed)
    assert codes.shape == x.shape
    assert absmax.shape == (3,)
    scale = absmax.double().repeat_interleave(BLOCK)[:700].view(7, 100)
    distances = (x.double() / scale).unsqueeze(-1) - dynamic_code(signed=signed).double()
    best, chosen = distances.abs().amin(-1), distances.abs().gather(-1, codes.long().unsqueeze(-1)).squeeze(-1)
    assert (chosen <= best + 1e-7 * x.abs() / scale).all()
    back = dequantize_moment(codes, absmax, signed=signed)
    large = x.abs() > 1e-4 * scale
    # The widest gap in the top three decades: 8 or 16 levels over a decade's 90 %, at its lower end.
    assert float(((back - x).abs() / x.abs())[large].max()) < (0.45 / 8 / 0.1 if signed else 0.45 / 16 / 0.1)


# The step -------------------------------------------------------------------------------------------------------------------


@table("clip", [None, 0.5])
def test_the_step_is_the_true_one_for_the_stored_moments(device: str, judge: Judge, clip: float | None) -> None:
    settings: dict[str, Any] = {"lr": 1e-2, "clip_norm": clip, "eps": 1e-6}
    ours, plain = tensors_of(device), tensors_of("cpu")
    truth = tensors_of("cpu", dtype=torch.float64)
    plain.on_device = False
    before = [p.clone() for p in ours.params]
    norms = [adamw_step(tensors, **settings) for tensors in (ours, plain, truth)]
    judge(norms[0], norms[1], norms[2].double(), "norm")
    for i, shape in enumerate(SHAPES):
        judge(ours.params[i], plain.params[i], truth.params[i], f"{shape}")
        assert (ours.params[i] != before[i]).all()
        assert ours.steps[i] == 4


def test_bytes_are_the_nearest_to_the_true_moments(device: str) -> None:
    """From zero and with betas of 0 the moments are the gradient and its square: every size there is."""
    shapes = [(3000,), (CONFIG[0] * 4 + 77,)]
    tensors = tensors_of(device, shapes)
    for i, shape in enumerate(shapes):
        tensors.grads[i].copy_(spread(shape, 50 + i))
        for absmax in tensors.absmaxes[i] or ():
            absmax.zero_()  # m + (g - m) would be g only within m's rounding
    adamw_step(tensors, lr=0.0, betas=(0.0, 0.0))
    for i, grad in enumerate(tensors.grads):
        absmax = tensors.absmaxes[i]
        agree(tensors.exp_avgs[i], absmax[0], grad, signed=True)
        agree(tensors.exp_avg_sqs[i], absmax[1], grad * grad, signed=False)


def test_every_byte_is_read_as_its_level(device: str, judge: Judge) -> None:
    """Without a gradient moments halve: absmax follows, the bytes stay. All 256 of each kind, some not filling a block."""
    shapes = [(256,), (256,), (CONFIG[0] + 256,)]
    results = []
    for dtype in (torch.float64, torch.float32, None):
        tensors = tensors_of(device if dtype is None else "cpu", shapes, dtype or torch.float32)
        for codes, squares in zip(tensors.exp_avgs, tensors.exp_avg_sqs, strict=True):
            codes.copy_((torch.arange(codes.numel()) % 256).view(codes.shape))
            squares.copy_(codes.flip(0))
        for absmax in tensors.absmaxes:
            absmax[0].fill_(1e-3)
            absmax[1].fill_(1e-6)
        for grad in tensors.grads:
            grad.zero_()
        before = [x.clone() for x in (*tensors.exp_avgs, *tensors.exp_avg_sqs)]
        tensors.on_device = dtype is None and tensors.on_device
        adamw_step(tensors, lr=0.1, betas=(0.5, 0.5), eps=1e-5)
        after = [*tensors.exp_avgs, *tensors.exp_avg_sqs]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        for absmax in tensors.absmaxes:
            torch.testing.assert_close(absmax[0], torch.full_like(absmax[0], 5e-4))
            torch.testing.assert_close(absmax[1], torch.full_like(absmax[1], 5e-7))
        results.append(tensors.params)
    for true, plain, got in zip(*results, strict=True):
        judge(got, plain, true, f"{tuple(got.shape)}")


def test_parameters_and_gradients_in_bf16(device: str) -> None:
    ours, plain = (tensors_of(where, dtype=torch.bfloat16) for where in (device, "cpu"))
    plain.on_device = False
    for tensors in (ours, plain):
        adamw_step(tensors, lr=1e-2, clip_norm=1.0)
    for got, expected in zip(values(ours), values(plain), strict=True):
        if got.dtype == torch.bfloat16:  # one step of rounding, since the interpreter cuts bits off
            torch.testing.assert_close(got.cpu(), expected, rtol=2**-7, atol=1e-6)
        elif got.dtype == torch.float32:
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=0)
        else:
            assert int((got.cpu().int() - expected.int()).abs().max()) <= 1


def test_unaligned_tensors(device: str) -> None:
    """Views that start off a 16-byte boundary give the same result."""
    shape, results = (CONFIG[0] * 2 + 3,), []
    for offset in (0, 1):
        tensors = tensors_of(device, [shape])
        for column in (tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs):
            buffer = torch.zeros(shape[0] + 1, dtype=column[0].dtype, device=device)
            buffer[offset:][: shape[0]] = column[0]
            column[0] = buffer[offset:][: shape[0]]
        again = AdamW8bitTensors(tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs, tensors.steps,
                                 absmaxes=tensors.absmaxes, weight_decays=[0.1])  # fmt: skip
        adamw_step(again, lr=1e-2)
        results.append(values(again))
    assert all(torch.equal(aligned, off) for aligned, off in zip(*results, strict=True))


def test_gradients_of_zero_and_of_next_to_nothing(device: str) -> None:
    """Blocks whose absmax is 0, or has no inverse in fp32, hold zeros, never NaN."""
    tensors = tensors_of(device, [(BLOCK * 3,)])
    (param,), (grad,), (absmax,) = tensors.params, tensors.grads, tensors.absmaxes
    for one in absmax:
        one.zero_()
    grad.zero_()
    grad[BLOCK : 2 * BLOCK] = 1e-19
    grad[2 * BLOCK :] = 1e-30
    for _ in range(3):
        adamw_step(tensors, lr=1e-2)
    assert all(torch.isfinite(x.float()).all() for x in values(tensors))
    assert (absmax[0][1] > 0).all()
    assert (tensors.exp_avgs[0][:BLOCK] == 127).all()
    assert (tensors.exp_avg_sqs[0][BLOCK:] == 0).all()
    assert torch.isfinite(param).all()


@table("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(device: str, bad: float) -> None:
    tensors = tensors_of(device)
    before = [x.clone() for x in values(tensors)]
    kept = float(tensors.grads[6][300])
    tensors.grads[6][300] = bad
    adamw_step(tensors, lr=1e-2, clip_norm=1.0)
    assert tensors.skipped == 1
    assert all(torch.equal(x, old) for x, old in zip(values(tensors), before, strict=True))
    tensors.grads[6][300] = kept
    adamw_step(tensors, lr=1e-2, clip_norm=1.0)
    assert tensors.skipped == 1
    changed = [not torch.equal(x, old) for x, old in zip(values(tensors), before, strict=True)]
    assert all(changed[: len(SHAPES)])


# The optimizer --------------------------------------------------------------------------------------------------------------


def optimizer_of(device: str, **options: Any) -> tuple[list[torch.nn.Parameter], FusedAdamW]:
    params = [torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device))
              for i, shape in enumerate([(70, 60), (SMALL - 1,), (SMALL,), (5,)])]  # fmt: skip
    return params, FusedAdamW(params, lr=1e-2, weight_decay=0.1, clip_norm=1.0, **options)


def take_steps(params: list[torch.nn.Parameter], optimizer: FusedAdamW, steps: range) -> None:
    for step in steps:
        for i, param in enumerate(params):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(spread(param.shape, 100 * step + i, 2.0))
        optimizer.step()


def test_small_tensors_keep_32_bits(device: str) -> None:
    params, optimizer = optimizer_of(device, eight_bit=True)
    plain, reference = optimizer_of(device)
    for members, one in ((params, optimizer), (plain, reference)):
        take_steps(members, one, range(3))
    kinds = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert kinds == [torch.uint8, torch.float32, torch.uint8, torch.float32]
    for i in (1, 3):
        assert torch.equal(params[i], plain[i])
        assert optimizer.state[params[i]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for i in (0, 2):
        assert not torch.equal(params[i], plain[i])
        assert optimizer.state[params[i]]["exp_avg_absmax"].shape == (blocks_of(params[i].numel()),)


@pytest.mark.parametrize("eight_bit", [False, True], ids=["32 bit", "8 bit"])
def test_paged_moments_are_the_same_ones_elsewhere(device: str, eight_bit: bool) -> None:
    params, paged = optimizer_of(device, eight_bit=eight_bit, paged=True)
    plain, reference = optimizer_of(device, eight_bit=eight_bit)
    for members, one in ((params, paged), (plain, reference)):
        take_steps(members, one, range(4))
    paged.wait_for_paged()
    for param, other in zip(params, plain, strict=True):
        assert torch.equal(param, other)
        state, expected = paged.state[param], reference.state[other]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key].cpu(), expected[key].cpu()) for key in state)
        large = param.numel() >= SMALL
        assert state["exp_avg"].device.type == ("cpu" if large else device)
        assert state["step"].device.type == device
        if large and CUDA and device == "cuda":
            assert state["exp_avg"].is_pinned()
    storages = {state[key].untyped_storage().data_ptr() for state in paged.state.values() for key in ("exp_avg", "exp_avg_sq")}
    assert len(storages) == 2 * len(params), "each has a storage of its own, as files want them"


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="captures a CUDA graph")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_captured_step_follows_schedule_and_gradients(eight_bit: bool, paged: bool) -> None:
    params, graphed = optimizer_of("cuda", eight_bit=eight_bit, paged=paged)
    again, eager = optimizer_of("cuda", eight_bit=eight_bit)
    for members, one in ((params, graphed), (again, eager)):
        take_steps(members, one, range(1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for step in range(1, 5):
        for members, one in ((params, graphed), (again, eager)):
            one.param_groups[0]["lr"] = 0.01 / step
            for i, param in enumerate(members):
                param.grad.copy_(spread(param.shape, 100 * step + i, 2.0))
        eager.step()
        graphed.refresh_lr()
        graph.replay()
    graphed.wait_for_paged()
    for param, other in zip(params, again, strict=True):
        assert torch.equal(param, other)
        assert all(torch.equal(graphed.state[param][key].cpu(), eager.state[other][key].cpu()) for key in eager.state[other])
