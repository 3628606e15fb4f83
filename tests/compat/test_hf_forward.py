"""A model with fast layers answers every call a trainer makes as transformers and PEFT alone would."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pronghorn.compat import hf_forward
from pronghorn.compat.hf_forward import install
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.lora import add_adapter
from pronghorn.model.text_stack import keep_softcap
from pronghorn.recipe_parts import Lora
from tables import first_of

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
}
GEMMA = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
FAMILIES = {
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "phi3": Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "gemma2": Gemma2Config(**SIZES, **GEMMA),
    "gemma4": Gemma4TextConfig(
        **(SIZES | {"num_hidden_layers": 4}),
        head_dim=8,
        global_head_dim=16,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=SIZES["vocab_size"],
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma3": Gemma3TextConfig(**SIZES, **GEMMA, layer_types=["sliding_attention", "full_attention"]),
    "granite": GraniteConfig(
        **SIZES, residual_multiplier=0.3, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.2
    ),
    "olmo2": Olmo2Config(**SIZES),
}


def make(family: str = "llama", *, adapter: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]))
    keep_softcap(model)
    for name, parameter in model.named_parameters():
        if "bias" in name or ("norm" in name and family.startswith("gemma")):
            torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if "layer_scalar" in name:
            buffer.fill_(0.7)
    if adapter:
        model = add_adapter(model, Lora(r=4, **options), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def pair(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    """The same model on its own layers and on fast ones."""
    plain = make(family, **options)
    fast = make(family, **options)
    assert install(fast) == ""
    return plain, fast


def batch(kind: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 67, (3, 14), generator=generator)
    labels = torch.where(torch.rand(3, 14, generator=generator) < 0.7, ids, -100)
    if kind == "full":
        return {"input_ids": ids, "labels": labels}
    if kind == "packed":
        positions = torch.cat([torch.arange(5), torch.arange(2), torch.arange(7)])
        # Without use_cache=False transformers makes a cache, and then mixes the documents.
        return {"input_ids": ids[:1], "labels": labels[:1], "position_ids": positions[None], "use_cache": False}
    mask = torch.ones_like(ids)
    for row, length in enumerate((14, 9, 4)):
        padding = slice(length, None) if kind == "right" else slice(0, 14 - length)
        mask[row, padding] = 0
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))  # the first real token has nothing before it
    return {"input_ids": ids * mask, "labels": labels.masked_fill(mask * before == 0, -100), "attention_mask": mask}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert found
    return found


def assert_same_gradients(plain: Any, fast: Any, tolerance: float = 5e-5) -> None:
    expected, found = gradients(plain), gradients(fast)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert (found[name] - value).norm() <= tolerance * value.norm() + 1e-7, name


def fast_layers_ran(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Filled with True each time the fast layers run; so that a test cannot pass by falling back."""
    ran: list[bool] = []
    engine = engine_of(model)
    own = engine.hidden
    monkeypatch.setattr(engine, "hidden", lambda *args: ran.append(True) or own(*args))
    return ran


# How rows are laid out is the same code for every family, up to its window and positions: two of the four ways for each.
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *zip(FAMILIES, itertools.cycle(["left", "packed", "right"]), strict=False),
        *zip(FAMILIES, itertools.cycle(["full", "left", "packed"]), strict=False),
    ],
)
def test_loss_and_gradients_with_labels(family: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = pair(family)
    ran = fast_layers_ran(fast, monkeypatch)
    inputs = batch(kind)
    expected, found = plain(**inputs), fast(**inputs)
    assert torch.allclose(found.loss, expected.loss, rtol=1e-5)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert torch.allclose(found.logits[real], expected.logits[real], atol=1e-4)
    expected.loss.backward()
    found.loss.backward()
    assert_same_gradients(plain, fast)
    assert ran


@pytest.mark.parametrize("family", first_of(FAMILIES, 2))
def test_greedy_generation_is_token_identical(family: str) -> None:
    plain, fast = pair(family)
    fast(**batch("full")).loss.backward()  # weights have become views of the layers' buffers
    prompt = batch("left")
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    for model in (plain, fast):
        model.eval()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 66}
    expected = plain.generate(input_ids=ids, attention_mask=mask, use_cache=True, **options)
    assert torch.equal(fast.generate(input_ids=ids, attention_mask=mask, use_cache=True, **options), expected)
    assert torch.equal(fast.generate(input_ids=ids, attention_mask=mask, use_cache=False, **options), expected)


def test_the_backbone_alone_as_trl_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = pair()
    ran = fast_layers_ran(fast, monkeypatch)
    inputs = batch("right")
    mask = inputs["attention_mask"]
    states, direction = [], torch.randn(32, generator=torch.Generator().manual_seed(1))
    for model in (plain, fast):
        backbone = base_of(model).base_model
        hidden = backbone(input_ids=inputs["input_ids"], attention_mask=mask, use_cache=False).last_hidden_state
        (hidden[mask.bool()] @ direction).tanh().sum().backward()
        states.append(hidden.detach())
    assert ran
    assert torch.allclose(states[0][mask.bool()], states[1][mask.bool()], atol=1e-5)
    assert (states[1][~mask.bool()] == 0).all()
    assert_same_gradients(plain, fast)


