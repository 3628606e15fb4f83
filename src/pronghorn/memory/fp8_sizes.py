"""Bytes of layers that multiply in FP8 (model/layers/fp8_linears.py), where they differ from those of sizes.py.

O, D = outputs and inputs of a group, R = its adapters' ranks together, to the next 16, E = 3R columns and rows that carry them
in the group's matrix (fp8.py); T = tokens of a micro-batch, e = bytes of a 16- or 32-bit value. An FP8 value is a byte.
"_in_pieces": with the MLP's rows done in several turns, of `rows` each (model/layers/mlp.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pronghorn.kernels.quant.fp8_cast import fp8_pitch

if TYPE_CHECKING:
    from pronghorn.memory.sizes import Group, Job, Recompute

FP32 = 4
RANK_MULTIPLE = 16  # kernels/lora/fp8.py


def matrix(group: Group) -> int:
    """Weights and adapters as one operand; a single weight without adapters is one by itself."""
    E, single = 3 * group.extra, len(group.outputs) == 1 and not group.extra
    return (sum(group.outputs) + E) * (group.inputs if single else fp8_pitch(group.inputs + E))


def adapter_parts(group: Group, element: int) -> int:
    """A and sB in 16 bits, and how their FP8 columns are scaled."""
    return group.extra * (group.inputs + sum(group.outputs)) * element + 2 * FP32 * (group.extra + 1)


def stored(group: Group, element: int) -> int:
    """Weights in FP8: the matrix, a scale a channel of the module and another of the group."""
    return matrix(group) + 2 * FP32 * sum(group.outputs) + adapter_parts(group, element)


def beside_4_bits(group: Group, element: int) -> int:
    """Weights in 4 bits, whose matrix is made for each use: a scale a channel, and the adapters' FP8 columns and rows."""
    columns = 3 * group.extra * (group.inputs + sum(group.outputs))
    return FP32 * sum(group.outputs) + adapter_parts(group, element) + columns


def trained(group: Group) -> int:
    """Weights that are trained, rounded to FP8, beside themselves."""
    return matrix(group) + FP32 * sum(group.outputs)


def shared(groups: Iterable[Group], *, in_4_bits: bool) -> int:
    """What all layers share: the largest matrix turned round for the input's gradient; and a matrix for each kind of group."""
    found = list(groups)
    turned = max(group.inputs * fp8_pitch(sum(group.outputs) + 3 * group.extra) for group in found)
    return turned + (sum(matrix(group) for group in found) if in_4_bits else 0)


def working(job: Job, recompute: Recompute, sums: int) -> int:
    """The most that a layer's backward holds beside what is kept and shared. Gradients take the place of gate and up, which are
    free again when attention begins; what a product reads is there in FP8 as well, until it is done. `sums`: of attention."""
    s, T, e, g = job.shape, job.capacity, job.element, job.groups()
    D, F, grad = s.width, s.mlp_width, fp8_pitch(2 * s.mlp_width + 3 * g["gate_up"].extra)
    copies = 2 if "after_mlp" in s.norms else 1  # a norm's gradient needs rows of its own
    ranks = sum(group.extra for group in g.values()) * e
    again = 0 if recompute == "nothing" else 2 * F * e
    activation = again + (copies * D + F) * e + grad  # dh3, da, the gradient of gate and up in FP8
    behind = again + 3 * D * e + grad  # dh3, dx2, dh2
    attention = (2 * D + s.out_width + s.qkv_width) * e - (2 * F * e if recompute == "nothing" else 0)
    return T * ranks + max(T * activation, T * behind, T * attention + sums)


def _input(group: Group) -> int:
    """Bytes of a row of its input in FP8."""
    return fp8_pitch(group.inputs + 3 * group.extra)


def _grad(group: Group) -> int:
    """Bytes of a row of its output's gradient in FP8."""
    return fp8_pitch(sum(group.outputs) + 3 * group.extra)


def forward_in_pieces(job: Job, recompute: Recompute, rows: int, parts: dict[str, int]) -> int:
    """The most that a layer's forward holds beside what it will keep and what is shared. `parts`: of what it could keep."""
    s, T, e, g = job.shape, job.capacity, job.element, job.groups()
    D, F, o8 = s.width * e, s.mlp_width * e, _input(g["out"])
    ranks = T * sum(group.extra for group in g.values()) * e
    mlp = rows * (2 * F + max(D + _input(g["gate_up"]), F + _input(g["down"])))
    if recompute == "gate_up":
        branch = D if "after_mlp" in s.norms else 0  # kept; not there yet of the last piece, then twice, to be one tensor
        return ranks + max(T * D + max(mlp - rows * branch, T * branch), T * o8)
    heads = parts["qkv"] + parts.get("q, k", 0) + (parts["lse"] if recompute == "layer" else 0)
    result = s.out_width * e if recompute == "layer" else 0  # attention's, else it stays
    branch = max(o8 + D, 2 * D if "after_attention" in s.norms else 0)
    return ranks + parts["rstd"] + max(T * D + mlp, heads + T * max(D + _input(g["qkv"]), result + branch))


def working_in_pieces(job: Job, recompute: Recompute, rows: int, sums: int, parts: dict[str, int]) -> int:
    """As `working`, with what is computed again from the layer's input. The gradient of h2 takes the place of that of h3;
    attention begins without h2 and the MLP's output, and what it kept is free before the norm of its input has its turn."""
    s, T, e, g = job.shape, job.capacity, job.element, job.groups()
    D, F, X, dgu8 = s.width * e, s.mlp_width * e, s.qkv_width * e, _grad(g["gate_up"])
    norm_of_mlp, norm_of_attention = (D if slot in s.norms else 0 for slot in ("after_mlp", "after_attention"))
    attended = sum(parts.get(name, 0) for name in ("qkv", "q, k", "lse", "o"))
    again = attended + parts["h2"] + parts["rstd"] + T * norm_of_attention if recompute != "gate_up" else 0
    again -= parts["o"] + parts["lse"] if recompute == "around_attention" else 0
    branch = norm_of_mlp if recompute != "gate_up" else 0  # the MLP's output, once more, for its norm
    freed = parts["h2"] + T * (norm_of_mlp - branch)
    gate_up = max(D + _input(g["gate_up"]), branch and branch + max(F + _input(g["down"]), D))
    back = branch + max(norm_of_mlp + F + max(dgu8, _grad(g["down"])), dgu8 + D)
    mlp = rows * (2 * F + max(gate_up, back))
    attention = T * (s.out_width * e + norm_of_attention + max(X, _grad(g["out"]))) + sums
    behind = T * (X + D + max(D, _grad(g["qkv"]))) - attended
    ranks = T * sum(group.extra for group in g.values()) * e
    return again + ranks + T * D + max(mlp, T * _input(g["out"]), max(attention, behind) - freed)
