"""TRL's fused head, answered by ours: every output and every gradient as TRL's own, which here runs in plain torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from api_parts import adapted
from pronghorn.compat import fused_head
from pronghorn.model.causal_lm import base_of, engine_of
from samples import make_model, make_tokenizer
from tables import first_of
from trl_on_a_cpu import TorchLogProbs

SFT = ("log_probs", "entropy", "is_top1")


class Counted(TorchLogProbs):
    calls = 0

    @staticmethod
    def apply(*args: Any) -> Any:
        Counted.calls += 1
        return TorchLogProbs.apply(*args)


@pytest.fixture(autouse=True)
def _trl_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    Counted.calls = 0
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", Counted)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def model_in(folder: Path, outputs: tuple[str, ...] = SFT, temperature: float = 1.0, **options: Any) -> Any:
    model, _ = adapted(folder, **options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    add_fused_lm_head(base_of(model), temperature=temperature, outputs=outputs)
    return model


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 259, (3, 17), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.rand(3, 17, generator=torch.Generator().manual_seed(1)) < 0.3, -100)
    if kind == "packed":
        positions = torch.cat([torch.arange(20), torch.arange(31)])[None]
        return {"input_ids": ids.view(1, -1), "labels": labels.view(1, -1), "position_ids": positions}
    mask = torch.ones_like(ids)
    side = slice(0, 4) if kind == "left" else slice(-5, None)
    mask[1, side], labels[1, side] = 0, -100
    if kind == "left":
        labels[1, 4] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def outcome(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """With a gradient of its own for each token."""
    model.zero_grad()
    output = model(**inputs, fused_lm_head=True)
    pull = torch.linspace(-1, 2, output.log_probs.numel()).view(output.log_probs.shape)
    (output.loss + (output.log_probs * pull).sum()).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", first_of(["right", "packed", "left"], 2))
@pytest.mark.parametrize(
    "changes", [{"temperature": 0.7}, {"num_items_in_batch": torch.tensor(77)}, {"four_bit": True}], ids=str
)
def test_outputs_and_gradients_are_trls(
    folder: Path, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(changes)
    model = model_in(folder, four_bit=changes.pop("four_bit", False), temperature=changes.pop("temperature", 1.0))
    inputs = batch(kind) | changes
    ours, gradients = outcome(model, inputs)
    assert Counted.calls == 0
    monkeypatch.setattr(fused_head, "_answer", lambda *_: None)
    theirs, expected = outcome(model, inputs)
    assert Counted.calls == 1
    assert type(ours) is type(theirs)
    assert ours.keys() == theirs.keys()
    for name in ("loss", "log_probs", "entropy"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    for name in ("is_top1", "label_mask"):
        assert torch.equal(ours[name], theirs[name]), name
    assert gradients.keys() == expected.keys()
    assert gradients
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


def test_labels_that_are_shifted_already(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_in(folder), batch("packed")
    labels = inputs.pop("labels")
    inputs["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    ours, _ = outcome(model, inputs)
    monkeypatch.setattr(fused_head, "_answer", lambda *_: None)
    theirs, _ = outcome(model, inputs)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=1e-4, atol=1e-5)
    assert ours.log_probs.shape == labels.shape


def test_no_label_at_all(folder: Path) -> None:
    inputs = batch("right")
    inputs["labels"][:] = -100
    output, gradients = outcome(model_in(folder), inputs)
    assert float(output.loss.detach()) == 0.0
    assert Counted.calls == 0
    assert all(not gradient.any() for gradient in gradients.values())


def asks_for_more(folder: Path) -> Any:
    return model_in(folder, (*SFT, "mean_logits"))


def trains_its_head(folder: Path) -> Any:
    return model_in(folder, target_modules=["q_proj", "lm_head"])


def hooked(folder: Path) -> Any:
    model = model_in(folder)
    base_of(model).model.norm.register_forward_hook(lambda module, args, output: output * 1.5)
    return model


def softcapped(folder: Path) -> Any:
    config = Gemma2Config(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        max_position_embeddings=512,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return model_in(folder)


@pytest.mark.parametrize("kind", [asks_for_more, trains_its_head, hooked, softcapped])
def test_what_is_not_computed_here_goes_on_to_trl(folder: Path, kind: Any) -> None:
    output, gradients = outcome(kind(folder), batch("right"))
    assert Counted.calls == 1
    assert gradients
    assert output.log_probs.any()


def test_without_gradients_and_without_the_argument(folder: Path) -> None:
    model, inputs = model_in(folder), batch("right")
    with torch.no_grad():
        assert model(**inputs, fused_lm_head=True).log_probs.any()
    assert Counted.calls == 1
    assert model(**inputs).logits.shape == (3, 17, 259)


def test_a_trainer_calls_it(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(folder)
    args = SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_length=64,
        packing=True,
        max_steps=3,
        report_to="none",
        use_cpu=True,
        per_device_train_batch_size=1,
        logging_steps=1,
        bf16=False,
        save_strategy="no",
    )
    data = datasets.Dataset.from_list([{"text": "to be or not to be"}] * 60)
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert Counted.calls == 0
    logged = [entry for entry in trainer.state.log_history if "entropy" in entry]
    assert len(logged) == 3
    assert all(0 < entry["entropy"] < 6 and 0 <= entry["mean_token_accuracy"] <= 1 for entry in logged)
    twin = copy.deepcopy(model)
    assert engine_of(twin) is not engine_of(model)
    outcome(twin, batch("right"))
    assert Counted.calls == 0
