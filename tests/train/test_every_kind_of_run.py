"""Every kind of run on a GPU, with evaluations, answers and checkpoints: none of them changes what is trained.

Skipped where there is no CUDA device: the step is captured only there, and what an evaluation leaves behind can break a graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from watching import Silent

from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.loop import train
from samples import chat_rows, make_model, make_tokenizer, pair_rows, write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SUPERVISED: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"lora": {"rslora": True}},
    "dora": {"lora": {"dora": True}},
    "lora+": {"lora": {"plus_ratio": 4.0}},
    "two targets": {"lora": {"targets": ["q_proj", "v_proj"]}},
    "nf4": {"method": "qlora"},
    "nvfp4": {"method": "qlora", "storage": "nvfp4"},
    "fp8": {"method": "fp8"},
    "qlora in fp8": {"method": "qlora", "compute": "fp8"},
    "full": {"method": "full"},
    "full in fp8": {"method": "full", "compute": "fp8"},
    "full, 8-bit moments": {"method": "full", "train": {"optimizer": "adamw_8bit"}},
    "full, paged moments": {"method": "full", "train": {"optimizer": "paged_adamw"}},
    "fp16": {"precision": "fp16"},
    "fp32": {"precision": "fp32"},
    "full fp32": {"method": "full", "precision": "fp32"},
    "transformers layers": {"layers": "own"},
    "eager": {"train": {"graph": "off"}},
    "metrics": {"eval": {"metrics": ["exact_match"], "samples": 4, "max_new_tokens": 40}},
    "a memory budget": {"memory": {"budget": "4GB"}},
}
PREFERENCE: dict[str, dict[str, Any]] = {
    **{name: {"objective": {"name": name}} for name in ("dpo", "ipo", "simpo", "orpo", "kto", "reward")},
    "dpo nf4": {"objective": {"name": "dpo"}, "method": "qlora"},
    "dpo fp8": {"objective": {"name": "dpo"}, "method": "fp8"},
    "dpo full": {"objective": {"name": "dpo"}, "method": "full"},
    "dpo with prompts of their own": {"objective": {"name": "dpo", "share_prompt": "off"}},
    "kto nf4": {"objective": {"name": "kto"}, "method": "qlora"},
    "reward full": {"objective": {"name": "reward"}, "method": "full"},
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(num_hidden_layers=2, hidden_size=256, intermediate_size=512).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {key: {**base[key], **changes[key]} for key in base.keys() & changes.keys() if isinstance(changes[key], dict)}
    return base | changes | both


@pytest.mark.parametrize("name", [*SUPERVISED, *PREFERENCE])
def test_evaluations_change_nothing(name: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    changes, rows = (PREFERENCE[name], pair_rows) if name in PREFERENCE else (SUPERVISED[name], chat_rows)
    reward = changes.get("objective", {}).get("name") == "reward"
    data = {"train": [str(write_rows(tmp_path / "train.jsonl", rows(60)))], "max_length": 128, "workers": 0}
    plain: dict[str, Any] = {
        "model": str(model_folder),
        "precision": "bf16",
        "lora": {"r": 16},
        "train": {"epochs": 2, "batch_tokens": 1024, "capacity": 512, "lr": 1e-3},
        "eval": {"every": 3, "generations": 0 if reward else 2, "max_new_tokens": 24},
        "checkpoint": {"every": 3, "keep": 2},
    }
    plain = merged(plain, changes)
    held_out = data | {"eval": str(write_rows(tmp_path / "eval.jsonl", rows(6, seed=1)))}
    evaluated = read_log(
        train(Recipe.model_validate(plain | {"data": held_out, "output": str(tmp_path / "a")}), display=Silent()).folder
    )
    alone = plain | {"data": data, "eval": {}, "checkpoint": {}, "output": str(tmp_path / "b")}
    trained = read_log(train(Recipe.model_validate(alone), display=Silent()).folder)
    ours, theirs = ([event["loss"] for event in log if event["event"] == "step"] for log in (evaluated, trained))
    assert len(ours) > 4
    assert ours == theirs  # to the last bit
    assert len([event for event in evaluated if event["event"] == "eval"]) >= 2
    assert not [event for event in evaluated if "again" in event.get("text", "") or "failed" in event.get("text", "")]
