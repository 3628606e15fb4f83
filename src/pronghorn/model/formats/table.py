"""The storage formats of frozen weights, as rows: a format is a row here and a file in kernels/quant/, never a class test.

    bf16     as the checkpoint has it, in the compute dtype: 16 or 32 bits            method: lora, full
    nf4      4 bits in blocks of 64, scales quantized twice: bitsandbytes' bytes      method: qlora
    nvfp4    4 bits in blocks of 16, scales of two levels: ModelOpt's names           method: qlora with storage: nvfp4
    mxfp4    4 bits in blocks of 32 that share a power of two: gpt-oss's experts      method: qlora, for those
    fp8      e4m3 with a scale for each output channel: compressed-tensors' names     method: fp8

A row says how a weight is quantized, what a checkpoint holds of it under which names, and which products read it. The tensors
themselves (kernels/quant/stored.py) dequantize, move and know their bytes, also on torch's meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pronghorn.errors import EnvironmentFault, ModelError
from pronghorn.kernels.lora.fp8 import fp8_linear
from pronghorn.kernels.moe.grouped_fp8 import WIDTH_MULTIPLE
from pronghorn.kernels.quant.fp8_cast import FP8Tensor, fp8_quantize, fp8_supported
from pronghorn.kernels.quant.mxfp4 import MXFP4Tensor, mxfp4_quantize
from pronghorn.kernels.quant.nf4 import nf4_quantize
from pronghorn.kernels.quant.nf4_fp8 import nf4_fp8_scales, nf4_to_fp8
from pronghorn.kernels.quant.nvfp4 import BLOCK as NVFP4_BLOCK
from pronghorn.kernels.quant.nvfp4 import NVFP4Tensor, nvfp4_quantize
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.model.families import INPUT_PROJECTION
from pronghorn.model.formats.bitsandbytes import nf4_of_state, nf4_state
from pronghorn.model.heads import WHOLE

# Linears of Gated DeltaNet whose output is the exponent of a state's decay, or its step: 64 columns of 12,352 in Qwen3.5-9B.
GATES = ("in_proj_a", "in_proj_b", "in_proj_ba")
ROUTERS = ("gate", "wg", "proj")  # linears inside routers (AFMoE, HunYuan, Gemma 4): 16 bits hardly separate experts
Storage = Literal["bf16", "nf4", "nvfp4", "mxfp4", "fp8"]


class ToFp8(NamedTuple):
    """How FP8 bytes are made of the stored ones for a product, with no wide weight between."""

    scales: Callable[[Any], Tensor]  # scale_O, once
    cast: Callable[..., Tensor]  # (q, scale_O, out=) at each use


@dataclass(frozen=True)
class Format:
    name: Storage
    title: str  # in messages: stored in 4 bits
    # All of these of a weight [O, D]; `quantize` and `stack` also of experts [E, O, D]. None: the weight stays as it is.
    quantize: Callable[[Tensor], StoredTensor] | None = None
    # To and from what a checkpoint holds, by names under the linear's own. None: no linear is stored so.
    save: Callable[[Any], dict[str, Tensor]] | None = None
    read: Callable[[Mapping[str, Tensor], str], StoredTensor] | None = None
    stack: tuple[str, ...] = ()  # what follows a stack's name in a checkpoint that has experts stored so
    read_stack: Callable[..., StoredTensor] | None = None  # of those tensors, and the dtype
    published: str = ""  # whose checkpoints have weights in it, where those are read
    as_published: bool = False  # what is published in another format of as many bits keeps that
    wide: tuple[str, ...] = ("lm_head", *WHOLE, *GATES, *ROUTERS, INPUT_PROJECTION)  # linears that stay in the compute dtype
    in_fp8: bool = False  # products read the bytes themselves; else weights are dequantized for them
    product: Callable[[Tensor, Any, Tensor | None], Tensor | None] | None = None  # by itself, where it can; else dequantized
    to_fp8: ToFp8 | None = None  # for compute: fp8

    @cached_property
    def bytes_each(self) -> float:
        """Bytes per value, its share of the scales included."""
        like = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
        return (like.nbytes if self.quantize is None else self.quantize(like).nbytes) / like.numel()


def _nf4(weight: Tensor) -> StoredTensor:
    """A stack as one weight, experts one under the other."""
    return nf4_quantize(weight.contiguous().flatten(0, -2))


def _nvfp4(weight: Tensor) -> StoredTensor:
    if weight.shape[-1] % NVFP4_BLOCK:
        raise ModelError(
            what=f"a weight with rows of {weight.shape[-1]} values cannot be stored as NVFP4",
            why=f"{NVFP4_BLOCK} neighbouring values share a scale",
            fix="set storage: nf4",
        )
    return nvfp4_quantize(weight.contiguous().flatten(0, -2))


def _not_stored_as(format_: str, scales: str, where: str) -> ModelError:
    why = f"{scales} is missing, or the values are not bytes"
    return ModelError(what=f"the weight is not stored as {format_}", where=where, why=why, fix="use the 16-bit model")


def _nvfp4_state(q: NVFP4Tensor) -> dict[str, Tensor]:
    return {"weight": q.packed, "weight_scale": q.scales, "weight_scale_2": q.tensor_scale}


def _nvfp4_of_state(parts: Mapping[str, Tensor], where: str) -> NVFP4Tensor:
    weight = parts["weight"]
    if "weight_scale_2" not in parts or weight.dtype != torch.uint8:
        raise _not_stored_as("NVFP4", "weight_scale_2", where)
    shape = len(weight), 2 * weight.shape[1]
    return NVFP4Tensor(weight, parts["weight_scale"], parts["weight_scale_2"].float(), shape, torch.bfloat16)


def _fp8_state(q: FP8Tensor) -> dict[str, Tensor]:
    """In memory of its own, not a view of a group's matrix: safetensors wants it."""
    return {"weight": q.values.contiguous(), "weight_scale": q.scales[:, None]}


