"""Whatever a program does to a model after it was loaded, the fast model computes what transformers and PEFT alone would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen3Config
from transformers.modeling_utils import AttentionInterface

from pronghorn.compat.hf_forward import install
from pronghorn.kernels.runtime import dispatch
from pronghorn.model.causal_lm import base_of, engine_of
from tables import table

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = torch.randint(3, 67, (2, 11), generator=torch.Generator().manual_seed(0))
Act = Callable[[Any], Any]


def make(family: str = "llama", *, adapter: bool = True) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))
    if adapter:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=LINEARS))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
    return model.train()


def pair(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    plain, fast = make(family, **options), make(family, **options)
    assert install(fast) == ""
    return plain, fast


def step(model: Any, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, **more).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(plain: Any, fast: Any, what: Any = "") -> torch.Tensor:
    """Returns the loss of the plain one."""
    (loss, gradients), (found, ours) = step(plain), step(fast)
    torch.testing.assert_close(found, loss, rtol=2e-5, atol=0, msg=lambda text: f"{what}: {text}")
    assert gradients.keys() == ours.keys()
    for name, value in gradients.items():
        assert (ours[name] - value).norm() <= 1e-4 * value.norm() + 1e-7, (what, name)
    return loss


@torch.no_grad()
def assert_same_look(plain: Any, fast: Any, *, generate: bool = False) -> None:
    """Without gradients: loss, logits, hidden states; a generated text with and without a cache."""
    for model in (plain, fast):
        model.eval()
    one, other = (model(input_ids=IDS, labels=IDS, output_hidden_states=False, use_cache=False) for model in (plain, fast))
    torch.testing.assert_close(other.loss, one.loss, rtol=2e-5, atol=0)
    torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-4)
    one, other = (model(input_ids=IDS, output_hidden_states=True) for model in (plain, fast))
    for mine, theirs in zip(other.hidden_states, one.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for cached in (True, False) if generate else ():
        texts = [
            model.generate(
                input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False, use_cache=cached
            )
            for model in (plain, fast)
        ]
        assert torch.equal(*texts)
    for model in (plain, fast):
        model.train()


def runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled with True each time the fast layers run."""
    ran: list[bool] = []
    own = engine_of(model).hidden
    monkeypatch.setattr(engine_of(model), "hidden", lambda *args: ran.append(True) or own(*args))
    return ran


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_said", set())


def at(path: str) -> Callable[[Any], Any]:
    return lambda model: base_of(model).get_submodule(path)


# ---- hooks -----------------------------------------------------------------------------------------------------------

IN_LAYERS = [
    "self_attn.q_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn",
    "mlp",
    "mlp.act_fn",
    "self_attn.o_proj.base_layer",
    "mlp.up_proj.lora_A.default",
]
HOOKED = [
    *(f"model.layers.1.{name}" for name in IN_LAYERS),
    "model.layers.0",
    "model.norm",
    "model.embed_tokens",
    "lm_head",
    "model",
]


