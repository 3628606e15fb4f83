"""Every family against transformers: loss and all gradients, packed and unpacked, for LoRA on all and on some linears, DoRA
and full fine-tuning, in float64 and in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from pronghorn.data.pack.batches import build_batch
from pronghorn.kernels.attention.rope_torch import rotate
from pronghorn.kernels.mlp.gated_mlp import gated_activation_reference
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.heads.lm import LmHead
from pronghorn.model.layers import wide_gemms
from pronghorn.model.lora import add_adapter
from pronghorn.model.text_stack import keep_softcap
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.recipe_parts import Lora
from samples import random_table, small
from tables import first_of

# Weights of about 1/sqrt(width), as large as trained ones. With transformers' initial 0.02 all scores at a width of 32 are
# nearly the same, and the gradients of queries and keys are what is left of large terms that cancel: a test of float32, not of
# the layer.
SMALL = small(initializer_range=0.15)
GEMMA: dict[str, Any] = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, every bias": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama 3 rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral": MistralConfig(**SMALL, sliding_window=16),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "phi3": Phi3Config(**SMALL, sliding_window=20),
    "phi3, partial rotary": Phi3Config(**SMALL, partial_rotary_factor=0.5),
    "gemma2": Gemma2Config(**SMALL, **GEMMA),
    "gemma3": Gemma3TextConfig(**SMALL, **GEMMA, layer_types=["full_attention", "sliding_attention"]),
    "granite": GraniteConfig(
        **SMALL, residual_multiplier=0.3, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.2
    ),
    "olmo2": Olmo2Config(**SMALL),
}
KINDS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
SCALED_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
GEMMA4 = {**KINDS, "layer_types": KINDS["layer_types"][::-1], "head_dim": 8, "global_head_dim": 16}  # the last layer is global
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2}
LATENT: dict[str, Any] = {  # multi-head latent attention; keys and values have a head for each query
    "num_key_value_heads": SMALL["num_attention_heads"],
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
# Rows of the table that need nothing, or a switch. Documents here are longer than windows and first lengths of RoPE.
MORE: dict[str, dict[str, Any]] = {
    "ministral": {**KINDS, "head_dim": 8},
    "ministral3": {"head_dim": 8, "rope_parameters": SCALED_ROPE},
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0, "attention_out_bias": True},
    "cwm": {**KINDS, "head_dim": 8, "rope_parameters": LLAMA3_ROPE},
    "smollm3": {"no_rope_layers": [0, 1]},
    "olmo3": KINDS,
    "exaone4": KINDS,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8, "use_bias": True},
    "helium": {"head_dim": 8},
    "gemma": {"head_dim": 16},
    "vaultgemma": GEMMA,
    "gemma4_text": {**GEMMA4, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0},
    "gemma4_unified_text": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text, as E2B": {
        **GEMMA4,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": SMALL["vocab_size"],
    },
    "hyperclovax": MULTIPLIERS,
    "arcee": {"mlp_bias": True, "head_dim": 16},
    "apertus": {},
    "nanochat": {},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "youtu": LATENT,
    "cohere": {"logit_scale": 0.3},
    "cohere2": {**KINDS, "logit_scale": 0.3},
    "muse_glimmer": {
        "text_config": SMALL
        | {**KINDS, "head_dim": 8, "layer_rope_theta": [0, 500.0], "post_norm_eps": 1e-3, "final_logit_softcapping": 3.0},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
    "granite_swa": {
        **MULTIPLIERS,
        "residual_multiplier": 0.3,
        "layer_rope_theta": [10000.0, 0, 500.0],
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
}
FAMILIES |= {
    kind: AutoConfig.for_model(kind.split(",")[0], **(values if "text_config" in values else SMALL | values))
    for kind, values in MORE.items()
}
SOME = {"q_proj", "down_proj", "qkv_proj", "up_proj"}


def model_of(family: str, method: str, dtype: torch.dtype) -> Any:
    """Norm weights and biases are drawn too: at their initial ones and zeros, mistakes in them would not show."""
    torch.manual_seed(0)
    model = LmHead.auto_class(FAMILIES[family]).from_config(FAMILIES[family]).to(dtype)
    keep_softcap(model)
    if hasattr(table := model.get_input_embeddings(), "embed_norm"):  # the layers call it, and it asks for float32
        table.embed_norm.forward = table.embed_norm._norm
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            one_plus = "gemma" in family and "gemma4" not in family
            torch.nn.init.normal_(parameter, mean=float("norm" in name and not one_plus), std=0.3)
    for name, buffer in model.named_buffers():
        if "layer_scalar" in name:
            torch.nn.init.normal_(buffer, mean=1.0, std=0.3)
    if method == "full":
        return model.train()
    linears = {name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets: Any = tuple(sorted(SOME & linears)) if method == "lora on some" else "all-linear"
    model = add_adapter(model, Lora(r=4, targets=targets, dora=method == "dora"), seed=1).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def own_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    output = model(
        input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False, logits_to_keep=batch.loss_rows
    )
    return F.cross_entropy(output.logits[0], batch.labels_T[batch.loss_rows], reduction="sum")


def fast_loss(model: Any, batch: PackedBatch) -> torch.Tensor:
    engine = engine_of(model)
    return engine.packed_loss(batch)[0]


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class InDouble(TorchFunctionMode):
    """Makes transformers' float64 whole: its norms and softmax ask for float32 whatever the weights are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


