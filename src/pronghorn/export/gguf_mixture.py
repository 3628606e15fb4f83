"""Which type each tensor of a quantized GGUF file gets: llama.cpp's mixtures, so that q4_k_m means here what it means there.

A mixture has one type for most tensors. The output (or the embedding that it shares) gets q6_K. In q4_k_m and q5_k_m
values and down projections get q6_K in the layers where it helps most: the first and the last eighth, and every third between.
K-quants need rows of a multiple of 256 weights. Others get the type that llama.cpp falls back to, which is wider.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = {"q4_K": 256, "q5_K": 256, "q6_K": 256, "q5_0": 32, "q5_1": 32, "q8_0": 32, "f16": 1}
# What a row that is no multiple of 256 gets, and what one that is no multiple of 32.
FALLBACK = {"q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0", "q8_0": "f16", "q5_0": "f16", "q5_1": "f16"}


@dataclass(frozen=True)
class Mixture:
    most: str
    file_type: int  # general.file_type: llama.cpp's number
    more_bits: bool = False  # q6_K for the tensors above


MIXTURES = {
    "q8_0": Mixture("q8_0", 7),
    "q6_k": Mixture("q6_K", 18),
    "q5_k_m": Mixture("q5_K", 17, more_bits=True),
    "q4_k_m": Mixture("q4_K", 15, more_bits=True),
}

# Small, or sums of them decide: they stay as wide as they are.
NEVER = re.compile(
    r"_norm\.weight|ffn_gate_inp|altup|laurel|per_layer_model_proj|ssm_conv1d|shortconv\.conv|indexer\.[kq]_proj|time_mix_"
    r"|attn_rel_b|position_embd|token_types|\.patch_|\.rel_pos"
)
VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")
LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Shape:
    name: str
    columns: int  # weights of a row
    dimensions: int


@dataclass(frozen=True)
class Model:
    """What the mixture asks of a model."""

    layers: int
    heads: int = 1
    heads_kv: int = 1
    experts: int = 0


def choose(shapes: Sequence[Shape], mixture: Mixture, model: Model) -> tuple[dict[str, str], Counter[str]]:
    """(type of each tensor that is quantized, how many fell back: 'q4_K -> q5_0': 3)."""
    tied = not any(shape.name == "output.weight" for shape in shapes)
    layers = sorted({_layer(shape.name) for shape in shapes if VALUES.search(shape.name)})
    ranks = {layer: (rank, len(layers)) for rank, layer in enumerate(layers)}  # not every layer of a hybrid has attention
    chosen: dict[str, str] = {}
    fell: Counter[str] = Counter()
    for shape in shapes:
        if shape.dimensions < 2 or not shape.name.endswith("weight") or NEVER.search(shape.name):
            continue
        wanted = kind = _wanted(shape, mixture, model, tied, ranks)
        while shape.columns % BLOCK[kind]:
            kind = FALLBACK[kind]
        if kind != wanted:
            fell[f"{wanted} -> {kind}"] += 1
        chosen[shape.name] = kind
    return chosen, fell


def _wanted(shape: Shape, mixture: Mixture, model: Model, tied: bool, ranks: dict[int, tuple[int, int]]) -> str:
    name, most = shape.name, mixture.most
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "q8_0" if most == "q8_0" else "q6_K"
    if not mixture.more_bits:
        return most
    if VALUES.search(name):
        if model.experts == 8:
            return "q8_0"
        if _more_bits(*ranks[_layer(name)]):
            return "q6_K"
        return "q5_K" if model.layers == 80 and model.heads != model.heads_kv else most  # 70B: eight heads share values
    if "attn_k.weight" in name and model.experts == 8:
        return "q8_0"
    if "attn_output.weight" in name and model.experts == 8 and most == "q4_K":
        return "q5_K"
    if "ffn_down" in name and _more_bits(_layer(name), model.layers):
        return "q6_K"
    return most


def _more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _layer(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else 0
