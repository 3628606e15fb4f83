"""Experts kept in 4 bits or FP8: gpt-oss checkpoints in MXFP4 and the others' load, train as their dequantized copies,
generate, and merge."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decoder_layer import apart, fast_loss, gradients, packed_batch, single_batch
from test_experts import own_loss
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from exports import export
from pronghorn.errors import ModelError
from pronghorn.kernels.quant.mxfp4 import MXFP4Tensor, mxfp4_dequantize_reference, mxfp4_quantize
from pronghorn.model import experts
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.export import save_model
from pronghorn.model.formats.experts import STACKS, StoredExperts
from pronghorn.model.formats.store import dequantize_, store_experts_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.load import load_model
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from samples import make_tokenizer, small
from tables import first_of

CPU = torch.device("cpu")
SIZES = small(hidden_size=64, head_dim=16, eos_token_id=2)
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
QWEN = Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
MIXTRAL = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
CONFIGS: dict[str, Any] = {
    "gpt_oss": GPT_OSS,
    "qwen3_moe": QWEN,
    "mixtral": MIXTRAL,
    "qwen2_moe": Qwen2MoeConfig(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        num_experts=4,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=64,
    ),
    "hy_v3": AutoConfig.for_model(
        "hy_v3",
        **SIZES,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        router_scaling_factor=1.7,
        mlp_layer_types=["sparse", "sparse"],
        initializer_range=0.02,
    ),
    "gemma4_text": AutoConfig.for_model(
        "gemma4_text",
        **(SIZES | {"initializer_range": 0.05}),
        global_head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        moe_intermediate_size=64,
        top_k_experts=2,
    ),
}
TARGETS: dict[str, Any] = {"attention": "all-linear", "experts": ("all-linear", "experts")}
LORA = Lora(r=4, targets=("all-linear", "experts"))


def quantized_model(
    family: str,
    storage: str,
    targets: str,
    *,
    before: Callable[[Any], Any] = lambda model: None,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """With its experts in few bits, and an adapter; `before` that, something else. Experts and routers are drawn wide, so that
    limits and imbalance show, and norms, biases and sinks are drawn, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]), attn_implementation="eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            mean = 0.4 if "gemma4" in family and ("q_norm" in name or "k_norm" in name) else 1.0  # scores have no factor there
            torch.nn.init.normal_(parameter, mean=mean if "norm" in name else 0.0, std=0.3)
        elif "experts" in name or "router" in name or ".gate." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            torch.nn.init.normal_(buffer, std=0.1)
    model = model.to(dtype)
    before(model)
    store_experts_(model, FORMATS[storage])
    return drawn(add_adapter(model, Lora(r=4, targets=TARGETS[targets]), seed=1)).train()


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As gpt-oss is published: experts as blocks and scales, all else in bf16."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(copy.deepcopy(GPT_OSS)).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        q = mxfp4_quantize(tensors.pop(key).transpose(1, 2).contiguous())
        tensors |= {f"{key}_blocks": q.blocks, f"{key}_scales": q.scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def folder_of(name: str, config: Any, stored_as: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(name)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(folder)
    assert any(stored_as in key for key in load_file(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("qwen", QWEN, ".experts.0.gate_proj.", tmp_path_factory)


@pytest.fixture(scope="module")
def mixtral_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Mixtral is published: each expert in three tensors, under names that transformers changes on loading."""
    return folder_of("mixtral", MIXTRAL, "model.layers.1.block_sparse_moe.experts.3.w2.weight", tmp_path_factory)


def few_bits(model: Any) -> list[StoredExperts]:
    return [module for module in model.modules() if isinstance(module, StoredExperts)]


def drawn(model: Any) -> Any:
    """LoRA's B is zero at the start."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_a_checkpoint_in_mxfp4_loads_in_16_bits(mxfp4_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(mxfp4_folder), torch.float32, CPU)
    tensors = load_file(mxfp4_folder / "model.safetensors")
    key = "model.layers.1.mlp.experts.down_proj"
    truth = mxfp4_dequantize_reference(MXFP4Tensor(tensors[f"{key}_blocks"], tensors[f"{key}_scales"]), torch.float32)
    assert torch.equal(model.get_parameter(key).float(), truth.transpose(1, 2))
    assert not few_bits(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    save_model(model, tmp_path / "again")  # under names that can be read
    again = load_model(str(tmp_path / "again"), torch.float32, CPU).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    fast = add_adapter(model, LORA, seed=1).train()
    assert not install(fast)
    assert all(gradient.isfinite().all() for gradient in gradients(fast, fast_loss(fast, packed_batch())).values())


@pytest.mark.parametrize("which", ["mxfp4_folder", "qwen_folder", "mixtral_folder"])
def test_experts_in_4_bits_train_as_their_dequantized_copy(which: str, request: pytest.FixtureRequest) -> None:
    folder, batch = request.getfixturevalue(which), packed_batch()
    model = load_model(str(folder), torch.float32, CPU, storage="nf4")
    assert len(few_bits(model)) == 2
    whole = load_model(str(folder), torch.float32, CPU, storage="nf4")
    assert dequantize_(whole, torch.float32) >= 2
    found = []
    for one in (model, whole):
        adapted = drawn(add_adapter(one, LORA, seed=1)).train()
        assert not install(adapted)
        loss = fast_loss(adapted, batch)
        engine = engine_of(adapted)
        assert all(layer.fused for layer in engine.layers)
        ids = torch.arange(1, 9)[None]
        grads = gradients(adapted, loss)
        answer = adapted.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        found.append((loss.detach(), grads, answer))
    assert apart(found[0][0], found[1][0]) < 1e-6
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        assert apart(gradient, found[1][1][name]) < 2e-5, name
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize(
    ("family", "storage", "targets"),
    first_of(
        [
            ("gpt_oss", "nf4", "experts"),
            ("gpt_oss", "fp8", "experts"),
            ("qwen3_moe", "nvfp4", "experts"),
            ("mixtral", "nf4", "attention"),
            ("qwen2_moe", "fp8", "attention"),
            ("hy_v3", "nf4", "experts"),
            ("mixtral", "fp8", "experts"),
            *((family, storage, "experts") for family in ("qwen3_moe", "qwen2_moe") for storage in ("nf4", "fp8")),
            ("hy_v3", "fp8", "experts"),
            ("mixtral", "nf4", "experts"),
            ("gpt_oss", "nvfp4", "experts"),
            *((family, "nf4", "attention") for family in ("gpt_oss", "qwen3_moe")),
            ("mixtral", "nvfp4", "attention"),
        ],
        6,
    ),
)
def test_loss_and_every_gradient_are_those_of_the_familys_own_layers(
    family: str, storage: str, targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With experts dequantized there. FP8 is stored and multiplied in 32 bits here; test_fp8_moe_layer.py has its products."""
    monkeypatch.setattr(experts, "fp8_grouped_supported", lambda device: "this test's chip has none")
    model, reference = quantized_model(family, storage, targets), quantized_model(family, storage, targets)
    assert dequantize_(reference, torch.float32) == 2
    assert not install(model)
    formats = {stack.stored.name for module in few_bits(model) for stack in module.stacks.values()}
    assert formats == {"mxfp4" if family == "gpt_oss" and storage == "nf4" else storage}
    for batch in (packed_batch(), single_batch()):
        own, fast = own_loss(reference, batch), fast_loss(model, batch)
        truth, ours = gradients(reference, own), gradients(model, fast)
        assert all(layer.fused for layer in engine_of(model).layers)  # type: ignore[union-attr]
        assert apart(fast.detach(), own.detach()) < 1e-6
        assert ours.keys() == truth.keys()
        for name, gradient in truth.items():
            assert apart(ours[name], gradient) < 3e-5, name  # 1.3e-5 seen: a shared expert's gate, on ARM


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_mixtral_loads_from_single_experts_and_from_stacks(mixtral_folder: Path, storage: str, tmp_path: Path) -> None:
    """The same bits, of the weights that transformers itself makes of them."""
    whole = AutoModelForCausalLM.from_pretrained(mixtral_folder, dtype=torch.float32)
    save_file(whole.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})  # under transformers' names
    shutil.copy(mixtral_folder / "config.json", tmp_path)
    one, other = (load_model(str(folder), torch.float32, CPU, storage=storage) for folder in (mixtral_folder, tmp_path))
    assert len(few_bits(one)) == 2
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in one.state_dict().items())
    for i, (ours, theirs) in enumerate(zip(few_bits(one), few_bits(other), strict=True)):
        for name in STACKS[0]:
            weight = getattr(whole.model.layers[i].mlp.experts, name)
            packed, same = (one.stacks[name].stored.kernel_parts[0].view(torch.uint8) for one in (ours, theirs))
            assert torch.equal(packed, same)
            assert 0 < apart(ours.dequantized(name, torch.float32), weight.detach()) < (0.15 if storage == "nf4" else 0.05)
        assert torch.equal(one.model.layers[i].mlp.gate.weight, whole.model.layers[i].mlp.gate.weight)


def test_files_that_hold_something_else_are_refused(mixtral_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(mixtral_folder / "model.safetensors")
    shutil.copy(mixtral_folder / "config.json", tmp_path)
    key = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    for changed, what in (
        ({}, "expert 2 of model.layers.1"),
        ({key: torch.zeros(32, 64)}, r"\(32, 64\) instead of \(64, 64\)"),
        ({key: torch.zeros(2048, 1, dtype=torch.uint8)}, "quantized, as uint8"),
    ):
        rest = {name: tensor for name, tensor in tensors.items() if name != key}
        save_file(rest | changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        for storage in ("nf4", "fp8"):
            with pytest.raises(ModelError, match=what):
                load_model(str(tmp_path), torch.float32, CPU, storage=storage)


@pytest.mark.parametrize(("which", "method"), [("mxfp4_folder", "qlora"), ("mixtral_folder", "qlora"), ("qwen_folder", "fp8")])
def test_merging_adds_to_what_was_trained_on(which: str, method: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(which)
    base = load_model(str(folder), torch.float32, CPU, storage="fp8" if method == "fp8" else "nf4")
    model = drawn(add_adapter(base, LORA, seed=1))
    ids = torch.arange(1, 21)[None]
    save_model(model, tmp_path / "adapter")
    make_tokenizer().save_pretrained(tmp_path / "adapter")
    dequantize_(model, torch.float32)  # whose own products round
    with torch.no_grad():
        truth = model.eval()(input_ids=ids, use_cache=False).logits
    recipe = Recipe.model_validate(
        {"model": str(folder), "method": method, "precision": "fp32", "lora": LORA.model_dump(), "data": {"train": ["x.jsonl"]}}
    )
    export(tmp_path / "adapter", recipe, tmp_path / "merged", "merged", {})
    again = load_model(str(tmp_path / "merged"), torch.float32, CPU)
    with torch.no_grad():
        assert apart(again(input_ids=ids, use_cache=False).logits, truth) < 1e-5
