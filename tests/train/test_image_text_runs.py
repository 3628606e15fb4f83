"""Whole runs over text of models that read images, too: what comes out is the whole model, under the names it came with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
from watching import RecipeFor, losses_of

from image_text_models import save_image_text_model, stored
from pronghorn.cli import main
from pronghorn.export.run import export_run
from pronghorn.train.run.run_evaluation import evaluate_run
from pronghorn.train.run.trained_run import Chat
from tables import first_of

pytestmark = pytest.mark.usefixtures("short_export_check")


@pytest.mark.parametrize(
    ("kind", "method"),
    first_of(
        [
            ("gemma3", "qlora"),
            ("gemma4", "lora"),
            ("qwen3_vl", "full"),
            ("mistral3", "fp8"),
            ("gemma3", "lora"),
            ("gemma3", "full"),
            ("qwen2_5_vl", "lora"),
            ("lfm2_vl", "qlora"),
            ("qwen3_vl_moe", "lora"),
            ("llava_next", "full"),
            ("internvl", "fp8"),
            ("glm4v", "qlora"),
            ("glm4v_moe", "lora"),
        ],
        3,
    ),
)
def test_text_is_trained_and_everything_else_comes_back(
    kind: str, method: str, recipe_for: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_image_text_model(kind, tmp_path / "model")
    recipe = recipe_for(
        model=model, method=method, train={"steps": 4, "lr": 1e-2 if method != "full" else 1e-3}, eval={"every": 4}
    )
    file, run = tmp_path / "recipe.yaml", Path(recipe.output)
    file.write_text(json.dumps(recipe.model_dump(exclude={"eval": {"stop"}})))  # JSON is YAML
    assert main(["check", str(file)]) == 0
    assert main(["plan", str(file), "--gpu", "h200"]) == 0
    assert main(["train", str(file), "--json"]) == 0
    assert "transformers layers" not in capsys.readouterr().out
    losses = losses_of(run)
    assert losses[-1] < losses[0] - 0.05
    figures = evaluate_run(run, "last", data=None, report=lambda *_: None)
    assert figures["loss"] == pytest.approx(losses_of(run, "eval")[-1], rel=1e-6)
    assert isinstance(Chat(run, "last", max_tokens=2).answer("add 1 and 2"), str)
    export_run(run, "last", tmp_path / "merged", "merged")
    before, after = stored(tmp_path / "model"), stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    text = [key for key in before if "vis" not in key and "multi_modal" not in key]
    assert all(torch.equal(before[key], after[key]) for key in before.keys() - set(text))
    assert any(not torch.equal(before[key], after[key]) for key in text)
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    ids = torch.arange(3, 23)[None]
    if method == "lora":
        export_run(run, "last", tmp_path / "adapter", "adapter")
        assert "AutoModelForImageTextToText" in (tmp_path / "adapter" / "README.md").read_text() or kind.startswith("gemma")
        stock = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(model), tmp_path / "adapter")
        with torch.no_grad():
            ours, theirs = (each.eval()(input_ids=ids).logits for each in (merged, stock))
        assert torch.allclose(ours, theirs, atol=1e-5)