def test_going_through_the_items_in_training_leaves_the_logits_uncomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate does so in every mixed-precision step, and builds a new output of the same type."""
    _, fast = pair()
    computed: list[bool] = []
    own = hf_forward.LateLogits.compute
    monkeypatch.setattr(hf_forward.LateLogits, "compute", lambda self: computed.append(True) or own(self))
    output = fast(**batch("full"))
    items = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in output.items()}
    again = type(output)(items)
    assert not computed
    assert again.logits.shape == (3, 14, 67)
    assert again["loss"] == output["loss"]


def test_what_the_fast_path_does_not_cover_still_works() -> None:
    plain, fast = pair()
    inputs = batch("full")
    for extra in ({"output_hidden_states": True}, {"output_attentions": True}):
        for model in (plain, fast):
            base_of(model).set_attn_implementation("eager")
        expected, found = plain(**inputs, **extra), fast(**inputs, **extra)
        for name in ("hidden_states", "attentions"):
            values = expected.get(name)
            assert (values is None) == (found.get(name) is None)
            for one, other in zip(values or (), found.get(name) or (), strict=True):
                assert torch.allclose(one, other, atol=1e-5)
    assert isinstance(fast(**inputs, return_dict=False), tuple)
    assert fast(input_ids=inputs["input_ids"], logits_to_keep=2).logits.shape == (3, 2, 67)
    base_of(fast).loss_function = lambda **_: torch.tensor(42.0)
    assert fast(**inputs).loss == 42


def test_hooks_of_others_are_called_and_transformers_own_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = pair()
    inputs = batch("full")
    fast(**inputs, output_hidden_states=True)  # leaves hooks of transformers behind
    ran = fast_layers_ran(fast, monkeypatch)
    fast(**inputs)
    assert len(ran) == 1
    seen: list[bool] = []
    handle = base_of(fast).model.layers[1].register_forward_hook(lambda *_: seen.append(True))
    fast(**inputs)
    assert seen
    handle.remove()
    fast(**inputs)
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("llama", {"dropout": 0.3}), ("llama", {"dora": True}), ("gemma3", {}), ("olmo2", {"dropout": 0.3})],
    ids=str,
)
def test_recomputing_gives_the_same_gradients(family: str, options: dict[str, Any]) -> None:
    _, fast = pair(family, **options)
    inputs = batch("packed")
    found = []
    for recompute in (False, True):
        for layer in engine_of(fast).layers:
            layer.recompute = recompute
        torch.manual_seed(7)
        fast(**inputs).loss.backward()
        found.append(gradients(fast))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


def test_recomputing_keeps_only_the_layers_input() -> None:
    """Also when a trainer asks for it in transformers' way."""
    _, fast = pair(adapter=False)
    node = fast(**batch("full"), num_items_in_batch=1).loss.grad_fn

    def kept(node: Any) -> list[Any]:
        found, todo, seen = [], [node], set()
        while todo:
            one = todo.pop()
            if one is None or one in seen:
                continue
            seen.add(one)
            if hasattr(one, "left"):
                found.append(one.left)
            todo += [following for following, _ in one.next_functions]
        return found

    assert ["q" in value for value in kept(node)] == [True, True]
    fast.gradient_checkpointing_enable()
    node = fast(**batch("full"), num_items_in_batch=1).loss.grad_fn
    assert [(list(value), tuple(value["h"].shape)) for value in kept(node)] == [(["h"], (42, 32))] * 2


def test_a_forward_replaced_by_others_is_left_alone() -> None:
    model = make(adapter=False)
    model.forward = model.forward
    assert "replaced" in install(model)


def test_saving_after_a_step(tmp_path: Path) -> None:
    """Weights are views of shared buffers then, which transformers' saving would refuse."""
    plain, fast = pair()
    inputs = batch("full")
    fast(**inputs).loss.backward()
    linear = base_of(fast).model.layers[0].mlp.up_proj.base_layer
    assert not linear.weight.is_contiguous()
    expected = plain.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in fast.state_dict().items())
    fast.save_pretrained(tmp_path / "adapter")
    assert not linear.weight.is_contiguous(), "saving an adapter copies no weights of the base"
    with torch.no_grad():
        logits = plain.eval()(input_ids=inputs["input_ids"]).logits
        stock = PeftModel.from_pretrained(make(adapter=False), tmp_path / "adapter").eval()
        assert torch.equal(stock(input_ids=inputs["input_ids"]).logits, logits)

    base_of(fast).save_pretrained(tmp_path / "base")
    base_of(plain).save_pretrained(tmp_path / "plain")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("base", "plain"))
    assert one == other
    assert torch.allclose(fast.train()(**inputs).loss, plain.train()(**inputs).loss, rtol=1e-5), "and it trains on"

    merged = fast.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=inputs["input_ids"]).logits, logits, atol=1e-4)


def test_releasing_weights_frees_the_buffers() -> None:
    import gc
    import weakref

    _, fast = pair()
    fast(**batch("full")).loss.backward()
    engine = engine_of(fast)
    buffer = weakref.ref(engine.layers[0].mlp.gate_up.gemms.matrix)
    base_of(fast).state_dict()
    gc.collect()
    assert buffer() is None
    storages = {p.untyped_storage().data_ptr() for p in fast.parameters()}
    assert len(storages) == len(list(fast.parameters())), "each weight has memory of its own"
