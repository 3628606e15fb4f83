"""The norm of heads without a weight: error against float64 at most twice plain torch's, on both paths."""

from __future__ import annotations

import torch
from kernel_parts import Judge, strided, truth_and_plain

from pronghorn.kernels.norm.head_norm import head_norm, head_norm_backward, head_norm_forward, head_norm_reference
from tables import covering, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(4, 64), (1, 512), (3, 24), (20, 128)]  # heads and their width: one tile and several, powers of two and not


@table(("dtype", "shape", "tokens"), covering(DTYPES, SHAPES, [1, 7], together=(0, 1)))
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, dtype: torch.dtype, shape: tuple[int, int], tokens: int
) -> None:
    x, dy = (strided(tokens, shape[0] * shape[1], 16, dtype, device).unflatten(1, shape) for _ in range(2))
    results = truth_and_plain(lambda x: head_norm_reference(x, 1e-5), [x], [dy])

    y, rstd = head_norm_forward(x, 1e-5)
    dx = head_norm_backward(dy, x, rstd, torch.empty_like(y))
    for name, ours, true, theirs in zip(("y", "dx"), (y, dx), *results, strict=True):
        judge(ours, theirs, true, name)
    before = strided(tokens, shape[0] * shape[1], 8, dtype, device).unflatten(1, shape)
    added = head_norm_backward(dy, x, rstd, before.clone(), add=True)
    judge(added, results[1][1] + before, results[0][1] + before.double(), "dx, added")
    in_place = dy.clone()
    assert torch.equal(head_norm_backward(in_place, x, rstd, in_place), dx)


def test_autograd_gives_the_gradient_of_the_reference(device: str) -> None:
    x = torch.randn(5, 3, 16, device=device)
    grads = []
    for function in (head_norm, head_norm_reference):
        leaf = x.clone().requires_grad_()
        function(leaf, 1e-6).sin().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
