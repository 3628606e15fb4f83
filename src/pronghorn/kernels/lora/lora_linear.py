"""Frozen linears that share an input, with their adapters, as one GEMM forward and one backward.

T = packed tokens, D = width of the input, O = rows of all the linears together (q, k, v one under the other), R = ranks of
all their adapters together, padded. One buffer M [O + R, D + R] holds everything:

    M = [ W   sB ]      W  [O, D] the frozen weights            sB [O, R] block diagonal: rows of a linear, columns of
        [ A   0  ]      A  [R, D] the adapters' A, stacked                its adapter, times the adapter's scale

    forward     x_ext  = [x  | x A^T]       y  = x_ext  M[:O]^T   = x W^T + (x A^T)(sB)^T
    backward    dy_ext = [dy | dy sB]       dx = dy_ext M[:, :D]  = dy W  + (dy sB) A
                dA = (dy sB)^T x            dB_i = s_i dy_i^T (x A_i^T), only for the rows of linear i

Where x = norm(h), dA needs no recomputed x: with x = rstd_T h w_D it is ((rstd dy sB)^T h) w, and h is saved.

The caller owns x_ext and dy_ext, row-strided buffers whose last R columns are filled here. At 16k x 28,672 the extra columns
cost 3 % of the frozen GEMM; LoRA as a second GEMM costs 17 % (H200). `nn.Linear.weight.data` can be a view of M
(`weight_view`), so the weights exist once. Gradients are summed in fp32 and have the parameters' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pronghorn.kernels.gemm.mm import mm, mm_accumulate_, mm_add
from pronghorn.kernels.lora.lora_grad_gemm import LoraGradJob, covered, lora_grad_gemm
from pronghorn.kernels.lora.multi_copy import CopyJob, CopyTable
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.runtime.dispatch import is_gpu

AdapterGrads = tuple[Tensor, Tensor]  # dA [r, D], dB [O_i, r]
Part = Literal["dA", "dB"]


def lora_linear_reference(
    x_TD: Tensor, weight_OD: Tensor, A_RD: Tensor, B_OR: Tensor, scale: float, bias_O: Tensor | None = None
) -> Tensor:
    """One linear and its adapter, as PEFT computes them."""
    y_TO = torch.nn.functional.linear(x_TD, weight_OD, bias_O)
    return y_TO + (x_TD @ A_RD.to(x_TD.dtype).T) @ B_OR.to(x_TD.dtype).T * scale


def linear_backward_weight(dy_TO: Tensor, x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """dW_OD of a trained linear, in `dtype`."""
    return mm(dy_TO.T, x_TD, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class NormOf:
    """Marks an x as the norm's input, not its output."""

    rstd_T: Tensor
    weight_D: Tensor
    one_plus: bool

    def columns(self, dtype: torch.dtype) -> Tensor:
        weight = self.weight_D.detach().to(dtype)
        return weight + 1.0 if self.one_plus else weight


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One LoRA adapter of the linear number `linear` of a group."""

    linear: int
    A_RD: Tensor
    B_OR: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.A_RD.shape[0]


def default_padding(adapters: Sequence[Adapter]) -> int:
    """R is a multiple of this. One adapter of rank 16 is faster as 16 columns than as 64 (8B down forward: 2.91 ms); several
    are padded to whole tiles of 64 (8B gate and up: 5.63 ms; H200, 16,384 tokens)."""
    return 16 if len(adapters) <= 1 else 64


class AdapterGroup:
    """Layout of a group's linears and adapters, and the adapters' gradients: independent of the storage format."""

    def _lay_out(self, widths: Sequence[int], D: int, adapters: Sequence[Adapter], padding: int | None) -> None:
        ranks = sum(adapter.rank for adapter in adapters)
        multiple = padding or default_padding(adapters)
        self.adapters = tuple(adapters)
        self.D = D
        self.R = -(-ranks // multiple) * multiple
        self.rows: list[slice] = []  # of each linear in M
        self.columns: list[slice] = []  # of each adapter among the R
        self.O = 0
        for width in widths:
            self.rows.append(slice(self.O, self.O + width))
            self.O += width
        used = 0
        for adapter in adapters:
            self.columns.append(slice(used, used + adapter.rank))
            used += adapter.rank
        self.sums: tuple[Tensor, Tensor] | None = None  # dA and dB^T of a step (`grad_shapes`); None: gradients are returned

    @property
    def used(self) -> int:
        """All ranks, rounded up to 16; later columns are zero."""
        return min(self.R, -(-sum(adapter.rank for adapter in self.adapters) // 16) * 16)

    @property
    def grad_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Sizes of dA [S, D] and dB^T [S, O]. S: the used columns. R may be padded further for speed, which would make these
        sums 1.5 times as large."""
        return (self.used, self.D), (self.used, self.O)

    def load(self, x_ext: Tensor | None = None) -> None:
        """Call before M is used; `x_ext`: by `extend`, `forward` and `forward_add` of these rows alone. A group that owns M has
        nothing to do."""

    def few(self, x_ext: Tensor | None) -> bool:
        """Whether these rows are multiplied without W in M."""
        return False

    def forget(self) -> None:
        """The next `load` makes M anew, where M is shared."""

    def adapter_grads(
        self, dy_TO: Tensor, dyb_TR: Tensor, x_TD: Tensor, xa_TR: Tensor, norm: NormOf | None = None
    ) -> list[AdapterGrads]:
        """dA of all adapters is one GEMM; dB is one GEMM an adapter, over its own columns of dy. With `norm`, x is
        that norm's input; dyb is then scaled in place."""
        if not self.adapters:
            return []
        dtype = self.adapters[0].A_RD.dtype
        if norm is not None:
            dyb_TR.mul_(norm.rstd_T[:, None])
        dA_RD = mm(dyb_TR.T, x_TD, dtype)
        if norm is not None:
            dA_RD.mul_(norm.columns(dtype))
        grads = []
        for adapter, columns in zip(self.adapters, self.columns, strict=True):
            dy_TO_i = dy_TO[:, self.rows[adapter.linear]]
            # As [r, O], not [O, r]: the long side on the tensor cores' 64-row side. The scaling pass transposes it.
            dB_RO = mm(xa_TR[:, columns].T, dy_TO_i, adapter.B_OR.dtype)
            grads.append((dA_RD[columns], torch.mul(dB_RO.T, adapter.scale, out=torch.empty_like(adapter.B_OR))))
        return grads

    def add_adapter_grads(
        self,
        dy_TO: Tensor,
        dyb_TR: Tensor,
        x_TD: Tensor,
        xa_TR: Tensor,
        norm: NormOf | None = None,
        without: Part | None = None,
    ) -> None:
        """The same gradients, accumulated in `sums` by two GEMMs: dB of all adapters together, including blocks of no adapter
        (dy is read once either way). `gather_jobs` applies the norm's weight. dyb is scaled in place where lora_grad_gemm.py
        does not cover them."""
        assert self.sums is not None
        dA_SD, dB_SO = self.sums
        jobs = []
        if without != "dA":
            jobs.append(LoraGradJob(dA_SD, dyb_TR[:, : len(dA_SD)], x_TD, None if norm is None else norm.rstd_T))
        if without != "dB":
            jobs.append(LoraGradJob(dB_SO, xa_TR[:, : len(dB_SO)], dy_TO))
        if all(covered(job) for job in jobs):
            lora_grad_gemm(jobs)
            return
        for job in jobs:
            if job.rstd_T is not None:
                job.thin_TS.mul_(job.rstd_T[:, None])
            mm_accumulate_(job.total_SD, job.thin_TS.T, job.wide_TD)

    def gather_jobs(self, norm: NormOf | None = None) -> list[GatherJob]:
        """Jobs that copy A.grad and B.grad out of `sums`. `norm`: as in `add_adapter_grads`; its rstd is not read."""
        assert self.sums is not None
        dA_SD, dB_SO = self.sums
        jobs = []
        for adapter, columns in zip(self.adapters, self.columns, strict=True):
            assert adapter.A_RD.grad is not None
            assert adapter.B_OR.grad is not None
            weight, one_plus = (norm.weight_D.detach(), norm.one_plus) if norm else (None, False)
            jobs.append(GatherJob(dA_SD[columns], adapter.A_RD.grad, weight=weight, one_plus=one_plus))
            block = dB_SO[columns, self.rows[adapter.linear]]
            jobs.append(GatherJob(block, adapter.B_OR.grad, adapter.scale, transposed=True))
        return jobs


