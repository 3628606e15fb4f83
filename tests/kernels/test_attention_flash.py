"""flash-attn-4's backward in chunks of heads: every head is done once, where it belongs. Plain torch stands in for
the library, which needs its GPU; tests/kernels/test_attention.py runs the library itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pronghorn.kernels.attention import attention_flash
from pronghorn.kernels.attention.attention import gradients_in_place
from pronghorn.kernels.attention.attention_flash import Flash4
from pronghorn.kernels.attention.attention_torch import Computed, Packed, PlainTorch


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_do_what_one_does(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def backward(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *, dq: Any, dk: Any, dv: Any, **options: Any) -> Any:
        calls.append(q.shape[1])
        packed = Packed(options["cu_seqlens_q"], options["max_seqlen_q"], options["softmax_scale"])
        read = Computed(q.clone(), k.clone(), v.clone(), out, lse)  # all before it writes
        found = PlainTorch.backward(dout, read, packed, None)
        for target, grad in zip((dq, dk, dv), found[:3], strict=True):
            target.copy_(grad)
        return dq, dk, dv

    monkeypatch.setattr(attention_flash, "_flash4", lambda: (SimpleNamespace(_flash_attn_bwd=backward), None))
    monkeypatch.setattr(attention_flash, "MOST_SUMS", 4 * 7 * (8 + 2 * 4) * 16 // chunks)
    torch.manual_seed(0)
    packed = Packed(torch.tensor([0, 3, 7, 7], dtype=torch.int32), 4, 0.25)
    qkv, dout = torch.randn(7, 16 * 16 + 8, dtype=torch.float64), torch.randn(7, 8, 16, dtype=torch.float64)
    q, k, v = (part.unflatten(1, (n, 16)) for part, n in zip(qkv[:, :256].split([128, 64, 64], 1), (8, 4, 4), strict=True))
    out, lse = PlainTorch.forward(q, k, v, packed, None)
    truth = PlainTorch.backward(dout, Computed(q, k, v, out, lse), packed, None)
    found = Flash4.backward(dout, Computed(q, k, v, out, lse), packed, (q, k, v))  # in their place
    assert calls == [8 // chunks] * chunks
    for mine, theirs in zip(found[:3], truth[:3], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert found[0].data_ptr() == qkv.data_ptr()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (2, None), (None, 5.0)])
def test_plain_torch_writes_in_place(window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own kernel, and in blocks."""
    monkeypatch.setattr("pronghorn.kernels.attention.attention_torch.BLOCK_ROWS", 2)
    assert gradients_in_place("torch", 4, 2, 8)
    torch.manual_seed(0)
    packed = Packed(torch.tensor([0, 3, 9], dtype=torch.int32), 6, 0.25, window, softcap)
    q, k, v, dout = (torch.randn(9, n, 8, dtype=torch.float64) for n in (4, 2, 2, 4))
    out, lse = PlainTorch.forward(q, k, v, packed, None)
    truth = PlainTorch.backward(dout, Computed(q, k, v, out, lse), packed, None)
    found = PlainTorch.backward(dout, Computed(q, k, v, out, lse), packed, (q, k, v))
    for mine, theirs in zip(found[:3], truth[:3], strict=True):
        torch.testing.assert_close(mine, theirs)
