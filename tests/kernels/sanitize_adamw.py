"""The checks of sanitize.py for the optimizer."""

from __future__ import annotations

import torch
from launches import BF16, FP32, moved_to, near

from pronghorn.kernels.optim.adamw import AdamWTensors, adamw_step
from pronghorn.kernels.optim.adamw8bit import AdamW8bitTensors, blocks_of
from pronghorn.kernels.runtime.host_memory import device_shift


def check_adamw(device: str) -> None:
    """Three kinds of dtypes, so three launches; a bad gradient.

    Two steps against the plain form, and a third, not finite, that must change nothing.
    """
    shapes = [((33, 129), FP32), ((40, 64), FP32), ((1025,), FP32), ((9, 31), BF16), ((1,), BF16)]
    params = [torch.randn(shape).to(dtype) for shape, dtype in shapes]
    grad_dtypes = [BF16, BF16, FP32, BF16, BF16]
    results = []
    for where, plain in ((device, False), ("cpu", True)):
        moved = moved_to(params, where)
        grads = [torch.empty(p.shape, dtype=dtype).to(where) for p, dtype in zip(params, grad_dtypes, strict=True)]
        moments = [[torch.zeros(p.shape, dtype=p.dtype).to(where) for p in params] for _ in range(2)]
        steps = [torch.zeros(()).to(where) for _ in params]
        tensors = AdamWTensors(moved, grads, *moments, steps, weight_decays=[0.1, 0.0, 0.1, 0.0, 0.1])
        tensors.on_device = not plain
        kept = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for grad in grads:
                grad.copy_(torch.randn(grad.shape, generator=generator))
            if step == 2:
                grads[2][7] = float("inf")
            norm = adamw_step(tensors, lr=0.01, clip_norm=1.0)
            if step == 1:
                kept = [x.cpu().clone() for x in (*moved, *moments[0], *moments[1], *steps, norm)]
        after = [x.cpu() for x in (*moved, *moments[0], *moments[1], *steps)]
        same = [torch.equal(a, b) for a, b in zip(after, kept, strict=False)]
        assert all(same), "a gradient that is not finite changed something"
        assert int(tensors.skipped) == 1
        results.append(kept)
    for got, expected in zip(*results, strict=True):
        near("adamw", got, expected, BF16 if got.dtype == BF16 else FP32)


def check_adamw8bit(device: str) -> None:
    """Part of a block, a program and a bit, several programs; one tensor with moments of 32 bits; moments in
    host memory, where there is a GPU. Two steps, and a third, not finite, that must change nothing."""
    shapes, small = [(257,), (33, 129), (40, 64), (5,)], 3
    params = [torch.randn(shape) for shape in shapes]
    results = []
    for where, plain in ((device, False), ("cpu", True)):
        params_there, on_host = moved_to(params, where), where == "cuda"
        grads = [torch.empty_like(p) for p in params_there]
        kinds = [FP32 if i == small else torch.uint8 for i in range(len(shapes))]
        moments = [
            [torch.zeros(p.shape, dtype=kind, pin_memory=on_host) for p, kind in zip(params, kinds, strict=True)]
            for _ in range(2)
        ]
        zeros = [[torch.zeros(blocks_of(p.numel())).to(where) for p in params] for _ in range(2)]
        absmaxes = [None if i == small else (zeros[0][i], zeros[1][i]) for i in range(len(params))]
        steps = [torch.zeros(()).to(where) for _ in params]
        tensors = AdamW8bitTensors(
            params_there,
            grads,
            *moments,
            steps,
            absmaxes=absmaxes,
            weight_decays=[0.1] * 4,
            host_shift=device_shift(moments[0][0], torch.device(where)),
        )
        tensors.on_device = not plain
        flat = [one for absmax in absmaxes for one in absmax or ()]
        kept: list[torch.Tensor] = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for grad in grads:
                grad.copy_(torch.randn(grad.shape, generator=generator))
            if step == 2:
                grads[1][7, 3] = float("inf")
            adamw_step(tensors, lr=0.01, clip_norm=1.0)
            now = [x.cpu().clone() for x in (*params_there, *flat, *steps)]
            if where == "cuda":
                torch.cuda.synchronize()  # the host reads moments
            now += [x.clone() for column in moments for x in column]
            same = step == 2 and all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
            assert same or step < 2, "a gradient that is not finite changed something"
            kept = now
        assert int(tensors.skipped) == 1
        results.append(kept)
    for got, expected in zip(*results, strict=True):
        if got.dtype == torch.uint8:
            assert int((got.int() - expected.int()).abs().max()) <= 1
        else:
            near("adamw8bit", got, expected)
