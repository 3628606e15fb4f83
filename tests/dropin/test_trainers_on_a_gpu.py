"""TRL's trainers on a GPU, where the layers are captured: what they log, every gradient and the weights are a stock model's.

Cases of test_trl_cases.py, with steps enough for captures, and for evaluations and reference passes between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

pytest.importorskip("trl")

from dropin import same_numbers
from dropin.same_numbers import SIZES, compare, fast_model, stock_model
from dropin.test_trl_cases import CASES, trained_by
from pronghorn.kernels.runtime import dispatch
from samples import make_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TOLERANCE = 1e-3  # a GPU adds in another order; eight steps
WIDE: dict[str, Any] = SIZES | {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}  # as kernels take it
CAPTURED = [("sft", "texts"), ("sft", "packed"), ("sft", "without padding"), ("sft", "accumulation")]
# Here the adapter is off for a reference between forward and backward, all weights are trained, or the head is another.
OTHERS = [
    ("dpo", "pairs"),
    ("dpo", "evaluated"),
    ("dpo", "without padding"),
    ("kto", "evaluated"),
    ("orpo", "pairs"),
    ("reward", "pairs"),
    ("reward", "an adapter by the trainer"),
    ("sft", "texts, a whole model"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wide-llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**WIDE)).save_pretrained(place)
    make_tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize(("kind", "name"), [*CAPTURED, *OTHERS])
def test_trl_trains_as_with_a_stock_model(
    kind: str, name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(same_numbers, "TOLERANCE", TOLERANCE)
    monkeypatch.setattr(dispatch, "_said", set())
    case = CASES[kind, name]
    case = case._replace(options={**case.options, "use_cpu": False, "max_steps": 8, "learning_rate": 0.01})
    plain = stock_model(folder, adapter=not case.whole)
    fast = fast_model(folder, plain, adapter=not case.whole)
    compare(trained_by(kind, case, tmp_path), plain.cuda(), fast)
    said = capsys.readouterr().err
    assert "capture failed" not in said
    if (kind, name) in CAPTURED:
        assert "captured the layers as CUDA graphs" in said
