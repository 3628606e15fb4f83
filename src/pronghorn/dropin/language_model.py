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

from pronghorn.data.tokens import load_tokenizer
from pronghorn.dropin import saving
from pronghorn.dropin.arguments import (
    DEFAULT_LENGTH,
    DTYPES,
    SEVEN_LINEARS,
    DeviceMap,
    Dtype,
    Recompute,
    check_choice,
    check_init,
    check_recompute,
    check_storage,
    chosen_layers,
    one_device,
    precision_of,
    refuse_unknown,
    set_length,
)
from pronghorn.dropin.instance import make_fast, verify_loaded
from pronghorn.errors import CommandError
from pronghorn.hub import model_folder
from pronghorn.kernels.dispatch import say_once
from pronghorn.model.causal_lm import base_of
from pronghorn.model.hf_adapter import QUANTIZED, with_adapter
from pronghorn.model.load import load_model, require_fp8_precision, require_tokenizer_fits
from pronghorn.model.text_stack import freeze_beside_text, set_cache

FULL = "_pronghorn_full_finetuning"  # attribute of the model instance


class FastLanguageModel:
    @staticmethod
    def from_pretrained(
        model_name: str | Path,
        max_seq_length: int = DEFAULT_LENGTH,
        dtype: Dtype = None,
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
        **unknown: Any,
    ) -> tuple[Any, Any]:
        """(model, tokenizer), the model on fast layers.

        dtype None: bf16 on a GPU that has it, else float32. device_map "auto": the GPU if there is one, else the CPU.
        `load_in_4bit` stores the linears as NF4 (QLoRA), `load_in_fp8` in 8 bits, which are multiplied as they are;
        `load_in_16bit` and `full_finetuning` mean unquantized weights; each of these whatever `load_in_4bit` says. Without
        `full_finetuning` all weights are frozen: `get_peft_model` or a trainer's `peft_config` adds what trains; with it all
        train, in `dtype` (float32 for master weights). `verify` compares loss and gradients with the family's own layers.
        """
        refuse_unknown(FastLanguageModel.from_pretrained, unknown)
        check_storage(load_in_8bit, load_in_fp8, load_in_16bit, full_finetuning)
        if trust_remote_code:
            raise CommandError(what="trust_remote_code=True", why="no file can make Pronghorn run code",
                               fix="use a model type that transformers has itself")
        check_recompute(use_gradient_checkpointing)
        device = one_device(device_map)
        precision = precision_of(dtype, load_in_16bit, device)
        if load_in_fp8:
            require_fp8_precision(device, DTYPES[precision])
        torch.manual_seed(random_state)
        model_name = str(model_name)
        source = str(model_folder(model_name, weights=True, token=token)) if token else model_name
        tokenizer = load_tokenizer(source)
        four_bit = load_in_4bit and not (load_in_16bit or load_in_fp8 or full_finetuning)
        model = load_model(source, precision, device, four_bit=four_bit, fp8=load_in_fp8)
        model.config._name_or_path = model.name_or_path = model_name  # adapters name their base by it
        require_tokenizer_fits(tokenizer, int(model.get_input_embeddings().weight.shape[0]), model_name)
        set_length(model, tokenizer, max_seq_length, model_name)
        model.requires_grad_(full_finetuning)
        if freeze_beside_text(model) and full_finetuning:
            say_once("only the text model is trained; what reads images stays as it is")
        setattr(model, FULL, full_finetuning)
        make_fast(model, use_gradient_checkpointing)
        if verify:
            verify_loaded(model, full_finetuning)
        return model.train(), tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Sequence[str] | str = SEVEN_LINEARS,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        bias: str = "none",
        use_gradient_checkpointing: Recompute = "unsloth",
        use_rslora: bool = False,
        use_dora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        init_lora_weights: bool | str = True,
        loftq_config: dict[str, Any] | None = None,
        layers_to_transform: Sequence[int] | int | None = None,
        finetune_last_n_layers: int | None = None,
        random_state: int = 3407,
        max_seq_length: int | None = None,
        **unknown: Any,
    ) -> Any:
        """An ordinary PEFT model, its base on fast layers. `embed_tokens` and `lm_head` among the targets train whole.

        `max_seq_length` is there because scripts repeat it here; it must be the one the model was loaded with.
        """
        refuse_unknown(FastLanguageModel.get_peft_model, unknown)
        if not isinstance(model, torch.nn.Module):
            raise CommandError(what=f"this is no model but a {type(model).__name__}",
                               fix="model, tokenizer = FastLanguageModel.from_pretrained(...), then get_peft_model(model)")
        if not 0 <= lora_dropout < 1:
            raise CommandError(what=f"lora_dropout={lora_dropout}", fix="a share from 0 up to, but not, 1")
        loaded_with = getattr(model, "max_seq_length", None)
        if max_seq_length not in (None, loaded_with, DEFAULT_LENGTH):
            raise CommandError(what=f"max_seq_length={max_seq_length} here, {loaded_with} in from_pretrained",
                               fix="give it to from_pretrained alone")
        if loftq_config:
            raise CommandError(what="loftq_config is not honoured", fix="leave it out",
                               why="the weights are stored as plain NF4; LoftQ would choose them together with the adapter")
        if hasattr(model, "peft_config"):
            raise CommandError(what="this model has an adapter already",
                               fix="give get_peft_model what from_pretrained returned")
        if getattr(model, FULL, False):
            raise CommandError(what="this model was loaded with full_finetuning=True",
                               why="an adapter would freeze its weights",
                               fix="leave get_peft_model out, or load without full_finetuning")
        check_choice("bias", bias, ("none", "all", "lora_only"))
        check_init(init_lora_weights, quantized=any(isinstance(module, QUANTIZED) for module in model.modules()))
        check_recompute(use_gradient_checkpointing)
        layers = chosen_layers(model, layers_to_transform, finetune_last_n_layers)
        adapted = with_adapter(
            model, r=r, target_modules=target_modules, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias,
            use_rslora=use_rslora, use_dora=use_dora, modules_to_save=modules_to_save, init_lora_weights=init_lora_weights,
            layers=layers, seed=random_state,
        )
        adapted.max_seq_length = loaded_with
        make_fast(adapted, use_gradient_checkpointing)
        return adapted.train()

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Ready to generate: no dropout, and a cache."""
        model.eval()
        set_cache(base_of(model), True)
        return model

    @staticmethod
    def for_training(model: Any, use_gradient_checkpointing: Recompute | None = None) -> Any:
        """`use_gradient_checkpointing` None: as it was asked for before."""
        check_recompute(use_gradient_checkpointing)
        model.train()
        set_cache(base_of(model), False)
        make_fast(model, use_gradient_checkpointing)
        return model

    save_pretrained_merged = staticmethod(saving.save_pretrained_merged)


def is_bfloat16_supported() -> bool:
    """Whether the GPU computes in bf16; False without a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


is_bf16_supported = is_bfloat16_supported


class FastModel(FastLanguageModel):
    """As scripts call it for models that read more than text: the text model is what trains."""


# By family, as older scripts have it.
FastLlamaModel = FastMistralModel = FastGemmaModel = FastGemma2Model = FastLanguageModel
FastQwen2Model = FastQwen3Model = FastQwen3MoeModel = FastLanguageModel
