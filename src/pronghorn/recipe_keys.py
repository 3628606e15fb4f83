"""Which key of a recipe somebody means: the same thing under the name of another tool, in another section, or misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from pronghorn.recipe import Recipe
from pronghorn.yaml_file import KeyPath

SYNONYMS = {
    "model": ("base_model", "model_name", "model_name_or_path", "model_id", "pretrained", "checkpoint_path"),
    "method": ("adapter", "finetuning_type", "peft", "peft_method", "load_in_4bit", "load_in_8bit", "quantization", "mode"),
    "lora.r": ("rank", "lora_r", "lora_rank"),
    "lora.alpha": ("lora_alpha",),
    "lora.dropout": ("lora_dropout",),
    "lora.targets": ("target_modules", "lora_target", "lora_target_modules", "modules", "target"),
    "lora.rslora": ("use_rslora",),
    "lora.dora": ("use_dora",),
    "lora.plus_ratio": ("loraplus_lr_ratio", "loraplus", "lora_plus"),
    "objective.name": ("rl", "stage", "trainer"),
    "objective.loss": ("loss_type", "pref_loss", "dpo_loss_type"),
    "objective.beta": ("rl_beta", "dpo_beta", "pref_beta", "orpo_alpha"),
    "objective.label_smoothing": ("dpo_label_smoothing",),
    "objective.length_normalized": ("dpo_norm_loss",),
    "objective.sft_weight": ("rpo_alpha", "cpo_alpha", "pref_ftx", "dpo_ftx"),
    "objective.gamma": ("simpo_gamma",),
    "objective.desirable_weight": ("kto_desirable_weight", "kto_chosen_weight"),
    "objective.undesirable_weight": ("kto_undesirable_weight", "kto_rejected_weight"),
    "objective.center_weight": ("center_rewards_coefficient",),
    "objective.updates": ("num_iterations",),
    "objective.delta": ("two_sided_clip",),
    "objective.scale": ("scale_rewards",),
    "rollouts.answers": ("num_generations", "group_size"),
    "rollouts.prompts": ("unique_prompts",),
    "rollouts.max_new_tokens": ("max_completion_length", "max_response_length"),
    "rollouts.truncated": ("mask_truncated_completions",),
    "rewards": ("reward_funcs", "reward_functions"),
    "precision": ("dtype", "torch_dtype", "bf16", "fp16", "mixed_precision"),
    "data.train": ("dataset", "datasets", "dataset_name", "train_file", "train_data", "data_path", "train_dataset", "path"),
    "data.eval": ("val", "valid", "validation", "eval_file", "eval_dataset", "test", "val_set_size", "test_size", "eval_data"),
    "data.max_length": (
        "max_seq_length",
        "max_seq_len",
        "sequence_len",
        "cutoff_len",
        "seq_len",
        "seq_length",
        "context_length",
        "max_tokens",
        "model_max_length",
    ),
    "data.loss_on": ("train_on_inputs", "mask_prompt", "completion_only_loss", "train_on_prompt", "loss_mask"),
    "data.workers": ("num_workers", "dataloader_num_workers", "preprocessing_num_workers"),
    "data.format": ("type", "dataset_format", "data_format"),
    "train.lr": ("learning_rate", "learningrate"),
    "train.epochs": ("num_epochs", "num_train_epochs", "n_epochs", "epoch"),
    "train.steps": ("max_steps", "num_steps", "total_steps", "iters", "iterations"),
    "train.batch_rows": (
        "batch_size",
        "per_device_train_batch_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "train_batch_size",
        "global_batch_size",
    ),
    "train.batch_tokens": ("tokens_per_step", "max_tokens_per_batch"),
    "train.schedule": ("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule"),
    "train.warmup": ("warmup_ratio", "warmup_steps", "num_warmup_steps"),
    "train.optimizer": ("optim",),
    "train.weight_decay": ("wd", "decay"),
    "train.clip": ("max_grad_norm", "grad_clip", "gradient_clip", "gradient_clipping", "clip_grad_norm"),
    "train.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "train.eps": ("adam_epsilon", "epsilon"),
    "train.seed": ("random_seed", "random_state"),
    "memory.budget": ("gradient_checkpointing", "vram", "gpu_memory", "max_memory", "activation_checkpointing"),
    "checkpoint.every": ("save_steps", "save_every", "save_strategy"),
    "checkpoint.keep": ("save_total_limit",),
    "eval.every": ("eval_steps", "eval_strategy", "evaluation_strategy", "val_check_interval"),
    "eval.stop": ("early_stopping", "early_stop"),
    "eval.stop.patience": ("early_stopping_patience",),
    "report.to": ("report_to", "logger", "loggers", "log_with", "use_wandb"),
    "report.project": ("wandb_project", "trackio_project", "mlflow_experiment_name"),
    "output": ("output_dir", "output_folder", "out", "out_dir", "save_dir", "output_path", "run_name"),
}
MEANS = {name: key for key, names in SYNONYMS.items() for name in names}

OF_A_SOURCE = {
    "fields": ["columns"],
    "rows": ["max_rows"],
    "limit": ["max_rows"],
    "file": ["path"],
    "config": ["name"],
    "ratio": ["weight"],
    "probability": ["weight"],
    "type": ["format"],
}  # of a source's keys, as other tools have them


def all_keys(model: type[BaseModel] = Recipe, above: str = "") -> Iterator[str]:
    """Every key, as `train.lr`; sections themselves are not."""
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is None:
            yield above + name
        else:
            yield from all_keys(inner, f"{above}{name}.")


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section behind a key's type, for `Stop | None` as well."""
    found = [a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, BaseModel)]
    return found[0] if found else None


