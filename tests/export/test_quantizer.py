"""llama.cpp's quantizer, called for rows: read back by gguf within the error that its own tool has."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from pronghorn.errors import EnvironmentFault
from pronghorn.export import quantizer

gguf = pytest.importorskip("gguf", reason="the package gguf reads what llama.cpp quantizes")
pytest.importorskip("xllamacpp", reason="has llama.cpp's quantizer")

# Root mean square errors of llama-quantize (ggml 0.13.1) for these weights.
ERRORS = {"q3_K": 0.151093, "q4_K": 0.0715525, "q5_K": 0.0362232, "q6_K": 0.0177764, "iq4_XS": 0.0768973, "iq4_NL": 0.0763199}


@pytest.mark.parametrize("kind", [*ERRORS, *quantizer.OLDER])
def test_rows_are_read_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    truth[7] = 0
    rows = torch.from_numpy(truth)
    stored = quantizer.packed(rows, kind)
    read = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()]).astype(np.float64)
    error = np.sqrt(np.square(read - truth).mean())
    assert error < 1.005 * ERRORS.get(kind, 0.1)
    assert not read[7].any()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # 256 rows in unequal parts
    assert np.array_equal(quantizer.packed(rows, kind), stored)


def test_other_widths_are_refused() -> None:
    for kind, width in (("q4_K", 288), ("iq4_XS", 288), ("iq4_NL", 272)):
        with pytest.raises(ValueError, match=r"multiple of (256|32)"):
            quantizer.packed(torch.zeros(2, width), kind)


def test_without_llama_cpp_only_q8_0_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer._quantize_chunk.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    quantizer.require_quantizer("q8_0")
    quantizer.require_quantizer("bf16")
    with pytest.raises(EnvironmentFault, match="not installed"):
        quantizer.require_quantizer("q4_k_m")
