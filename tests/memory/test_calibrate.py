from __future__ import annotations

import numpy as np
import pytest
import torch

from pronghorn.data.pack.batches import build_batch
from pronghorn.memory.calibrate import calibrate
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.types import Documents
from samples import make_model, preference_table


@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_is_timed_on_a_pack_as_the_step_sees_it(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents are made by what the step makes them by, shared prompts included."""
    model, table = make_model(), preference_table(4, shared=shared)
    assert not install(model)
    engine = engine_of(model)
    assert engine is not None
    pack = build_batch(table, np.arange(len(table)), 256)
    made, real = [], Documents.of
    monkeypatch.setattr(Documents, "of", lambda pack, positions: made.append(real(pack, positions)) or made[-1])
    for part in (pack, pack.cut(T=128, N=20)):
        costs = calibrate(engine, (0, 0), part, torch.float32, torch.device("cpu"))
        assert costs.measured
        assert costs.kinds[0].forward > 0
    assert [len(one.rotary["every layer"][0]) for one in made] == [256, 128]
    assert all((one.prefix_2T is not None) == shared for one in made)