def key_like(path: Sequence[str]) -> str:
    """The key that is meant by an unknown one, as it is to be written in the same section; nothing, where none is like it."""
    *section, last_word = path
    name, keys = last_word.lower().replace("-", "_"), list(all_keys())
    own = [key for key in keys if key.split(".")[:-1] == list(section)]
    sections = [key for key in Recipe.model_fields if section_of(Recipe.model_fields[key].annotation)] if not section else []
    here = [key.split(".")[-1] for key in own] + sections
    found = name if name in here else ""
    found = found or MEANS.get(name, "")
    found = found or next((key for key in keys if key.split(".")[-1] == name), "")
    if not found and (close := difflib.get_close_matches(name, here, n=1, cutoff=0.6)):
        found = close[0]
    if not found and (close := difflib.get_close_matches(name, {key.split(".")[-1]: 0 for key in keys}, n=1, cutoff=0.8)):
        found = next(key for key in keys if key.split(".")[-1] == close[0])
    *parents, last = found.split(".")
    return last if parents == list(section) else found


def source_key_like(key: str, known: Sequence[str]) -> str:
    """The key of one source of data.train that is meant; nothing, where none is like it."""
    return next(iter([*OF_A_SOURCE.get(key.lower(), []), *difflib.get_close_matches(key.lower(), known, n=1)]), "")


def default_of(path: KeyPath) -> Any:
    """What the key is where nobody sets it, as it is written in a recipe; None where that says nothing."""
    model: type[BaseModel] | None = Recipe
    for part in path[:-1]:
        model = section_of(model.model_fields[str(part)].annotation) if model and str(part) in model.model_fields else None
    field = model.model_fields.get(str(path[-1])) if model else None
    return field.default if field is not None and isinstance(field.default, (int, float)) else None


def keys_in(path: KeyPath) -> list[str]:
    """The keys a section takes."""
    model: type[BaseModel] = Recipe
    for part in path:
        if isinstance(part, int):  # of a list of sections, whose keys are those of one of them
            continue
        sections = [a for a in _inside(model.model_fields[part].annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)


def _inside(annotation: object) -> list[Any]:
    return [annotation, *(inner for part in get_args(annotation) for inner in _inside(part))]
