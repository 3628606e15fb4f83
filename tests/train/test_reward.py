"""Reward models: loss and gradients against TRL's RewardTrainer, and whole runs whose results stock transformers loads."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl_losses as theirs
from peft import PeftModel
from rich.console import Console
from test_preference import CPU, FAMILIES, assert_near, batches_of, gradients, pairs_of, stepped, table_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from watching import RecipeFor, Silent

from pronghorn.data.encode.tokens import padding_id
from pronghorn.data.preference.pair_packing import ends_of
from pronghorn.errors import CommandError, ModelError, RecipeError
from pronghorn.export.run import export_run
from pronghorn.model.causal_lm import install
from pronghorn.model.config import read_config
from pronghorn.model.formats.checkpoint import Shards
from pronghorn.model.heads import require_head
from pronghorn.model.heads.score import ScoreHead
from pronghorn.model.load import load_model
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from pronghorn.report.html import render_page
from pronghorn.report.run_log import read_log
from pronghorn.report.summary import summary
from pronghorn.serve.models import load as load_served
from pronghorn.train.loop import train
from pronghorn.train.objectives.reward import Reward
from pronghorn.train.run.run_evaluation import EvaluationRequest, evaluate_run
from pronghorn.train.run.trained_run import Chat, TrainedRun
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep
from pronghorn.train.step.step import EagerStep
from samples import ListTable, make_model, pair_rows
from tables import first_of

MARGINS = [0.5, 0.0, -0.3, 1.0, 0.2]


def scored(family: str, *, full: bool = False) -> tuple[Any, Any]:
    """(of stock transformers and PEFT, the same with fast layers)"""
    models = []
    for fast in (False, True):
        torch.manual_seed(3)
        model = ScoreHead.attach(AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family])), seed=4)
        ScoreHead.set_padding(model, 0)
        torch.nn.init.normal_(model.score.weight, std=0.3)
        if not full:
            model = add_adapter(model, Lora(r=4, targets=("q_proj", "v_proj", "o_proj")), seed=1)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
        if fast:
            assert install(model) == ""
        models.append(model.train())
    return models[0], models[1]


def with_margins(table: ListTable) -> ListTable:
    table.pairs = replace(table.pairs, margins=np.repeat(np.array(MARGINS, np.float32), 2))
    return table


@pytest.mark.parametrize(
    ("family", "shared", "full", "center"),
    [("llama", True, False, 0.0), ("qwen3", False, True, 0.1), ("qwen3", True, False, 0.1), ("gpt-oss", True, False, 0.0)],
)
def test_loss_gradients_and_figures_are_those_of_trl(family: str, shared: bool, full: bool, center: float) -> None:
    stock, fast = scored(family, full=full)
    pairs = pairs_of(5)
    expected, figures = theirs.reward(stock, pairs, MARGINS, center or None)
    expected.backward()
    capacity, padded = (128, True) if shared else (48, False)  # in one pack, padded to a run's shapes; or in several
    table = with_margins(table_of(pairs, shared=shared))
    loss, found, watched = stepped(fast, Reward(0, center_weight=center), table, capacity, padded)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_near(found, gradients(stock), 1e-5)
    assert any("score" in name for name in found)
    assert watched == pytest.approx({name: figures[name] for name in ("accuracy", "margin", "mean_reward")}, rel=1e-4)


def test_the_own_layers_give_the_same_and_both_steps_train_alike() -> None:
    own, fast = scored("llama")
    table = with_margins(table_of(pairs_of(5), shared=False))
    assert stepped(own, Reward(0), table, 48)[0] == pytest.approx(stepped(fast, Reward(0), table, 128)[0], rel=1e-5)
    found = []
    for kind in (EagerStep, GraphedStep):
        model, objective = scored("llama")[1], Reward(0)
        optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
        options: dict[str, Any] = {"device": CPU, "precision": "fp32", "clip": 1e9, "objective": objective}
        step = kind(model, optimizer, **options, **({"say": print} if kind is GraphedStep else {}))
        packs = tuple(objective.complete(batch, table) for batch in batches_of(table, 64, padded=True))
        dry = packs[0].beginning(16)  # as kernels are compiled for: fewer rows than slots
        assert len(dry.loss_rows) < len(dry.roles_D)
        assert objective.sums(model, dry).loss.isfinite()
        for _ in range(3):
            step.begin(theirs.SimpleNamespace(batches=packs))
            found.append(step.finish())
    for eager, graphed in zip(found[:3], found[3:], strict=True):
        assert graphed.loss == pytest.approx(eager.loss, rel=1e-5)
        assert graphed.figures == pytest.approx(eager.figures, rel=1e-3, abs=1e-5)
    assert found[2].loss < found[0].loss


@pytest.mark.parametrize("shared", [False, True])
def test_a_score_is_read_at_the_last_token_that_is_no_padding(shared: bool) -> None:
    """As transformers' classifier does; also where all of an answer is such tokens."""
    table = table_of([([5, 6], [7, 8, 0], [0, 0]), ([9], [3], [4, 2])], shared=shared)
    ids = batches_of(table, 32)[0].ids_T
    ends = ends_of(table, np.arange(4), 0)
    assert ids[torch.from_numpy(ends)].tolist() == [8, 6, 3, 2]
    assert ends.tolist() == ([3, 1, 8, 10] if shared else [3, 6, 10, 13])


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({**row, "margin": 0.1 * (i % 3)}) + "\n" for i, row in enumerate(pair_rows(24))))
    return str(file)