def _fp8_of_state(parts: Mapping[str, Tensor], where: str) -> FP8Tensor:
    if "weight_scale" not in parts or parts["weight"].itemsize != 1:
        raise _not_stored_as("FP8 with a scale for each row", "weight_scale", where)
    return FP8Tensor(parts["weight"].view(torch.uint8), parts["weight_scale"][:, 0].float(), torch.float32)


def _fp8_product(x: Tensor, q: FP8Tensor, bias: Tensor | None) -> Tensor | None:
    if x.is_cuda and not (x.dtype == torch.bfloat16 and fits_fp8(q.shape) and fp8_supported(x.device) is None):
        return None
    return fp8_linear(x, q.values, q.scales, bias)


def require_fp8(device: torch.device) -> None:
    """Before anything is loaded to be trained in FP8."""
    if why := fp8_supported(device):
        raise EnvironmentFault(
            what="this device cannot train in FP8",
            where=str(device),
            why=why,
            fix="set method: lora, or method: qlora if memory is short: both train on any GPU",
        )


def fits_fp8(shape: tuple[int, ...]) -> bool:
    """Whether a GPU's FP8 products take a weight of this shape."""
    return all(width % WIDTH_MULTIPLE == 0 for width in shape)


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("bf16", "16 bits"),
        Format(
            "nf4",
            "4 bits",
            _nf4,
            nf4_state,
            nf4_of_state,
            published="bitsandbytes' NF4",
            as_published=True,
            to_fp8=ToFp8(nf4_fp8_scales, nf4_to_fp8),
        ),
        Format("nvfp4", "4 bits", _nvfp4, _nvfp4_state, _nvfp4_of_state, published="ModelOpt's NVFP4"),
        Format(
            "mxfp4",
            "4 bits",
            lambda weight: mxfp4_quantize(weight.contiguous()),
            stack=("_blocks", "_scales"),
            read_stack=MXFP4Tensor,
            published="gpt-oss's MXFP4",
        ),
        # Routers that are linears stay wide, too: others are no linears.
        Format(
            "fp8",
            "FP8",
            fp8_quantize,
            _fp8_state,
            _fp8_of_state,
            wide=("lm_head", *WHOLE, *GATES, *ROUTERS, INPUT_PROJECTION, "shared_expert_gate"),
            in_fp8=True,
            product=_fp8_product,
        ),
    )
}


def format_of(stored: StoredTensor) -> Format:
    return FORMATS[stored.name]


def storage_of(module: nn.Module) -> Format | None:
    """The storage format of a linear or of experts; None where they are not quantized."""
    found = getattr(module, "storage", None)
    return found if isinstance(found, Format) else None
