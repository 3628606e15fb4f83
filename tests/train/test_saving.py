"""A run's checkpoints: what the first one needs is tried before step 1, and none holds a number that is not finite."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from watching import RecipeFor, Silent

from pronghorn.errors import EnvironmentFault, HealthStop, ModelError
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.checkpoint.checkpoint import TENSORS
from pronghorn.train.checkpoint.checkpoint_writer import Copy
from pronghorn.train.checkpoint.saving import WritingSaver as Saver
from pronghorn.train.loop import train
from pronghorn.train.run import run_folder
from pronghorn.train.setup import setup
from tables import first_of, table

# Numbers that are not finite


@table("value", [math.nan, math.inf, -math.inf])
@table("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_copy_knows_what_in_it_is_not_finite(value: float, dtype: torch.dtype) -> None:
    tensors = {"a": torch.ones(7, dtype=dtype), "b": torch.ones(3, 4, dtype=dtype), "bytes": torch.ones(9).byte()}
    copy = Copy(torch.device("cpu"), print)
    copy.take([tensors, {"c": torch.ones(2), "none": torch.empty(0)}])
    assert copy.not_finite() == []
    tensors["b"][1, 2] = value
    copy.take([tensors, {"c": torch.ones(2), "none": torch.empty(0)}])
    assert copy.not_finite() == ["b"]


def all_finite(checkpoint: Path) -> bool:
    tensors = [t for file in checkpoint.glob("*.safetensors") for t in load_file(file).values()]
    return len(tensors) > 4 and all(bool(torch.isfinite(t).all()) for t in tensors)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("every", first_of([1, 100]))
def test_an_absurd_rate_leaves_no_checkpoint_that_is_not_finite_and_its_advice_works(
    method: str, every: int, recipe_for: RecipeFor
) -> None:
    """At 1e38 the update makes numbers that no product stands; with a checkpoint every step, one with them is on its way."""

    def recipe(lr: float) -> Recipe:
        return recipe_for(
            method=method,
            train={"steps": 6, "lr": lr, "schedule": "constant", "warmup": 0.0},
            checkpoint={"every": every},
            eval={"every": 99, "generations": 0},
        )

    sound = recipe(1e-3)
    with pytest.raises(HealthStop) as caught:
        train(recipe(1e38), display=Silent())
    assert "--allow-change train.lr" in caught.value.fix
    run = Path(sound.output)
    assert all(all_finite(path) for path in run.glob("checkpoint-*"))
    result = train(sound, display=Silent(), allow=["train.lr"])
    assert result.step == 6
    assert all_finite(result.checkpoint)
    losses = [e["loss"] for e in read_log(run) if e["event"] == "step"]
    assert losses[-1] < losses[-6]


def test_a_moment_that_is_not_finite_is_named_and_the_checkpoint_before_kept(
    recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    savers: list[Saver] = []
    made = Saver.__init__

    def remember(self: Saver, *arguments: Any) -> None:
        made(self, *arguments)
        savers.append(self)

    def spoil(step: int) -> None:
        if step == 3:
            optimizer = savers[0]._session.optimizer
            next(iter(optimizer.state.values()))["exp_avg_sq"].fill_(math.inf)  # updates of zero: weights stay sound

    monkeypatch.setattr(Saver, "__init__", remember)
    recipe = recipe_for(train={"steps": 6}, checkpoint={"every": 2}, eval={"every": 99})
    with pytest.raises(HealthStop, match="checkpoint-4 is not written") as caught:
        train(recipe, display=Silent(spoil))
    assert "exp_avg_sq" in caught.value.why
    assert sorted(path.name for path in Path(recipe.output).glob("checkpoint-*")) == ["checkpoint-2"]
    assert all_finite(Path(recipe.output) / "checkpoint-2")
    assert (Path(recipe.output) / "checkpoint-2" / TENSORS).is_file()


# Before step 1


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("a name that is a path\nand more"), ModelError, ", so no checkpoint"),
        (Exception("No such token"), ModelError, ", so no checkpoint"),  # tokenizers has no error of its own
        (OSError(28, "No space left on device"), EnvironmentFault, ""),
    ],
)
def test_a_tokenizer_that_cannot_be_saved_is_refused_before_weights_load(
    error: Exception, kind: type[Exception], said: str, recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fails)
    monkeypatch.setattr(setup, "load_model", None)
    recipe, display = recipe_for(), Silent()
    with pytest.raises(kind, match=f"cannot save the tokenizer{said}"):
        train(recipe, display=display)
    assert display.events == []
    assert not Path(recipe.output).exists()


def test_a_disk_of_a_few_megabytes_is_enough_for_a_small_adapter(
    recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: SimpleNamespace(total=4 * 10**6, used=0, free=4 * 10**6))
    assert train(recipe_for(train={"steps": 1}), display=Silent()).checkpoint


# While it runs


@pytest.mark.parametrize(
    ("method", "harm"), first_of([("lora", "moved"), ("full", "removed"), ("lora", "removed"), ("lora", "a file")], 2)
)
def test_an_output_folder_that_is_gone_ends_in_a_sentence(method: str, harm: str, recipe_for: RecipeFor) -> None:
    recipe = recipe_for(method=method, train={"steps": 5}, checkpoint={"every": 2}, eval={"every": 99})
    run = Path(recipe.output)

    def do(step: int) -> None:
        if step == 3:
            run.rename(run.with_name("elsewhere"))
            if harm == "removed":
                shutil.rmtree(run.with_name("elsewhere"))
            elif harm == "a file":
                run.touch()

    # Checkpoints are written beside the run: step 2's may be under way at step 3, step 4's at the last step's evaluation.
    with pytest.raises(
        EnvironmentFault, match=r"cannot write (checkpoint-[24]|the (base model's answers|rows' losses))"
    ) as caught:
        train(recipe, display=Silent(do))
    assert Path(caught.value.where).is_relative_to(run)


LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
import pronghorn.train.loop
from pronghorn.cli import main
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 600_000_000,) * 2)
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.usefixtures("imported_python")
def test_main_memory_that_runs_out_in_a_step_is_told_with_what_to_lower(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """In a process whose address space may grow by 0.6 GB: so many tokens take 0.25 GB wherever they are kept. A new one: in a
    fork of this one memory that earlier tests have left free was enough, and the step took three minutes."""
    capacity = 2**21
    recipe = recipe_for(train={"batch_tokens": capacity, "capacity": capacity, "steps": 2}, data={"eval": None})
    file = tmp_path / "little-memory.json"
    file.write_text(recipe.model_dump_json(exclude={"eval": {"stop"}}), encoding="utf-8")  # JSON is YAML
    ended = subprocess.run(
        [sys.executable, "-c", LITTLE_MEMORY, str(file)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 3, ended.stderr
    assert "out of host RAM" in ended.stderr
    assert f"lower train.capacity (now {capacity:,})" in ended.stderr
