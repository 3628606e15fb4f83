"""What PEFT can do to a fast model: every way computes what it computes on the model's own layers, loss and all gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    VeraConfig,
    get_peft_model,
)
from test_changes import CONFIGS, IDS, LINEARS, _said, assert_same_look, assert_same_step, runs, step  # noqa: F401
from torch import nn
from transformers import AutoModelForCausalLM

from pronghorn.compat.hf_forward import install
from pronghorn.model.causal_lm import base_of
from tables import table

pytestmark = pytest.mark.usefixtures("_said")
CAUSAL = TaskType.CAUSAL_LM
Act = Callable[[Any], Any]


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**({"task_type": CAUSAL, "r": 4, "target_modules": LINEARS} | options))


def shaken(model: Any) -> Any:
    """Adapters that do something: most begin with nothing."""
    chance = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora_" in name:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=chance))
    return model


def pair(config: Any, family: str = "llama", act: Act | None = None) -> tuple[Any, Any]:
    models = []
    for quick in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
        if quick:
            assert install(model) == ""
        torch.manual_seed(1)
        model = shaken(get_peft_model(model, copy.deepcopy(config))).train()
        if act is not None:
            act(model)
        models.append(model)
    return models[0], models[1]


CASES: dict[str, Any] = {
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "ranks and alphas by pattern": lora(rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 8}, alpha_pattern={"down_proj": 64}),
    "biases of the adapted": lora(bias="lora_only"),
    "a bias in B": lora(lora_bias=True),
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
    "gaussian": lora(init_lora_weights="gaussian"),
    "some layers": lora(layers_to_transform=[1]),
    "some linears": lora(target_modules=["q_proj", "up_proj"]),
    "tokens": lora(trainable_token_indices=[5, 6, 7]),
    "embeddings": lora(target_modules=[*LINEARS, "embed_tokens"]),
    "head": lora(target_modules=[*LINEARS, "lm_head"]),
    "norms saved": lora(modules_to_save=["input_layernorm", "norm", "lm_head"]),
    "an MLP saved": lora(target_modules=["q_proj"], modules_to_save=["mlp"]),
    "attention saved": lora(target_modules=["up_proj"], modules_to_save=["self_attn"]),
    "a linear saved": lora(target_modules=["q_proj"], modules_to_save=["o_proj"]),
    "layers replicated": lora(layer_replication=[[0, 2], [0, 2]]),
    "parameters": lora(target_modules=["q_proj"], target_parameters=["up_proj.weight", "o_proj.weight"]),
    "ia3": IA3Config(task_type=CAUSAL, target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "norms tuned": LNTuningConfig(task_type=CAUSAL, target_modules=["input_layernorm", "norm"]),
    "adalora": AdaLoraConfig(task_type=CAUSAL, target_modules=["q_proj", "down_proj"], total_step=10),
    "vera": VeraConfig(task_type=CAUSAL, r=4, target_modules=["q_proj"]),
    "oft": OFTConfig(task_type=CAUSAL, r=4, target_modules=["q_proj"], oft_block_size=0),
    "prompt": PromptTuningConfig(task_type=CAUSAL, num_virtual_tokens=3),
    "prompt encoder": PromptEncoderConfig(task_type=CAUSAL, num_virtual_tokens=3, encoder_hidden_size=8),
    "prefix": PrefixTuningConfig(task_type=CAUSAL, num_virtual_tokens=3),
}


@table("name", CASES)
def test_every_kind_of_adapter(name: str) -> None:
    plain, fast = pair(CASES[name])
    assert_same_step(plain, fast)
    with torch.no_grad():
        losses = [model.eval()(input_ids=IDS, labels=IDS).loss for model in (plain, fast)]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-5, atol=0)


@table(("family", "name"), [
    *(("qwen3", name) for name in ("dora", "tokens", "norms saved", "ia3")),
    *(("mixtral", name) for name in ("rslora", "some layers", "layers replicated")),
])  # fmt: skip
def test_in_other_families(family: str, name: str) -> None:
    config = copy.deepcopy(CASES[name])
    if family == "mixtral":
        config.target_modules = {"q_proj", "o_proj"}
        config.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]
    assert_same_step(*pair(config, family))


def second(name: str = "second", **options: Any) -> Act:
    def act(model: Any) -> None:
        torch.manual_seed(2)
        model.add_adapter(name, lora(**options))
        shaken(model)

    return act


def both(model: Any) -> None:
    second()(model)
    model.base_model.set_adapter(["default", "second"])


def weighted(model: Any) -> None:
    second()(model)
    model.add_weighted_adapter(["default", "second"], [0.7, 0.6], "sum", combination_type="linear")
    model.set_adapter("sum")


def switched_off_in_one_layer(model: Any) -> None:
    base_of(model).model.layers[0].mlp.up_proj.enable_adapters(False)


def frozen(part: str) -> Act:
    return lambda model: [p.requires_grad_(False) for name, p in model.named_parameters() if part in name]


def scaled(model: Any) -> None:
    for module in base_of(model).modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(2.0)


ACTS: dict[str, Act] = {
    "another adapter added": second(),
    "another adapter in use": lambda model: (second()(model), model.set_adapter("second")),
    "another, of other linears": lambda model: (second(target_modules=["q_proj"])(model), model.set_adapter("second")),
    "both in use": both,
    "a sum of both": weighted,
    "one deleted": lambda model: (second()(model), model.set_adapter("second"), model.delete_adapter("default")),
    "off in one layer": switched_off_in_one_layer,
    "merged": lambda model: model.merge_adapter(),
    "merged and not": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "A frozen": frozen("lora_A"),
    "B frozen": frozen("lora_B"),
    "scaled": scaled,
    "a base weight trains": lambda model: base_of(model).model.layers[0].mlp.up_proj.base_layer.weight.requires_grad_(True),
    "A replaced": lambda model: base_of(model).model.layers[0].mlp.up_proj.lora_A.update({"default": Halved(32, 4, False)}),
}


class Halved(nn.Linear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).view_as(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


@table("name", ACTS)
def test_what_is_done_with_adapters(name: str) -> None:
    plain, fast = pair(lora())
    assert_same_step(plain, fast)
    for model in (plain, fast):
        ACTS[name](model)
    if name != "merged":  # then PEFT's forward leaves the adapter's parameters out
        assert_same_step(plain, fast)
    assert_same_look(plain, fast)
    with plain.disable_adapter(), fast.disable_adapter():
        assert_same_look(plain, fast)


@pytest.mark.parametrize("end", ["unload", "merge_and_unload"])
def test_without_its_adapter_again(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = pair(lora())
    step(fast)
    plain, fast = (getattr(model, end)().train().requires_grad_(True) for model in (plain, fast))
    ran = runs(fast, monkeypatch)
    assert_same_step(plain, fast)
    assert ran


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_for_each_row(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    plain, fast = pair(lora(**options), act=second(**options))
    names = ["second", "__base__"]
    for model in (plain, fast):
        step(model)
        model.eval()
    with torch.no_grad():
        one, other = (model(input_ids=IDS, labels=IDS, adapter_names=names) for model in (plain, fast))
        torch.testing.assert_close(other.loss, one.loss, rtol=2e-5, atol=0)
        torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-4)
        usual = plain(input_ids=IDS, labels=IDS).loss
        assert abs(one.loss - usual) > 1e-3
        one, other = (
            model.generate(input_ids=IDS, adapter_names=names, max_new_tokens=4, do_sample=False) for model in (plain, fast)
        )
        assert torch.equal(one, other)
        torch.testing.assert_close(fast(input_ids=IDS, labels=IDS).loss, usual, rtol=2e-5, atol=0)
    assert capsys.readouterr().err.count("adapter_names: PEFT selects an adapter per row") == 1


def test_an_adapter_without_the_copies_of_the_first() -> None:
    """Norm and head of a second adapter are those of the model; those of the first are copies."""
    plain, fast = pair(lora(modules_to_save=["input_layernorm", "norm", "lm_head", "embed_tokens"]))
    for model in (plain, fast):
        second()(model)
    assert_same_step(plain, fast)
    for model in (plain, fast):
        model.set_adapter("second")
    assert_same_step(plain, fast)