@contextmanager
def whole_float64(model: Any) -> Iterator[None]:
    """transformers' model computes in float64 throughout. Tables of RoPE stay float32: the fast layers use them."""

    def as_it_is(forward: Any) -> Any:
        def call(x: torch.Tensor, *args: Any, **options: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return forward(x.float(), *args, **options)

        return call

    rotary = [module for module in model.modules() if "RotaryEmbedding" in type(module).__name__]
    for module in rotary:
        module.forward = as_it_is(module.forward)
    with InDouble():
        yield
    for module in rotary:
        del module.forward


def true_gradients(model: Any, batch: PackedBatch, loss_of: Any = own_loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' model, which has weights in float64 and no fast layers yet."""
    with whole_float64(model):
        loss = loss_of(model, batch)
        return loss.detach(), gradients(model, loss)


def assert_all_equal(model: Any, batches: Sequence[PackedBatch], loss_of: Any = own_loss) -> None:
    """Of one model, first without and then with the fast layers: building it takes longer than a step."""
    truths = [true_gradients(model, batch, loss_of) for batch in batches]
    assert not install(model)
    for batch, truth in zip(batches, truths, strict=True):
        assert_equal(model, batch, *truth)


def assert_equal(model: Any, batch: PackedBatch, true_loss: torch.Tensor, truth: dict[str, torch.Tensor]) -> None:
    loss = fast_loss(model, batch)
    ours = gradients(model, loss)
    assert ours.keys() == truth.keys()
    assert apart(loss.detach(), true_loss) < 1e-12
    for name, gradient in ours.items():
        assert apart(gradient, truth[name]) < 1e-10, name


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def packed_batch(seed: int = 0, documents: int = 6, capacity: int = 256) -> PackedBatch:
    """Documents of up to 59 tokens, and padding."""
    return build_batch(random_table(documents, seed=seed), np.arange(documents), capacity)


def single_batch() -> PackedBatch:
    table = random_table(1, longest=90, seed=3)
    return build_batch(table, np.array([0]), int(table.lengths[0]))


# Which linears have adapters matters to groups of them: separate or one, with a bias or not, behind a norm or not. DoRA has
# other code for norms, window, cap, rotary and multiplier. Of families that are alike in these, one each.
LATER = [family for family in MORE if "gemma4" not in family and family not in ("muse_glimmer", "cohere2")]
CASES = [
    *((family, "full") for family in FAMILIES),
    *((family, "lora") for family in FAMILIES if family not in LATER),
    *((family, "lora on some") for family in ("llama", "llama, every bias", "qwen3", "phi3", "gemma2", "granite", "olmo2")),
    *(
        (family, "dora")
        for family in (
            "llama, every bias",
            "mistral",
            "qwen3",
            "phi3, partial rotary",
            "gemma2",
            "gemma3",
            "granite",
            "olmo2",
            "ministral3",
            "exaone4",
            "apertus",
            "hunyuan_v1_dense",
            "gemma4_unified_text",
            "cohere2",
            "muse_glimmer",
            "gemma4_text, as E2B",
            "nanochat",
        )
    ),
]
CASES = first_of([*CASES, *((family, "lora") for family in LATER)], len(CASES))


@pytest.mark.parametrize(("family", "method"), CASES, ids=str)
def test_loss_and_every_gradient_equal_transformers(family: str, method: str) -> None:
    """In float64, where nothing but a mistake makes a difference."""
    model = model_of(family, method, torch.float64)
    assert_all_equal(model, (packed_batch(), single_batch()))


class Inside:
    """hopper_gemm.py's products, which need a Hopper GPU, in torch; and how often each was asked for."""

    def __init__(self) -> None:
        self.gated = self.rotated = 0

    def gated_mm(
        self, x: Tensor, weight: Tensor, kind: Any, *, gu_out: Tensor, a_out: Tensor, lora_TR: Tensor | None = None
    ) -> bool:
        self.gated += 1
        gu_out.copy_(self._mm(x, weight, lora_TR))
        a_out.copy_(gated_activation_reference(gu_out, kind))
        return True

    def rope_mm(
        self, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, rope_heads: int, head_width: int, out: Tensor,
        lora_TR: Tensor | None = None,
    ) -> bool:  # fmt: skip
        if cos.shape[1] * 2 != head_width:
            return False
        self.rotated += 1
        heads = self._mm(x, weight, lora_TR).unflatten(1, (-1, head_width))
        out.copy_(torch.cat([rotate(heads[:, :rope_heads], cos, sin, False), heads[:, rope_heads:]], dim=1).flatten(1))
        return True

    def _mm(self, x: torch.Tensor, weight: torch.Tensor, behind: torch.Tensor | None) -> torch.Tensor:
        whole = x if behind is None else torch.cat([x, behind], dim=1)
        return whole @ weight[:, : whole.shape[1]].T


@pytest.mark.parametrize(
    ("family", "turns"),
    [("llama", True), ("phi3", True), ("gemma2", True), ("qwen3", False), ("smollm3", True), ("ministral3", True)],
)
def test_the_same_where_rope_and_the_activation_are_inside_the_products(
    family: str, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside()
    monkeypatch.setattr(wide_gemms, "covered", lambda *_: True)
    monkeypatch.setattr(wide_gemms, "FEW_ROWS", 0)
    for name in ("gated_mm", "rope_mm"):
        monkeypatch.setattr(wide_gemms, name, getattr(inside, name))
    assert_all_equal(model_of(family, "lora", torch.float64), [packed_batch(), single_batch()])
    assert inside.gated == 2 * SMALL["num_hidden_layers"]
    assert inside.rotated == (inside.gated if turns else 0)


@pytest.mark.parametrize(
    ("family", "method", "trained_every"),
    [("llama", "lora", 100), ("llama", "full", 7), ("gemma2", "lora", 7), ("gemma2", "full", 100)],
)
def test_rows_without_a_loss_are_left_out_of_the_last_layer(family: str, method: str, trained_every: int) -> None:
    """Few rows have a label, and the list of them is filled up to a static size with the last token, which has none."""
    batch = packed_batch(documents=12, capacity=512)
    labels = torch.where(torch.arange(len(batch.labels_T)) % trained_every == 3, batch.labels_T, IGNORED)
    rows = (labels != IGNORED).nonzero().flatten()
    last = len(labels) - 1
    assert 0 < len(rows) < 200
    assert last not in rows
    padded = torch.cat([rows, torch.full((256 - len(rows),), last)])
    few, filled = (replace(batch, labels_T=labels, loss_rows=which) for which in (rows, padded))
    model = model_of(family, method, torch.float64)
    true_loss, truth = true_gradients(model, few)
    assert not install(model)
    assert_equal(model, filled, true_loss, truth)
    every_row = fast_loss(model, replace(filled, loss_rows=torch.arange(last + 1)))
    assert apart(every_row.detach(), true_loss) < 1e-12


def assert_float32_is_near(model: Any, batches: Sequence[PackedBatch], loss_of: Any, what: str) -> None:
    own_losses = [loss_of(model, batch) for batch in batches]
    all_theirs = [gradients(model, own) for own in own_losses]
    assert not install(model)
    for batch, own, theirs in zip(batches, own_losses, all_theirs, strict=True):
        fast = fast_loss(model, batch)
        ours = gradients(model, fast)
        assert ours.keys() == theirs.keys()
        assert apart(fast.detach(), own.detach()) < 1e-6
        for name, gradient in ours.items():
            assert apart(gradient, theirs[name]) < 1e-5, f"{what}: {name}"


# A step in fewer digits would be in a norm (of each place and kind), in RoPE or in a product: one family of each.
@pytest.mark.parametrize("family", ["llama, every bias", "qwen3", "phi3, partial rotary", "gemma2", "granite", "olmo2"])
def test_float32_is_within_1e_5_of_transformers(family: str) -> None:
    """The worst seen is 3e-6. From weights of 0.02 (see SMALL) Gemma 3's q_proj A is 1.7e-5 apart and a Llama's bias of k_proj
    1e-4, where transformers' own float32 is 8e-6 and 6e-5 from its float64: docs/log/2026-11-15-float32-parity.md."""
    for method in ("lora", "full"):
        assert_float32_is_near(model_of(family, method, torch.float32), (packed_batch(), single_batch()), own_loss, method)


def test_state_dict_keys_and_values_never_change() -> None:
    model = model_of("llama", "lora", torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not install(model)
    gradients(model, fast_loss(model, build_batch(random_table(6), np.arange(6), 512)))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_an_update_by_any_optimizer_reaches_the_next_forward() -> None:
    """torch's fused optimizers do not count versions, so nothing may rely on them."""
    batch = build_batch(random_table(6), np.arange(6), 512)
    for method in ("lora", "full"):
        model = model_of("llama", method, torch.float32)
        assert not install(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        fast_loss(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            assert float(fast_loss(model, batch)) == pytest.approx(float(own_loss(model, batch)), rel=1e-6)


def test_a_family_without_a_row_is_told_and_left_alone() -> None:
    from transformers import GPT2Config

    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    assert "model type gpt2" in install(model)
    assert engine_of(model) is None
