"""What compile_matrix.py launches beside whole training steps: conversions, a step of decoding, layers with states."""

from __future__ import annotations

import torch

from pronghorn.generation.sampling import Rules, draw
from pronghorn.kernels.attention.attention_paged import MEMBERS, PAGE, Segments, paged_attention, write_pages
from pronghorn.kernels.attention.attention_shared import shared_spans
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.conv.shared_prompts import shared_prompts
from pronghorn.kernels.delta.delta_chunks import chunk_table
from pronghorn.kernels.delta.delta_gates import delta_gates_backward, delta_gates_forward
from pronghorn.kernels.delta.delta_inputs import Heads, delta_inputs_backward, delta_inputs_forward
from pronghorn.kernels.delta.delta_rule import delta_rule_backward, delta_rule_forward
from pronghorn.kernels.delta.delta_step import delta_step
from pronghorn.kernels.delta.gated_norm import gated_norm_backward, gated_norm_forward
from pronghorn.kernels.lora.nf4_rows import NF4Rows
from pronghorn.kernels.quant.fp8_cast import fp8_cast_rows, fp8_supported
from pronghorn.kernels.quant.mxfp4 import mxfp4_dequantize, mxfp4_quantize
from pronghorn.kernels.quant.nf4 import nf4_dequantize, nf4_quantize
from pronghorn.kernels.quant.nvfp4 import nvfp4_dequantize, nvfp4_quantize


def convert() -> None:
    """Formats that exports and tools read and write, and rows in FP8 that are too wide for registers."""
    weight = torch.empty(256, 4096, dtype=torch.bfloat16)
    nf4_dequantize(nf4_quantize(weight))
    mxfp4_dequantize(mxfp4_quantize(weight[None]))
    nvfp4_dequantize(nvfp4_quantize(weight))
    if fp8_supported("cpu") is None:
        fp8_cast_rows(torch.empty(64, 28672, dtype=torch.bfloat16))


def decode() -> None:
    """What a step of decoding launches that training does not."""
    for dtype, width, window in (
        (torch.bfloat16, 128, None),
        (torch.bfloat16, 64, 128),
        (torch.bfloat16, 512, None),
        (torch.float32, 512, None),
    ):
        pages = torch.empty(8, 8, PAGE, width, dtype=dtype)
        q_BNH, position_B = torch.empty(16, 32, width, dtype=dtype), torch.zeros(16, dtype=torch.int32)
        parts = [
            Segments(*(torch.zeros(size, dtype=torch.int32) for size in ((rows, 4), rows, rows, (rows, members))))
            for rows, members in ((2, MEMBERS), (16, 1))
        ]
        write_pages(pages, pages, torch.zeros(16, dtype=torch.int64), q_BNH[:, :8], q_BNH[:, :8])
        paged_attention(q_BNH, pages, pages, parts, position_B, scale=1.0, window=window, out=torch.empty_like(q_BNH))
    weight = nf4_quantize(torch.empty(1024, 4096, dtype=torch.bfloat16))
    for rows in (16, 64):
        x_ext, sB = torch.empty(rows, 4096 + 64, dtype=torch.bfloat16), torch.empty(1024, 64, dtype=torch.bfloat16)
        NF4Rows([weight])(x_ext, sB, h_BO=x_ext[:, :1024])
    key_B = torch.zeros(16, dtype=torch.int64)
    for truncates in (False, True):
        draw(torch.empty(16, 128256), Rules.empty(16, key_B.device), key_B, key_B, truncates=truncates)


def delta_net() -> None:
    """The kernels of Gated DeltaNet with the heads of Qwen3.5-9B, in training, of pairs with shared prompts too, and in
    decoding."""
    T, heads, dtype = 2048, Heads(16, 128, 32, 128), torch.bfloat16
    _, K, N, V = heads
    bounds = torch.tensor([*range(0, T, 125), T], dtype=torch.int32)
    where, chunks = spans(bounds, T), chunk_table(bounds, T)
    qkv, taps = torch.empty(T, heads.columns, dtype=dtype), torch.empty(heads.columns, 4, dtype=dtype)
    a_TN, per_head = torch.empty(T, N, dtype=dtype), torch.empty(N)
    prompts = torch.tensor([-1, 0, 0] * 5 + [-1, -1], dtype=torch.int32)
    where_shared = shared_spans(bounds, prompts, T)
    shared = shared_prompts(bounds, prompts, where_shared.prefix_2T)
    q, k, v = delta_inputs_forward(qkv, taps, where, heads)
    delta_inputs_forward(qkv, taps, where_shared.spans_2T, heads, None, shared)
    g, beta = delta_gates_forward(a_TN, a_TN, per_head, per_head)
    states, place = torch.empty(len(bounds) - 1, N, K, V), torch.arange(len(bounds) - 1, dtype=torch.int32)
    delta_rule_forward(q, k, v, g, beta, chunks, bounds, initial=states, final=states, places=place)
    o, R = delta_rule_forward(q, k, v, g, beta, chunks, bounds)
    delta_rule_backward(o, q, k, v, g, beta, R, chunks, bounds)
    delta_rule_forward(q, k, v, g, beta, chunks, bounds, shared=shared)
    delta_rule_backward(o, q, k, v, g, beta, R, chunks, bounds, shared=shared)
    z, weight = v.flatten(1), taps[:V, 0].contiguous()
    gated_norm_forward(o, z, weight, 1e-6)
    for trained in (False, True):
        gated_norm_backward(z, o, z, weight, 1e-6, need_weight=trained)
        delta_gates_backward(g, beta, a_TN, a_TN, per_head, per_head, need_weights=trained)
        delta_inputs_backward(q, k, v, qkv, taps, where, heads, need_taps=trained)
        delta_inputs_backward(q, k, v, qkv, taps, where_shared.spans_2T, heads, None, shared, need_taps=trained)
    delta_step(q[:16], k[:16], v[:16], g[:16], beta[:16], states, place)


def mamba() -> None:
    """What Mamba-2 launches in answering, with the heads of Nemotron 3 Nano: states that are handed on, and a step."""
    T, (J, K, N, V), dtype = 2048, Heads(8, 128, 64, 64), torch.bfloat16
    bounds = torch.tensor([*range(0, T, 125), T], dtype=torch.int32)
    B_TJK, u_TNV = torch.empty(T, J, K, dtype=dtype), torch.empty(T, N, V, dtype=dtype)
    g, skip = torch.empty(T, N), torch.empty(N)
    states, place = torch.empty(len(bounds) - 1, N, K, V), torch.arange(len(bounds) - 1, dtype=torch.int32)
    where = {"initial": states, "final": states, "places": place}
    delta_rule_forward(B_TJK, B_TJK, u_TNV, g, g, chunk_table(bounds, T), bounds, skip_N=skip, **where)
    delta_step(B_TJK[:16], B_TJK[:16], u_TNV[:16], g[:16], g[:16], states, place, skip)
