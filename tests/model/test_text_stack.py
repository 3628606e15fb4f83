"""The text model inside a model that reads images: on fast layers, and everything beside it as it was loaded."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig

from image_text_models import PARTS, make_image_text_model, published_name, save_image_text_model, stored
from pronghorn import FastLanguageModel
from pronghorn.compat.hf_forward import Output, install
from pronghorn.compat.outer_loop import loop_of
from pronghorn.errors import RecipeError
from pronghorn.memory.dry_run import static_parts
from pronghorn.memory.job import Job, shape_of
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.families import ties_embeddings, why_not_fast
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.load import inspect_model, load_model
from pronghorn.model.lora import add_adapter
from pronghorn.model.text_stack import beside_text, freeze_beside_text, is_beside
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora
from tables import first_of

CPU = torch.device("cpu")
KINDS = sorted(PARTS)
# Linears of the text model with adapters, and the adapters' parameters, where they are not those of Llama.
LINEARS = {"gemma4": 33, "lfm2_vl": 12, "qwen3_vl_moe": 8, "glm4v_moe": 8, "glm4v": 12, "glm46v": 12, "glm_ocr": 12,
           "muse_glimmer": 16}  # fmt: skip
STORED = LINEARS | {"glm4v_moe": 14, "gemma4": 32}  # a dense MLP and a shared expert, which have no adapters; one in 16 bits
ADAPTERS = {"lfm2_vl": 3584, "qwen3_vl_moe": 1792, "glm4v_moe": 1792, "glm4v": 3456, "glm46v": 3456, "glm_ocr": 3456,
            "muse_glimmer": 4224}  # fmt: skip


def beside(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "vis" in name or "multi_modal" in name or "audio" in name}


def own(model: Any, **inputs: Any) -> Any:
    with loop_of(model).own_layers():
        return model(**inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_fast_layers_compute_what_the_whole_model_computes(kind: str) -> None:
    """Loss and every adapter's gradient; and for rows with padding, with labels and without, what its own forward gives."""
    model = add_adapter(make_image_text_model(kind), Lora(r=4), seed=0)
    verdict = verify(model)
    assert install(model) == ""
    assert verdict.loss_difference < 1e-6
    assert len(verdict.gradients) == 2 * LINEARS.get(kind, 14)
    ids = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    labels = torch.where(mask.bool(), ids, -100)
    labels[1, 6] = -100
    model.eval()
    with torch.no_grad():
        ours, theirs = (
            call(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
            for call in (model, lambda **inputs: own(model, **inputs))
        )
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.equal(ours, theirs)  # so they are two ways of computing it
    loss, truth = (
        model(input_ids=ids, attention_mask=mask, labels=labels),
        own(model, input_ids=ids, attention_mask=mask, labels=labels),
    )
    assert isinstance(loss, Output)
    assert not isinstance(truth, Output)
    assert float(loss.loss.detach()) == pytest.approx(float(truth.loss.detach()), rel=1e-6)
    assert model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2, do_sample=False).shape == (2, 22)


def test_images_go_through_the_models_own_forward() -> None:
    model = make_image_text_model("gemma3").eval()
    ids = torch.tensor([[5, 6, 255, 255, 255, 255, 7, 8]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28), "token_type_ids": (ids == 255).long(), "labels": ids}
    with torch.no_grad():
        truth = model(**inputs)
        assert install(model) == ""
        assert torch.equal(model(**inputs).loss, truth.loss)
        text_only = model(**(inputs | {"pixel_values": None})).loss  # tokens of an image see each other, with pixels or without
        assert torch.equal(text_only, own(model, **(inputs | {"pixel_values": None})).loss)


