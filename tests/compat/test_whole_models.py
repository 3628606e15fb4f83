"""A fast model as a whole: pickled, copied, offloaded, merged, and one forward with two backwards."""

from __future__ import annotations

import copy
import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.state import AcceleratorState
from test_changes import IDS, _said, assert_same_look, assert_same_step, pair, runs, step  # noqa: F401
from test_quantized_experts import GPT_OSS
from transformers import AutoModelForCausalLM

from pronghorn import FastLanguageModel
from pronghorn.compat.hf_forward import install
from pronghorn.compat.outer_loop import loop_of
from pronghorn.errors import ModelError
from pronghorn.model.causal_lm import base_of, engine_of
from samples import make_tokenizer

pytestmark = pytest.mark.usefixtures("_said")


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("adapter", [True, False])
def test_a_pickled_model_opens_on_its_own_layers_and_gets_fast_ones_again(
    adapter: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, fast = pair(adapter=adapter)
    step(fast)
    opened = pickled(fast)
    assert "loaded from a pickle uses the transformers layers" in capsys.readouterr().err
    assert_same_step(plain, opened)
    assert engine_of(opened) is None
    opened.state_dict()
    FastLanguageModel.for_training(opened)
    ran = runs(opened, monkeypatch)
    assert_same_step(plain, opened)
    assert ran


def test_a_pickled_model_of_the_interface(tiny_model: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(
        str(tiny_model), max_seq_length=64, load_in_4bit=False, dtype=torch.float32, device_map="cpu"
    )
    model = FastLanguageModel.get_peft_model(model, r=4)
    opened = pickled(model)
    opened.save_pretrained_merged(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    assert opened.save_pretrained_merged.args[0] is opened


def test_a_second_backward_that_was_not_asked_for_and_gradients_of_gradients_are_errors() -> None:
    _, fast = pair(adapter=False)
    loss = fast(input_ids=IDS, labels=IDS).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()
    hidden = base_of(fast).model(input_ids=IDS, use_cache=False).last_hidden_state
    weight = base_of(fast).model.layers[0].mlp.up_proj.weight
    (gradient,) = torch.autograd.grad(hidden.square().sum(), weight, create_graph=True)
    with pytest.raises(ModelError, match="gradients of gradients"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("adapter", [True, False])
def test_weights_that_accelerate_moves(adapter: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain, fast = pair(adapter=adapter)
    expected = step(plain)[0]
    step(fast)
    cpu_offload(fast, execution_device=torch.device("cpu"))
    torch.testing.assert_close(fast(input_ids=IDS, labels=IDS).loss, expected, rtol=2e-5, atol=0)
    assert "accelerate, which moves its weights" in capsys.readouterr().err


def test_mixed_precision_on_and_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate wraps the forward, and unwraps it down to the innermost."""
    plain, fast = pair(adapter=False)
    assert inspect.signature(fast.forward) == inspect.signature(plain.forward)
    AcceleratorState._reset_state(reset_partial_state=True)  # one a process, and others have made it
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(fast)
    prepared(input_ids=IDS, labels=IDS)
    fast = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    ran = runs(fast, monkeypatch)
    assert_same_step(plain, fast)
    assert ran


def test_a_copy_has_layers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = pair()
    step(fast)
    twin = copy.deepcopy(fast)
    assert engine_of(twin).model is base_of(twin)
    ran, never = runs(twin, monkeypatch), runs(fast, monkeypatch)
    assert_same_step(plain, twin)
    twin.base_model.model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: 2 * out)
    assert loop_of(fast).changes.why_not_now() == ""
    assert loop_of(twin).changes.why_not_now()
    assert len(ran) == 1
    assert not never


@pytest.fixture(scope="module")
def small_gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(copy.deepcopy(GPT_OSS)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_experts_in_4_bits_merge_before_a_first_forward(small_gpt_oss: Path, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(small_gpt_oss), max_seq_length=64, dtype=torch.float32, device_map="cpu")
    model = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "experts"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained_merged(tmp_path)
    experts = next(module for module in base_of(model).modules() if type(module).__name__ == "StoredExperts")
    assert not any(experts.gate_up_proj.stride()), "nothing is stored beside the 4 bits"
    with pytest.raises(ModelError, match="save_pretrained_merged"):
        model.merge_and_unload()
    with pytest.raises(ModelError, match="save_pretrained_merged"):
        model.merge_adapter()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert (merged(input_ids=ids).logits - expected).abs().max() < 0.03 * expected.abs().max()


def test_fast_layers_are_not_given_twice() -> None:
    _, fast = pair()
    engine = engine_of(fast)
    assert install(fast) == ""
    assert engine_of(fast) is engine
    assert_same_look(*pair(adapter=False))
