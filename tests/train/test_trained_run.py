"""A run that is over, used: the right checkpoint, the same held-out loss as while training, answers, exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.errors import CheckpointError, CommandError
from pronghorn.export.run import export_run
from pronghorn.recipe import Recipe
from pronghorn.report.display import JsonDisplay
from pronghorn.report.run_log import history, read_log
from pronghorn.train.loop import train
from pronghorn.train.run.run_evaluation import evaluate_run
from pronghorn.train.run.trained_run import Chat, TrainedRun
from samples import chat_rows, make_model, make_tokenizer, write_rows
from tables import table

pytestmark = pytest.mark.usefixtures("short_export_check")


def recipe_at(folder: Path, model: Path, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": str(model),
        "precision": "fp32",
        "lora": {"r": 4},
        "data": {
            "train": str(write_rows(folder / "train.jsonl", chat_rows(40))),
            "max_length": 128,
            "workers": 0,
            "eval": str(write_rows(folder / "eval.jsonl", chat_rows(8, seed=1))),
        },
        "train": {"steps": 6, "batch_tokens": 512, "capacity": 256, "lr": 3e-2},
        "eval": {"every": 2, "generations": 0},
        "checkpoint": {"every": 2, "keep": 10},
        "output": str(folder / "run"),
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and key in base else value
    return Recipe.model_validate(base)


@pytest.fixture(scope="module")
def run(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PRONGHORN_CACHE", str(folder / "cache"))
        yield train(recipe_at(folder, one_layer_model), display=JsonDisplay()).folder


def with_best(run: Path, copy: Path, step: int | None) -> Path:
    """The run as if its best evaluation had been at `step`: the newest manifest says so."""
    from pronghorn.train.checkpoint.checkpoint import _as_text, _with_checksum

    shutil.copytree(run, copy)
    newest = max(copy.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["values"]["progress"] |= {"best_step": step, "best": None if step is None else 1.0}
    (newest / "manifest.json").write_text(_as_text(_with_checksum(manifest)))
    return copy


def steps_of(run: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*"))


def test_the_checkpoint_asked_for_is_the_one_used(run: Path, tmp_path: Path) -> None:
    steps = steps_of(run)
    assert len(steps) >= 3
    assert TrainedRun(run, "last").step == steps[-1]
    assert TrainedRun(run, str(steps[0])).path == run / f"checkpoint-{steps[0]}"
    copy = with_best(run, tmp_path / "copy", steps[1])
    assert TrainedRun(copy, "best").step == steps[1]
    assert TrainedRun(copy, "last").step == steps[-1]


def test_best_is_the_last_where_nothing_was_evaluated_or_it_is_gone(run: Path, tmp_path: Path) -> None:
    last = steps_of(run)[-1]
    assert TrainedRun(with_best(run, tmp_path / "never", None), "best").step == last
    assert TrainedRun(with_best(run, tmp_path / "gone", 1), "best").step == last


@table("which", ["7000", "newest", "-1", ""])
def test_a_checkpoint_that_is_not_there(run: Path, which: str) -> None:
    with pytest.raises(CommandError, match="not found") as caught:
        TrainedRun(run, which)
    assert ", ".join(map(str, steps_of(run))) in caught.value.fix


def test_a_damaged_checkpoint_is_never_used(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    file = copy / f"checkpoint-{steps_of(copy)[-1]}" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="content changed"):
        TrainedRun(copy, "last")


def test_the_held_out_loss_is_the_one_the_run_saw(run: Path) -> None:
    seen = {e["step"]: e["loss"] for e in history(read_log(run)) if e["event"] == "eval"}
    assert len(set(seen.values())) == len(seen)
    for step in (min(seen), max(seen)):
        figures = evaluate_run(run, str(step), data=None, report=lambda *_: None)
        assert figures["loss"] == pytest.approx(seen[step], rel=1e-5)
        assert figures["checkpoint"].endswith(f"checkpoint-{step}")
        assert figures["documents"] == 8


def test_a_run_keeps_its_template_its_special_tokens_and_what_ends_a_turn(tmp_path: Path) -> None:
    """The model has another template."""
    make_tokenizer("{{ messages }}").save_pretrained(tmp_path / "model")
    make_model().save_pretrained(tmp_path / "model")
    recipe = recipe_at(
        tmp_path,
        tmp_path / "model",
        train={"steps": 1},
        eval={"every": 0.5, "generations": 1},
        data={"template": "chatml", "special_tokens": {"pad_token": "<|im_start|>"}, "eot_tokens": ["<|im_end|>"]},
    )
    folder = train(recipe, display=JsonDisplay()).folder
    _, tokenizer, _ = TrainedRun(folder, "last").load()
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tokenize=False)
    assert asked == "<|im_start|>user\nq<|im_end|>\n"
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.pronghorn_eot_tokens == tokenizer.pronghorn_stop_tokens == ("<|im_end|>",)
    seen = [event["loss"] for event in read_log(folder) if event["event"] == "eval"]
    assert evaluate_run(folder, "last", data=None, report=lambda *_: None)["loss"] == pytest.approx(seen[-1], rel=1e-5)


def test_a_run_is_used_from_any_folder(one_layer_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe's names count from where it was trained, which its own place gives away; also after a move."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copytree(one_layer_model, home / "model")
    monkeypatch.chdir(home)
    recipe = recipe_at(Path(), Path("model"), train={"steps": 2}, output="runs/a")
    assert (recipe.model, recipe.data.train, recipe.data.eval) == ("model", ("train.jsonl",), "eval.jsonl")
    train(recipe, display=JsonDisplay())
    seen = evaluate_run(Path("runs/a"), "last", data=None, report=lambda *_: None)["loss"]
    monkeypatch.chdir(tmp_path)
    home.rename(tmp_path / "moved")
    for run in ("moved/runs/a", str(tmp_path / "moved" / "runs" / "a")):
        assert evaluate_run(Path(run), "last", data=None, report=lambda *_: None)["loss"] == seen
    monkeypatch.chdir(tmp_path / "moved" / "runs" / "a")
    export_run(Path(), "last", tmp_path / "merged", "merged")
    shutil.copytree(tmp_path / "moved" / "runs" / "a", tmp_path / "alone")
    assert TrainedRun(tmp_path / "alone", "last").recipe == recipe  # from there nothing can be found


def test_other_data_can_be_evaluated(run: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", chat_rows(3, seed=4))
    figures = evaluate_run(run, "last", data=str(other), report=lambda *_: None)
    assert figures["documents"] == 3
    assert figures["loss"] != evaluate_run(run, "last", data=None, report=lambda *_: None)["loss"]


@pytest.mark.parametrize("held_out", [0.2, None])
def test_a_held_out_fraction_is_found_again_and_no_held_out_data_is_said(
    one_layer_model: Path, tmp_path: Path, held_out: float | None
) -> None:
    recipe = recipe_at(tmp_path, one_layer_model, data={"eval": held_out}, train={"steps": 2}, method="full")
    folder = train(recipe, display=JsonDisplay()).folder
    if held_out is None:
        with pytest.raises(CommandError, match="no held-out data") as caught:
            evaluate_run(folder, "last", data=None, report=lambda *_: None)
        assert "--data" in caught.value.fix
        return
    (seen,) = (e["loss"] for e in read_log(folder) if e["event"] == "eval")
    figures = evaluate_run(folder, "last", data=None, report=lambda *_: None)
    assert figures["loss"] == pytest.approx(seen, rel=1e-5)
    assert figures["documents"] == 8


def test_a_talk_remembers_what_was_said(run: Path) -> None:
    talk = Chat(run, "last", max_tokens=6, system="be brief")
    first = talk.answer("add 1 and 2")
    talk.answer("again")
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert talk.messages[2]["content"] == first
    assert Chat(run, "last", max_tokens=6, system="be brief").answer("add 1 and 2") == first
    talk.forget()
    assert [message["role"] for message in talk.messages] == ["system"]
    drawn: dict[float, set[str]] = {}
    for talk.temperature in (1e-3, 3.0):
        for talk.seed in range(4):
            talk.forget()
            drawn.setdefault(talk.temperature, set()).add(talk.answer("add 1 and 2"))
    assert drawn[1e-3] == {first}  # almost no chance for any token but the likeliest
    assert len(drawn[3.0]) > 1
    pieces: list[str] = []
    answer = talk.answer("again", lambda name, text: pieces.append(text))
    assert "".join(pieces).strip() == answer
    assert len(pieces) > 1  # token by token


def test_the_answer_is_that_of_the_trained_model(run: Path) -> None:
    """By hand: the template's prompt, then the most likely token of the adapted model, four times."""
    trained = TrainedRun(run, "last")
    model, tokenizer, _ = trained.load()
    messages = [{"role": "user", "content": "add 1 and 2"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text)
    prompt = len(ids)
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[prompt:], skip_special_tokens=True).strip()
    assert Chat(run, "last", max_tokens=4).answer("add 1 and 2") == expected


