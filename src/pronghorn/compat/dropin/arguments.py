"""What the arguments of `from_pretrained` and `get_peft_model` may be. One that is not honoured is an error, never silence."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

import torch

from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.load import Precision, pick_device, resolve_precision

SEVEN_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEFAULT_LENGTH = 2048
DTYPES: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
INITS = ("gaussian", "orthogonal")  # of those PEFT knows, what needs no data
WEIGHT_INITS = ("olora", "pissa")  # and what takes the adapter out of the weights

Recompute = bool | Literal["unsloth"]
Dtype = torch.dtype | None
DeviceMap = str | int | torch.device | dict[str, Any] | None


def check_storage(fp8: bool, half: bool, full: bool) -> None:
    if fp8 not in (True, False):
        raise CommandError(
            what=f"load_in_fp8={fp8!r}",
            why="FP8 weights use one scale per row; there is no other layout to choose",
            fix="use load_in_fp8=True, or remove it",
        )
    for name, asked in {"load_in_16bit": half, "full_finetuning": full}.items():
        if fp8 and asked:
            raise CommandError(
                what=f"load_in_fp8=True contradicts {name}=True",
                fix="keep one of them",
                why="FP8 base weights are 8-bit and frozen",
            )


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        close = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise CommandError(what=f"{name}={value!r}", fix=f"{hint}use one of: {', '.join(known)}")


def check_recompute(asked: object) -> None:
    if asked not in (True, False, "unsloth", None):
        raise CommandError(
            what=f"use_gradient_checkpointing={asked!r}",
            fix='use True, False or "unsloth" (Pronghorn\'s memory planner chooses)',
        )


def check_share(asked: float | None) -> None:
    if asked is not None and not 0 < asked <= 1:
        raise CommandError(what=f"gpu_memory_utilization={asked!r}", fix="use a share above 0 and up to 1")


def check_init(asked: bool | str, *, quantized: bool) -> None:
    if not isinstance(asked, str):
        return
    changes_weights = asked in WEIGHT_INITS or asked.startswith("pissa_niter_")
    if asked not in INITS and not changes_weights:
        raise CommandError(
            what=f"init_lora_weights={asked!r} is not supported",
            why="this initialization needs a data pass before training",
            fix=f"use True, False, {', '.join(INITS + WEIGHT_INITS)}",
        )
    if changes_weights and quantized:
        raise CommandError(
            what=f"init_lora_weights={asked!r} needs 16-bit base weights",
            why="this initialization changes the base weights, and quantized weights are frozen",
            fix=f"use True, False, {', '.join(INITS)}, or load with load_in_16bit=True",
        )


def one_device(asked: DeviceMap) -> torch.device:
    """One device holds the whole model."""
    if isinstance(asked, dict) and list(asked) == [""]:
        asked = asked[""]
    if asked in (None, "auto", "sequential"):
        return pick_device()
    try:
        if isinstance(asked, dict):
            raise RuntimeError("several devices")
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except RuntimeError as error:
        raise CommandError(
            what=f"device_map={asked!r}",
            why="Pronghorn keeps the whole model on one device",
            fix='use "auto", "cuda", "cuda:1", "cpu" or {"": 0}',
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError(what=f"device_map={asked!r}", why="torch finds no CUDA GPU", fix='device_map="cpu"')
    return device


def precision_of(dtype: Dtype, half: bool, device: torch.device) -> torch.dtype:
    if dtype is None:
        chosen = next(key for key, name in DTYPES.items() if name == resolve_precision("auto", device))
        if half and chosen == torch.float32:
            say_once(
                f"load_in_16bit: the model loads in float32, because {device.type} has no fast bf16; pass "
                "dtype=torch.bfloat16 to force bf16"
            )
        return chosen
    if dtype not in DTYPES:
        raise CommandError(what=f"dtype={dtype!r}", fix="use None, torch.bfloat16, torch.float16 or torch.float32")
    if half and dtype == torch.float32:
        raise CommandError(what="load_in_16bit=True contradicts dtype=torch.float32", fix="keep one of them")
    resolve_precision(DTYPES[dtype], device)
    return dtype


def chosen_layers(model: HFModel, chosen: Sequence[int] | int | None, last: int | None) -> list[int] | None:
    if chosen is None and last is None:
        return None
    if chosen is not None and last is not None:
        raise CommandError(what="layers_to_transform and finetune_last_n_layers are both set", fix="keep one of them")
    count = int(model.config.get_text_config().num_hidden_layers)
    if last is not None:
        layers = list(range(count - last, count))
    else:
        layers = [chosen] if isinstance(chosen, int) else list(chosen or ())
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong or not layers:
        raise CommandError(
            what=f"layers {wrong or layers} are not valid for a model with {count} layers",
            why="no such layers to train",
            fix=f"choose layers from 0 to {count - 1}",
        )
    return layers
