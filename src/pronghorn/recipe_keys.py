"""Which key of a recipe somebody means: the same thing under the name of another tool, in another section, or misspelt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from pronghorn.recipe import Recipe
from pronghorn.recipe_section import NO_CODE
from pronghorn.yaml_file import KeyPath

# What TRL, transformers, PEFT, Axolotl, LLaMA-Factory and others call a key. A name of several keys is that of the section in
# which it stands, else the first.
SYNONYMS = {
    "model": "base_model model_name model_name_or_path model_id pretrained checkpoint_path",
    "method": "adapter finetuning_type peft peft_method load_in_4bit load_in_8bit quantization quantization_bit mode",
    "lora.r": "rank lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target lora_target_modules lora_target_linear modules target lora.layers",
    "lora.rslora": "use_rslora peft_use_rslora",
    "lora.dora": "use_dora peft_use_dora",
    "lora.plus_ratio": "loraplus_lr_ratio loraplus lora_plus",
    "objective.name": "rl stage trainer type kind algorithm importance_sampling_level",
    "objective.loss": "loss_type pref_loss dpo_loss_type",
    "objective.beta": "rl_beta dpo_beta pref_beta orpo_alpha kl kl_coef kl_coeff kl_weight kl_penalty init_kl_coef",
    "objective.label_smoothing": "dpo_label_smoothing",
    "objective.length_normalized": "dpo_norm_loss",
    "objective.sft_weight": "rpo_alpha cpo_alpha pref_ftx dpo_ftx alpha nll_weight",
    "objective.gamma": "simpo_gamma",
    "objective.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "objective.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "objective.center_weight": "center_rewards_coefficient",
    "objective.clip": "epsilon epsilon_high epsilon_low eps_clip cliprange clip_range clip_eps clip_high clip_low",
    "objective.updates": "num_iterations ppo_epochs num_ppo_epochs epochs mu",
    "objective.delta": "two_sided_clip",
    "objective.scale": "scale_rewards",
    "precision": "dtype torch_dtype bf16 fp16 mixed_precision",
    "data.train": "dataset datasets dataset_name train_file train_data data_path train_dataset path files file sources",
    "data.eval": "val valid validation eval_file eval_dataset test val_set_size val_size test_size eval_data validation_split "
    "eval.data eval.file eval.path eval.dataset",
    "data.fields": "columns column_names field_names",
    "data.fields.messages": "conversations conversation dialogue chat",
    "data.fields.instruction": "question problem query",
    "data.fields.expected": "answer solution ground_truth reference target gold",
    "data.fields.completion": "response",
    "data.fields.system": "data.fields.system_prompt",
    "data.fields.text": "dataset_text_field",
    "data.train.columns": "fields",
    "data.train.max_rows": "rows limit",
    "data.train.path": "file",
    "data.train.name": "config",
    "data.train.weight": "ratio probability",
    "data.train.format": "type",
    "data.max_rows": "limit max_samples max_examples num_samples",
    "data.max_length": "max_seq_length max_seq_len sequence_len cutoff_len seq_len seq_length context_length max_tokens "
    "model_max_length max_prompt_length max_prompt_len vllm_max_model_length",
    "data.long": "truncation truncate truncation_mode overflow",
    "data.duplicates": "dedup deduplicate dataset_exact_deduplication",
    "data.loss_on": "train_on_inputs mask_prompt completion_only_loss assistant_only_loss train_on_prompt loss_mask",
    "data.workers": "num_workers dataloader_num_workers preprocessing_num_workers num_proc dataset_num_proc",
    "data.format": "type dataset_format data_format",
    "data.chat_template": "chat_template_path",
    "train.lr": "learning_rate learningrate",
    "train.epochs": "num_epochs num_train_epochs n_epochs epoch",
    "train.steps": "max_steps num_steps total_steps iters iterations",
    "train.batch_rows": "batch_size per_device_train_batch_size micro_batch_size gradient_accumulation_steps train_batch_size "
    "global_batch_size gradient_accumulation grad_accum accumulation_steps",
    "train.batch_tokens": "tokens_per_step max_tokens_per_batch batch",
    "train.capacity": "micro_batch_tokens pack_length pack_size",
    "train.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "train.warmup": "warmup_ratio warmup_steps num_warmup_steps",
    "train.decay": "num_decay_steps decay_steps decay_ratio cooldown cooldown_steps",
    "train.optimizer": "optim",
    "train.weight_decay": "wd",
    "train.clip": "max_grad_norm grad_clip gradient_clip gradient_clipping clip_grad_norm max_norm",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "train.eps": "adam_epsilon adam_eps train.epsilon",
    "train.graph": "cuda_graph cuda_graphs",
    "train.seed": "random_seed random_state",
    "memory.budget": "gradient_checkpointing activation_checkpointing vram gpu gpu_memory gpu_memory_limit max_memory max "
    "limit",
    "checkpoint.every": "save_steps save_every save_strategy steps interval frequency",
    "checkpoint.keep": "save_total_limit limit max_to_keep",
    "eval": "evaluation",
    "eval.every": "eval_steps eval_strategy evaluation_strategy val_check_interval steps interval frequency",
    "eval.samples": "n num_samples max_samples",
    "eval.max_new_tokens": "max_tokens max_length eval_max_new_tokens",
    "eval.metrics": "metric compute_metrics",
    "eval.regex": "pattern",
    "eval.system": "system_prompt system_message",
    "eval.best": "metric_for_best_model",
    "eval.stop": "early_stopping early_stop",
    "eval.stop.patience": "early_stopping_patience",
    "report.to": "report_to logger loggers log_with use_wandb use_tensorboard use_trackio use_mlflow wandb tensorboard",
    "report.project": "wandb_project trackio_project trackio_project_name mlflow_experiment_name",
    "world.shard": "fsdp deepspeed zero_stage fsdp_config",
    "world.replicate": "hsdp dp_replicate_size replicas",
    "world.context": "cp context_parallel context_parallel_size context_parallel_degree sequence_parallel_degree",
    "rollouts.answers": "num_generations group_size n samples num_samples completions generations num_return_sequences",
    "rollouts.prompts": "unique_prompts generation_batch_size steps_per_generation batch_size batch_rows num_prompts",
    "rollouts.max_new_tokens": "max_completion_length max_response_length max_tokens max_length response_length",
    "rollouts.temperature": "temp sampling_temperature",
    "rollouts.stop": "stop_tokens stop_strings stop_token_ids eos_token",
    "rollouts.truncated": "mask_truncated_completions overlong_filtering",
    "rollouts.slots": "max_num_seqs max_batch_size concurrency",
    "rollouts.engine": "use_vllm vllm_mode vllm_server_base_url vllm_server_host vllm_server_port server url backend",
    "rollouts.engine_seconds": "vllm_server_timeout server_timeout engine_timeout",
    "rollouts.reward_seconds": "reward_timeout timeout seconds",
    "rollouts.reward_workers": "num_workers reward_processes",
    "rollouts.eval_answers": "num_generations_eval eval_samples",
    "rollouts.patience": "early_stopping",
    "rewards": "reward reward_funcs reward_functions reward_weights reward_model_path",
    "rewards.function": "func fn callable name_of_function",
    "rewards.metric": "type kind reward",
    "rewards.model": "reward_model path judge",
    "rewards.regex": "pattern",
    "rewards.weight": "coef factor scale weights",
    "output": "output_dir output_folder out out_dir save_dir output_path run_name dir folder",
}
# The same of values.
_ADAMW, _8BIT, _PAGED, _PAGED_8BIT = "adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"
OPTIMIZERS = {
    "adamw": _ADAMW, "adamw_torch": _ADAMW, "adamw_torch_fused": _ADAMW, "adamw_hf": _ADAMW, "adamw_apex_fused": _ADAMW,
    "adamw_anyprecision": _ADAMW, "optimi_adamw": _ADAMW, "flash_adamw": _ADAMW, "adamw_bnb_8bit": _8BIT, "adamw_8bit": _8BIT,
    "adamw_torch_8bit": _8BIT, "ao_adamw_8bit": _8BIT, "paged_adamw": _PAGED, "paged_adamw_32bit": _PAGED,
    "paged_adamw_8bit": _PAGED_8BIT,
}  # fmt: skip
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
VALUES = {
    "train.optimizer": OPTIMIZERS,
    "train.schedule": SCHEDULES | {"warmup_stable_decay": "wsd"},
    "precision": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "no": "fp32"},
    "method": {"4bit": "qlora", "8bit": "fp8"},
    "objective.name": {
        "sft": "supervised", "pt": "supervised", "rm": "reward", "ppo": "grpo", "dapo": "grpo", "dr_grpo": "grpo",
        "cispo": "grpo", "bnpo": "grpo", "reinforce": "rloo",
    },
}  # fmt: skip
MEANS: dict[str, list[str]] = {}
for _key, _names in SYNONYMS.items():
    for _name in _names.split():
        MEANS.setdefault(_name, []).append(_key)

# What else to know of a name above.
_STEP = "a step samples rollouts.prompts x rollouts.answers answers and learns from all of them"
NOTES = {
    **dict.fromkeys(("epsilon", "epsilon_high", "epsilon_low"), "write both: [epsilon, epsilon_high], such as [0.2, 0.28]"),
    "importance_sampling_level": "`sequence` is objective.name: gspo",
    **dict.fromkeys(("generation_batch_size", "steps_per_generation"), _STEP),
    "mask_truncated_completions": "true is `mask`",
    "scale_rewards": "true is `group`, false is `none`",
    "reward_weights": "each reward has its weight: [{function: NAME, weight: 0.5}]",
    **dict.fromkeys(("use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port"), "write the server's address"),
    **dict.fromkeys(("answer", "solution", "ground_truth", "gold"), "of rows that are no prompts: `completion`"),
    "max_prompt_length": "it limits a prompt and its answer together",
}

# Names of other tools that no key has: why.
_WEIGHTS = "answers are sampled from the weights that learn; with a server the correction is fixed (docs/rollout-server.md)"
_REFERENCE = "the reference is the model before training"
_PACKED = "rows are always packed; attention does not cross rows"
_KERNELS = "Pronghorn uses its own kernels"
_SHOWN = "every step is logged, and the report shows answers"
_ENTROPY = "the entropy is a figure of every step, and no part of the loss"
_LOSS = "no loss here has it"
_SERVER = "it is an option of the server's own command (docs/rollout-server.md)"
_CONFIG = "the model's config.json is used"
_TEMPLATE = "chat templates receive messages and tools only"
_RESUME = "the same command resumes from the last checkpoint; --fresh starts over"
_HUB = "training uploads nothing; `pronghorn export --push-to-hub` uploads an export"
_ADAPTER = "adapters have r, alpha, targets, dropout, rslora, dora and plus_ratio only"
_ABSENT = {
    _WEIGHTS: "vllm_importance_sampling_* off_policy_mask_threshold use_bias_correction_kl ds3_gather_for_generation",
    _REFERENCE: "sync_ref_model ref_model_* ref_model precompute_ref_log_probs precompute_ref_batch_size",
    _PACKED: "packing sample_packing neat_packing eval_packing packing_strategy padding_free group_by_length "
    "pad_to_multiple_of pad_to_sequence_len remove_unused_columns",
    _KERNELS: "flash_attention flash_attn attn_implementation use_liger_kernel torch_compile cache_implementation "
    "use_transformers_* transformers_continuous_batching_config torch_empty_cache_steps",
    _SHOWN: "logging_steps logging_strategy log_completions log_completions_hub_repo log_multimodal log_unique_prompts "
    "num_completions_to_print",
    _ENTROPY: "entropy_coef entropy_coef_* entropy_target top_entropy_quantile use_adaptive_entropy",
    _LOSS: "sapo_* vespo_* discopop_tau f_divergence_type f_alpha_divergence_coef ld_alpha use_weighting loss_weights",
    _SERVER: "vllm_*",
    _CONFIG: "model_init_kwargs router_aux_loss_coef rope_scaling",
    _TEMPLATE: "chat_template_kwargs",
    _RESUME: "resume_from_checkpoint auto_resume_from_checkpoints resume",
    _HUB: "hub_* push_to_hub",
    _ADAPTER: "bias task_type modules_to_save lora_modules_to_save init_lora_weights layers_to_transform peft_type",
    "rewards are weighted and added up": "multi_objective_aggregation reward_clip_range",
    "objective rloo divides advantages by nothing; grpo has objective.scale": "normalize_advantages",
    "answers have no penalties or further options of generation": "repetition_penalty presence_penalty frequency_penalty "
    "generation_kwargs",
    "--episode-file has conversations with tools (docs/rollouts.md)": "tools max_tool_calling_iterations environment_factory",
    "answers are sampled and learned from without dropout": "disable_dropout",
    "log-probabilities are computed in fp32": "cast_lm_head_to_fp32",
    "rows are shuffled in every epoch, by train.seed": "shuffle shuffle_dataset",
    "Pronghorn runs no code from model repositories": "trust_remote_code",
    "schedules have no settings except train.warmup and train.decay": "lr_scheduler_kwargs",
    "embedding noise (NEFTune) is not supported": "neftune_noise_alpha neftune_alpha",
    "evaluation chooses its batch size itself": "eval.batch_size eval_batch_size per_device_eval_batch_size",
    "answers to held-out rows are greedy; those of objective grpo are sampled as rollouts says": "eval.temperature eval.top_p",
}
ABSENT = {name: why for why, names in _ABSENT.items() for name in names.split()}
PREFIXES = [name for name in ABSENT if name.endswith("*")]
CODE = re.compile(r"(?<![a-z])(reward|metric|episode)s?(?=[._]|$)(?:\w*[._](file|module|script)s?$)?")  # keys that name code
LISTS = ("rewards.", "data.train.")  # keys of the items of a list
SECTIONS = {key for key, field in Recipe.model_fields.items() if isinstance(field.annotation, type(BaseModel))}


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


def key_like(path: KeyPath) -> str:
    """The key that is meant by an unknown one, as it is to be written in the same section; nothing, where none is like it."""
    section, name = ".".join(str(part) for part in path[:-1] if isinstance(part, str)), _plain(path[-1])
    section = section.replace("data.train.columns", "data.fields")
    above, words = f"{section}." if section else "", set(name.split("_"))
    here = {key: above + key for key in keys_in(path[:-1])}
    keys = [*Recipe.model_fields, *(key for key in all_keys() if not key.startswith(LISTS))]
    there: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: not key.startswith(above)):
        there.setdefault(key.split(".")[-1], key)
    meant = [*MEANS.get(above + name, ()), *MEANS.get(name, ())]
    meant = [key for key in meant if above in LISTS or not key.startswith(LISTS)]
    foreign = next((key for key in meant if key.startswith(above)), next(iter(meant), ""))
    same = there.get(name, "")
    ways = (
        here.get(name),
        same if same.startswith(above) else "",
        foreign if foreign.startswith(above) else "",
        _close(name, here, 0.8) if section else _in_its_name(name) or _close(name, here, 0.8),
        next((here[key] for key in here if section and words <= set(key.split("_"))), ""),  # delta: min_delta
        foreign if above + name in MEANS else "",
        same,
        foreign,
        next((here[key] for key in here if section and words >= set(key.split("_"))), ""),  # clip_norm: clip
        _close(
            name, {other: key for key, others in SYNONYMS.items() if key.startswith(above) for other in others.split()}, 0.8
        ),
        _close(name, here, 0.6),
        _close(name, {other: key for other, (key, *_) in MEANS.items() if not key.startswith(LISTS)}, 0.85),
        _close(name, there, 0.8),
    )
    found = next((key for key in ways if key), "")
    return found.removeprefix(above) if found.rpartition(".")[0] == section else found


def _plain(word: str | int) -> str:
    return str(word).lower().replace("-", "_")


def value_like(dotted: str, given: str, choices: Sequence[str]) -> str:
    """The same of a value, among those that the key takes."""
    return VALUES.get(dotted, {}).get(_plain(given)) or _close(_plain(given), {choice: choice for choice in choices}, 0.6)


def _close(name: str, known: Mapping[str, str], cutoff: float) -> str:
    return next((known[close] for close in difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def _in_its_name(name: str) -> str:
    """The key of a name such as train_lr."""
    section, _, rest = name.partition("_")
    inner = rest and section in Recipe.model_fields and section_of(Recipe.model_fields[section].annotation)
    found = key_like((section, rest)) if inner else ""
    return found if "." in found or not found else f"{section}.{found}"


def advice(path: KeyPath, given: object, *, answers: bool = False) -> tuple[str, str]:
    """Why there is no such key, where that is known, and what to do instead. `answers`: the model answers prompts."""
    name, dotted = _plain(path[-1]), ".".join(str(part) for part in path if isinstance(part, str))
    file = given.partition(":")[0] if isinstance(given, str) else ""
    if (code := CODE.search(dotted)) and (code[2] or file.endswith(".py")):
        return NO_CODE, f"remove it here and add: --{code[1]}-file {file or 'FILE'}"
    begins = next((ABSENT[how] for how in PREFIXES if name.startswith(how[:-1]) and name not in MEANS), "")
    why = ABSENT.get(dotted) or ABSENT.get(name) or begins
    meant = "" if why else key_like(path)
    a_section = name in MEANS or _close(name, {key: key for key in Recipe.model_fields}, 0.7)
    if isinstance(given, dict) and given and len(path) == 1 and not (a_section and meant in Recipe.model_fields):
        meant = key_like((str(next(iter(given))),)) or meant  # grpo: {num_generations: 8}
    if answers and meant.rpartition(".")[2] in ("batch_rows", "batch_tokens"):
        return _STEP, "set rollouts.prompts, or rollouts.answers"
    if meant:
        if meant in keys_in(path[:-1]) and not any(isinstance(part, int) for part in path):  # whole, to be copied
            meant = ".".join(map(str, (*path[:-1], meant)))
        note = NOTES.get(name, "")
        return "", f"did you mean `{meant}`?" + (f" {note}" if note else "")
    return why, "remove it" if why else f"known keys: {', '.join(sorted(keys_in(path[:-1])))}"


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
