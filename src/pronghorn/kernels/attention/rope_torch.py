"""QK-norm and rotary positions in plain torch: the path of rope.py without Triton, in fp32 or wider."""

from __future__ import annotations

import torch

from pronghorn.kernels.norm.rms_norm import rms_norm_backward

Pair = tuple[torch.Tensor, torch.Tensor]  # of queries and of keys


def rotate(x_TNH: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """In fp32, or wider; with -sin it is the transpose, which backward needs."""
    wide = torch.promote_types(x_TNH.dtype, torch.float32)
    cos, sin = cos_TP.to(wide)[:, None], sin_TP.to(wide)[:, None]
    width = 2 * cos.shape[-1]
    rotating = x_TNH[..., :width].to(wide)
    a, b = (rotating[..., 0::2], rotating[..., 1::2]) if neighbours else rotating.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack([a, b], dim=-1).flatten(-2) if neighbours else torch.cat([a, b], dim=-1)
    return rotated if width == x_TNH.shape[-1] else torch.cat([rotated, x_TNH[..., width:].to(wide)], dim=-1)


def rotate_forward(
    raw: Pair, out: Pair, cos_TP: torch.Tensor, sin_TP: torch.Tensor, neighbours: bool, norms: Pair | None, eps: float,
    one_plus: bool, after: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Per-head norm and rotation into `out`. Returns rstd of both, if there is a norm."""
    rstds = []
    for i, x in enumerate(raw):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = rotate(wide, cos_TP, sin_TP, neighbours) if after else wide
        if norms is not None:
            rstds.append(torch.rsqrt(wide.square().mean(-1) + eps))
            wide = wide * rstds[i][..., None] * (norms[i].to(wide.dtype) + int(one_plus))
        out[i].copy_(wide if after else rotate(wide, cos_TP, sin_TP, neighbours))
    return rstds


def rotate_backward(
    grads: Pair, raw: Pair, out: Pair, cos_TP: torch.Tensor, sin_TP: torch.Tensor, neighbours: bool,
    rstd: torch.Tensor | None, norms: Pair | None, one_plus: bool, need_norm_grad: bool, after: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Writes the gradients before norm and rotation. Returns those of the norms' weights, or None."""
    norm_grads: list[torch.Tensor | None] = [None, None]
    first, H = grads[0].shape[1:]
    found = []  # all of them before the first is written: `out` may be `grads`
    for i, (grad, x) in enumerate(zip(grads, raw, strict=True)):
        given = grad if after else rotate(grad, cos_TP, -sin_TP, neighbours)
        if norms is not None and rstd is not None:
            inverse, shape = (rstd[:, :first], rstd[:, first:])[i], x.shape
            read = rotate(x, cos_TP, sin_TP, neighbours) if after else x
            given, norm_grads[i] = rms_norm_backward(
                given.reshape(-1, H), read.reshape(-1, H), norms[i], inverse.reshape(-1), one_plus=one_plus,
                need_weight_grad=need_norm_grad,
            )  # fmt: skip
            given = given.view(shape)
        found.append(rotate(given, cos_TP, -sin_TP, neighbours) if after else given)
    for target, result in zip(out, found, strict=True):
        target.copy_(result)
    return norm_grads[0], norm_grads[1]