@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, "16 bits") for kind in KINDS), *first_of(zip(KINDS, itertools.cycle(["nf4", "fp8"]), strict=False), 2)],
)
def test_published_names_are_read_and_written_again(kind: str, method: str, tmp_path: Path) -> None:
    """What is beside the text model keeps its bits; the text model's linears are stored as the method says."""
    name = save_image_text_model(kind, tmp_path / "model")
    model = load_model(name, torch.float32, CPU, storage="bf16" if method == "16 bits" else method)
    whole = make_image_text_model(kind).state_dict()
    assert all(torch.equal(value, whole[key]) for key, value in beside(model.state_dict()).items())
    few_bits = [path for path, module in model.named_modules() if isinstance(module, StoredLinear)]
    assert len(few_bits) == (0 if method == "16 bits" else STORED.get(kind, 14))
    assert all(path.startswith("model.language_model.layers.") for path in few_bits)
    assert torch.equal(model.get_input_embeddings().weight, whole["model.language_model.embed_tokens.weight"])
    if method == "16 bits":
        model.save_pretrained(tmp_path / "again")
        before, after = stored(tmp_path / "model"), stored(tmp_path / "again")
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_a_head_of_its_own_is_kept_whatever_the_config_ties(method: str, tmp_path: Path) -> None:
    """Mistral 3's config ties by default; Mistral Small's files have both, and they differ."""
    from safetensors.torch import save_file

    name = save_image_text_model("mistral3", tmp_path / "model")
    head = torch.randn(259, 32)
    save_file(
        stored(tmp_path / "model") | {"language_model.lm_head.weight": head},
        tmp_path / "model" / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = load_model(name, torch.float32, CPU, storage=method)
    assert torch.equal(model.lm_head.weight, head)
    assert not torch.equal(model.get_input_embeddings().weight, head)
    assert not ties_embeddings(AutoConfig.from_pretrained(name))  # so a plan counts both


@pytest.mark.parametrize("kind", first_of(KINDS, 3))
def test_adapters_are_on_the_text_model_alone(kind: str, tmp_path: Path) -> None:
    model = add_adapter(make_image_text_model(kind), Lora(r=4), seed=0)
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapted) == 2 * LINEARS.get(kind, 14)
    inside = (".model.language_model.layers.", ".model.language_model.per_layer_model_projection.")
    assert all(any(part in name for part in inside) for name in adapted)
    with pytest.raises(RecipeError, match="matches no linear layer"):
        add_adapter(make_image_text_model(kind), Lora(targets=("fc1",)), seed=0)
    python, _ = FastLanguageModel.from_pretrained(save_image_text_model(kind, tmp_path), max_seq_length=128, load_in_4bit=False)
    python = FastLanguageModel.get_peft_model(python, r=4)
    named = {name for name, _ in python.named_parameters() if "lora_" in name}
    assert all(".model.language_model.layers." in name for name in named)
    assert named == adapted or kind in LINEARS  # Llama's names, which are its default, mean other modules there
    assert engine_of(python) is not None


@pytest.mark.parametrize("kind", first_of(KINDS, 3))
def test_what_is_beside_is_counted_and_never_trained(kind: str, tmp_path: Path) -> None:
    model = make_image_text_model(kind)
    counted = sum(value.numel() for value in beside(dict(model.named_parameters())).values())
    assert freeze_beside_text(model) == counted > 0
    assert all(p.requires_grad != is_beside(name, beside_text(model)) for name, p in model.named_parameters())
    shape = shape_of(model.config)
    both = 259 * 32 if model.get_output_embeddings().weight is model.get_input_embeddings().weight and not shape.tied else 0
    parts = static_parts(Job(shape, 256, method="full", element=4))
    expected = 4 * (sum(p.numel() for p in model.parameters()) + both)
    assert (
        expected <= parts["weights"] <= expected + 2 * 64 * 4 + 4 * 4
    )  # biases of q, k and v once more, as one; that of a choice of experts
    assert parts["gradients and optimizer"] == 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts = inspect_model(save_image_text_model(kind, tmp_path), Lora(r=4))
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    text = [m for m in model.model.language_model.modules() if isinstance(m, torch.nn.Linear)]
    adapted = sum(4 * (linear.in_features + linear.out_features) for linear in text)
    assert facts.adapter_parameters == ADAPTERS.get(kind, adapted)
    assert kind in ADAPTERS or len(text) == LINEARS.get(kind, 2 * 7)


def test_a_wrapper_that_is_not_in_the_table_trains_on_its_own_layers() -> None:
    config = AutoConfig.for_model("vipllava", text_config=LlamaConfig(hidden_size=32).to_dict())
    assert "model type vipllava is not supported" in why_not_fast(config)


def test_python_saves_the_whole_model_with_what_prepares_images(tmp_path: Path) -> None:
    name = save_image_text_model("gemma3", tmp_path / "model", torch.bfloat16)
    model, tokenizer = FastLanguageModel.from_pretrained(name, max_seq_length=128, dtype=torch.bfloat16)  # in 4 bits
    model = FastLanguageModel.get_peft_model(model, r=4)
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    before, after = stored(tmp_path / "model"), stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in beside(before).items())
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert published_name("gemma3", "model.vision_tower.encoder.x").startswith("vision_tower.vision_model.")
