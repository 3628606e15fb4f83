"""FastLanguageModel: the Python interface people already write, on Pronghorn's layers.

The names and defaults of the arguments are those of scripts written for Unsloth, so that such a script needs one changed
import. What comes back is an ordinary transformers or PEFT model: any trainer takes it, and it saves what stock tools load.
An argument that is not honoured is an error, never silence.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from pronghorn.data.named_templates import get_chat_template
from pronghorn.data.responses import train_on_responses_only
from pronghorn.data.tokens import load_tokenizer
from pronghorn.errors import CommandError, ModelError
from pronghorn.hub import model_folder
from pronghorn.kernels.dispatch import say_once
from pronghorn.model.causal_lm import base_of, engine_of, install
from pronghorn.model.hf_adapter import QUANTIZED, save_merged, with_adapter
from pronghorn.model.load import (
    Precision,
    load_model,
    pick_device,
    require_fp8_precision,
    require_tokenizer_fits,
    resolve_precision,
    without_progress_bars,
)
from pronghorn.model.text_stack import freeze_beside_text, set_cache

__all__ = ["FastLanguageModel", "get_chat_template", "is_bfloat16_supported", "train_on_responses_only"]

SEVEN_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEFAULT_LENGTH = 2048
DTYPES: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INITS = ("gaussian", "orthogonal")  # of those PEFT knows, what needs no data
WEIGHT_INITS = ("olora", "pissa")  # and what takes the adapter out of the weights
FULL = "_pronghorn_full_finetuning"  # attribute of the model instance

Recompute = bool | Literal["unsloth"]
Dtype = torch.dtype | None
DeviceMap = str | int | torch.device | dict[str, Any] | None


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
        _refuse_unknown(FastLanguageModel.from_pretrained, unknown)
        _check_storage(load_in_8bit, load_in_fp8, load_in_16bit, full_finetuning)
        if trust_remote_code:
            raise CommandError(what="trust_remote_code=True", why="no file can make Pronghorn run code",
                               fix="use a model type that transformers has itself")
        _check_recompute(use_gradient_checkpointing)
        device = _device(device_map)
        precision = _precision(dtype, load_in_16bit, device)
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
        _set_length(model, tokenizer, max_seq_length, model_name)
        model.requires_grad_(full_finetuning)
        if freeze_beside_text(model) and full_finetuning:
            say_once("only the text model is trained; what reads images stays as it is")
        setattr(model, FULL, full_finetuning)
        _make_fast(model, use_gradient_checkpointing)
        if verify:
            _verify(model, full_finetuning)
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
        _refuse_unknown(FastLanguageModel.get_peft_model, unknown)
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
        _check_choice("bias", bias, ("none", "all", "lora_only"))
        _check_init(init_lora_weights, quantized=any(isinstance(module, QUANTIZED) for module in model.modules()))
        _check_recompute(use_gradient_checkpointing)
        layers = _chosen_layers(model, layers_to_transform, finetune_last_n_layers)
        adapted = with_adapter(
            model, r=r, target_modules=target_modules, lora_alpha=lora_alpha, lora_dropout=lora_dropout, bias=bias,
            use_rslora=use_rslora, use_dora=use_dora, modules_to_save=modules_to_save, init_lora_weights=init_lora_weights,
            layers=layers, seed=random_state,
        )
        adapted.max_seq_length = loaded_with
        _make_fast(adapted, use_gradient_checkpointing)
        return adapted.train()

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Ready to generate: no dropout, and a cache."""
        model.eval()
        set_cache(base_of(model), True)
        return model

    @staticmethod
    def for_training(model: Any, use_gradient_checkpointing: Recompute = True) -> Any:
        _check_recompute(use_gradient_checkpointing)
        model.train()
        set_cache(base_of(model), False)
        _make_fast(model, use_gradient_checkpointing)
        return model

    @staticmethod
    def save_pretrained_merged(
        model: Any, save_directory: str | Path, tokenizer: Any = None, save_method: str = "merged_16bit", **unknown: Any
    ) -> None:
        """merged_16bit: one model folder, adapter added in float32 and rounded once; lora: the adapter, as PEFT has it."""
        _refuse_unknown(FastLanguageModel.save_pretrained_merged, unknown)
        if save_method.startswith("merged_4bit"):
            raise CommandError(what=f"save_method={save_method!r} is not in this version",
                               why="a second rounding to 4 bits would undo much of the training",
                               fix='save_method="merged_16bit" or "lora"')
        _check_choice("save_method", save_method, ("merged_16bit", "lora"))
        folder = Path(save_directory).expanduser()
        if save_method == "merged_16bit":
            save_merged(model, folder)
        elif not hasattr(model, "peft_config"):
            raise CommandError(what="this model has no adapter to save", fix='save_method="merged_16bit"')
        else:
            model.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))


