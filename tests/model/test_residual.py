"""Who adds a branch to the residual stream, the GEMM or the next norm, changes no gradient."""

from __future__ import annotations

from typing import Any

import pytest
from test_saved import FAMILIES, close, gradients, model_of

from pronghorn.model.layers import wide_gemms


def added_by_norm(layer: Any) -> bool:
    """Whether the norm before the MLP adds the residual."""
    return layer.mixer.after is None and layer.mlp.before is not None and layer.mixer.out.leaves_residual_to_norm(1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_added_by_a_product_gives_the_same_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper; with a norm behind the projection (Gemma, OLMo 2) there is nothing to choose."""
    model, engine = model_of(family, lora=True)
    loss, expected = gradients(model)
    by_norm = [added_by_norm(layer) for layer in engine.layers]
    assert by_norm == [family in ("llama", "qwen3")] * 4
    monkeypatch.setattr(wide_gemms, "adds_freely", lambda *_: True)
    for pieces in (1, 3):
        for layer in engine.layers:
            layer.level, layer.mlp_chunks = "layer", pieces
        again, found = gradients(model)
        assert not any(added_by_norm(layer) for layer in engine.layers)
        assert again == pytest.approx(loss, rel=1e-6)
        assert close(found, expected), pieces
