"""Exports that are wrong in one place are found by the check of every target: a scale, rows in another order, another rope
base, an adapter that is left out. (GGUF files: test_gguf_target.py.)"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.export_models import make_checkpoint, make_model
from exports import export
from pronghorn.export.checking import GROSS, Reference, Scores, Verdict, reference_of
from pronghorn.export.job import Job, Options
from pronghorn.export.targets import asked_for
from pronghorn.recipe import Recipe
from pronghorn.train.run.trained_run import Trained
from samples import chat_rows, make_tokenizer, write_rows
from tables import first_of

Q = "layers.1.self_attn.q_proj"
NEEDS_READER = ("fp8", "nvfp4")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("right")
    recipe = Recipe.model_validate(
        {
            "model": str(make_model("llama", folder / "model")),
            "precision": "fp32",
            "lora": {"r": 4},
            "data": {"train": str(write_rows(folder / "rows.jsonl", chat_rows(4))), "max_length": 128, "workers": 0},
            "output": str(folder / "run"),
        }
    )
    checkpoint = make_checkpoint(recipe, folder / "checkpoint", make_tokenizer())
    none = shutil.copytree(checkpoint, folder / "without")
    in_file(none, lambda found: {name: value * ("lora_A" in name) for name, value in found.items()})
    reference = reference_of(Trained(checkpoint, recipe), lambda *_: None)
    return SimpleNamespace(recipe=recipe, checkpoint=checkpoint, without=none, reference=reference)


def in_file(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    (file,) = folder.glob("*.safetensors")
    changed = change(load_file(file))
    save_file({name: value.contiguous() for name, value in changed.items()}, file, metadata={"format": "pt"})


def doubled(folder: Path) -> None:
    """One layer's scale: the tensor's own one, the adapter's alpha, or the weight itself."""
    config = folder / "adapter_config.json"
    if config.is_file():
        settings = json.loads(config.read_text())
        config.write_text(json.dumps({**settings, "alpha_pattern": {Q: 2 * settings["lora_alpha"]}}))
        return

    def change(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = next(n for n in sorted(found, key=len, reverse=True) if f"{Q}.weight" in n and not n.endswith("_packed"))
        factor = 0.5 if name.endswith("global_scale") else 2.0  # which weights are divided by
        return {**found, name: (found[name].float() * factor).to(found[name].dtype)}

    in_file(folder, change)


def swapped(folder: Path) -> None:
    """Two rows of a query."""

    def change(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        order = torch.arange(64)
        order[:2] = order[:2].flip(0)
        rows = {name: value for name, value in found.items() if Q in name and value.shape[:1] == (64,)}
        return found | {name: value.view(torch.uint8)[order].view(value.dtype) for name, value in rows.items()}

    in_file(folder, change)


def other_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (folder / "config.json").write_text(json.dumps(config))


def checked(run: SimpleNamespace, to: str, folder: Path, damage: Callable[[Path], None] | None, **options: Any) -> Verdict:
    """`damage` None: the adapter is left out."""
    (asked,) = asked_for(to)
    export(run.checkpoint if damage else run.without, run.recipe, folder, to, **options)
    if damage:
        damage(folder)
    job = Job(Trained(run.checkpoint, run.recipe), folder, folder, Options(**options), asked.variant)
    return asked.target.check(job, run.reference)


WHOLE = {"a doubled scale": doubled, "swapped rows": swapped, "another rope base": other_rope, "no adapter": None}
BESIDE = {"a doubled scale": doubled, "swapped rows": swapped, "no adapter": None}


EXPORTS = [("adapter", {}, BESIDE), ("vllm", {}, BESIDE), ("merged", {"dtype": "bf16"}, WHOLE), ("fp8", {}, WHOLE),
           ("nvfp4", {}, WHOLE), ("merged", {}, WHOLE)]  # fmt: skip


@pytest.mark.parametrize(("to", "options", "wrongs"), first_of(EXPORTS, 5))
def test_a_wrong_export_is_found(
    to: str, options: dict[str, Any], wrongs: dict[str, Any], run: SimpleNamespace, tmp_path: Path
) -> None:
    if to in NEEDS_READER:
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    right = checked(run, to, tmp_path / "right", lambda _: None, **options)
    assert right.passed, right.sentence
    passed = [name for name, damage in wrongs.items() if checked(run, to, tmp_path / name, damage, **options).passed]
    assert passed == []


def test_what_an_export_may_differ_by_is_the_model_s_own_noise(run: SimpleNamespace) -> None:
    reference: Reference = run.reference
    bf16, fp16 = reference.tolerance(torch.bfloat16), reference.tolerance(torch.float16)
    assert bf16.mean == pytest.approx(8 * fp16.mean)
    assert 1e-3 < bf16.mean < 0.5
    other = Reference(reference.rows, reference.scores, (reference.scores,))  # a model that rounding does not change
    assert other.tolerance(torch.bfloat16).mean == 2e-3


@pytest.mark.parametrize(("worse", "passed"), [(0.2, True), (0.25, False), (float("nan"), False), (float("inf"), False)])
def test_gross_damage(worse: float, passed: bool, run: SimpleNamespace) -> None:
    """exp(0.2) is 22 % more, exp(0.25) 28 %."""
    found = [Scores(one.best, tuple(p - worse for p in one.log_probs)) for one in run.reference.scores]
    assert run.reference.verdict(found, GROSS, "a program").passed is passed
