"""Heads out of latents: error against float64 at most twice plain torch's, on both paths; the shared key's gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.attention.latent_heads import (
    LatentHeads,
    latent_heads,
    latent_heads_backward,
    latent_heads_forward,
    latent_heads_reference,
)
from tables import covering, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [  # (heads, plain, rotary, value)
    (3, 192, 64, 256),  # GLM-4.7-Flash's heads; more than a program holds would be 9 of them
    (17, 128, 64, 128),  # DeepSeek-V3's: values narrower than heads, and a third tile of them with one head
    (1, 6, 4, 14),  # values wider than keys
]
TOKENS = 5


def rows(width: int, dtype: torch.dtype, device: str) -> Tensor:
    """NaN in memory that must not be read."""
    buffer = torch.full((TOKENS, width + 8), float("nan"), dtype=dtype, device=device)
    buffer[:, :width] = torch.randn(TOKENS, width, device=device)
    return buffer[:, :width]


def turns(rotary: int, device: str) -> tuple[Tensor, Tensor]:
    angles = torch.arange(TOKENS, device=device)[:, None] * 100.0 ** (-torch.arange(0, rotary, 2, device=device) / rotary)
    return 1.1 * angles.cos(), 1.1 * angles.sin()  # with YaRN's factor


def by_hand(q: Tensor, kv: Tensor, kr: Tensor, angle: tuple[Tensor, Tensor], sizes: LatentHeads) -> tuple[Tensor, ...]:
    """Head by head, pair by pair."""
    N, C, R, V, neighbours = sizes
    found = torch.zeros(3, TOKENS, N, sizes.width, dtype=q.dtype)
    for head in range(N):
        own, both = q[:, head * (C + R) : (head + 1) * (C + R)], kv[:, head * (C + V) : (head + 1) * (C + V)]
        found[0, :, head, :C], found[1, :, head, :C], found[2, :, head, :V] = own[:, :C], both[:, :C], both[:, C:]
        for which, turning in ((0, own[:, C:]), (1, kr)):
            for pair in range(R // 2):
                i, j = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + R // 2)
                cos, sin = angle[0][:, pair].to(q.dtype), angle[1][:, pair].to(q.dtype)
                found[which, :, head, C + i] = turning[:, i] * cos - turning[:, j] * sin
                found[which, :, head, C + j] = turning[:, j] * cos + turning[:, i] * sin
    return tuple(found)


@table(("dtype", "shape", "neighbours"), covering(DTYPES, SIZES, [True, False], together=(1, 2)))
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Callable[..., None], dtype: torch.dtype, shape: tuple[int, int, int, int], neighbours: bool
) -> None:
    sizes = LatentHeads(*shape, neighbours=neighbours)
    given, angle = [rows(width, dtype, device) for width in sizes.columns], turns(sizes.rotary, device)
    grads = [torch.randn(TOKENS, sizes.heads, sizes.width, device=device).to(dtype) for _ in range(3)]
    results = []
    for number in (torch.float64, dtype):
        leaves = [each.clone().to(number).requires_grad_() for each in given]
        parts = latent_heads_reference(*leaves, *angle, sizes)
        back = torch.autograd.grad(parts, leaves, [grad.to(number) for grad in grads])
        results.append([*(part.detach() for part in parts), *back])
    exact, turned = [each.double().cpu() for each in given], (angle[0].cpu(), angle[1].cpu())
    for one, other in zip(results[0][:3], by_hand(exact[0], exact[1], exact[2], turned, sizes), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-12, atol=1e-12)
    ours = (*latent_heads_forward(*given, *angle, sizes), *latent_heads_backward(*grads, *angle, sizes))
    for name, mine, true, theirs in zip(("q", "k", "v", "dq", "dkv", "dkr"), ours, *results, strict=True):
        judge(mine, theirs, true, name)


def test_written_rows_are_written_only_inside(device: str) -> None:
    sizes = LatentHeads(3, 6, 4, 8, neighbours=True)
    grads, angle = [torch.randn(TOKENS, 3, 10, device=device) for _ in range(3)], turns(4, device)
    buffers = [torch.full((TOKENS, width + 5), float("nan"), device=device) for width in sizes.columns]
    into = tuple(buffer[:, :width] for buffer, width in zip(buffers, sizes.columns, strict=True))
    latent_heads_backward(*grads, *angle, sizes, out=into)  # type: ignore[arg-type]
    for buffer, width, alone in zip(buffers, sizes.columns, latent_heads_backward(*grads, *angle, sizes), strict=True):
        assert torch.equal(buffer[:, :width], alone)
        assert buffer[:, width:].isnan().all()


def test_autograd_sees_what_backward_gives(device: str) -> None:
    sizes = LatentHeads(2, 6, 4, 8, neighbours=False)
    given, angle = [torch.randn(TOKENS, width, device=device).requires_grad_() for width in sizes.columns], turns(4, device)
    parts = latent_heads(*given, *angle, sizes)
    found = torch.autograd.grad(sum(part.sum() for part in parts), given)
    ones = [torch.ones(TOKENS, 2, sizes.width, device=device)] * 3
    assert all(torch.equal(*pair) for pair in zip(found, latent_heads_backward(*ones, *angle, sizes), strict=True))


def test_tables_of_another_width_are_refused(device: str) -> None:
    sizes = LatentHeads(2, 6, 4, 8, neighbours=False)
    given = [torch.randn(TOKENS, width, device=device) for width in sizes.columns]
    with pytest.raises(ValueError, match="rotate 6 columns, not 4"):
        latent_heads_forward(*given, *turns(6, device), sizes)