class LoraGroup(AdapterGroup):
    """Linears that share an input, any subset of them with an adapter. Owns M; the caller owns the adapters'
    parameters.

    Without adapters M is the weights alone, R is 0, and x_ext, dy_ext are plain x and dy.
    """

    M: Tensor

    def __init__(self, weights: Sequence[Tensor], adapters: Sequence[Adapter] = (), *, padding: int | None = None) -> None:
        self._lay_out([weight.shape[0] for weight in weights], weights[0].shape[1], adapters, padding)
        self.M = self._joined(weights)
        self._table = CopyTable([job for pair in self._jobs() for job in pair])
        self.refresh()

    def _joined(self, weights: Sequence[Tensor]) -> Tensor:
        if len(weights) == 1 and not self.adapters:
            return weights[0].detach()  # nothing to join: no second copy
        like = weights[0]
        joined = torch.zeros(self.O + self.R, self.D + self.R, dtype=like.dtype, device=like.device)
        for rows, weight in zip(self.rows, weights, strict=True):
            joined[rows, : self.D] = weight.detach()
        return joined

    def _jobs(self) -> list[tuple[CopyJob, CopyJob]]:
        """Copies of a refresh, for each adapter: A into its rows, sB into its block."""
        jobs = []
        for adapter, columns in zip(self.adapters, self.columns, strict=True):
            A_RD = self.M[self.O + columns.start : self.O + columns.stop, : self.D]
            sB_OR = self.M[self.rows[adapter.linear], self.D + columns.start : self.D + columns.stop]
            jobs.append((CopyJob(adapter.A_RD, A_RD, 1.0), CopyJob(adapter.B_OR, sB_OR, adapter.scale)))
        return jobs

    @property
    def jobs(self) -> list[CopyJob]:
        """For one `CopyTable` over all the groups of a model: one launch an optimizer step."""
        return self._table.jobs

    def refresh(self) -> None:
        """Copies A and sB into M, always: torch's fused optimizers do not bump version counters. A CUDA graph can capture
        it."""
        self._table.run()

    def weight_view(self, linear: int) -> Tensor:
        """The frozen weight [O_i, D] as a view of M, for `nn.Linear.weight.data`."""
        return self.M[self.rows[linear], : self.D]

    @property
    def input_width(self) -> int:
        """Columns of x_ext."""
        return self.D + self.R

    @property
    def grad_width(self) -> int:
        """Columns of dy_ext."""
        return self.O + self.R

    def extend(self, x_ext: Tensor) -> Tensor:
        """Fills the last R columns of x_ext with x A^T (zeros where R is padding) and returns them."""
        xa_TR = x_ext[:, self.D :]
        if self.R:
            mm(x_ext[:, : self.D], self.M[self.O :, : self.D].T, out=xa_TR)
        return xa_TR

    def extend_grad(self, dy_ext: Tensor) -> Tensor:
        """Fills the last R columns of dy_ext with dy sB and returns them."""
        dyb_TR = dy_ext[:, self.O :]
        if self.R:
            mm(dy_ext[:, : self.O], self.M[: self.O, self.D :], out=dyb_TR)
        return dyb_TR

    def forward(
        self, x_ext: Tensor, *, bias_O: Tensor | None = None, out: Tensor | None = None, extended: bool = False
    ) -> Tensor:
        """y_TO. `extended`: the kernel that made x already filled the last R columns."""
        if not extended:
            self.extend(x_ext)
        weight = self.M[: self.O].T
        if bias_O is None:
            return mm(x_ext, weight, out=out)
        if out is None or is_gpu(x_ext):  # one kernel: the bias is added in the GEMM's epilogue
            return torch.addmm(bias_O, x_ext, weight) if out is None else torch.addmm(bias_O, x_ext, weight, out=out)
        return mm(x_ext, weight, out=out).add_(bias_O)

    def forward_add(self, h_TO: Tensor, x_ext: Tensor, multiplier: float, out: Tensor | None = None) -> Tensor:
        """h + multiplier * y, of an x_ext whose last R columns are filled. `out` may be h."""
        return mm_add(h_TO, x_ext, self.M[: self.O].T, multiplier, out)

    def backward(
        self, dy_ext: Tensor, x_ext: Tensor, xa_TR: Tensor | None = None, *, need_dx: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor | None, list[AdapterGrads]]:
        """(dx_TD or None, [(dA, dB)] of each adapter). Fills dy_ext's last R columns.

        Without `xa_TR`, x_ext is the forward's. With it, x_ext may be a recomputed plain x [T, D].
        """
        dyb_TR = self.extend_grad(dy_ext)
        xa_TR = x_ext[:, self.D :] if xa_TR is None else xa_TR
        grads = self.adapter_grads(dy_ext[:, : self.O], dyb_TR, x_ext[:, : self.D], xa_TR)
        if not need_dx:
            return None, grads
        return mm(dy_ext, self.M[:, : self.D], out=out), grads
