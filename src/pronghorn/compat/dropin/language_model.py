"""FastLanguageModel: the Python interface people already write, on Pronghorn's layers.

The names and defaults of the arguments are those of scripts written for Unsloth, so that such a script needs one changed
import. What comes back is an ordinary transformers or PEFT model: any trainer takes it, and it saves what stock tools load.
An argument that is not honoured is an error, never silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pronghorn.compat.dropin import instance, saving
from pronghorn.compat.dropin.accepted import ADAPTING, LOADING, check_class, check_local, check_others, one_dtype
from pronghorn.compat.dropin.arguments import (
    DEFAULT_LENGTH,
    DTYPES,
    SEVEN_LINEARS,
    DeviceMap,
    Dtype,
    Recompute,
    check_choice,
    check_init,
    check_recompute,
    check_share,
    check_storage,
    chosen_layers,
    one_device,
    precision_of,
)
from pronghorn.compat.dropin.instance import make_fast, set_generation, verify_loaded
from pronghorn.compat.dropin.length import set_length
from pronghorn.compat.dropin.targets import SWITCHES, chosen_targets, require_same_adapter
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel
from pronghorn.hub import model_folder
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.formats.store import is_quantized
from pronghorn.model.hf_adapter import with_adapter
from pronghorn.model.load import load_model, require_fp8_precision, require_tokenizer_fits
from pronghorn.model.stored_adapter import adapter_folder, attach_adapter, base_name
from pronghorn.model.text_stack import beside_text, freeze_beside_text

FULL = "_pronghorn_full_finetuning"  # attribute of the model instance


class FastLanguageModel:
    @staticmethod
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int | None = DEFAULT_LENGTH,
        dtype: Dtype | str = None,
        load_in_4bit: bool = True,
        load_in_8bit: bool = False,
        load_in_16bit: bool = False,
        load_in_fp8: bool = False,
        full_finetuning: bool = False,
        token: str | None = None,
        device_map: DeviceMap = "auto",
        trust_remote_code: bool = False,
        use_gradient_checkpointing: Recompute = "unsloth",
        random_state: int = 3407,
        verify: bool = False,
        **others: Any,
    ) -> tuple[Any, Any]:
        """(model, tokenizer), the model on fast layers.

        dtype None: bf16 on a GPU that has it, else float32. device_map "auto": the GPU if there is one, else the CPU.
        `load_in_4bit` stores the linears as NF4 (QLoRA), `load_in_fp8` in 8 bits, which are multiplied as they are;
        `load_in_16bit` and `full_finetuning` mean unquantized weights; each of these whatever `load_in_4bit` says. Without
        `full_finetuning` all weights are frozen: `get_peft_model` or a trainer's `peft_config` adds what trains; with it all
        train, in `dtype` (float32 for master weights). `verify` compares loss and gradients with the family's own layers.
        The folder of an adapter gives the model it was trained on, with the adapter, which is trained on.
        `fast_inference` is how every model here generates; with it, one that cannot is refused. `gpu_memory_utilization`: the
        share of free GPU memory that keys and values may take.
        """
        asked_dtype = one_dtype(dtype, others.pop("torch_dtype", None))
        check_class(others.pop("auto_model", None))
        tokenizer_name = others.pop("tokenizer_name", None)
        check_local(str(model_name), others.pop("local_files_only", False))
        fast_inference, share = others.get("fast_inference", False), others.get("gpu_memory_utilization")
        check_share(share)
        refused = {"load_in_8bit": load_in_8bit, "trust_remote_code": trust_remote_code}
        check_others(FastLanguageModel.from_pretrained, others | refused, LOADING)
        check_storage(load_in_fp8, load_in_16bit, full_finetuning)
        check_recompute(use_gradient_checkpointing)
        device = one_device(device_map)
        precision = precision_of(asked_dtype, load_in_16bit, device)
        if load_in_fp8:
            require_fp8_precision(device, DTYPES[precision])
        torch.manual_seed(random_state)
        adapter = adapter_folder(str(model_name), token)
        if adapter and full_finetuning:
            raise CommandError(
                what="full_finetuning=True with an adapter folder",
                fix="remove full_finetuning, or pass the folder of a merged model",
                why="the base model of an adapter is frozen",
            )
        name = base_name(adapter) if adapter else str(model_name)
        source = str(model_folder(name, weights=True, token=token)) if token else name
        tokenizer = load_tokenizer(tokenizer_name or (str(adapter) if adapter and _has_tokenizer(adapter) else source))
        four_bit = load_in_4bit and not (load_in_16bit or full_finetuning)
        storage = "fp8" if load_in_fp8 else "nf4" if four_bit else "bf16"
        model: HFModel = load_model(source, precision, device, storage=storage)
        model.config._name_or_path = model.name_or_path = name  # adapters name their base by it
        require_tokenizer_fits(tokenizer, int(model.get_input_embeddings().weight.shape[0]), name)
        set_length(model, tokenizer, max_seq_length, name)
        model.requires_grad_(full_finetuning)
        if freeze_beside_text(model) and full_finetuning:
            say_once("full_finetuning: only the text model is trained; the vision tower stays frozen")
        setattr(model, FULL, full_finetuning)
        make_fast(model, use_gradient_checkpointing)
        set_generation(model, tokenizer, fast_inference, share)
        if verify:
            verify_loaded(model, full_finetuning)
        if adapter:
            model = _with_length(attach_adapter(model, adapter), model.max_seq_length)
            make_fast(model, use_gradient_checkpointing)
        return model.train(), tokenizer

    @staticmethod
    def get_peft_model(
        model: HFModel, r: int = 16, target_modules: Sequence[str] | str | None = SEVEN_LINEARS, lora_alpha: float = 16,
        lora_dropout: float = 0.0, bias: str = "none", use_gradient_checkpointing: Recompute = "unsloth",
        use_rslora: bool = False, use_dora: bool = False, modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True, loftq_config: dict[str, Any] | None = None,
        layers_to_transform: Sequence[int] | int | None = None, finetune_last_n_layers: int | None = None,
        random_state: int = 3407, max_seq_length: int | None = None, **others: object,
    ) -> Any:  # fmt: skip
        """An ordinary PEFT model, its base on fast layers. `embed_tokens` and `lm_head` among the targets train whole.

        `max_seq_length` is there because scripts repeat it here; it must be the one the model was loaded with. The switches
        `finetune_attention_modules` and `finetune_mlp_modules` choose among the targets (targets.py). A model that has just
        this adapter already, out of its folder, is trained on.
        """
        switches = {name: others.pop(name) for name in SWITCHES if name in others}
        check_others(FastLanguageModel.get_peft_model, others | {"loftq_config": loftq_config}, ADAPTING)
        if not isinstance(model, torch.nn.Module):
            raise CommandError(
                what=f"expected a model, got {type(model).__name__}",
                fix="call model, tokenizer = FastLanguageModel.from_pretrained(...) first, then get_peft_model(model)",
            )
        if not 0 <= lora_dropout < 1:
            raise CommandError(what=f"lora_dropout={lora_dropout}", fix="use a number from 0 up to, but not including, 1")
        loaded_with = getattr(model, "max_seq_length", None)
        if max_seq_length not in (None, loaded_with, DEFAULT_LENGTH):
            raise CommandError(
                what=f"max_seq_length={max_seq_length} here, max_seq_length={loaded_with} in from_pretrained",
                fix="set it in from_pretrained only",
            )
        check_recompute(use_gradient_checkpointing)
        config = {"r": r, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout, "bias": bias}
        config |= {"use_rslora": use_rslora, "use_dora": use_dora}
        if hasattr(model, "peft_config"):
            targets = chosen_targets(model, target_modules, switches)
            layers = chosen_layers(model, layers_to_transform, finetune_last_n_layers)
            require_same_adapter(model, targets, modules_to_save, layers, **config)
            return instance.for_training(model, use_gradient_checkpointing)
        if getattr(model, FULL, False):
            raise CommandError(
                what="the model was loaded with full_finetuning=True",
                why="adding an adapter would freeze its weights",
                fix="remove get_peft_model, or load without full_finetuning",
            )
        check_choice("bias", bias, ("none", "all", "lora_only"))
        check_init(init_lora_weights, quantized=is_quantized(model))
        layers = chosen_layers(model, layers_to_transform, finetune_last_n_layers)
        adapted = with_adapter(
            model,
            target_modules=chosen_targets(model, target_modules, switches),
            modules_to_save=modules_to_save,
            init_lora_weights=init_lora_weights,
            layers=layers,
            seed=random_state,
            **config,
        )
        make_fast(_with_length(adapted, loaded_with), use_gradient_checkpointing)
        return adapted.train()

    for_inference = staticmethod(instance.for_inference)
    for_training = staticmethod(instance.for_training)
    save_pretrained_merged = staticmethod(saving.save_pretrained_merged)


def _with_length(adapted: HFModel, length: int | None) -> Any:
    adapted.max_seq_length = length
    return adapted


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def is_bfloat16_supported() -> bool:
    """Whether the GPU computes in bf16; False without a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


is_bf16_supported = is_bfloat16_supported


class FastModel(FastLanguageModel):
    """As scripts call it for models that read more than text: the text model is what trains."""


class FastVisionModel(FastModel):
    """The same, for scripts that train on text alone under this name."""

    @staticmethod
    def get_peft_model(model: HFModel, *given: Any, **named: Any) -> Any:
        if isinstance(model, torch.nn.Module) and beside_text(model) and "finetune_vision_layers" not in named:
            say_once("FastVisionModel: only the text model gets an adapter; the layers that read images stay frozen")
        return FastModel.get_peft_model(model, *given, **named)


# By family, as older scripts have it.
FastLlamaModel = FastMistralModel = FastGemmaModel = FastGemma2Model = FastLanguageModel
FastQwen2Model = FastQwen3Model = FastQwen3MoeModel = FastLanguageModel
