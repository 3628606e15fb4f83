"""The interface where there is a GPU: the default call puts the model there, in bf16, and everything that follows works there.

Numbers are compared on the CPU (test_language_model.py); here, the fast layers with the model's own on the same GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from api_parts import SCRIPT
from pronghorn import FastLanguageModel
from pronghorn.compat.outer_loop import loop_of
from pronghorn.model.causal_lm import base_of
from samples import chat_rows, make_model, make_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
STORED = {"16 bit": {"load_in_4bit": False}, "4 bit": {"load_in_4bit": True}}


@pytest.fixture(scope="module")
def usual_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that every kernel takes."""
    folder = tmp_path_factory.mktemp("usual-llama")
    make_model(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05
    ).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def losses(model: Any, ids: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    found = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("stored", STORED)
def test_a_model_trains_generates_and_merges_where_the_gpu_is(usual_model: Path, tmp_path: Path, stored: str) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(usual_model), max_seq_length=512, **STORED[stored])
    assert model.device.type == "cuda"
    assert model.dtype == torch.bfloat16
    model = FastLanguageModel.get_peft_model(model, r=8)
    ids = torch.randint(3, 259, (4, 64), generator=torch.Generator().manual_seed(0)).to(model.device)
    curve = losses(model, ids, 20)
    assert curve[-1] < 0.9 * curve[0]
    gradients, values = [], []
    for paused in (False, True):
        loop_of(model).paused = paused
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        values.append(float(output.loss.detach()))
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    loop_of(model).paused = False
    assert abs(values[0] - values[1]) < 2e-2 * values[1]
    assert torch.cosine_similarity(*gradients, dim=0) > 0.97
    prompt = tokenizer("add 1 and 2", return_tensors="pt").to(model.device)
    answer = FastLanguageModel.for_inference(model).generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer.device.type == "cuda"
    model.save_pretrained_merged(tmp_path, tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to("cuda").eval()
    with torch.no_grad():
        expected, found = model(input_ids=ids).logits.float(), merged(input_ids=ids).logits.float()
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_hooks_count_on_a_gpu_too(usual_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(usual_model), max_seq_length=512, load_in_4bit=False)
    ids = torch.randint(3, 259, (2, 33), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        before = model(input_ids=ids, labels=ids).loss
        base_of(model).model.layers[0].mlp.down_proj.register_forward_hook(lambda _, args, out: 0 * out)
        after = model(input_ids=ids, labels=ids).loss
        loop_of(model).paused = True
        own = model(input_ids=ids, labels=ids).loss
    assert torch.equal(after, own)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bit", "4 bit"])
def test_a_script_runs_on_the_gpu(usual_model: Path, tmp_path: Path, four_bit: bool) -> None:
    rows = [{"messages": row["messages"]} for row in chat_rows(60)]
    names: dict[str, Any] = {"MODEL": str(usual_model), "ROWS": rows, "OUTPUT": str(tmp_path)}
    script = SCRIPT.replace("load_in_4bit = False", f"load_in_4bit = {four_bit}")
    exec(script.replace("from unsloth import", "from pronghorn import"), names)
    found = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(found) == 6
    assert found[-1] < found[0]
    assert next(names["model"].parameters()).device.type == "cuda"
    assert (tmp_path / "model" / "model.safetensors").is_file()
