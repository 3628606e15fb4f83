"""The gate of attention's output: error against float64 at most twice plain torch's, on both paths, among other columns."""

from __future__ import annotations

import torch
from kernel_parts import Judge, truth_and_plain

from pronghorn.kernels.attention.output_gate import output_gate_backward, output_gate_forward, output_gate_reference
from tables import covering, table


@table(
    ("dtype", "heads", "width", "apart"),  # apart: heads of the gate follow one another
    covering([torch.float32, torch.bfloat16, torch.float16], [1, 3, 16], [24, 128], [False, True], together=(1, 2, 3)),
)
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, dtype: torch.dtype, heads: int, width: int, apart: bool
) -> None:
    T, nan = 3, float("nan")

    def gate_in(columns: torch.Tensor) -> torch.Tensor:
        both = columns[:, : 2 * heads * width]
        return both[:, heads * width :].unflatten(1, (heads, width)) if apart else both.unflatten(1, (heads, -1))[..., width:]

    qkv = torch.full((T, 2 * heads * width + 40), nan, dtype=dtype, device=device)
    gate = gate_in(qkv)
    gate.copy_(4 * torch.randn(T, heads, width, device=device))
    o, dy = (torch.randn(T, heads, width, device=device).to(dtype) for _ in range(2))
    results = truth_and_plain(output_gate_reference, [o, gate], [dy])
    buffer, dqkv = torch.full((T, heads * width + 8), nan, dtype=dtype, device=device), torch.full_like(qkv, nan)
    y = output_gate_forward(o, gate, out=buffer[:, : heads * width].unflatten(1, (heads, width)))
    dgate = gate_in(dqkv)
    grad = dy.clone()
    do = output_gate_backward(grad, o, gate, out=grad, gate_out=dgate)
    for name, ours, true, theirs in zip(("y", "do", "dgate"), (y, do, dgate), *results, strict=True):
        judge(ours, theirs, true, name)
    assert buffer[:, heads * width :].isnan().all()
    assert dqkv.isnan().sum() == dqkv.numel() - dgate.numel()