def larger(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value * 1.5 if value.is_floating_point() else value
    if isinstance(value, tuple):
        return (larger(value[0]), *value[1:])
    value["last_hidden_state"] = value.last_hidden_state * 1.5
    return value


HOOKS: dict[str, Act] = {
    "forward": lambda module: module.register_forward_hook(lambda _, args, out: larger(out)),
    "pre": lambda module: module.register_forward_pre_hook(
        lambda _, args, kwargs: (
            tuple(map(larger, args)),
            {k: larger(v) if k == "hidden_states" else v for k, v in kwargs.items()},
        ),
        with_kwargs=True,
    ),
    "backward": lambda module: module.register_full_backward_hook(
        lambda _, grads, outs: tuple(g if g is None else g * 1.5 for g in grads)
    ),
    "backward pre": lambda module: module.register_full_backward_pre_hook(
        lambda _, outs: tuple(g if g is None else g * 1.5 for g in outs)
    ),
}


@table("path", HOOKED, one_in=3)
def test_hooks_are_called_and_what_they_return_counts(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, fast = pair()
    free = assert_same_step(plain, fast)
    for kind, hook in HOOKS.items():
        if path == "model" and kind != "forward":
            continue  # gets tokens and gives an output object: there is nothing to change
        handles = [hook(at(path)(model)) for model in (plain, fast)]
        loss = assert_same_step(plain, fast, kind)
        if kind == "forward":
            assert abs(loss - free) > 1e-3, "it has an effect"
            assert_same_look(plain, fast, generate=path in ("model", "lm_head", "model.layers.1.mlp.down_proj"))
        for handle in handles:
            handle.remove()
    said = [line for line in capsys.readouterr().err.splitlines() if "hook" in line]
    assert len(said) <= 1 + (path == "lm_head")
    ran = runs(fast, monkeypatch)
    assert_same_step(plain, fast)
    assert ran, "without hooks, on the fast layers again"


def test_hooks_on_all_modules(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fast = pair()
    free = step(plain)[0]
    for register in (torch_module.register_module_forward_hook, torch_module.register_module_forward_pre_hook):
        handle = register(lambda module, args, *out: None if type(module) is not nn.Linear else larger((out or args)[0]))
        try:
            assert_same_step(plain, fast)
            assert abs(step(fast)[0] - free) > 1e-3
        finally:
            handle.remove()
    assert "global module hooks" in capsys.readouterr().err
    assert_same_step(plain, fast)


# ---- modules ---------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return larger(self.module(x, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "module" or name in self._modules else getattr(self.module, name)


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * super().forward(x)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * x


def replace(model: Any, path: str, make: Callable[[Any], nn.Module]) -> None:
    parent, _, name = path.rpartition(".")
    setattr(at(parent)(model), name, make(at(path)(model)))


def louder(own: Any) -> nn.Module:
    """A subclass of Linear, in a place with or without an adapter."""
    linear = own.get_base_layer() if hasattr(own, "get_base_layer") else own
    new = Louder(linear.in_features, linear.out_features, bias=False)
    new.weight = linear.weight
    return new


def other_weights(own: Any) -> Any:
    new = copy.deepcopy(own)
    with torch.no_grad():
        new.weight.mul_(1.5)
    return new


def replaced(path: str, make: Callable[[Any], nn.Module]) -> Act:
    return lambda model: replace(model, path, make)


def assigned(path: str, name: str, value: Any) -> Act:
    return lambda model: setattr(at(path)(model), name, value)


def keep_one_layer(model: Any) -> None:
    backbone = base_of(model).model
    backbone.layers = nn.ModuleList(backbone.layers[:1])


def layers_swapped(model: Any) -> None:
    layers = base_of(model).model.layers
    layers[0], layers[1] = layers[1], layers[0]


def own_forward(path: str) -> Act:
    def act(model: Any) -> None:
        module = at(path)(model)
        own = module.forward
        module.forward = lambda *args, **kwargs: larger(own(*args, **kwargs))

    return act


def config(name: str, value: Any) -> Act:
    return lambda model: setattr(base_of(model).config, name, value)


def louder_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_: Any) -> Any:
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scaling)
    return 1.5 * out.transpose(1, 2), None


ACTS: dict[str, Act] = {
    "layers removed": keep_one_layer,
    "layers swapped": layers_swapped,
    "a layer wrapped": replaced("model.layers.0", Wrapper),
    "a layer copied": replaced("model.layers.1", copy.deepcopy),
    "an MLP wrapped": replaced("model.layers.1.mlp", Wrapper),
    "an MLP replaced": replaced("model.layers.1.mlp", lambda own: Twice()),
    "an MLP of another model": lambda model: replace(model, "model.layers.1.mlp", lambda _: at("model.layers.0.mlp")(model)),
    "attention copied": replaced("model.layers.1.self_attn", copy.deepcopy),
    "a norm replaced": replaced("model.layers.1.input_layernorm", lambda own: Twice()),
    "a norm of the same kind": replaced("model.layers.1.input_layernorm", other_weights),
    "the last norm replaced": replaced("model.norm", lambda own: Twice()),
    "the last norm wrapped": replaced("model.norm", Wrapper),
    "a linear of a subclass": replaced("model.layers.1.mlp.down_proj", louder),
    "o_proj wrapped": replaced("model.layers.1.self_attn.o_proj", Wrapper),
    "an activation replaced": replaced("model.layers.1.mlp.act_fn", lambda own: nn.GELU()),
    "the head wrapped": replaced("lm_head", Wrapper),
    "the head of a subclass": replaced("lm_head", louder),
    "embeddings wrapped": replaced("model.embed_tokens", Wrapper),
    "the backbone wrapped": replaced("model", lambda own: own),
    "forward of a layer": own_forward("model.layers.0"),
    "forward of attention": own_forward("model.layers.1.self_attn"),
    "forward of a linear": own_forward("model.layers.1.mlp.up_proj"),
    "forward of a norm": own_forward("model.layers.1.post_attention_layernorm"),
    "forward of the last norm": own_forward("model.norm"),
    "forward of the head": own_forward("lm_head"),
    "forward of the embeddings": own_forward("model.embed_tokens"),
    "forward of the backbone": own_forward("model"),
    "eps of a norm": assigned("model.layers.1.input_layernorm", "variance_epsilon", 0.5),
    "eps of the last norm": assigned("model.norm", "variance_epsilon", 0.5),
    "no eps at all": assigned("model.layers.1.input_layernorm", "variance_epsilon", 0.0),
    "scaling of attention": assigned("model.layers.1.self_attn", "scaling", 0.1),
    "attention that looks ahead": assigned("model.layers.1.self_attn", "is_causal", False),
    "rope frequencies": lambda model: base_of(model).model.rotary_emb.inv_freq.mul_(0.5),
    "rope scaling": assigned("model.rotary_emb", "attention_scaling", 1.5),
    "rope replaced": replaced("model.rotary_emb", copy.deepcopy),
    "number of layers in the config": config("num_hidden_layers", 1),
    "class of an MLP": lambda model: setattr(at("model.layers.1.mlp")(model), "__class__", _OtherMLP),
}


class _OtherMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.up_proj(x))


