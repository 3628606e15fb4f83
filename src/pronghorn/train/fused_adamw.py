"""AdamW as an optimizer object over kernels/adamw.py: torch's groups and state, three launches in all, clipping inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pronghorn.kernels.adamw import AdamWTensors, Shadow, adamw_step


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's parameters, groups and state (exp_avg, exp_avg_sq, step), on `adamw_step`.

    `grad_norm` holds the last step's norm before clipping, `skipped` how many steps were left out; both on the device.
    `watched_loss`: a 0-dim tensor on the device; see kernels/adamw.py. Tables are built again when an address changes: keep
    gradients in place for speed, and for a CUDA graph, which is captured after `prepare` and replayed after `refresh_lr`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        clip_norm: float | None = None,
        shadows: Mapping[torch.Tensor, Shadow] | None = None,
    ) -> None:
        # fused: torch's load_state_dict then keeps `step` beside the parameter, as its own fused AdamW does
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        self.clip_norm = clip_norm
        self.grad_norm: torch.Tensor | None = None
        self.watched_loss: torch.Tensor | None = None
        self._shadows = dict(shadows or {})
        self._tensors: AdamWTensors | None = None
        self._addresses: list[int] = []
        self._lr_G: torch.Tensor | None = None
        self._lr_values: list[float] = []
        self.skipped: torch.Tensor | None = None

    def refresh_lr(self) -> None:
        """Copies the groups' learning rates to the device, where they changed. `step` does it, except under capture."""
        rates = [float(group["lr"]) for group in self.param_groups]
        device = self.param_groups[0]["params"][0].device
        if self._lr_G is None or len(rates) != len(self._lr_values):
            self._lr_G, self._lr_values = torch.zeros(len(rates), dtype=torch.float64, device=device), [0.0] * len(rates)
        for i, (rate, before) in enumerate(zip(rates, self._lr_values, strict=True)):
            if rate != before:
                self._lr_G[i].fill_(rate)  # a launch, not a copy: nothing on the host has to outlive it
        self._lr_values = rates

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        on_gpu = self.param_groups[0]["params"][0].is_cuda
        if not (on_gpu and torch.cuda.is_current_stream_capturing()):
            self.refresh_lr()
        tensors = self._gather()
        if tensors is not None and self._lr_G is not None:
            group = self.param_groups[0]
            if any(other["betas"] != group["betas"] or other["eps"] != group["eps"] for other in self.param_groups):
                raise ValueError("FusedAdamW takes one betas and one eps for all parameter groups")
            settings = {"betas": tuple(group["betas"]), "eps": group["eps"], "clip_norm": self.clip_norm,
                        "loss": self.watched_loss}
            self.grad_norm = adamw_step(tensors, lr=self._lr_G, **settings)
        return loss

    def prepare(self) -> None:
        """State and tables for the gradients that are there now, without a step."""
        self._gather()

    def forget_gradients(self) -> None:
        """The tables hold on to the gradients they were built for; they are built again when there are others."""
        self._tensors, self._addresses = None, []

    def _gather(self) -> AdamWTensors | None:
        """The tensors of this step; the table of the last one, while nothing moved."""
        members = [(param, number, group["weight_decay"]) for number, group in enumerate(self.param_groups)
                   for param in group["params"] if param.grad is not None]  # fmt: skip
        if not members:
            return None
        for param, _, _ in members:
            if not self.state[param]:
                self.state[param] = {"step": torch.zeros((), dtype=torch.float32, device=param.device),
                                     "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}  # fmt: skip
            elif self.state[param]["step"].device != param.device:  # loaded from an AdamW that was not fused
                self.state[param]["step"] = self.state[param]["step"].to(param.device, torch.float32)
        states = [self.state[param] for param, _, _ in members]
        columns = [[param for param, _, _ in members], [param.grad for param, _, _ in members],
                   *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))]  # fmt: skip
        addresses = [tensor.data_ptr() for column in columns for tensor in column]
        decays = [decay for _, _, decay in members]
        if self._tensors is None or addresses != self._addresses or decays != self._tensors.weight_decays:
            self._tensors = AdamWTensors(
                *columns, weight_decays=decays, lr_groups=[number for _, number, _ in members],
                shadows=[self._shadows.get(param) for param, _, _ in members],
            )  # fmt: skip
            self.skipped = self._tensors.skipped = self._tensors.skipped if self.skipped is None else self.skipped
            self._addresses = addresses
        return self._tensors
