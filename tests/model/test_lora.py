"""Adapters are PEFT's: same scaling, same files, same logits when stock PEFT loads what we save."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from pronghorn.errors import CheckpointError, RecipeError
from pronghorn.model.export import save_model
from pronghorn.model.lora import add_adapter, load_adapter, restore_adapter
from pronghorn.recipe_parts import Lora
from samples import make_model, small
from tables import table

KINDS = {
    "lora": Lora(r=4, alpha=8),
    "rslora": Lora(r=4, alpha=8, rslora=True),
    "dora": Lora(r=4, alpha=8, dora=True),
    "some layers": Lora(r=2, alpha=3, targets=("q_proj", "down_proj")),
}


def stirred(model: Any, seed: int = 3) -> Any:
    """B is zero and DoRA's magnitude is the weight's own at the start: move all, so that the adapter does something."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(3, 40)[None]).logits
    return result


def test_a_new_adapter_changes_nothing() -> None:
    for lora in KINDS.values():
        assert torch.allclose(logits(add_adapter(make_model(), lora, seed=1).eval()), logits(make_model().eval()), atol=1e-6)


@table("kind", KINDS)
def test_the_adapter_computes_the_formula_of_its_paper(kind: str) -> None:
    """In float64, by hand: W x + scale B A x; DoRA: the sum's rows stretched to the learned lengths."""
    lora = KINDS[kind]
    model = stirred(add_adapter(make_model(), lora, seed=1)).double()
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale = lora.alpha / (math.sqrt(lora.r) if lora.rslora else lora.r)
    weight = layer.base_layer.weight + scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    if lora.dora:
        length = layer.lora_magnitude_vector["default"].weight
        weight = weight * (length / weight.norm(dim=1))[:, None]
    assert layer.scaling["default"] == pytest.approx(scale, rel=1e-12)
    assert torch.allclose(layer(x), x @ weight.T, rtol=1e-9, atol=1e-12)


@table("kind", KINDS)
def test_stock_peft_loads_what_we_save_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    ours = stirred(add_adapter(make_model(), KINDS[kind], seed=1))
    save_model(ours, tmp_path)
    stock = PeftModel.from_pretrained(make_model(), str(tmp_path)).eval()
    assert torch.equal(logits(stock), logits(ours))
    assert not torch.allclose(logits(stock), logits(make_model().eval()), atol=1e-3)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@table("kind", KINDS)
def test_what_is_saved_is_put_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    ours = stirred(add_adapter(make_model(), KINDS[kind], seed=1))
    save_model(ours, tmp_path)
    fresh = add_adapter(make_model(), KINDS[kind], seed=2)
    restore_adapter(fresh, tmp_path)
    expected = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert {name for name, p in fresh.named_parameters() if p.requires_grad} == expected.keys()
    assert all(torch.equal(p, expected[name]) for name, p in fresh.named_parameters() if p.requires_grad)
    again = load_adapter(make_model(), tmp_path, KINDS[kind], seed=3)
    assert torch.equal(logits(again.eval()), logits(ours))


def test_adapter_weights_are_float32_over_a_base_of_any_precision() -> None:
    model = add_adapter(make_model().to(torch.bfloat16), Lora(r=4), seed=1)
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_the_same_seed_starts_from_the_same_adapter() -> None:
    def start(seed: int) -> torch.Tensor:
        torch.manual_seed(12345 + seed)  # what was drawn before does not matter
        return torch.cat([p.flatten() for p in add_adapter(make_model(), Lora(r=4), seed).parameters() if p.requires_grad])

    assert torch.equal(start(1), start(1))
    torch.rand(3)
    assert not torch.equal(start(1), start(2))


def test_all_linear_means_all_but_the_head() -> None:
    model = add_adapter(make_model(), Lora(r=4), seed=1)
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_targets_given_by_their_longer_name() -> None:
    model = add_adapter(make_model(), Lora(r=4, targets=("mlp.up_proj",)), seed=1)
    assert sum(".lora_A." in name for name, _ in model.named_parameters()) == 2