PLAIN_ONLY: dict[str, Act] = {  # of weights that no adapter wraps
    "a linear wrapped": replaced("model.layers.1.mlp.down_proj", Wrapper),
    "a linear of another size": lambda model: [
        replace(model, f"model.layers.1.mlp.{name}", lambda own, cut=cut: cut(own))
        for name, cut in {"gate_proj": fewer_rows, "up_proj": fewer_rows, "down_proj": fewer_columns}.items()],
    "a linear parametrized": lambda model: parametrize.register_parametrization(
        at("model.layers.1.mlp.down_proj")(model), "weight", Twice()),
    "a norm parametrized": lambda model: parametrize.register_parametrization(
        at("model.layers.1.input_layernorm")(model), "weight", Twice()),
    "embeddings parametrized": lambda model: parametrize.register_parametrization(
        at("model.embed_tokens")(model), "weight", Twice()),
    "the head parametrized": lambda model: parametrize.register_parametrization(at("lm_head")(model), "weight", Twice()),
    "a weight norm": lambda model: nn.utils.weight_norm(at("model.layers.1.mlp.down_proj")(model)).weight_g.data.mul_(1.5),
    "weights of a linear": replaced("model.layers.1.mlp.down_proj", other_weights),
    "a bias added": lambda model: at("model.layers.1.mlp.down_proj")(model).register_parameter(
        "bias", nn.Parameter(torch.ones(32))),
    "only norms train": lambda model: [p.requires_grad_("norm" in name) for name, p in model.named_parameters()],
    "one linear trains": lambda model: [p.requires_grad_("1.mlp.up" in name) for name, p in model.named_parameters()],
}  # fmt: skip


def fewer_rows(own: nn.Linear) -> nn.Linear:
    new = nn.Linear(own.in_features, 40, bias=False)
    new.weight = nn.Parameter(own.weight.detach()[:40].clone())
    return new


def fewer_columns(own: nn.Linear) -> nn.Linear:
    new = nn.Linear(40, own.out_features, bias=False)
    new.weight = nn.Parameter(own.weight.detach()[:, :40].clone())
    return new


HARMLESS = {
    "a layer copied",
    "rope replaced",
    "attention copied",
    "the backbone wrapped",
    "attention that looks ahead",
    "no eps at all",
    "only norms train",
    "one linear trains",
}


GENERATED = {"layers removed", "a linear of a subclass", "forward of attention", "eps of a norm"}


def after(act: Act, *, adapter: bool, harmless: bool) -> tuple[Any, Any]:
    plain, fast = pair(adapter=adapter)
    before = assert_same_step(plain, fast)  # everything is joined and cached as the layers want it
    for model in (plain, fast):
        torch.manual_seed(3)
        act(model)
    loss = assert_same_step(plain, fast)
    assert harmless or abs(loss - before) > 1e-3, "it has an effect"
    return plain, fast


@table("name", ACTS, one_in=2)
def test_what_is_done_to_a_model_after_loading_counts(name: str) -> None:
    assert_same_look(*after(ACTS[name], adapter=True, harmless=name in HARMLESS), generate=name in GENERATED)


@table("name", PLAIN_ONLY)
def test_what_is_done_to_weights_after_loading_counts(name: str) -> None:
    assert_same_look(*after(PLAIN_ONLY[name], adapter=False, harmless=name in HARMLESS))


def test_a_forward_replaced_on_a_class(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As libraries do that bring kernels of their own, before or after loading."""
    plain, fast = pair()
    norm = type(base_of(fast).model.norm)
    own = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: 1.5 * own(self, x))
    assert_same_step(plain, fast)
    assert_same_step(*pair())
    assert "LlamaRMSNorm.forward is" in capsys.readouterr().err
    monkeypatch.setattr(norm, "forward", own)
    ran = runs(fast, monkeypatch)
    assert_same_step(plain, fast)
    assert ran


def test_attention_registered_by_others(capsys: pytest.CaptureFixture[str]) -> None:
    plain, fast = pair()
    AttentionInterface.register("louder", louder_attention)
    try:
        for model in (plain, fast):
            base_of(model).config._attn_implementation = "louder"
        assert_same_step(plain, fast)
    finally:
        del AttentionInterface._global_mapping["louder"]
    assert "attention is louder" in capsys.readouterr().err


class OwnLoss(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = None if output.loss is None else 2 * output.loss
        return output


def test_a_subclass_with_a_forward_of_its_own_keeps_it() -> None:
    model = OwnLoss(copy.deepcopy(CONFIGS["llama"]))
    expected = model(input_ids=IDS, labels=IDS).loss
    assert "defines its own forward" in install(model)
    assert torch.equal(model(input_ids=IDS, labels=IDS).loss, expected)
