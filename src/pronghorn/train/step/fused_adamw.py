"""AdamW as an optimizer object over kernels/optim/adamw.py: torch's groups and state, three launches in all, clipping inside.

Moments can be stored in 8 bits (adamw8bit.py) and can lie in pinned host memory, where the update reads and writes them
over the link: 16 or 4 bytes a parameter in all, half of them each way, at 55 GB/s where PCIe 5 has 16 lanes. Of 8 B parameters
that should be 1.2 s and 0.3 s a step (predicted), which only a step of many tokens makes worth it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pronghorn.kernels.optim.adamw import AdamWTensors, adamw_step
from pronghorn.kernels.optim.adamw8bit import SMALL, AdamW8bitTensors, blocks_of
from pronghorn.kernels.runtime.host_memory import device_shift, pin, unpin

ABSMAX = ("exp_avg_absmax", "exp_avg_sq_absmax")
PAGE = 4096
PLACE = 256  # bytes from its page: every moment in host memory begins at a multiple, so a warp's 128 bytes are one request


class FusedAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's parameters, groups and state (exp_avg, exp_avg_sq, step), on `adamw_step`.

    `grad_norm` holds the last step's norm before clipping, `skipped` how many steps were left out; both on the device.
    `watched_loss`: a 0-dim tensor on the device; see adamw.py. Tables are built again when an address changes: keep
    gradients in place for speed, and for a CUDA graph, which is captured after `prepare` and replayed after `refresh_lr`.
    `eight_bit`: moments are uint8, with `exp_avg_absmax` and `exp_avg_sq_absmax` in the state. `paged`: moments are in host
    memory. Either only for parameters of 4,096 elements and more. Who reads paged moments on the host waits for the device.
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
        eight_bit: bool = False,
        paged: bool = False,
    ) -> None:
        # fused: torch's load_state_dict then keeps `step` beside the parameter, as its own fused AdamW does
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        self.clip_norm, self.eight_bit, self.paged = clip_norm, eight_bit, paged
        self._paged_moments: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._host_shift = 0
        self.grad_norm: torch.Tensor | None = None
        self.watched_loss: torch.Tensor | None = None
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
                raise ValueError("FusedAdamW needs the same betas and eps in all parameter groups")
            settings = {
                "betas": tuple(group["betas"]),
                "eps": group["eps"],
                "clip_norm": self.clip_norm,
                "loss": self.watched_loss,
            }
            self.grad_norm = adamw_step(tensors, lr=self._lr_G, **settings)
        return loss

    def fresh_state(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Zeros, in the dtypes and places that a step expects; a checkpoint is copied into them."""
        small = param.numel() < SMALL
        dtype = torch.uint8 if self.eight_bit and not small else param.dtype
        state = {"step": torch.zeros((), dtype=torch.float32, device=param.device)}
        if self.paged and not small:
            if self._paged_moments is None:
                self._paged_moments = self._place_on_host()
            for key, moment in zip(("exp_avg", "exp_avg_sq"), self._paged_moments[param], strict=True):
                state[key] = moment.zero_()
        else:
            state |= {key: torch.zeros(param.shape, dtype=dtype, device=param.device) for key in ("exp_avg", "exp_avg_sq")}
        if dtype == torch.uint8:
            state |= {key: torch.zeros(blocks_of(param.numel()), device=param.device) for key in ABSMAX}
        return state

    def _place_on_host(self) -> dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """One stretch of pinned memory with the two moments of every parameter that is not small."""
        params = [param for group in self.param_groups for param in group["params"] if param.numel() >= SMALL]
        dtypes = [torch.uint8 if self.eight_bit else param.dtype for param in params]
        sizes = [-(-param.numel() * dtype.itemsize // PLACE) * PLACE for param, dtype in zip(params, dtypes, strict=True)]
        memory, device = torch.empty(2 * sum(sizes) + PAGE, dtype=torch.uint8), params[0].device
        memory = memory[-memory.data_ptr() % PAGE :][: 2 * sum(sizes)]
        if device.type == "cuda":
            pin(memory, "set train.optimizer: adamw_8bit")
            weakref.finalize(self, unpin, memory, device).atexit = False  # a process that ends takes it along
        self._host_shift = device_shift(memory, device)
        # by way of numpy: tensors with storages of their own, as a checkpoint's file wants them, and not views of one tensor
        ends = np.cumsum([size for size in sizes for _ in range(2)])
        parts = (torch.from_numpy(part) for part in np.split(memory.numpy(), ends[:-1]))
        return {
            param: (_shaped(next(parts), param, dtype), _shaped(next(parts), param, dtype))
            for param, dtype in zip(params, dtypes, strict=True)
        }

    def prepare(self) -> None:
        """State and tables for the gradients that are there now, without a step."""
        self._gather()

    def wait_for_paged(self) -> None:
        """Before the host reads moments that the device has under way."""
        if self.paged and self._paged_moments and self._lr_G is not None and self._lr_G.is_cuda:
            torch.cuda.current_stream(self._lr_G.device).synchronize()

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
                self.state[param] = self.fresh_state(param)
            elif self.state[param]["step"].device != param.device:  # loaded from an AdamW that was not fused
                self.state[param]["step"] = self.state[param]["step"].to(param.device, torch.float32)
        states = [self.state[param] for param, _, _ in members]
        columns = [[param for param, _, _ in members], [param.grad for param, _, _ in members],
                   *([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))]  # fmt: skip
        absmaxes = [tuple(state[key] for key in ABSMAX) if ABSMAX[0] in state else None for state in states]
        addresses = [tensor.data_ptr() for column in (*columns, *absmaxes) for tensor in column or ()]
        decays = [decay for _, _, decay in members]
        if self._tensors is None or addresses != self._addresses or decays != self._tensors.weight_decays:
            settings: dict[str, Any] = {
                "weight_decays": decays, "lr_groups": [number for _, number, _ in members],
                "host_shift": self._host_shift if self.paged else None,
            }  # fmt: skip
            self._tensors = (
                AdamW8bitTensors(*columns, absmaxes=absmaxes, **settings)
                if self.eight_bit
                else AdamWTensors(*columns, **settings)
            )
            self.skipped = self._tensors.skipped = self._tensors.skipped if self.skipped is None else self.skipped
            self._addresses = addresses
        return self._tensors


def _shaped(memory: torch.Tensor, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory.view(dtype)[: param.numel()].view(param.shape)
