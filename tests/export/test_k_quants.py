"""K-quants and the 4-bit types with levels of their own: as exact as llama.cpp's, and read back by gguf."""

from __future__ import annotations

import ctypes
import importlib.util

import numpy as np
import pytest
import torch

from pronghorn.export import iq4_quants, k_quants

gguf = pytest.importorskip("gguf", reason="the package gguf reads what we quantize")

# llama.cpp's own root mean square errors (ggml_quantize_chunk of ggml 0.13.1) for these weights.
LLAMA_CPP = {
    "normal": {
        "q3_K": 0.151093, "q4_K": 0.0715525, "q5_K": 0.0362232, "q6_K": 0.0177764, "iq4_XS": 0.0768973, "iq4_NL": 0.0763199,
    },
    "laplace": {
        "q3_K": 0.00498534, "q4_K": 0.00240316, "q5_K": 0.00121488, "q6_K": 0.000617078, "iq4_XS": 0.00251439,
        "iq4_NL": 0.00249405,
    },
}  # fmt: skip
CLOSE = 1.005  # of these; the issue was 1.02
KINDS = {**dict.fromkeys(k_quants.BLOCK_BYTES, k_quants), **dict.fromkeys(iq4_quants.BLOCK_BYTES, iq4_quants)}


def quantize(rows: torch.Tensor, kind: str) -> torch.Tensor:
    return KINDS[kind].quantize(rows, kind)


def weights(kind: str) -> np.ndarray:
    random = np.random.default_rng(0)
    normal, laplace = random.standard_normal((256, 1024)), random.laplace(size=(256, 1024)) * 0.02
    return {"normal": normal, "laplace": laplace}[kind].astype(np.float32)


def type_of(kind: str) -> int:
    return gguf.GGMLQuantizationType[kind.upper()]


def read(stored: torch.Tensor, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(stored.numpy(), type_of(kind)).astype(np.float64)


def error(stored: torch.Tensor, kind: str, truth: np.ndarray) -> float:
    return float(np.sqrt(np.square(read(stored, kind) - truth).mean()))


@pytest.mark.parametrize("shape", LLAMA_CPP)
def test_errors_are_llama_cpps(shape: str) -> None:
    truth = weights(shape)
    for kind, theirs in LLAMA_CPP[shape].items():
        assert error(quantize(torch.from_numpy(truth), kind), kind, truth) < CLOSE * theirs, kind


def test_errors_beside_llama_cpp_itself() -> None:
    """The library inside xllamacpp has the function that llama-quantize calls."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")
    found = importlib.util.find_spec("xllamacpp.xllamacpp")
    assert found is not None
    their = ctypes.CDLL(found.origin).ggml_quantize_chunk
    their.restype = ctypes.c_size_t
    whole = ctypes.c_int64
    their.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, whole, whole, whole, ctypes.c_void_p]
    truth = (np.random.default_rng(1).standard_t(4, (32, 512)) * 0.03).astype(np.float32)
    for kind in KINDS:
        ours = quantize(torch.from_numpy(truth), kind)
        theirs = torch.zeros_like(ours)
        written = their(int(type_of(kind)), truth.ctypes.data, theirs.data_ptr(), 0, *truth.shape, None)
        assert written == ours.numel()
        assert error(ours, kind, truth) < CLOSE * error(theirs, kind, truth), kind
        assert (ours == theirs).float().mean() > 0.95, kind  # not only as good: nearly always the same codes


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_all_sorts(kind: str) -> None:
    assert gguf.GGML_QUANT_SIZES[type_of(kind)] == (32 if kind == "iq4_NL" else 256, KINDS[kind].BLOCK_BYTES[kind])
    rows = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    rows[0] = 0
    rows[1] = 3.0
    rows[2] = -3.0
    rows[3] = rows[3].abs() + 1  # above zero, where the format has no minimum
    rows[4] *= 1e-12  # below what fp16 scales can say
    rows[5, ::7] *= 100
    rows[6, :256] = 0
    rows[7] = torch.where(rows[7] > 0, 1.0, -1.0)
    back = torch.from_numpy(read(quantize(rows, kind), kind))
    steps = {"q3_K": 6, "q5_K": 32, "q6_K": 64}.get(
        kind, 16 if kind == "q4_K" else 8
    )  # levels of iq4 lie up to 24 of 240 apart
    blocks, found = rows.double().view(-1, 32), back.view(-1, 32)
    span = blocks.amax(1).clamp(min=0) - blocks.amin(1).clamp(max=0)
    assert ((blocks - found).abs().amax(1) <= 1.3 * span / steps + 1e-6).all()
    assert torch.equal(back[0], torch.zeros(512, dtype=torch.float64))
    in_parts = torch.cat([quantize(row[None].bfloat16(), kind) for row in rows])
    assert torch.equal(in_parts, quantize(rows.bfloat16(), kind))


def test_other_widths_are_refused() -> None:
    for kind, width in (("q4_K", 288), ("iq4_XS", 288), ("iq4_NL", 272)):
        with pytest.raises(ValueError, match=r"multiple of (256|32)"):
            quantize(torch.zeros(2, width), kind)
