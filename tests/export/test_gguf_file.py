"""A GGUF file is quantized tensor by tensor: the types that llama.cpp would choose, everything else as it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronghorn.errors import ModelError
from pronghorn.export import gguf_file
from pronghorn.export.gguf_mixture import MIXTURES, Model, Shape, choose
from tables import table

gguf = pytest.importorskip("gguf", reason="the package gguf writes and reads these files")

LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def shapes(layers: int, width: int = 4096, *, tied: bool = False, linears: tuple[str, ...] = LINEARS) -> list[Shape]:
    found = [Shape("token_embd.weight", width, 2), Shape("output_norm.weight", width, 1)]
    found += [] if tied else [Shape("output.weight", width, 2)]
    for layer in range(layers):
        found += [Shape(f"blk.{layer}.{name}.weight", width, 2) for name in linears]
        found += [Shape(f"blk.{layer}.attn_norm.weight", width, 1)]
    return found


# What llama.cpp prints when it loads the files that people publish: layers, the model, and its types.
LLAMA_8B, LLAMA_70B, TINYLLAMA = Model(32, 32, 8), Model(80, 64, 8), Model(22, 32, 4)


@table(
    ("model", "mixture", "expected"),
    [
        (LLAMA_8B, "q4_k_m", {"q4_K": 193, "q6_K": 33}),
        (LLAMA_8B, "q5_k_m", {"q5_K": 193, "q6_K": 33}),
        (LLAMA_8B, "q6_k", {"q6_K": 226}),
        (LLAMA_8B, "q8_0", {"q8_0": 226}),
        (LLAMA_8B, "q5_0", {"q5_0": 225, "q6_K": 1}),
        (LLAMA_8B, "q4_0", {"q4_0": 225, "q6_K": 1}),
        (LLAMA_8B, "q3_k_m", {"q3_K": 129, "q4_K": 92, "q5_K": 4, "q6_K": 1}),
        (TINYLLAMA, "q4_k_m", {"q4_K": 135, "q6_K": 21}),
        (LLAMA_70B, "q4_k_m", {"q4_K": 441, "q5_K": 40, "q6_K": 81}),
    ],
)
def test_mixtures(model: Model, mixture: str, expected: dict[str, int]) -> None:
    chosen, fell = choose(shapes(model.layers), MIXTURES[mixture], model)
    assert Counter(chosen.values()) == expected
    assert not fell


def test_mixture_of_a_small_tied_model() -> None:
    """SmolLM2-135M: rows of 576 weights are no multiple of 256."""
    found = [Shape(one.name, 1536 if "ffn_down" in one.name else 576, one.dimensions) for one in shapes(30, tied=True)]
    chosen, fell = choose(found, MIXTURES["q4_k_m"], Model(30, 9, 3))
    assert Counter(chosen.values()) == {"q5_0": 166, "q8_0": 15, "q4_K": 16, "q6_K": 14}
    assert fell == {"q4_K -> q5_0": 166, "q6_K -> q8_0": 15}
    assert chosen["token_embd.weight"] == "q8_0"
    odd, _ = choose([Shape("blk.0.ffn_up.weight", 172, 2)], MIXTURES["q4_k_m"], Model(1))
    assert odd == {"blk.0.ffn_up.weight": "f16"}


def test_mixture_of_experts() -> None:
    linears = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    chosen, _ = choose(shapes(4, linears=linears), MIXTURES["q4_k_m"], Model(4, 8, 8, experts=8))
    assert {name.split(".")[2]: kind for name, kind in chosen.items() if name.startswith("blk.1.")} == {
        "attn_q": "q4_K", "attn_k": "q8_0", "attn_v": "q8_0", "attn_output": "q5_K", "ffn_gate_exps": "q4_K",
        "ffn_up_exps": "q4_K", "ffn_down_exps": "q4_K",
    }  # fmt: skip
    assert chosen["blk.3.ffn_down_exps.weight"] == "q6_K"


def write(path: Path, kind: str = "f32") -> dict[str, np.ndarray]:
    """A file as the converter writes it, with a metadata value of every sort."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(8)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<unk>", "\u00e9", "\u2581b"])
    writer.add_token_scores([0.0, -1.0, 2.5])
    writer.add_chat_template("{{ messages }}")
    writer.add_file_type(0)
    writer.add_quantization_version(2)
    sizes = {"token_embd": (96, 256), "output": (96, 256), "blk.0.attn_v": (64, 256), "blk.3.attn_v": (64, 256)}
    sizes |= {"blk.3.ffn_up": (64, 96), "blk.3.ffn_gate_inp": (4, 256), "blk.3.ffn_down_exps": (3, 16, 512)}
    weights = {f"{name}.weight": random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    weights["output_norm.weight"] = random.standard_normal(256).astype(np.float32)
    for name, value in weights.items():
        if value.ndim == 1 or kind == "f32":
            writer.add_tensor(name, value)
        elif kind == "f16":
            writer.add_tensor(name, value.astype(np.float16))
        else:
            stored = gguf.quants.quantize(value, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_a_file_is_quantized_and_the_rest_stays(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "AT_ONCE", 5000)  # several pieces of each weight
    weights = write(tmp_path / "wide.gguf", kind)
    steps: list[tuple[int, int]] = []
    facts = gguf_file.quantized(
        tmp_path / "wide.gguf", tmp_path / "small.gguf", "q4_k_m", lambda _, done, total: steps.append((done, total))
    )
    wide, small = gguf.GGUFReader(tmp_path / "wide.gguf"), gguf.GGUFReader(tmp_path / "small.gguf")

    def metadata(reader: Any) -> dict[str, Any]:
        return {key: (field.types, field.contents()) for key, field in reader.fields.items() if key != "general.file_type"}

    assert metadata(small) == metadata(wide)
    assert small.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M
    types = {one.name.removesuffix(".weight"): one.tensor_type.name for one in small.tensors}
    plain = {"f32": "F32", "bf16": "BF16", "f16": "F16"}[kind]
    assert types == {
        "token_embd": "Q4_K", "output": "Q6_K", "blk.0.attn_v": "Q4_K", "blk.3.attn_v": "Q6_K", "blk.3.ffn_up": "Q5_0",
        "blk.3.ffn_gate_inp": plain, "blk.3.ffn_down_exps": "Q6_K", "output_norm": "F32",
    }  # fmt: skip
    assert facts["fell_back"] == {"q4_K -> q5_0": 1}
    assert facts["types"]["Q6_K"] == 3
    assert steps[-1][0] == steps[-1][1]
    errors = {"Q4_K": 0.08, "Q5_0": 0.08, "Q6_K": 0.02}
    for one in small.tensors:
        values = gguf.quants.dequantize(one.data, one.tensor_type).reshape(weights[one.name].shape)
        rms = np.sqrt(np.square(values - weights[one.name]).mean())
        assert rms < errors.get(one.tensor_type.name, 0.01), one.name
        assert one.data_offset % small.alignment == 0


@pytest.mark.parametrize("mixture", MIXTURES)
def test_every_mixture_is_read_back_within_its_steps(mixture: str, tmp_path: Path) -> None:
    """As the check of an export does."""
    write(tmp_path / "wide.gguf")
    gguf_file.quantized(tmp_path / "wide.gguf", tmp_path / "small.gguf", mixture)
    seen: list[tuple[int, int]] = []
    told = gguf_file.differing(tmp_path / "wide.gguf", tmp_path / "small.gguf", lambda _, *amounts: seen.append(amounts))
    assert told == []
    assert seen[-1][0] <= seen[-1][1]
    reader = gguf.GGUFReader(tmp_path / "small.gguf")
    assert gguf.LlamaFileType(reader.fields["general.file_type"].contents()).name == f"MOSTLY_{mixture.upper()}"


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "wide.gguf")
    reader = gguf.GGUFReader(tmp_path / "wide.gguf", "r+")
    next(one for one in reader.tensors if one.name == "output.weight").data[3, 7] = np.inf
    reader.data.flush()
    with pytest.raises(ModelError, match=r"output\.weight"):
        gguf_file.quantized(tmp_path / "wide.gguf", tmp_path / "small.gguf", "q8_0")
