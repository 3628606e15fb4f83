"""Expert counts of every training forward, on the device, and the routers' auxiliary loss where the config asks for it.

T = packed tokens, E = experts, K = experts a token, L = layers with experts.

Each of these layers adds how often its experts were chosen, and their probabilities, to its rows of one buffer [L, 2, E],
without padding. Sums over all steps stay on the device until they are read (`ExpertCounts`). The auxiliary loss
(load_balance.py) needs all layers' counts before any layer's gradient, so it is an autograd node after the last layer: forward
computes the loss, backward stores the incoming factor, and the layers add their part to their logits' gradient.

In the last layer only rows with a loss pass attention, so only they are counted, unless there is an auxiliary loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.moe.load_balance import add_load_balancing_grad, add_router_statistics, load_balancing_loss
from pronghorn.kernels.runtime.first_order import Ctx


class RouterStats:
    """Router statistics of one forward."""

    def __init__(
        self,
        layers: int,
        experts: int,
        device: torch.device,
        *,
        coefficient: float,
        real_T: Tensor | None = None,
        real_rows: Tensor | None = None,
    ) -> None:
        """`real_T`: which tokens are not padding (None: all); `real_rows`: the same of the rows of the last layer."""
        self.stats_L2E = torch.zeros(layers, 2, experts, device=device)
        self.coefficient, self.real_T, self.real_rows = coefficient, real_T, real_rows
        self.totals_2E: Tensor | None = None
        self.tokens: int | Tensor = 0
        self.factor: Tensor | None = None  # of the auxiliary loss, in what is differentiated
        self.loss: Tensor | None = None

    def add(self, slot: int, logits_TE: Tensor, ids_TK: Tensor, few: bool) -> None:
        """`few`: these are the rows of the last layer."""
        real = self.real_rows if few else self.real_T
        if logits_TE.dtype == torch.float64:
            self.stats_L2E = self.stats_L2E.double()
        add_router_statistics(self.stats_L2E[slot], logits_TE, ids_TK, real)
        self.tokens = len(logits_TE) if real is None else real.sum()

    def balanced(self, h_TD: Tensor) -> Tensor:
        """After the last layer: returns h, and sets `loss` if there is an auxiliary loss."""
        if not self.coefficient:
            return h_TD
        h_TD, self.loss = _Balance.apply(h_TD, self)  # type: ignore[no-untyped-call]
        return h_TD

    def add_grad(self, dlogits_TE: Tensor, logits_TE: Tensor) -> Tensor:
        """dlogits plus the gradient of the auxiliary loss."""
        if self.totals_2E is None or self.factor is None:
            return dlogits_TE
        factor: Any = self.factor  # a number on the device
        return add_load_balancing_grad(dlogits_TE, logits_TE, self.totals_2E, self.rows, factor, self.real_T)

    @property
    def rows(self) -> int | Tensor:
        return len(self.stats_L2E) * self.tokens


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, h_TD: Tensor, load: RouterStats) -> tuple[Tensor, Tensor]:
        load.totals_2E = load.stats_L2E.sum(0)
        ctx.load = load
        return h_TD.view_as(h_TD), load_balancing_loss(load.totals_2E, load.rows)

    @staticmethod
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor, None]:
        ctx.load.factor = incoming[1]
        return incoming[0], None


class BalancedLogits(torch.autograd.Function):
    """For an MLP that the model computes itself: returns its output, and adds the auxiliary loss' gradient to the logits."""

    @staticmethod
    def forward(ctx: Ctx, y_TD: Tensor, logits_TE: Tensor, load: RouterStats) -> Tensor:
        ctx.save_for_backward(logits_TE)
        ctx.load = load
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor, Tensor, None]:
        (logits_TE,) = ctx.saved_tensors
        return incoming[0], ctx.load.add_grad(torch.zeros_like(logits_TE), logits_TE), None


class ExpertCounts:
    """How often each expert was chosen in all steps so far, [L, E], on the device. A CUDA graph adds to it as well."""

    def __init__(self, layers: list[int], experts: int, device: torch.device) -> None:
        """`layers`: their numbers in the model."""
        self.layers = layers
        self.counts_LE = torch.zeros(len(layers), experts, dtype=torch.float64, device=device)

    def add(self, load: RouterStats) -> None:
        self.counts_LE += load.stats_L2E[:, 0]

    def read(self) -> dict[int, list[int]]:
        """Synchronizes: not for use within a step. Resets the counts to zero."""
        counts: list[list[float]] = self.counts_LE.tolist()
        self.counts_LE.zero_()
        return {layer: [round(count) for count in row] for layer, row in zip(self.layers, counts, strict=True)}


def padding_mask(labels_N: Tensor, rows: Tensor | None, spans_2T: Tensor, ignored: int) -> Tensor:
    """1 for tokens up to the end of the last document that has a label, 0 for those after it: a pack is padded at its end with
    documents without labels. `labels_N`: of `rows`, or of all tokens. No synchronization."""
    place = torch.arange(spans_2T.shape[1], device=labels_N.device)
    last = torch.where(labels_N != ignored, place if rows is None else rows, 0).amax()
    end = spans_2T[1].index_select(0, last[None])  # an index of no dimensions would be read by the host
    return (place < end).float()