def test_the_base_model_answers_beside_it_and_goes_on_from_its_own_answers(run: Path) -> None:
    talk = Chat(run, "last", max_tokens=6, base=True)
    with torch.no_grad():
        talk.model.get_base_model().lm_head.weight[:] = 0  # then the base always says token 0, which no text has
    both = [talk.answers(message) for message in ("add 1 and 2", "again")]
    said = talk.tokenizer.decode([0] * 6, skip_special_tokens=True).strip()
    assert [one["base"] for one in both] == [said, said]
    assert [message["content"] for message in talk._of_base[1::2]] == [said, said]
    assert talk.messages[1]["content"] == both[0]["model"]
    talk.show_base(False)
    assert talk.answers("more").keys() == {"model"}


def with_pickled_adapter(run: Path, copy: Path, canary: Path) -> Path:
    """The run as someone would forge it: a pickle for the adapter, and manifests that agree."""
    from pronghorn.train.checkpoint.checkpoint import _as_text, _sealed, _with_checksum

    shutil.copytree(run, copy)
    for folder in copy.glob("checkpoint-*"):
        (folder / "adapter_model.safetensors").unlink()
        (folder / "adapter_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n(S'touch %s'\ntR." % str(canary).encode())
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["sha256"], manifest["files"]["adapter_model.safetensors"]
        manifest["files"]["adapter_model.bin"] = _sealed(folder / "adapter_model.bin")
        (folder / "manifest.json").write_text(_as_text(_with_checksum(manifest)))
    return copy


@pytest.mark.parametrize(
    "use",
    [
        lambda run, target: evaluate_run(run, "last", data=None, report=lambda *_: None),
        lambda run, target: export_run(run, "last", target, "merged"),
        lambda run, target: export_run(run, "last", target, "adapter"),
        lambda run, target: Chat(run, "last", max_tokens=1),
    ],
    ids=["eval", "merged", "adapter", "chat"],
)
def test_a_pickled_adapter_is_never_opened(run: Path, tmp_path: Path, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: opened.append(arguments))
    forged = with_pickled_adapter(run, tmp_path / "forged", tmp_path / "ran")
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing") as caught:
        use(forged, tmp_path / "target")
    assert "a pickle" in caught.value.why
    assert opened == []
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "target").exists()
