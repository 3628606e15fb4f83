"""What a loop of another library adds to an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pronghorn.compat.hf_forward import install
from pronghorn.compat.outer_loop import OuterLoop, loop_of
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.causal_lm import install as install_engine
from pronghorn.model.verify import verify
from samples import make_model

IDS = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0))


def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    run = OuterLoop.run
    monkeypatch.setattr(OuterLoop, "run", lambda *given: calls.append(given) or run(*given))
    return calls


def test_an_engine_that_is_there_already_answers_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = ran(monkeypatch), make_model()
    assert install_engine(model) == ""
    engine = engine_of(model)
    model(input_ids=IDS, labels=IDS)
    assert not calls
    assert install(model) == ""
    model(input_ids=IDS, labels=IDS)
    assert len(calls) == 1
    assert engine_of(model) is engine
    assert loop_of(model).engine is engine


def test_verify_compares_with_the_own_layers_of_a_model_whose_calls_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, model = ran(monkeypatch), make_model()
    assert install(model) == ""
    verify(model)
    assert not calls
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS)
    assert calls, "and they are answered again"
