"""Bytes of layers with experts in FP8 (model/layers/moe.py), where they differ from those of moe_sizes.py and fp8_sizes.py.

T = tokens of a micro-batch, D = model width, K = experts a token, S = T * K rows sorted by expert, F = width of an expert,
R = columns that carry a stack's adapters, e = bytes of a 16- or 32-bit value. An FP8 value is a byte. Scales of rows, a
thousandth of them, are left out.

Attention and a shared expert are a dense FP8 layer's, the router and the shared expert's gate any mixture's. To multiply the
other way a stack is turned round in memory that all layers share, as large as the largest one. What a layer keeps is what
moe_sizes.py says: it is in 16 bits. Rows on their way through the experts are there in FP8 as well, while they are multiplied;
the gradient of each row's result is there in 16 bits only where an adapter needs it. Gradients of the residual stream do not
take each other's place: there is the one that came in, and the one that goes on. The formulas are compared with every
allocation of layers of real size. A chip that multiplies the same bytes in 16 bits (model/experts.py) holds less than they say:
no stack is turned round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pronghorn.kernels.quant.fp8_cast import fp8_pitch
from pronghorn.memory import fp8_sizes
from pronghorn.memory.moe_sizes import gradients, logit_bytes, of_the_mlp, stacks, turned_gradient

if TYPE_CHECKING:
    from pronghorn.memory.sizes import Job, Recompute


def shared(job: Job) -> int:
    """What all layers share: where the largest stack, or group of linears, is turned round."""
    linears = [group for name, group in job.groups().items() if group.outputs and name != "shared_gate"]
    return max(fp8_sizes.shared(linears, in_4_bits=False), *(stack.weights for stack in stacks(job)))


def forward(job: Job) -> int:
    """The most that a layer's forward holds beside all that could be kept: in the product with down, whose rows are there in
    FP8, too; or behind it, in the shared expert, or where the tokens' rows are added up."""
    s, m, T, e = job.shape, job.shape.mixture, job.capacity, job.element
    assert m is not None
    S, D, down = T * m.chosen, s.width, stacks(job)[1]
    moments = [S * m.width, T * D * e]
    if s.mlp_width:
        activation = s.mlp_width * e + fp8_pitch(s.mlp_width + 3 * job.groups()["down"].extra)
        moments += [T * (activation + D * e), 3 * T * D * e]
    return S * (m.width + down.extra + D) * e + max(moments)


def working(job: Job, recompute: Recompute, parts: dict[str, int], sums: int) -> int:
    """The most that a layer's backward holds beside what is kept, shared, and computed again from its input. `parts`: of what
    it could keep. `sums`: of attention."""
    dh, gu = job.capacity * job.shape.width * job.element, parts["gu"]
    fresh = gu if recompute != "nothing" else 0
    return fresh + dh + max(_in_experts(job, gu), _in_attention(job, sums) - of_the_mlp(parts))


def _in_experts(job: Job, gu: int) -> int:
    """Where the backward of the MLP holds most, beside what was kept and the gradient that came in."""
    s, m, T, e = job.shape, job.shape.mixture, job.capacity, job.element
    assert m is not None
    S, D, F, (up, down) = T * m.chosen, s.width, m.width, stacks(job)
    d, da = T * D * e, S * F * e
    dy = S * (D + down.extra) * e if down.extra else 0  # in 16 bits
    own_a = S * (F + down.extra) * e if down.extra else 0  # else the activation takes its gradient's place
    own_dgu = S * (2 * F + up.extra) * e if up.extra else 0  # else it takes gate and up's place
    gu_goes = gu if own_dgu else 0
    through = dy + da + own_a + own_dgu
    moments = [dy + S * D + da, through, through - gu_goes + gradients(down, job) + turned_gradient(down, job)]
    after = own_dgu - gu_goes + gradients(down, job) + d + T * m.experts * logit_bytes(job)  # dx2, dlogits
    if s.mlp_width:
        dgu8 = fp8_pitch(2 * s.mlp_width + 3 * job.groups()["gate_up"].extra)
        moments.append(after + T * (s.mlp_width * e + dgu8) + d)
        after += d  # the shared expert's part of dx2
    moments.append(after + S * (2 * F + D * e))
    if up.rank:
        moments.append(after + d + S * (D + up.extra) * e + gradients(up, job) + turned_gradient(up, job))
    return max(moments)


def _in_attention(job: Job, sums: int) -> int:
    """The same of attention's backward, if all of the MLP were still there."""
    s, grads = job.shape, sum(gradients(stack, job) for stack in stacks(job))
    return grads + job.capacity * (s.width + s.out_width + s.qkv_width) * job.element + sums
