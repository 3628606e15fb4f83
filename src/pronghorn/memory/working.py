"""Bytes that come and go within a step, beside what layers keep (sizes.py): of a layer's forward and backward, and of the head.

Written down tensor by tensor as model/layers/layer.py and model/layers/mlp.py hold them; a test counts the bytes of layers of
an 8B model's size (on torch's `meta` device) and compares. T = tokens of a micro-batch, D = model width, F = MLP width,
`pieces` = turns in which the rows of an MLP are done where gate and up are computed again.

Backward goes on in the memory of what it has used: the gradient of gate and up takes their place, the activation that of its
gradient, and the gradient of the residual stream is one buffer all the way down. So a layer's backward holds most either in the
MLP (the activation's gradient beside gate and up) or in attention (gradients of its output and of q, k, v).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pronghorn.kernels.attention.attention_flash import backward_chunks
from pronghorn.kernels.lora.gated_lora_thin import COLUMNS as THIN_COLUMNS
from pronghorn.kernels.lora.gated_lora_thin import WIDTH as THIN_WIDTH
from pronghorn.kernels.loss.linear_cross_entropy import chunk_rows
from pronghorn.memory import fp8_moe_sizes, fp8_sizes, moe_sizes
from pronghorn.memory.sizes import FP32, FROM_ITS_INPUT, Job, Recompute, kept_bytes, kept_parts, unpacked_bytes

SMALLEST_PIECE = 2048  # rows: below, a product of the MLP does not fill the GPU any more
MOST_PIECES = 32
SUMS_PROGRAMS = 8  # partial sums of the adapters' gradients in the activation's backward (kernels/lora/gated_lora.py), at most


def pieces_worth_trying(job: Job) -> tuple[int, ...]:
    """Mixtures do their MLP at once: rows of a piece would be too few for most experts. So do FP8 layers that are trained
    themselves."""
    counts, pieces, at_once = [1], 2, job.shape.mixture is not None or (job.fp8 and job.method == "full")
    while pieces <= MOST_PIECES and job.capacity // pieces >= SMALLEST_PIECE and not at_once:
        counts.append(pieces)
        pieces *= 2
    return tuple(counts)


@dataclass(frozen=True)
class _Tensors:
    """Of so many rows, in bytes. `_ext`: with the extra columns that carry adapters."""

    d: int  # as wide as the model
    x1_ext: int  # input of q, k, v
    x2_ext: int  # input of gate and up
    gu_ext: int
    a_ext: int  # the activation
    da: int
    dh_ext: int  # gradient of the residual stream, as `down` reads it
    do: int
    dqkv_ext: int

    @classmethod
    def of(cls, job: Job, rows: int) -> _Tensors:
        s, g, e = job.shape, job.groups(), job.element
        D, F = s.width, s.mlp_width
        widths = (D, D + g["qkv"].extra, D + g["gate_up"].extra, 2 * F + g["gate_up"].extra, F + g["down"].extra, F,
                  D + g["down"].extra, s.out_width, s.qkv_width + g["qkv"].extra)
        return cls(*(rows * width * e for width in widths))


def _sizes(job: Job, pieces: int) -> tuple[dict[str, int], _Tensors, _Tensors]:
    """(what is kept by name, tensors of all rows, of a piece)"""
    return kept_parts(job), _Tensors.of(job, job.capacity), _Tensors.of(job, -(-job.capacity // pieces))


def forward_bytes(job: Job, recompute: Recompute, pieces: int = 1) -> int:
    """The most that a layer's forward holds beside what it will keep."""
    parts, whole, piece = _sizes(job, pieces)
    if job.shape.mixture:
        return sum(parts.values()) - kept_bytes(job, recompute) + _forward_of_experts(job) + unpacked_bytes(job)
    if recompute == "nothing" or pieces == 1:
        later_dropped = sum(parts.values()) - kept_bytes(job, recompute)
        in_fp8 = job.capacity * (job.shape.mlp_width + 3 * job.groups()["down"].extra) if job.fp8 else 0
        return later_dropped + max(whole.x2_ext, whole.a_ext + whole.d + in_fp8) + unpacked_bytes(job)
    if job.fp8:
        return fp8_sizes.forward_in_pieces(job, recompute, -(-job.capacity // pieces), parts) + unpacked_bytes(job)
    mlp = whole.d + piece.gu_ext + max(piece.x2_ext, piece.a_ext + (piece.d if "after_mlp" in job.shape.norms else 0))
    if recompute == "gate_up":
        return mlp + unpacked_bytes(job)
    heads, result = parts["qkv"] + parts.get("q, k", 0), parts["o"]
    if recompute == "layer":
        heads += parts["lse"]
    else:  # it stays
        result = 0
    attention = heads + max(whole.x1_ext, result + whole.d * (2 if "after_attention" in job.shape.norms else 1))
    return max(attention, mlp) + unpacked_bytes(job)


def working_bytes(job: Job, recompute: Recompute, pieces: int = 1) -> int:
    """The most that a layer's backward holds beside what is kept."""
    parts, whole, piece = _sizes(job, pieces)
    g, s = job.groups(), job.shape
    again = kept_bytes(job, "gate_up") - kept_bytes(job, recompute) if recompute in FROM_ITS_INPUT else 0
    if s.mixture:
        working = fp8_moe_sizes.working if job.fp8 else moe_sizes.working
        return again + working(job, recompute, parts, _sums_of_attention(job)) + unpacked_bytes(job)
    trained = max(group.weights for group in g.values()) * FP32 if job.method == "full" else 0
    if job.fp8 and pieces > 1 and recompute != "nothing":
        return unpacked_bytes(job) + fp8_sizes.working_in_pieces(job, recompute, -(-job.capacity // pieces),
                                                                 _sums_of_attention(job), parts)
    if job.fp8:
        return again + fp8_sizes.working(job, recompute, _sums_of_attention(job)) + unpacked_bytes(job) + trained
    one_buffer = g["down"].extra and g["down"].extra == g["out"].extra
    dh = whole.dh_ext if one_buffer else 3 * whole.d  # the gradient itself, and copies of it where it cannot be used in place
    if recompute in FROM_ITS_INPUT and pieces > 1:
        again -= parts.get("xa2", 0) + parts.get("y", 0)
    if recompute == "nothing":
        mlp = max(whole.da, whole.d)
    else:
        rows = piece if pieces > 1 else whole
        mlp = rows.gu_ext + max(rows.x2_ext, rows.da, rows.d)
    if "after_mlp" in s.norms:
        mlp += (piece if pieces > 1 and recompute != "nothing" else whole).a_ext
    if job.graphed and g["down"].extra:
        mlp += SUMS_PROGRAMS * job.rank * sum(g[name].adapters for name in ("gate_up", "down")) * s.mlp_width * FP32
    if recompute == "nothing" or pieces == 1:
        mlp += _thin_sums(job)
    mlp_is_done = parts["h2"] + parts.get("xa2", 0) + parts.get("y", 0)
    freed = parts["h2"] if recompute in FROM_ITS_INPUT else mlp_is_done + (parts["gu"] if recompute == "nothing" else 0)
    attention = whole.do + (0 if job.in_place else whole.dqkv_ext) + _sums_of_attention(job) - freed
    attention += whole.d if "after_attention" in s.norms else 0
    return again + dh + max(mlp, attention) + unpacked_bytes(job) + trained


def _thin_sums(job: Job) -> int:
    """What blocks of columns add to dgu sB in the activation's backward (gated_lora_thin.py), where it makes that."""
    gate_up = job.groups()["gate_up"]
    if not job.graphed or gate_up.adapters != 2 or job.rank > THIN_WIDTH // 2 or job.element != 2:
        return 0
    return job.capacity * -(-job.shape.mlp_width // THIN_COLUMNS) * (2 * THIN_WIDTH + 1)


def _forward_of_experts(job: Job) -> int:
    return fp8_moe_sizes.forward(job) if job.fp8 else moe_sizes.forward(job)


def _sums_of_attention(job: Job) -> int:
    """Our kernel for short documents keeps two numbers a row; the flash kernels add up dq, dk, dv in fp32, with 128 rows more
    for each document; flash-attn-4 of some heads at a time."""
    s, T = job.shape, job.capacity
    if job.attends_itself:
        return T * s.heads * 2 * FP32
    sums = (T + 128 * job.entries) * (s.heads + 2 * s.kv_heads) * s.head_width * FP32
    return -(-sums // backward_chunks(T, s.heads, s.kv_heads, s.head_width)) if job.in_place else sums


def top_bytes(job: Job, recompute: Recompute, pieces: int = 1) -> int:
    """What the last layer's backward holds more than another's, where only some rows have a loss: copies of those."""
    s, g, e = job.shape, job.groups(), job.element
    if job.rows == job.capacity:
        return 0
    if not g["down"].extra:
        copies = 0  # where nothing can be used in place, every layer makes them
    elif pieces > 1 and recompute != "nothing":
        copies = job.rows * (s.width + g["out"].extra) + -(-job.rows // pieces) * (s.width + g["down"].extra)
    else:
        copies = job.rows * (s.width + g["down"].extra)
    return (copies + job.rows * (s.out_width + g["out"].extra + s.width)) * e


def head_bytes(job: Job, pieces: int = 1) -> int:
    """The head: the residual stream, its norm and its gradient, and a chunk of logits; beside them the memory that a layer's
    weights are made ready in, which stays."""
    s, rows, e = job.shape, job.rows, job.element
    dtype = torch.bfloat16 if e == 2 else torch.float32
    chunk = chunk_rows(rows, s.vocabulary, dtype, torch.device("cuda"), head_share(pieces))
    trained = s.vocabulary * s.width * (FP32 + (e if e < FP32 else 0)) if job.method == "full" else 0
    return rows * 3 * s.width * e + chunk * -(-s.vocabulary // 64) * 64 * e + trained + unpacked_bytes(job)


def head_share(pieces: int) -> int:
    """Into how many parts the logits' usual chunk is cut. It is no larger than a layer's work up to four pieces."""
    return max(1, pieces // 4)


def evaluation_bytes(job: Job, tokens: int) -> int:
    """The most that the loss of a pack of so many tokens takes without gradients, beside the weights."""
    small = replace(job.with_capacity(tokens), loss_rows=0)
    layer = kept_bytes(small, "nothing") + tokens * (small.shape.mlp_width + 3 * small.shape.width) * job.element
    if small.shape.mixture:
        layer = kept_bytes(small, "nothing") + _forward_of_experts(small)
    return max(layer + unpacked_bytes(job), head_bytes(small))