@pytest.mark.parametrize(("target", "hint"), [("q_prj", "did you mean `q_proj`?"), ("wte", "available: down_proj")])
def test_a_target_that_matches_nothing_is_refused(target: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=f"`{target}` matches no linear layer") as caught:
        add_adapter(make_model(), Lora(targets=("k_proj", target)), seed=1)
    assert hint in caught.value.fix


def test_what_adapter_config_says_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT imports the module that `megatron_core` names, and other kinds of adapters bring other classes."""
    ours = stirred(add_adapter(make_model(), Lora(r=4), seed=1))
    save_model(ours, tmp_path)
    file = tmp_path / "adapter_config.json"
    changes = {"megatron_config": {"a": 1}, "megatron_core": "named_by_a_file", "peft_type": "IA3", "bias": "all"}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (tmp_path / "named_by_a_file.py").write_text("import pathlib; (pathlib.Path(__file__).parent / 'ran').touch()")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert torch.equal(logits(load_adapter(make_model(), tmp_path, Lora(r=4), 1).eval()), logits(ours))
    assert not (tmp_path / "ran").exists()


@table(
    ("change", "why"),
    [
        (lambda tensors: tensors.popitem(), "is not in the file"),
        (lambda tensors: tensors.update({"base_model.model.model.layers.7.x.lora_A.weight": torch.ones(4)}), "does not exist"),
        (lambda tensors: tensors.update({min(tensors): torch.ones(3, 3)}), "size mismatch"),
    ],
)
def test_weights_of_another_adapter(tmp_path: Path, change: Any, why: str) -> None:
    model = add_adapter(make_model(), Lora(r=4), seed=1)
    save_model(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="does not contain the recipe's adapter") as caught:
        restore_adapter(model, tmp_path)
    assert why in caught.value.why
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="does not contain the recipe's adapter"):
        restore_adapter(model, tmp_path)


SIGMOID = small(vocab_size=67, intermediate_size=48, head_dim=8, moe_intermediate_size=16, num_experts_per_tok=2)
WITH_SHARED = {
    "glm4_moe": {"n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "hy_v3": {"num_experts": 4, "num_shared_experts": 1},
    "exaone_moe": {"num_experts": 4, "num_shared_experts": 1},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"n_routed_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_num_shared_experts": 1},
    "afmoe": {"num_experts": 4, "num_shared_experts": 1},  # PEFT takes the gate of its attention for experts, too
    "hunyuan_v1_moe": {"num_experts": 4},
}


@table("family", WITH_SHARED)
def test_names_that_peft_takes_for_experts_are_not_meant_by_all_linear(family: str) -> None:
    """An adapter called all-linear would be on the experts instead, with twice the rank, and a plan would not know."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pronghorn.model.families import FAMILIES

    def model() -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIGMOID, **WITH_SHARED[family]))

    names = [name for name, _ in add_adapter(model(), Lora(r=2), 0).named_parameters() if "lora_A" in name]
    adapted = {name.split(".lora_")[0].rpartition("layers.1.")[2] for name in names if ".layers.1." in name}
    latent = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    linears = {"deepseek_v3": latent | {"q_proj"}, "glm4_moe_lite": latent | {"q_a_proj", "q_b_proj"}}.get(
        family, {f"{name}_proj" for name in "qkvo"}
    )
    attention = {f"self_attn.{name}" for name in linears}
    shared = {f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    row = FAMILIES[family].experts
    assert row
    assert adapted == attention | (shared if row.shared_adapted else set())
    if not row.shared_adapted:
        with pytest.raises(RecipeError, match="PEFT interprets `up_proj` as part of this model's experts"):
            add_adapter(model(), Lora(r=2, targets=("o_proj", "up_proj")), 0)
