"""A small training state and the model files that go with it, for the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pronghorn.train.checkpoint.checkpoint import TrainState, save_checkpoint


def state(step: int, **values: Any) -> TrainState:
    tensors = {"optimizer/exp_avg/a": torch.full((3, 5), float(step)), "optimizer/step/a": torch.tensor(float(step))}
    return TrainState(step, tensors, {"cursor": {"epoch": 0, "row": step}, **values}, {"model": "m", "lr": 1e-4})


def write_model(folder: Path) -> None:
    save_file({"lora_A": torch.arange(6.0)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 16}')
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "chat_template.jinja").write_text("{{ messages }}")


def save(run: Path, step: int, keep: int = 9, best: int | None = None) -> Path:
    return save_checkpoint(run, state(step), write_model, keep=keep, best_step=best)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
