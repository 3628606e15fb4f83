"""QK-norm and rotary positions: error against float64 truth at most twice plain torch's, on both paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.attention.rope import qk_rope, qk_rope_backward, qk_rope_forward, qk_rope_reference
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# heads, key heads, head width, rotary width: whole and partial rotary, powers of two and not, one head, many tiles of heads.
SHAPES = [(4, 2, 64, 64), (3, 1, 96, 96), (5, 5, 80, 32), (20, 3, 128, 128), (1, 1, 64, 24)]
NORMS = [None, "per_head", "full", "after_rope"]
# (shape, dtype, neighbours, norm): every pair of values of any two of the four, in 20 cases instead of 120. The interpreter
# takes 20 ms a program, and on a GPU every combination of constants is a compilation (of two to eight kernels).
CASES = [(shape, DTYPES[(i + j) % 3], (i + j) % 2 == 1, norm) for i, shape in enumerate(SHAPES) for j, norm in enumerate(NORMS)]


def angles(T: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed positions: they start again in the middle."""
    positions = torch.arange(T, device=device) % max(1, T // 2 + 1)
    turns = positions[:, None] * 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    return turns.cos().float() * 1.1, turns.sin().float() * 1.1  # YaRN's factor is in cos and sin


def case(T: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, norm: str | None) -> dict[str, Any]:
    heads, kv_heads, head_width, rotary = shape
    width = (heads + 2 * kv_heads) * head_width
    buffer = torch.full((T, width + 16), float("nan"), dtype=dtype, device=device)
    buffer[:, :width] = torch.randn(T, width, device=device)
    cos, sin = angles(T, rotary, device)
    given: dict[str, Any] = {"qkv_TX": buffer[:, :width], "cos_TP": cos, "sin_TP": sin}
    given |= {"heads": heads, "kv_heads": kv_heads, "head_width": head_width}
    if norm is not None:
        sizes = (head_width, head_width) if norm != "full" else (heads * head_width, kv_heads * head_width)
        weights = [torch.randn(size, device=device).to(dtype) for size in sizes]
        given |= {"q_norm_H": weights[0], "k_norm_H": weights[1], "norm_kind": norm, "eps": 1e-5}
    return given


def truth_and_plain(given: dict[str, Any], grads: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """[q, k, v, dqkv, dq_norm, dk_norm] by autograd over the reference, in float64 and in the inputs' dtype."""
    results = []
    for dtype in (torch.float64, given["qkv_TX"].dtype):
        names = [name for name in ("qkv_TX", "q_norm_H", "k_norm_H") if name in given]
        leaves = {name: given[name].detach().to(dtype).requires_grad_() for name in names}
        outputs = qk_rope_reference(**(given | leaves))
        found = torch.autograd.grad(outputs, list(leaves.values()), [grad.to(dtype) for grad in grads])
        results.append([*(output.detach() for output in outputs), *found])
    return results


def backward_of(given: dict[str, Any], grads: list[torch.Tensor], rstd: torch.Tensor | None, **more: Any) -> Any:
    kept = {k: v for k, v in given.items() if k in {"neighbours", "q_norm_H", "k_norm_H", "norm_kind", "one_plus", "qkv_TX"}}
    return qk_rope_backward(*grads, given["cos_TP"], given["sin_TP"], rstd=rstd, **kept, **more)


@table(("shape", "dtype", "neighbours", "norm"), CASES)
def test_forward_and_backward_are_as_good_as_plain_torch(
    device: str, judge: Judge, shape: tuple[int, int, int, int], dtype: torch.dtype, neighbours: bool,
    norm: str | None,
) -> None:  # fmt: skip
    compiled = device == "cuda" or not use_triton(torch.empty(1))
    T = {4: 1000, 20: 127}.get(shape[0], 3) if compiled else 2
    T = 2001 if device == "cuda" and shape[0] == 20 else T  # each program of the weight gradient takes several tokens
    given = case(T, shape, dtype, device, norm) | {"neighbours": neighbours, "one_plus": neighbours}
    heads, kv_heads, head_width, _ = shape
    grads = [torch.randn(T, n, head_width, dtype=dtype, device=device) for n in (heads, kv_heads, kv_heads)]
    truth, plain = truth_and_plain(given, grads)

    q, k, v, rstd = qk_rope_forward(**given)
    assert v.untyped_storage().data_ptr() == given["qkv_TX"].untyped_storage().data_ptr(), "v is a view"
    width = (heads + 2 * kv_heads) * head_width
    buffer = torch.full((T, width + 8), float("nan"), dtype=dtype, device=device)
    dqkv, *norm_grads = backward_of(given, grads, rstd, need_norm_grad=norm is not None, out=buffer[:, :width])
    assert torch.isnan(buffer[:, width:]).all(), "wrote beyond the row"
    found = [q, k, v, dqkv, *(grad.to(dtype) for grad in norm_grads if grad is not None)]
    for name, ours, true, theirs in zip(("q", "k", "v", "dqkv", "dq_norm", "dk_norm"), found, truth, plain, strict=False):
        judge(ours, theirs, true, name)
    assert len(found) == len(truth)
    without, *nothing = backward_of(given, grads, rstd)  # another tile and no loop: the last bit may differ on a GPU
    assert nothing == [None, None]
    judge(without, plain[3], truth[3], "dqkv without the norms' gradients")


@table(("shape", "dtype", "neighbours"), [((3, 1, 64, 16), torch.bfloat16, False), ((5, 2, 24, 24), torch.float32, True)])
def test_gates_beside_the_queries_are_left_alone(
    device: str, shape: tuple[int, int, int, int], dtype: torch.dtype, neighbours: bool
) -> None:
    """The bits of the same heads without gates, whose columns, and the columns of their gradients, are neither read nor
    written."""
    heads, kv_heads, width, _ = shape
    given = case(3, shape, dtype, device, "per_head") | {"neighbours": neighbours}
    gated = torch.full((3, (2 * heads + 2 * kv_heads) * width), float("nan"), dtype=dtype, device=device)
    q, kv = gated[:, : 2 * heads * width].unflatten(1, (heads, 2 * width))[..., :width], gated[:, 2 * heads * width :]
    q.copy_(given["qkv_TX"][:, : heads * width].unflatten(1, (heads, width)))
    kv.copy_(given["qkv_TX"][:, heads * width :])
    plain, found = qk_rope_forward(**given), qk_rope_forward(**(given | {"qkv_TX": gated}))
    assert all(
        torch.equal(one, other) for one, other in zip(plain, found, strict=True) if one is not None and other is not None
    )
    grads, out = [torch.randn_like(part) for part in plain[:3]], torch.full_like(gated, float("nan"))
    dqkv, *of_norms = backward_of(given, grads, plain[3], need_norm_grad=True)
    _, *found_norms = backward_of(given | {"qkv_TX": gated}, grads, plain[3], need_norm_grad=True, out=out)
    assert all(map(torch.equal, of_norms, found_norms))
    of_q = out[:, : 2 * heads * width].unflatten(1, (heads, 2 * width))
    assert of_q[..., width:].isnan().all()
    assert torch.equal(torch.cat([of_q[..., :width].flatten(1), out[:, 2 * heads * width :]], 1), dqkv)
    assert not backward_of(given | {"qkv_TX": gated}, grads, plain[3])[0].isnan().any()  # zeros
    with pytest.raises(ValueError, match="gates"):
        qk_rope_forward(**{**case(3, shape, dtype, device, None), "qkv_TX": gated}, in_place=True)


@table(
    ("shape", "neighbours"),
    [((4, 2, 64, 64), False), ((4, 2, 64, 64), True), ((5, 5, 80, 32), False), ((5, 5, 80, 32), True)][
        :: 3 if torch.cuda.is_available() else 1
    ],
)
def test_in_place_is_the_same(device: str, shape: tuple[int, int, int, int], neighbours: bool) -> None:
    given = case(5, shape, torch.float32, device, None) | {"neighbours": neighbours}
    raw = given["qkv_TX"].clone()
    q, k, v, rstd = qk_rope_forward(**given)
    assert rstd is None
    torch.testing.assert_close(given["qkv_TX"], raw, rtol=0, atol=0)
    q_in, k_in, v_in, _ = qk_rope_forward(**given, in_place=True)
    assert q_in.data_ptr() == given["qkv_TX"].data_ptr()
    for ours, expected in ((q_in, q), (k_in, k), (v_in, v)):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    grads = [torch.randn_like(x) for x in (q, k, v)]
    expected, _, _ = backward_of(given, grads, None)
    row = torch.cat([grad.flatten(1) for grad in grads], dim=1)
    parts = [part.unflatten(1, (-1, shape[2])) for part in row.split([grad[0].numel() for grad in grads], dim=1)]
    got, _, _ = backward_of(given, parts, None, out=row)
    assert got is row
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_rows_without_values_are_the_same_without_them(device: str) -> None:
    """Keys that are values, too (Gemma 4): the projection has no columns for values."""
    given, width = case(5, (4, 2, 64, 64), torch.float32, device, "per_head"), 6 * 64
    q, k, v, rstd = qk_rope_forward(**given)
    short = given | {"qkv_TX": given["qkv_TX"][:, :width]}
    found = qk_rope_forward(**short)
    assert found[2].shape == (5, 0, 64)
    grads = [torch.randn_like(x) for x in (q, k, v)]
    dqkv, *norm_grads = backward_of(given, grads, rstd, need_norm_grad=True)
    dqk, *found_grads = backward_of(short, [*grads[:2], found[2]], rstd, need_norm_grad=True)
    pairs = [(found[0], q), (found[1], k), (found[3], rstd), (dqk, dqkv[:, :width]), *zip(found_grads, norm_grads, strict=True)]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_queries_alone_are_the_same_without_keys(device: str) -> None:
    """Keys of an earlier layer (Gemma 4's E2B): the projection has columns for queries only."""
    given, width = case(5, (3, 1, 64, 64), torch.float32, device, "per_head"), 3 * 64
    q, k, v, rstd = qk_rope_forward(**given)
    alone = given | {"qkv_TX": given["qkv_TX"][:, :width], "kv_heads": 0}
    found = qk_rope_forward(**alone)
    grads = [torch.randn_like(x) for x in (q, k, v)]
    dqkv, dq_norm, _ = backward_of(given, grads, rstd, need_norm_grad=True)
    dq, found_norm, _ = backward_of(alone, [grads[0], *found[1:3]], found[3], need_norm_grad=True)
    assert found[1].shape == found[2].shape == (5, 0, 64)
    for ours, expected in ((found[0], q), (found[3], rstd[:, :3]), (dq, dqkv[:, :width]), (found_norm, dq_norm)):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@table("norm", NORMS)
def test_autograd_gives_the_gradients_of_the_reference(device: str, norm: str | None) -> None:
    given = case(4, (5, 5, 80, 32), torch.float32, device, norm)
    grads = []
    for function in (qk_rope, qk_rope_reference):
        leaves = {name: t.clone().requires_grad_() for name, t in given.items() if name in {"qkv_TX", "q_norm_H", "k_norm_H"}}
        q, k, v = function(**(given | leaves))
        (q.sin().sum() + (k * k).sum() + v.cos().sum()).backward()
        grads.append([leaf.grad for leaf in leaves.values()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_norm_gradients_are_the_same_every_time(device: str) -> None:
    given = case(13, (4, 2, 64, 64), torch.float32, device, "per_head")  # more tokens than the interpreter's grid has lanes
    q, k, v, rstd = qk_rope_forward(**given)
    grads = [torch.randn_like(x) for x in (q, k, v)]
    first, second = (backward_of(given, grads, rstd, need_norm_grad=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
