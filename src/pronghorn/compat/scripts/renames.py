"""What trainers and their arguments were called before, and what it is in the TRL and transformers that are installed.

A rule applies only where the installed class refuses the old name: with an older TRL a script's arguments pass as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pronghorn.compat.dropin.sampling_params import of
from pronghorn.compat.scripts.notes import Notes
from pronghorn.errors import CommandError

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from pronghorn.hf_types import HFModel

# old -> new, with the same meaning
RENAMED = {
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "use_liger": "use_liger_kernel",
}
# gone, and why leaving it out is right
LEFT_OUT = {
    "max_prompt_length": "TRL no longer truncates prompts separately; max_length, if set, truncates prompt plus answer",
    "max_completion_length": "TRL no longer truncates answers separately; max_length, if set, truncates prompt plus answer",
    "max_target_length": "TRL no longer truncates answers separately; max_length, if set, truncates prompt plus answer",
    "truncation_mode": "TRL cuts the end of a row that exceeds max_length",
    "label_pad_token_id": "padding carries no loss",
    "padding_value": "padding carries no loss",
    "is_encoder_decoder": "TRL reads it from the model",
    "generate_during_eval": "it logged sample answers only",
    "use_logits_to_keep": "it affected memory only, not the result",
    "use_num_logits_to_keep": "it affected memory only, not the result",
    "base_model_attribute_name": "TRL finds the base model itself",
    "force_use_ref_model": "a ref_model that is passed is used",
    "use_mps_device": "the device is chosen automatically",
    "use_ipex": "transformers no longer uses it",
    "jit_mode_eval": "transformers no longer uses it",
    "tpu_num_cores": "transformers no longer uses it",
    "tpu_metrics_debug": "transformers no longer uses it",
    "past_index": "transformers no longer uses it",
    "ray_scope": "transformers no longer uses it",
    "overwrite_output_dir": "transformers always writes into the output folder",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR instead",
    "save_safetensors": "checkpoints are always safetensors",
    "dataset_batch_size": "it affected preprocessing speed only, not the result",
    "num_of_sequences": "packing no longer needs an estimate",
    "chars_per_token": "packing no longer needs an estimate",
    "fp16_opt_level": "it applied to apex only",
    "half_precision_backend": "torch autocast is the only backend",
    "fp16_backend": "torch autocast is the only backend",
    "include_tokens_per_second": "it affected logging only",
}
# gone, and not to be left out; a value that is off (None, False, 0) is
_TWO_ADAPTERS = ("TRL takes the model without its adapter as the reference", "merge the adapter first, and pass ref_model=None")
REFUSED = {
    "reference_free": ("TRL no longer has it", 'use CPOTrainer with loss_type="simpo", which needs no reference'),
    "rpo_alpha": ("TRL no longer has it", 'loss_type=["sigmoid", "sft"], loss_weights=[1.0, rpo_alpha]'),
    "model_adapter_name": _TWO_ADAPTERS,
    "ref_adapter_name": _TWO_ADAPTERS,
    "ref_model_init_kwargs": ("TRL loads no reference model by name here", "load ref_model yourself and pass it"),
    "adafactor": ("transformers no longer has it", 'optim="adafactor"'),
    "include_inputs_for_metrics": ("transformers no longer has it", 'include_for_metrics=["inputs"]'),
}
TRAINER_RENAMED = {"tokenizer": "processing_class"}
# AdamW with states in 8 bits or in pages needs bitsandbytes; the same steps with states in 32 bits do not.
BITSANDBYTES_ADAMW = {"adamw_8bit", "adamw_bnb_8bit", "paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit"}
GIVEN = "_given_by_script"  # attributes of an object of arguments
STOPS = "_stops_of_script"
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "max_completion_length")  # of vLLM's parameters
NEEDS_GPU = ("fp16", "fp16_full_eval")


def is_trainer(value: object) -> bool:
    return _descends(value, "transformers.trainer", "Trainer")


def is_arguments(value: object) -> bool:
    return _descends(value, "transformers.training_args", "TrainingArguments")


def _descends(value: object, module: str, name: str) -> bool:
    """By name, so that nothing is imported to find out."""
    return isinstance(value, type) and any(base.__module__ == module and base.__name__ == name for base in value.__mro__)


def arguments_class(trainer: type) -> type:
    """SFTConfig for SFTTrainer and what is derived from it, TrainingArguments for Trainer."""
    for base in trainer.__mro__:
        name = "TrainingArguments" if base.__name__ == "Trainer" else f"{base.__name__.removesuffix('Trainer')}Config"
        found: Any = getattr(sys.modules[base.__module__], name, None)
        if is_arguments(found):
            return found  # type: ignore[no-any-return]
    raise TypeError(f"{trainer.__name__} has no arguments class")


def fields_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls) if field.init}


def positional_names(cls: type) -> list[str]:
    """Names of what may be given by place. A class that only passes `*args` on has those of the class it passes them to."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            if not any(one.kind is one.VAR_POSITIONAL for one in parameters):
                return [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    return []


def by_name(cls: type, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    names = positional_names(cls)
    if len(given) > len(names) or set(names[: len(given)]) & set(named):
        raise TypeError(f"{cls.__name__}(): too many positional arguments, or an argument given twice")
    return dict(zip(names, given, strict=False)) | named


# ---- arguments of a run ----------------------------------------------------------------------------------------------


def translate_arguments(cls: type, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Arguments for `cls` (SFTConfig, TrainingArguments, ...) out of those a script gives."""
    known, name = fields_of(cls), cls.__name__
    result = {key: value for key, value in given.items() if key in known}
    for old, value in given.items():
        if old in known:
            continue
        if old in REFUSED and value:
            why, fix = REFUSED[old]
            raise CommandError(what=f"{name}({old}=...) is not supported", why=why, fix=fix)
        if old in LEFT_OUT or old in REFUSED:
            if value is not None and old in LEFT_OUT:
                notes.say(f"{name}({old}=...) is dropped: {LEFT_OUT[old]}")
        elif old == "warmup_ratio":
            _warm_up(name, value, result, notes)
        elif old == "vllm_sampling_params":
            _sampling(name, value, result, notes)
        elif old == "group_by_length":
            if value:
                _put(name, old, "train_sampling_strategy", "group_by_length", result, notes)
        elif RENAMED.get(old) in known:
            _put(name, old, RENAMED[old], value, result, notes)
        else:
            result[old] = value  # unknown to us, too: the class itself says so
    if "num_generations" in known:
        _whole_groups(cls, result, notes)
        _without_vllm(name, result, notes)
    _optimizer(name, result, notes)
    _without_gpu(cls, result, notes)
    return result


def _put(cls: str, old: str, new: str, value: object, result: dict[str, Any], notes: Notes) -> None:
    if new in result and result[new] != value:
        raise CommandError(
            what=f"{cls}({old}={value!r}) contradicts {new}={result[new]!r}",
            why=f"{old} is the old name of {new}",
            fix="keep one of them",
        )
    result[new] = value
    shown = f'"{value}"' if old == "group_by_length" else "..."  # of the others only the name is new
    notes.say(f"{cls}({old}=...) becomes {new}={shown}")


def _warm_up(cls: str, ratio: Any, result: dict[str, Any], notes: Notes) -> None:
    """A share of all steps is `warmup_steps` below 1; a count of steps always went before the share."""
    if not ratio or result.get("warmup_steps"):
        return
    if not 0 < float(ratio) < 1:
        raise CommandError(
            what=f"{cls}(warmup_ratio={ratio!r})", fix="use a fraction of all steps, from 0 up to, but not including, 1"
        )
    result["warmup_steps"] = float(ratio)
    notes.say(f"{cls}(warmup_ratio=...) becomes warmup_steps=...: values below 1 are a fraction of all steps")


def _whole_groups(cls: type, result: dict[str, Any], notes: Notes) -> None:
    """GRPO compares the answers to one prompt: TRL refuses a batch without all of them, such as one of 1."""
    if result.get("generation_batch_size") or result.get("steps_per_generation"):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations")
    batch, accumulated, answers = (result.get(name, defaults[name]) for name in names)
    if isinstance(answers, int) and answers > 0 and batch * accumulated % answers:
        result["per_device_train_batch_size"] = answers
        notes.say(
            f"{cls.__name__}(per_device_train_batch_size={batch}) becomes {answers}: a batch holds all num_generations "
            "completions of a prompt"
        )


def _sampling(cls: str, params: Any, result: dict[str, Any], notes: Notes) -> None:
    """Moves vLLM's parameters that the script itself gives: TRL has the same under the same names."""
    if params is None:
        return
    given = dict(of(params).given)
    stop, moved = given.pop("stop", None), {}
    given.pop("include_stop_str_in_output", None)  # TRL keeps the token that ends an answer
    if given.pop("seed", None) is not None:
        notes.say(f"{cls}(vllm_sampling_params=...): its seed is dropped; answers are drawn by {cls}(seed=...)")
    if "max_tokens" in given:
        given["max_completion_length"] = given.pop("max_tokens")
    for key, value in given.items():
        if key not in SAMPLED:
            raise CommandError(
                what=f"{cls}(vllm_sampling_params=SamplingParams({key}={value!r})) is not supported",
                why="TRL decides it",
                fix=f"remove {key}",
            )
        new = max(0, value) if key == "top_k" else value
        if key in result and result[key] != new:
            raise CommandError(
                what=f"{cls}({key}={result[key]!r}) contradicts vllm_sampling_params with {key}={new!r}", fix="keep one of them"
            )
        moved[key] = result[key] = new
    shown = ", ".join(f"{key}={value}" for key, value in moved.items()) or "nothing"
    notes.say(f"{cls}(vllm_sampling_params=...) becomes {shown}")
    if stop:
        result[STOPS] = [stop] if isinstance(stop, str) else list(stop)


def _without_vllm(cls: str, result: dict[str, Any], notes: Notes) -> None:
    """vLLM in this process would hold the weights once more. A server of its own is asked as TRL asks it."""
    if result.get("use_vllm") and result.get("vllm_mode", "colocate") != "server":
        result["use_vllm"] = False
        notes.say(f"{cls}(use_vllm=True) becomes False: model.generate() runs on Pronghorn's layers, in vLLM's place")


def _optimizer(cls: str, result: dict[str, Any], notes: Notes) -> None:
    asked = str(getattr(result.get("optim"), "value", result.get("optim")))
    if asked == "adamw_hf":
        result["optim"] = "adamw_torch"
        notes.say(f'{cls}(optim="adamw_hf") becomes "adamw_torch": transformers has no AdamW of its own any more; same updates')
    if asked in BITSANDBYTES_ADAMW and find_spec("bitsandbytes") is None:
        result["optim"] = "adamw_torch_fused"
        notes.say(
            f'{cls}(optim="{asked}") becomes "adamw_torch_fused": bitsandbytes is not installed; same updates, 8 bytes '
            "of optimizer state per trained weight"
        )


def _without_gpu(cls: type, result: dict[str, Any], notes: Notes) -> None:
    """Without a GPU, 16 bits are left to who asks for them: `fp16=not is_bf16_supported()` did not ask for a CPU's fp16, and
    TRL's own default bf16=True did not either."""
    from torch import cuda

    if cuda.is_available():
        return
    for key in NEEDS_GPU:
        if result.get(key):
            result[key] = False
            notes.say(f"{cls.__name__}({key}=True) becomes {key}=False: no GPU found, training runs in float32 on the CPU")
    default = next(field.default for field in dataclasses.fields(cls) if field.name == "bf16")
    if default is None and result.get("bf16") is None:  # None becomes True
        result["bf16"] = False
        notes.say(f"{cls.__name__}(bf16=False): TRL's default is True, but no GPU was found")


# ---- arguments of a trainer ------------------------------------------------------------------------------------------


def translate_trainer(cls: type, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Arguments for the trainer `cls`. What belongs to its arguments by now goes there."""
    known, name, config = set(positional_names(cls)), cls.__name__, arguments_class(cls)
    result, moved = {}, {}
    for key, value in given.items():
        new = TRAINER_RENAMED.get(key, key)
        if key in known or new not in known:
            result[key] = value
        else:
            _put(name, key, new, value, result, notes)
    for key in [key for key in result if key not in known]:
        if key in fields_of(config) or key in (*LEFT_OUT, *REFUSED) or RENAMED.get(key) in fields_of(config):
            moved[key] = result.pop(key)
    settings = result.get("args")
    _require_ends(name, getattr(settings, STOPS, ()), result.get("processing_class"))
    if is_arguments(type(settings)) and not isinstance(settings, config):
        notes.say(f"{name}(args={type(settings).__name__}(...)) becomes {config.__name__} with the same values")
        settings = remember(config(**_values(settings)), ())
    if moved:
        settings = _with(settings, config, moved, name, notes)
    settings = _with_length(cls, settings, moved, result.get("model"), notes)
    if settings is not None:
        result["args"] = settings
    return result


def _require_ends(trainer: str, stops: Sequence[str], tokenizer: object) -> None:
    """Texts that end an answer: TRL knows the tokenizer's and the model's end, and no other."""
    for text in stops:
        if text != getattr(getattr(tokenizer, "tokenizer", tokenizer), "eos_token", None):
            raise CommandError(
                what=f"{trainer} with vllm_sampling_params and stop={text!r} is not supported",
                why="TRL ends an answer at the end-of-sequence token only",
                fix="stop=[tokenizer.eos_token]",
            )


def _values(settings: TrainingArguments) -> dict[str, Any]:
    """As TRL itself makes one of its own out of TrainingArguments."""
    return {**settings.to_dict(), "hub_token": settings.hub_token}


def remember(settings: TrainingArguments, given: Iterable[str]) -> Any:
    """Which values are the script's own: an object does not tell them from defaults."""
    setattr(settings, GIVEN, frozenset(given))
    return settings


def _with_length(cls: type, settings: TrainingArguments, moved: dict[str, Any], model: HFModel, notes: Notes) -> Any:
    """Where no trainer is told a length, scripts mean the model's; TRL 1.15 would cut every row after its own 1,024 tokens."""
    length = getattr(model, "max_seq_length", None)
    said = {"max_length", "max_seq_length"} & {*moved, *getattr(settings, GIVEN, {"max_length"})}
    if said or length is None or settings is None or not any(base.__name__ == "SFTTrainer" for base in cls.__mro__):
        return settings
    if settings.max_length != length:
        notes.say(
            f"{cls.__name__}: rows are truncated to the model's max_seq_length={length}, not to TRL's default "
            f"max_length={settings.max_length}; set max_length to change this"
        )
        settings = copy.copy(settings)
        settings.max_length = length
    return settings


def _with(settings: TrainingArguments, config: type, moved: dict[str, Any], trainer: str, notes: Notes) -> Any:
    """A copy with these values; what a trainer is given itself goes before what its arguments say."""
    quiet = Notes(lambda text: None)
    wanted = translate_arguments(config, moved, quiet)
    for old in moved:
        if old in LEFT_OUT and old not in fields_of(config):
            notes.say(f"{trainer}({old}=...) is dropped: {LEFT_OUT[old]}")
        elif old not in REFUSED:
            notes.say(f"{trainer}({old}=...) moves into its args: {config.__name__}({RENAMED.get(old, old)}=...)")
    if settings is None:
        return remember(config(**wanted), wanted)
    settings = copy.copy(settings)
    for key in {RENAMED.get(old, old) for old in moved} & fields_of(config):
        setattr(settings, key, wanted[key])
    return settings