def is_bfloat16_supported() -> bool:
    """Whether the GPU computes in bf16; False without a GPU."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _refuse_unknown(function: Any, unknown: dict[str, Any]) -> None:
    known = [name for name in function.__annotations__ if name not in ("unknown", "return")]
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "it is not honoured, so leave it out"
        raise TypeError(f"{function.__name__}() has no argument `{name}`; {hint}")


def _check_storage(eight_bit: bool, fp8: bool, half: bool, full: bool) -> None:
    if eight_bit:
        raise CommandError(what="load_in_8bit=True is not in this version", why="base weights are quantized as NF4 or FP8",
                           fix="pass load_in_4bit=True, load_in_fp8=True or load_in_16bit=True")
    for name, asked in {"load_in_16bit": half, "full_finetuning": full}.items():
        if fp8 and asked:
            raise CommandError(what=f"load_in_fp8=True with {name}=True", fix="drop one of them",
                               why="weights in FP8 are frozen, and there are no others")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        close = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise CommandError(what=f"{name}={value!r}", fix=f"{hint}one of: {', '.join(known)}")


def _check_recompute(asked: Any) -> None:
    if asked not in (True, False, "unsloth"):
        raise CommandError(what=f"use_gradient_checkpointing={asked!r}",
                           fix='True, False, or "unsloth" (which means our own)')


def _check_init(asked: bool | str, *, quantized: bool) -> None:
    if not isinstance(asked, str):
        return
    changes_weights = asked in WEIGHT_INITS or asked.startswith("pissa_niter_")
    if asked not in INITS and not changes_weights:
        raise CommandError(what=f"init_lora_weights={asked!r} is not honoured", why="it needs data at the start",
                           fix=f"True, False, {', '.join(INITS + WEIGHT_INITS)}")
    if changes_weights and quantized:
        raise CommandError(what=f"init_lora_weights={asked!r} on weights in 4 or 8 bits",
                           why="it changes the weights it starts from",
                           fix=f"True, False, {', '.join(INITS)}, or load_in_16bit=True")


def _device(asked: DeviceMap) -> torch.device:
    """One device holds the whole model."""
    if isinstance(asked, dict) and list(asked) == [""]:
        asked = asked[""]
    if asked in (None, "auto", "sequential"):
        return pick_device()
    try:
        if isinstance(asked, dict):
            raise RuntimeError("several places")
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except RuntimeError as error:
        raise CommandError(what=f"device_map={asked!r}", why="the whole model goes to one device",
                           fix='"auto", "cuda", "cuda:1", "cpu", or {"": 0}') from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError(what=f"device_map={asked!r}", why="torch sees no GPU here", fix='device_map="cpu"')
    return device


def _precision(dtype: Dtype, half: bool, device: torch.device) -> torch.dtype:
    if dtype is None:
        chosen = next(key for key, name in DTYPES.items() if name == resolve_precision("auto", device))
        if half and chosen == torch.float32:
            say_once(f"load_in_16bit: float32 on {device.type}, which has no fast bf16; dtype=torch.bfloat16 asks for it")
        return chosen
    if dtype not in DTYPES:
        raise CommandError(what=f"dtype={dtype!r}", fix="None, torch.bfloat16, torch.float16 or torch.float32")
    if half and dtype == torch.float32:
        raise CommandError(what="load_in_16bit=True with dtype=torch.float32", fix="drop one of them")
    resolve_precision(DTYPES[dtype], device)
    return dtype


def _set_length(model: Any, tokenizer: Any, length: int, name: str) -> None:
    if length < 1:
        raise CommandError(what=f"max_seq_length={length}", fix="the longest sequence in tokens, such as 2048")
    made_for = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)
    if made_for and length > made_for:
        if length != DEFAULT_LENGTH:
            raise ModelError(what=f"max_seq_length={length:,} is more than the {made_for:,} positions of this model",
                             where=name, why="its positions are not stretched here", fix=f"max_seq_length={made_for}")
        length = made_for
    model.max_seq_length = tokenizer.model_max_length = length


def _chosen_layers(model: Any, chosen: Sequence[int] | int | None, last: int | None) -> list[int] | None:
    if chosen is None and last is None:
        return None
    if chosen is not None and last is not None:
        raise CommandError(what="layers_to_transform and finetune_last_n_layers together", fix="drop one of them")
    count = int(model.config.get_text_config().num_hidden_layers)
    if last is not None:
        layers = list(range(count - last, count))
    else:
        layers = [chosen] if isinstance(chosen, int) else list(chosen or ())
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise CommandError(what=f"layers {wrong or layers} of a model with {count}", why="there is nothing to train there",
                           fix=f"layers from 0 to {count - 1}")
    return layers


# ---- the instance ----------------------------------------------------------------------------------------------------


def _make_fast(model: Any, recompute: Recompute) -> None:
    if why := install(model):
        say_once(f"{base_of(model).config.model_type} trains on transformers' own layers: {why}")
    _set_recompute(model, recompute)
    model.save_pretrained_merged = functools.partial(FastLanguageModel.save_pretrained_merged, model)  # a pickle takes it along


def _verify(model: Any, full: bool) -> None:
    """A frozen model has no gradients to compare: its norms get them for the moment, since they stand in every layer and
    cost next to no memory."""
    from pronghorn.model.verify import verify

    norms = [] if full else [parameter for name, parameter in model.named_parameters() if "norm" in name]
    for parameter in norms:
        parameter.requires_grad_(True)
    try:
        verify(model)
    finally:
        for parameter in norms:
            parameter.requires_grad_(False)


def _set_recompute(model: Any, recompute: Recompute) -> None:
    """Each layer keeps only its input and runs again in backward: a third more compute, a tenth of the memory."""
    engine, base = engine_of(model), base_of(model)
    if engine is not None:
        for layer in engine.layers:
            layer.recompute = bool(recompute)
    elif recompute:
        with without_progress_bars():
            base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    elif base.is_gradient_checkpointing:
        base.gradient_checkpointing_disable()
