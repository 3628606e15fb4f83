"""NF4 as bitsandbytes' `Linear4bit` has it in a checkpoint: names and bytes.

weight  weight.absmax  weight.quant_map  weight.nested_absmax  weight.nested_quant_map  weight.quant_state.bitsandbytes__nf4
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.kernels.quant.nf4 import BLOCK, NESTED_BLOCK, NF4Tensor, dynamic_code, nf4_code

STATE = "weight.quant_state.bitsandbytes__"
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INSTEAD = "use the 16-bit model with method: qlora"


def nf4_state(q: NF4Tensor) -> dict[str, Tensor]:
    facts: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": str(q.dtype).removeprefix("torch."),
                             "shape": list(q.shape)}  # fmt: skip
    parts = {"weight": q.packed, "weight.absmax": q.absmax, "weight.quant_map": q.code.clone()}
    if q.nested_absmax is not None and q.nested_code is not None and q.offset is not None:
        facts |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(q.offset)}
        parts |= {
            "weight.nested_absmax": q.nested_absmax,
            "weight.nested_quant_map": q.nested_code.clone(),
        }  # not shared: safetensors
    parts[f"{STATE}nf4"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    return parts


def nf4_of_state(parts: Mapping[str, Tensor], where: str) -> NF4Tensor:
    """The weight from what a checkpoint holds, refused where it is another 4-bit format."""
    kinds = [name.removeprefix(STATE) for name in parts if name.startswith(STATE)]
    if kinds != ["nf4"]:
        raise ModelError(
            what=f"the weight is stored as {kinds[0] if kinds else 'something'}, not as nf4",
            where=where,
            why="NF4 is the only supported 4-bit format",
            fix=INSTEAD,
        )
    facts = json.loads(bytes(parts[f"{STATE}nf4"].cpu().tolist()))
    if facts["blocksize"] != BLOCK or facts.get("nested_blocksize", NESTED_BLOCK) != NESTED_BLOCK:
        raise ModelError(
            what=f"the weight is quantized in blocks of {facts['blocksize']}",
            where=where,
            why=f"only blocks of {BLOCK} are supported",
            fix=INSTEAD,
        )
    if not torch.equal(parts["weight.quant_map"].float().cpu(), nf4_code()):
        raise ModelError(
            what="the weight's code table is not NF4's", where=where, why="it would be dequantized wrongly", fix=INSTEAD
        )
    packed, (rows, columns) = parts["weight"], facts["shape"]
    device = packed.device
    if packed.dtype != torch.uint8:  # bnb_4bit_quant_storage: the same bytes under another name
        packed = packed.contiguous().view(torch.uint8)
    packed, absmax = packed.reshape(-1, 1), parts["weight.absmax"].to(device)
    if packed.numel() != (rows * columns + 1) // 2 or absmax.numel() != -(-rows * columns // BLOCK):
        raise ModelError(
            what=f"the weight's bytes do not match its shape {rows} x {columns}",
            where=where,
            why="the file is damaged or comes from a different version",
            fix="download the model's files again",
        )
    nested: dict[str, Tensor] = {}
    if "weight.nested_absmax" in parts:
        code, shared = parts["weight.nested_quant_map"].to(device), dynamic_code(device)
        nested = {
            "nested_absmax": parts["weight.nested_absmax"].to(device),
            "nested_code": shared if torch.equal(code, shared) else code,
            "offset": torch.tensor(facts["nested_offset"], device=device),
        }
    return NF4Tensor(packed, absmax, (rows, columns), FLOATS[facts["dtype"]], **nested)
