"""AdamW over any number of tensors in three launches, with gradient clipping inside.

    norm   = sqrt(sum of g² over all tensors)        clip = min(1, clip_norm / (norm + 1e-6))     as clip_grad_norm_
    m      = m + (1 - beta1) * (clip * g - m)        v = beta2 * v + (1 - beta2) * (clip * g)²    t = t + 1
    p      = p * (1 - lr * weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The launches: sums of squares of gradient blocks; one program that sums them, advances the step counters and computes each
tensor's factors; the update. There are three because each needs all of the one before, and a grid-wide barrier would need all
programs resident. Each combination of dtypes takes its own launches (adapters have one). Addresses come from a table on the
device, built once: a step neither copies from the host nor synchronizes with it.

A non-finite norm changes no tensor and no step counter, decided on the device, and increments `skipped`. With a watched loss,
so does a non-finite loss or a norm of zero, and so does every step after the first refused one: the host, which reads the loss
a step later, finds the weights of the last sound step. Sums have a fixed order, so results are bit-identical. Everything is
computed in fp32 (the bias corrections in fp64) and rounded once. Moments may be in pinned host memory (host_memory.py): the
update reads and writes them over the link, 8 bytes a parameter each way; adamw8bit.py makes it 2.
Bound by memory: 4 bytes a parameter for the norm, 28 for the update, with fp32 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pronghorn.kernels.runtime.dispatch import jit, tl, use_triton

# Elements a program of the update, warps. 4 elements a thread: one 16-byte load of each of four streams, 48 registers
# at most, so five programs fit a multiprocessor, with 80 KB in flight. 8 elements take 86 registers (two programs), 16
# take 153 (one). `python -m benchmarks.ops --sweep adamw`.
CONFIGS = [(1024, 8), (512, 4), (1024, 4), (2048, 8), (2048, 4)]
CONFIG = CONFIGS[0]
# The sums of squares read one stream, after three dependent loads: larger blocks, 32 KB a program.
SUMS_BLOCK, SUMS_WARPS = 8192, 8
# The single program reads 16 partial sums a thread at once: 5,000 (42 M parameters) in one iteration, not five.
PARTIALS_AT_ONCE, TENSORS_AT_ONCE, FACTORS_WARPS = 8192, 1024, 16

# Columns of the table: five addresses, the number of elements, which learning rate.
FIELDS = tl.constexpr(7)
AT_PARAM, AT_GRAD, AT_EXP_AVG, AT_EXP_AVG_SQ, AT_STEP, AT_NUMEL, AT_LR = (tl.constexpr(column) for column in range(7))
AT_NORM, AT_CLIP, AT_FINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # in the result
CLIP_EPS = 1e-6  # as in clip_grad_norm_
_CLIP_EPS = tl.constexpr(CLIP_EPS)


class Part(NamedTuple):
    """The tensors that share their dtypes: one launch."""

    blocks: torch.Tensor  # [programs of the update, 2] int32: tensor, block of that tensor
    sums_blocks: torch.Tensor  # the same for the sums of squares
    first_sum: int
    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    block: int  # elements a program of the update
    warps: int
    aligned: bool  # every address is a multiple of 16 bytes

    def options(self) -> dict[str, Any]:
        """What every update kernel is compiled for."""
        return {
            "PARAM": triton_type(self.param),
            "GRAD": triton_type(self.grad),
            "ALIGNED": self.aligned,
            "BLOCK": self.block,
            "num_warps": self.warps,
        }


class AdamWTensors:
    """The tensors of a step and their addresses, which must not change."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
        *,
        weight_decays: Sequence[float],
        lr_groups: Sequence[int] | None = None,
        host_shift: int | None = None,
    ) -> None:
        """steps: 0-dim fp32, one per tensor, incremented by the update. lr_groups: which entry of `lr` a tensor takes.
        host_shift: moments may be in pinned host memory; its device address is so many bytes higher."""
        self.params, self.grads, self.steps = list(params), list(grads), list(steps)
        self.exp_avgs, self.exp_avg_sqs = list(exp_avgs), list(exp_avg_sqs)
        self.weight_decays = list(weight_decays)
        self.lr_groups = [0] * len(self.params) if lr_groups is None else list(lr_groups)
        self.host_shift = host_shift
        self._check()
        self.device = self.params[0].device
        doubles = any(tensor.dtype == torch.float64 for tensor in (*self.params, *self.grads, *self.exp_avgs))
        self.on_device = use_triton(self.params[0]) and not doubles
        self.skipped = torch.zeros((), dtype=torch.int32, device=self.device)
        if self.on_device:
            self._build_tables()

    def _check(self) -> None:
        columns = (self.params, self.grads, self.exp_avgs, self.exp_avg_sqs)
        others = (self.steps, self.weight_decays, self.lr_groups)
        if not self.params or any(len(column) != len(self.params) for column in (*columns, *others)):
            raise ValueError("AdamW needs at least one parameter, and one tensor of each kind per parameter")
        device = self.params[0].device
        if any(step.dtype != torch.float32 or step.device != device for step in self.steps):
            raise ValueError("step counters must be fp32 and on the parameters' device")
        for param, grad, m, v in zip(*columns, strict=True):
            for tensor in (param, grad, m, v):
                on_host = self.host_shift is not None and tensor.device.type == "cpu" and (tensor is m or tensor is v)
                if tensor.shape != param.shape or not (on_host or tensor.device == device) or not tensor.is_contiguous():
                    raise ValueError(f"a tensor of shape {tuple(tensor.shape)} for a parameter of shape "
                                     f"{tuple(param.shape)}: shapes and devices must match, and all must be "
                                     "contiguous")  # fmt: skip

    def read_moments(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """In fp32 (fp64 for fp64), beside the parameter."""
        return _wide(self.exp_avgs[i].to(self.device)), _wide(self.exp_avg_sqs[i].to(self.device))

    def write_moments(self, i: int, m: torch.Tensor, v: torch.Tensor) -> None:
        self.exp_avgs[i].copy_(m)
        self.exp_avg_sqs[i].copy_(v)

    def config(self, moment: torch.dtype) -> tuple[int, int]:
        """Elements a program of the update, and its warps."""
        return CONFIG

    def launch_update(self, part: Part, betas: tuple[float, float], eps: float) -> None:
        _update_kernel[(len(part.blocks),)](
            self.table, self.factors, self.result, part.blocks, 1 - betas[0], betas[1], 1 - betas[1], eps,
            MOMENT=triton_type(part.moment), **part.options(),
        )  # fmt: skip

    def _build_tables(self) -> None:
        rows = []
        for i, param in enumerate(self.params):
            tensors = (param, self.grads[i], self.exp_avgs[i], self.exp_avg_sqs[i], self.steps[i])
            rows.append([*map(self._address, tensors), param.numel(), self.lr_groups[i]])
        self.table = torch.tensor(rows, dtype=torch.int64, device=self.device)
        self.decays = torch.tensor(self.weight_decays, dtype=torch.float32, device=self.device)
        self.factors = torch.empty((len(rows), 3), dtype=torch.float32, device=self.device)
        self.result = torch.zeros(3, dtype=torch.float32, device=self.device)
        kinds: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[int]] = {}
        for i, param in enumerate(self.params):
            kinds.setdefault((param.dtype, self.grads[i].dtype, self.exp_avgs[i].dtype), []).append(i)
        self.parts: list[Part] = []
        programs = 0
        for kind, members in kinds.items():
            aligned = all(address % 16 == 0 for i in members for address in rows[i][:4])
            block, warps = self.config(kind[2])
            blocks, sums_blocks = self._blocks(members, block), self._blocks(members, SUMS_BLOCK)
            self.parts.append(Part(blocks, sums_blocks, programs, *kind, block, warps, aligned))
            programs += len(sums_blocks)
        self.partials = torch.zeros(max(programs, 1), dtype=torch.float32, device=self.device)

    def _address(self, tensor: torch.Tensor) -> int:
        """As the device sees it."""
        return tensor.data_ptr() + (self.host_shift or 0 if tensor.device != self.device else 0)

    def _blocks(self, members: list[int], size: int) -> torch.Tensor:
        counts = torch.tensor([-(-self.params[i].numel() // size) for i in members])
        tensor = torch.repeat_interleave(torch.tensor(members), counts)
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return torch.stack([tensor, torch.arange(len(tensor)) - first], 1).to(self.device, torch.int32)


def adamw_reference(
    tensors: AdamWTensors,
    lr: Sequence[float],
    betas: tuple[float, float],
    eps: float,
    clip_norm: float | None,
    loss: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plain torch, and what runs without Triton. Returns the norm before clipping; computes in fp32, or fp64 for fp64."""
    norms = [torch.linalg.vector_norm(_wide(grad)) for grad in tensors.grads]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    refused = loss is not None and (not bool(torch.isfinite(loss)) or float(norm) == 0 or int(tensors.skipped) > 0)
    if refused or not bool(torch.isfinite(norm)):
        tensors.skipped += 1
        return norm
    clip = 1.0 if clip_norm is None else (clip_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    for i, param in enumerate(tensors.params):
        step = tensors.steps[i].add_(1.0)
        rate, t = lr[tensors.lr_groups[i]], float(step)
        grad = _wide(tensors.grads[i]) * clip
        m, v = tensors.read_moments(i)
        m = torch.lerp(m, grad, 1 - betas[0])
        v = v * betas[1] + grad.square() * (1 - betas[1])
        denominator = v.sqrt() / math.sqrt(1 - betas[1] ** t) + eps
        value = _wide(param) * (1 - rate * tensors.weight_decays[i]) - rate / (1 - betas[0] ** t) * (m / denominator)
        param.copy_(value)
        tensors.write_moments(i, m, v)
    return norm


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


# ---- Triton -------------------------------------------------------------------------------------------------


@jit
def table_address(row, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(row + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@jit
def load_fp32(pointers, inside, MASKED: tl.constexpr):
    """Whole blocks load without a mask: a mask of unknown length would split 16-byte loads into single elements."""
    if MASKED:
        value = tl.load(pointers, mask=inside, other=0.0)
    else:
        value = tl.load(pointers)
    return value.to(tl.float32)


@jit
def store_rounded(pointers, value, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=inside)
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty))


@jit
def _square_sums_kernel(table, blocks, partials, GRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = table + tl.load(blocks + 2 * program) * FIELDS
    first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    left = tl.load(row + AT_NUMEL) - first
    pointers = table_address(row, AT_GRAD, GRAD, ALIGNED) + first + lanes
    if left >= BLOCK:
        grad = load_fp32(pointers, lanes < left, False)
        tl.store(partials + program, tl.sum(grad * grad, 0))
    else:
        grad = load_fp32(pointers, lanes < left, True)
        tl.store(partials + program, tl.sum(grad * grad, 0))


@jit
def _factors_kernel(
    partials, partial_count, table, decays, lr, count, factors, result, skipped, clip_norm, loss, WATCHED: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, PARTIALS: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """One program: the norm, the clip factor, the steps, and (step size, 1 / sqrt(correction), decay) of each tensor.

    In fp64: 1 - 0.999 loses its last four digits in fp32. It is a few hundred numbers.
    """
    sums = tl.zeros([PARTIALS], dtype=tl.float32)
    for start in range(0, partial_count, PARTIALS):
        index = start + tl.arange(0, PARTIALS)
        sums += tl.load(partials + index, mask=index < partial_count, other=0.0)
    norm = tl.sqrt_rn(tl.sum(sums, 0))
    finite = norm < float("inf")  # false for NaN, too
    if WATCHED:
        finite &= (norm > 0) & (tl.abs(tl.load(loss)) < float("inf")) & (tl.load(skipped) == 0)
    tl.store(result + AT_NORM, norm)
    tl.store(result + AT_CLIP, tl.where(clip_norm > 0, tl.minimum(clip_norm / (norm + _CLIP_EPS), 1.0), 1.0))
    tl.store(result + AT_FINITE, tl.where(finite, 1.0, 0.0))
    tl.store(skipped, tl.load(skipped) + tl.where(finite, 0, 1))
    for start in range(0, count, TENSORS):
        tensor = start + tl.arange(0, TENSORS)
        inside = tensor < count
        row = table + tensor.to(tl.int64) * FIELDS
        counters = tl.load(row + AT_STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(counters, mask=inside, other=0.0) + 1.0
        tl.store(counters, tl.where(finite, step, step - 1.0), mask=inside)
        t = step.to(tl.float64)
        rate = tl.load(lr + tl.load(row + AT_LR, mask=inside, other=0), mask=inside, other=0.0).to(tl.float64)
        weight_decay = tl.load(decays + tensor, mask=inside, other=0.0).to(tl.float64)
        step_size = rate / (1.0 - tl.exp(t * LOG_BETA1))
        spread = 1.0 / tl.sqrt(1.0 - tl.exp(t * LOG_BETA2))
        tl.store(factors + 3 * tensor, step_size.to(tl.float32), mask=inside)
        tl.store(factors + 3 * tensor + 1, spread.to(tl.float32), mask=inside)
        tl.store(factors + 3 * tensor + 2, (1.0 - rate * weight_decay).to(tl.float32), mask=inside)


@jit
def moved(p, m, v, grad, factors, one_minus_beta1, beta2, one_minus_beta2, eps):
    """Parameter and moments after the step, in fp32."""
    m += (grad - m) * one_minus_beta1
    v = v * beta2 + grad * grad * one_minus_beta2
    denominator = tl.sqrt_rn(v) * tl.load(factors + 1) + eps
    p = p * tl.load(factors + 2) - tl.load(factors) * tl.div_rn(m, denominator)
    return p, m, v


@jit
def _update_block(
    row, factors, clip, first, left, one_minus_beta1, beta2, one_minus_beta2, eps, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MOMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    inside = lanes < left
    params = table_address(row, AT_PARAM, PARAM, ALIGNED) + first + lanes
    exp_avgs = table_address(row, AT_EXP_AVG, MOMENT, ALIGNED) + first + lanes
    exp_avg_sqs = table_address(row, AT_EXP_AVG_SQ, MOMENT, ALIGNED) + first + lanes
    grad = load_fp32(table_address(row, AT_GRAD, GRAD, ALIGNED) + first + lanes, inside, MASKED) * clip
    p = load_fp32(params, inside, MASKED)
    m = load_fp32(exp_avgs, inside, MASKED)
    v = load_fp32(exp_avg_sqs, inside, MASKED)
    p, m, v = moved(p, m, v, grad, factors, one_minus_beta1, beta2, one_minus_beta2, eps)
    store_rounded(params, p, inside, MASKED)
    store_rounded(exp_avgs, m, inside, MASKED)
    store_rounded(exp_avg_sqs, v, inside, MASKED)


@jit
def _update_kernel(
    table, factors, result, blocks, one_minus_beta1, beta2, one_minus_beta2, eps, PARAM: tl.constexpr, GRAD: tl.constexpr,
    MOMENT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(result + AT_FINITE) != 0.0:
        program = tl.program_id(0)
        tensor = tl.load(blocks + 2 * program)
        row = table + tensor * FIELDS
        first = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK
        left = tl.load(row + AT_NUMEL) - first
        clip = tl.load(result + AT_CLIP)
        if left >= BLOCK:
            _update_block(row, factors + 3 * tensor, clip, first, left,
                          one_minus_beta1, beta2, one_minus_beta2, eps,
                          PARAM, GRAD, MOMENT, ALIGNED, BLOCK, False)  # fmt: skip
        else:
            _update_block(row, factors + 3 * tensor, clip, first, left,
                          one_minus_beta1, beta2, one_minus_beta2, eps,
                          PARAM, GRAD, MOMENT, ALIGNED, BLOCK, True)  # fmt: skip


def triton_type(dtype: torch.dtype) -> Any:
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return getattr(tl, names[dtype])


def _step_triton(
    tensors: AdamWTensors,
    lr: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    clip_norm: float | None,
    loss: torch.Tensor | None,
) -> torch.Tensor:
    table, result = tensors.table, tensors.result
    for part in tensors.parts:
        if len(part.blocks):
            _square_sums_kernel[(len(part.sums_blocks),)](
                table, part.sums_blocks, tensors.partials[part.first_sum :],
                GRAD=triton_type(part.grad), ALIGNED=part.aligned, BLOCK=SUMS_BLOCK, num_warps=SUMS_WARPS,
            )  # fmt: skip
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in betas]
    _factors_kernel[(1,)](
        tensors.partials, len(tensors.partials), table, tensors.decays, lr, len(tensors.params), tensors.factors, result,
        tensors.skipped, clip_norm or 0.0, loss, WATCHED=loss is not None, LOG_BETA1=logs[0], LOG_BETA2=logs[1],
        PARTIALS=PARTIALS_AT_ONCE, TENSORS=TENSORS_AT_ONCE, num_warps=FACTORS_WARPS,
    )  # fmt: skip
    for part in tensors.parts:
        if len(part.blocks):
            tensors.launch_update(part, betas, eps)
    return result[0]


@torch.no_grad()
def adamw_step(
    tensors: AdamWTensors,
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    clip_norm: float | None = None,
    loss: torch.Tensor | None = None,
) -> torch.Tensor:
    """One update in place. Returns the gradient's norm before clipping, 0-dim on the device, until the next step.

    lr: a number, or a tensor on the device with one entry for each of the tensors' lr_groups, so that a captured CUDA graph
    follows a schedule; a rate ratio (LoRA+) is one entry more. clip_norm None or 0: no clipping. loss: 0-dim, watched.
    """
    if clip_norm == 0:
        clip_norm = None
    if not tensors.on_device:
        rates = lr.reshape(-1).tolist() if isinstance(lr, torch.Tensor) else [lr] * (1 + max(tensors.lr_groups))
        return adamw_reference(tensors, rates, betas, eps, clip_norm, loss)
    if not isinstance(lr, torch.Tensor):
        lr = torch.full((1 + max(tensors.lr_groups),), lr, dtype=torch.float64, device=tensors.device)
    return _step_triton(tensors, lr.reshape(-1), betas, eps, clip_norm, loss)
