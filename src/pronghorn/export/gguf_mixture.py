"""Which type each tensor of a quantized GGUF file gets: llama.cpp's mixtures, so that q4_k_m means here what it means there.

A mixture has one type for most tensors. The output (or the embedding that it shares) gets q6_K. In q4_k_m and q5_k_m
values and down projections get q6_K in the layers where it helps most: the first and the last eighth, and every third between.
In q3_k_m values, down projections and the attention's output get q4_K, the first layers q5_K; in iq4_xs the first eighth of the
down projections and values that four or more heads share get q5_K.
K-quants and iq4_xs need rows of a multiple of 256 weights. Others get the type that llama.cpp falls back to, which is wider.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BLOCK = {"q3_K": 256, "q4_K": 256, "q5_K": 256, "q6_K": 256, "iq4_XS": 256}
BLOCK |= {"iq4_NL": 32, "q4_0": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32, "f16": 1}
BITS = {"q3_K": 3.4375, "q4_K": 4.5, "q5_K": 5.5, "q6_K": 6.5625, "iq4_XS": 4.25, "iq4_NL": 4.5, "q4_0": 4.5, "q5_0": 5.5}
BITS |= {"q5_1": 6.0, "q8_0": 8.5, "f16": 16.0, "bf16": 16.0, "f32": 32.0}  # of a weight, with its share of the scales
# What a row that is no multiple of 256 gets; one that is no multiple of 32 gets f16.
FALLBACK = {"q3_K": "iq4_NL", "iq4_XS": "iq4_NL", "q4_K": "q5_0", "q5_K": "q5_1", "q6_K": "q8_0"}


@dataclass(frozen=True)
class Model:
    """What the mixture asks of a model."""

    layers: int
    heads: int = 1
    heads_kv: int = 1
    experts: int = 0


# (number of the layer, how many there are, the model) -> type; None: as most.
Choice = Callable[[int, int, Model], str | None]


def _more_bits(layer: int, layers: int, _: Model) -> str | None:
    helped = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "q6_K" if helped else None


@dataclass(frozen=True)
class Mixture:
    most: str
    file_type: int  # general.file_type: llama.cpp's number
    values: Choice = lambda *_: None
    down: Choice = lambda *_: None  # projections
    attention_output: str | None = None


MIXTURES = {
    "q8_0": Mixture("q8_0", 7),
    "q6_k": Mixture("q6_K", 18),
    "q5_k_m": Mixture("q5_K", 17, values=_more_bits, down=_more_bits),
    "q5_0": Mixture("q5_0", 8),
    "q4_k_m": Mixture("q4_K", 15, values=_more_bits, down=_more_bits),
    "q4_0": Mixture("q4_0", 2),
    "iq4_xs": Mixture(
        "iq4_XS",
        30,
        values=lambda _, __, model: "q5_K" if model.heads >= 4 * model.heads_kv else None,
        down=lambda layer, layers, _: "q5_K" if layer < layers // 8 else None,
    ),
    "q3_k_m": Mixture(
        "q3_K",
        12,
        values=lambda layer, _, __: "q5_K" if layer < 2 else "q4_K",
        down=lambda layer, layers, _: "q5_K" if layer < layers // 16 else "q4_K",
        attention_output="q4_K",
    ),
}

WIDE = ("f16", "bf16", "f32")
TYPES = (*MIXTURES, *WIDE)  # of a GGUF file; the first one is the default

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
            kind = FALLBACK.get(kind, "f16")
        if kind != wanted:
            fell[f"{wanted} -> {kind}"] += 1
        chosen[shape.name] = kind
    return chosen, fell


def _wanted(shape: Shape, mixture: Mixture, model: Model, tied: bool, ranks: dict[int, tuple[int, int]]) -> str:
    name, most = shape.name, mixture.most
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        return "q8_0" if most == "q8_0" else "q6_K"
    if VALUES.search(name):
        if model.experts == 8:
            return "q8_0"
        kind = mixture.values(*ranks[_layer(name)], model) or most
        shared = model.layers == 80 and model.heads != model.heads_kv  # 70B: eight heads share values
        return "q5_K" if shared and kind in ("q3_K", "q4_K") else kind
    if "attn_k.weight" in name and model.experts == 8:
        return "q8_0"
    if "attn_output.weight" in name:
        return "q5_K" if model.experts == 8 and most in ("q3_K", "q4_K", "iq4_XS") else mixture.attention_output or most
    if "ffn_down" in name:
        return mixture.down(_layer(name), model.layers, model) or most
    return most


def _layer(name: str) -> int:
    found = LAYER.match(name)
    return int(found[1]) if found else 0