def settings(pairs: str, **more: Any) -> dict[str, Any]:
    return {
        "objective": "reward",
        "data": {"train": [pairs], "eval": 0.25},
        "eval": {"every": 2, "best": "accuracy", "generations": 0},
        "train": {"steps": 4, "lr": 2e-2},
        **more,
    }


def scores_by(model: Any, rows: list[list[int]], pad: int) -> list[float]:
    """Of a padded batch, by a stock model's own forward."""
    with torch.no_grad():
        return model(
            input_ids=theirs.padded(rows, pad), attention_mask=theirs.padded([[1] * len(row) for row in rows])
        ).logits[:, 0].tolist()  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_resumed_run_ends_with_the_same_bits(method: str, pairs: str, recipe_for: RecipeFor) -> None:
    """Score and all: what a kill after the checkpoint of step 2 leaves."""
    recipe = recipe_for(**settings(pairs, method=method, checkpoint={"every": 2}))
    last = Path(recipe.output) / "checkpoint-4"

    def trained() -> dict[str, bytes]:
        train(recipe, display=Silent())
        return {file.name: file.read_bytes() for file in last.glob("*.safetensors")}

    whole = trained()
    shutil.rmtree(last)
    assert trained() == whole
    assert len(whole) == 2


@pytest.mark.parametrize("method", first_of(["lora", "full", "qlora"], 2))
def test_stock_transformers_loads_what_a_run_trained(method: str, pairs: str, recipe_for: RecipeFor) -> None:
    recipe = recipe_for(**settings(pairs, method=method, precision="fp32"))
    train(recipe, display=Silent())
    run = Path(recipe.output)
    events = read_log(run)
    held_out = [event for event in events if event["event"] == "eval"][-1]
    assert {"accuracy", "margin", "mean_reward"} == set(held_out["metrics"])
    assert ">Accuracy<" in (page := render_page(events))
    assert ">Reward<" in page
    shown = Console(width=200, file=StringIO(), color_system=None)
    shown.print(summary(events))
    assert re.search(r"accuracy +\S+ +best \S+ at step \d, selects the best checkpoint", shown.file.getvalue())
    figures = evaluate_run(run, "last", data=None, report=lambda *_: None)
    assert figures["margin"] == pytest.approx(held_out["metrics"]["margin"], rel=1e-4, abs=1e-5)
    trained = TrainedRun(run, "last")
    model, tokenizer, _ = trained.load()
    rows = [tokenizer(text)["input_ids"] for text in ("a question and its answer", "short")]
    expected = scores_by(model, rows, padding_id(tokenizer))
    assert abs(expected[0] - expected[1]) > 1e-6
    (merged,) = export_run(run, "last", None, "merged")
    assert merged.verdict.passed
    stock = AutoModelForSequenceClassification.from_pretrained(merged.folder, dtype=torch.float32)
    assert stock.config.num_labels == 1
    assert scores_by(stock, rows, stock.config.pad_token_id) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    if method == "lora":
        (written,) = export_run(run, "last", None, "adapter")
        assert written.verdict.passed
        stored = json.loads((written.folder / "adapter_config.json").read_text())
        assert stored["task_type"] == "SEQ_CLS"
        assert "score" in stored["modules_to_save"]
        base = AutoModelForSequenceClassification.from_pretrained(
            recipe.model, num_labels=1, pad_token_id=padding_id(tokenizer), dtype=torch.float32
        )
        adapted = PeftModel.from_pretrained(base, str(written.folder))
        assert scores_by(adapted, rows, padding_id(tokenizer)) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_what_a_reward_model_cannot_is_refused(pairs: str, recipe_for: RecipeFor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="writes no answers"):
        recipe_for(**settings(pairs, eval={"generations": 2}))
    recipe = recipe_for(**settings(pairs, method="full", train={"steps": 1}))
    unsaid = Recipe.model_validate({"model": "m", "objective": "reward", "data": {"train": [pairs]}})
    assert unsaid.eval.generations == 0  # not the usual 3
    assert Recipe.model_validate(unsaid.model_dump()) == unsaid
    train(recipe, display=Silent())
    run = Path(recipe.output)
    for to in ("gguf", "ollama", "vllm", "fp8"):
        with pytest.raises(CommandError, match="does not support a reward model"):
            export_run(run, "last", tmp_path / to, to)
    metrics = EvaluationRequest({"metrics": ("exact_match",)})
    for use in (
        lambda: Chat(run, "last", max_tokens=3),
        lambda: load_served([run], "last"),
        lambda: evaluate_run(run, "last", data=None, report=lambda *_: None, asked=metrics),
    ):
        with pytest.raises(CommandError, match="trained a reward model"):
            use()
    classifier = str(next(run.glob("checkpoint-1")))
    with pytest.raises(ModelError, match="the head of a reward model"):
        train(recipe_for(model=classifier, output=str(tmp_path / "other")), display=Silent())
    further = recipe_for(**settings(pairs, model=classifier, output=str(tmp_path / "further"), train={"steps": 1}))
    train(further, display=Silent())  # its own score goes on
    config = read_config(recipe.model)
    config.architectures, config.num_labels = ["LlamaForSequenceClassification"], 3
    with pytest.raises(ModelError, match="with 3 labels"):
        require_head(config, "model", "score")
    with pytest.raises(RecipeError):
        train(recipe_for(**settings(pairs, lora={"targets": ["lm_head"]}, output=str(tmp_path / "x"))), display=Silent())


@pytest.mark.parametrize("storage", ["bf16", "nf4"])
def test_the_lm_head_is_not_loaded_onto_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    make_model(tie_word_embeddings=False).save_pretrained(tmp_path)  # a tied one is not in the files
    moved, read = [], []
    to, get = PreTrainedModel.to, Shards.get
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, *device: moved.append(model) or to(model, *device))
    monkeypatch.setattr(Shards, "get", lambda shards, key: read.append(key) or get(shards, key))
    model = load_model(str(tmp_path), torch.float32, CPU, storage=storage, head="score", seed=3)
    assert not any(hasattr(one, "lm_head") for one in moved)
    assert "model.norm.weight" in read or moved
    assert "lm_head.weight" not in read
    assert torch.equal(model.score.weight, load_model(str(tmp_path), torch.float32, CPU, head="score", seed=3).score.weight)
    assert model.score.weight.std() > 0
    assert all(not parameter.is_meta for parameter in model.parameters())
