"""Short convolution: error against float64 at most twice plain torch's, on both paths; documents apart to the bit."""

from __future__ import annotations

import pytest
import torch
from kernel_parts import Judge, strided, truth_and_plain
from torch import Tensor

from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.conv.short_conv import short_conv, short_conv_backward, short_conv_forward, short_conv_reference
from tables import covering, table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TAPS = [2, 3, 4]
WIDTHS = [8, 130]  # 130: a second tile of channels, partly filled
LENGTHS = [[1], [1, 2, 3], [63, 1, 65], [64, 0, 66]]


def spans_of(lengths: list[int], device: str) -> Tensor:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return spans(bounds, int(bounds[-1]))


def alone(bcx: Tensor, taps: Tensor, lengths: list[int]) -> Tensor:
    """Each document by itself, by torch's own convolution."""
    outs = []
    for document in filter(len, bcx.split(lengths)):
        B, C, x = document.chunk(3, -1)
        u = torch.nn.functional.pad((B * x).T, (taps.shape[1] - 1, 0))
        outs.append(C * torch.nn.functional.conv1d(u[None], taps[:, None], groups=len(taps))[0].T)
    return torch.cat(outs)


@table(("dtype", "taps", "width", "lengths"), covering(DTYPES, TAPS, WIDTHS, LENGTHS, together=(1, 3)))
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, dtype: torch.dtype, taps: int, width: int, lengths: list[int]
) -> None:
    T, where = sum(lengths), spans_of(lengths, device)
    bcx, dy = strided(T, 3 * width, 16, dtype, device), strided(T, width, 5, dtype, device)
    weight = torch.randn(width, taps, device=device).to(dtype)
    results = truth_and_plain(lambda x, taps: short_conv_reference(x, taps, where), [bcx, weight], [dy])
    torch.testing.assert_close(results[0][0], alone(bcx.double(), weight.double(), lengths), rtol=1e-12, atol=1e-12)

    y = short_conv_forward(bcx, weight, where)
    dbcx, dtaps = short_conv_backward(dy, bcx, weight, where)
    assert dtaps is not None
    for name, ours, true, theirs in zip(("y", "dbcx", "dtaps"), (y, dbcx, dtaps), *results, strict=True):
        judge(ours, theirs, true, name)
    assert short_conv_backward(dy, bcx, weight, where, need_taps=False)[1] is None


def test_documents_are_apart_to_the_bit(device: str) -> None:
    lengths = [5, 1, 40, 2]
    where, weight = spans_of(lengths, device), torch.randn(16, 3, device=device)
    bcx = torch.randn(48, 48, device=device)
    other = bcx.clone()
    other[:6], other[46:] = torch.randn(6, 48, device=device), float("inf")
    one, two = (short_conv_forward(each, weight, where)[6:46] for each in (bcx, other))
    assert torch.equal(one, two)
    dy = torch.zeros(48, 16, device=device)
    dy[6:46] = torch.randn(40, 16, device=device)
    dbcx, _ = short_conv_backward(dy, bcx, weight, where)
    assert not dbcx[:6].any()
    assert not dbcx[46:].any()
    assert dbcx[6:46].all()


def test_a_written_buffer_is_written_only_inside(device: str) -> None:
    where, weight = spans_of([3, 4], device), torch.randn(8, 3, device=device)
    bcx, buffer = torch.randn(7, 24, device=device), torch.full((7, 40), float("nan"), device=device)
    y = short_conv_forward(bcx, weight, where, out=buffer[:, :8])
    assert torch.equal(y, short_conv_forward(bcx, weight, where))
    assert buffer[:, 8:].isnan().all()
    short_conv_backward(y, bcx, weight, where, out=buffer[:, :24])
    assert buffer[:, 24:].isnan().all()
    assert not buffer[:, :24].isnan().any()


@pytest.mark.parametrize("trained", [True, False])
def test_autograd_sees_what_backward_gives(device: str, trained: bool) -> None:
    where, weight = spans_of([3, 4], device), torch.randn(8, 3, device=device).requires_grad_(trained)
    bcx = torch.randn(7, 24, device=device).requires_grad_()
    found = torch.autograd.grad(short_conv(bcx, weight, where).sum(), [bcx, *([weight] if trained else [])])
    expected = short_conv_backward(torch.ones(7, 8, device=device), bcx.detach(), weight.detach(), where)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=False) if other is not None)
