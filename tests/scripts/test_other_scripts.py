"""Scripts in the ways of other people than the other library's authors, as they are: preference tuning, classifiers, loops,
trainers and callbacks of their own. Each trains to a lower loss and leaves what it saves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_public_scripts import CudaIsCpu, hub, notebook_room  # noqa: F401

from pronghorn.compat.scripts.notes import Notes
from pronghorn.compat.scripts.running import run

pytestmark = pytest.mark.usefixtures("_no_gpu")
OTHERS = Path(__file__).parent / "public" / "others"
# script -> (its folder, its arguments, its first loss where that is known)
SCRIPTS: dict[str, tuple[str, list[str], float | None]] = {
    "dpo_argparse.py": ("dpo-out", ["--lr", "2e-3", "--steps", "6"], math.log(2)),
    "kto_unpaired.py": ("kto-out", ["--rank", "8"], 0.5),
    "pretrain_blocks.py": ("pretrain-out", [], None),
    "sequence_classifier.py": ("classifier-out", [], None),
    "reward_model.py": ("reward-out", [], None),
    "own_loop.py": ("loop-out", [], None),
    "weighted_trainer.py": ("weighted-out", [], None),
    "completion_callbacks.py": ("callback-out", [], None),
    "spawned_cleaning.py": ("spawn-out", [], None),
    "long_context.py": ("long-out", [], None),
}
# Mostly imports of a new process (test_run_script.py has one that is
# shorter); `make dropin-cases` takes them all.
LATER = {"spawned_cleaning.py"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "script" in metafunc.fixturenames:
        every = metafunc.config.getoption("--every-case")
        metafunc.parametrize("script", [name for name in SCRIPTS if every or name not in LATER])


def losses_in(folder: Path) -> list[float]:
    if (folder / "history.json").is_file():  # of a loop without a trainer
        return list(json.loads((folder / "history.json").read_text(encoding="utf-8"))["train"])
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def test_a_script_of_other_people_as_it_is(script: str, notebook_room: Path) -> None:  # noqa: F811
    folder, words, first = SCRIPTS[script]
    notes = Notes(lambda text: None)
    torch.manual_seed(0)  # some make a head before their trainer sets a seed
    with CudaIsCpu():
        main = vars(run(str(OTHERS / script), words, notes=notes))
    losses = losses_in(notebook_room / folder)
    assert len(losses) >= 6
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < sum(losses[:3]), losses
    assert first is None or abs(losses[0] - first) < 1e-3  # an adapter begins as its reference
    trained = load_file(notebook_room / folder / "adapter_model.safetensors")
    assert trained
    assert all(weight.any() for name, weight in trained.items() if "lora_B" in name)
    if check := CHECKS.get(script):
        check(main, notebook_room / folder, notes)


def blocks(main: dict[str, Any], _: Path, notes: Notes) -> None:
    assert main["after"] < main["before"]
    assert (
        "train_dataset: the column labels equals input_ids and is removed, because the collator makes the same labels"
        in notes.said
    )


def classified(main: dict[str, Any], folder: Path, _: Notes) -> None:
    assert main["scores"]["eval_accuracy"] == max(
        row["eval_accuracy"] for row in main["trainer"].state.log_history if "eval_accuracy" in row
    )
    assert any("score" in name for name in load_file(folder / "adapter_model.safetensors"))


def looped(_: dict[str, Any], folder: Path, __: Notes) -> None:
    history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    assert history["eval"][-1] < history["eval"][0]
    assert len(list(folder.glob("epoch-*/adapter_model.safetensors"))) == 3


def called_back(main: dict[str, Any], folder: Path, _: Notes) -> None:
    assert len((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()) == len(main["recorder"].rows) == 6
    assert len(main["sampler"].samples) == 2
    labels = main["labels"][0]
    answer = labels[labels != -100]
    assert main["tokenizer"].decode(answer).strip() == main["dataset"][0]["output"] + main["tokenizer"].eos_token


def lengthened(main: dict[str, Any], _: Path, __: Notes) -> None:
    config = main["model"].config
    assert config.rope_parameters["factor"] == 4.0
    assert config.max_position_embeddings == main["trainer"].args.max_length == 8192


CHECKS = {
    "pretrain_blocks.py": blocks,
    "sequence_classifier.py": classified,
    "own_loop.py": looped,
    "weighted_trainer.py": lambda main, *_: all(main["trainer"].penalties) or pytest.fail("no penalty"),
    "completion_callbacks.py": called_back,
    "long_context.py": lengthened,
}
