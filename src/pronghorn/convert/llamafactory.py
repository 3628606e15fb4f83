"""LLaMA-Factory's config: a row for each key that stands alone, and functions for those that say something together."""

from __future__ import annotations

from pathlib import Path

from pronghorn.convert.data_sets import OWN_TEMPLATE, set_template
from pronghorn.convert.draft import (
    Draft,
    Row,
    UnfitError,
    choice,
    decimal,
    is_on,
    not_here,
    nothing,
    number,
    only_if_one,
    plain,
    refused,
    text,
    to,
    whole,
    words,
)
from pronghorn.convert.llamafactory_data import convert_data, newer_data
from pronghorn.convert.shared import (
    BITS,
    FROZEN,
    GPUS,
    IMAGES,
    KERNELS,
    MODEL,
    NEAR_OPTIMIZERS,
    NEW_TOKENS,
    NO_CODE,
    NOTHING_SENT,
    OPTIMIZERS,
    OTHER_OPTIMIZER,
    OTHER_SCHEDULE,
    PACKED,
    PLAN,
    PREFERENCE,
    PREFERENCE_FIX,
    RESUME,
    SCHEDULES,
    adapter_off,
    batch,
    betas,
    clip,
    duration,
    every,
    fp8_products,
    fraction_held_out,
    held_out_first,
    precision,
    warmup,
)

NAME = "LLaMA-Factory"
MARKS = ("model_name_or_path", "stage", "finetuning_type", "template", "cutoff_len", "do_train", "dataset",
         "per_device_train_batch_size", "train_dataset", "model_class", "num_train_epochs", "peft_config")
TRAINS = ("do_train", "train_dataset", "dataset", "num_train_epochs", "max_steps")
TEMPLATES = {  # LLaMA-Factory's names: ours
    "llama2": "llama-2", "llama3": "llama-3", "gemma": "gemma", "gemma2": "gemma-2", "gemma3": "gemma-3", "gemma3n": "gemma-3",
    "gemma4": "gemma-4", "qwen": "qwen-2.5", "qwen3": "qwen3", "qwen3_nothink": "qwen3-instruct", "chatml": "chatml",
    "phi": "phi-3", "phi4": "phi-4", "mistral": "mistral", "alpaca": "alpaca", "vicuna": "vicuna", "zephyr": "zephyr",
}  # fmt: skip
LORA_KEYS = ["lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora", "use_rslora", "loraplus_lr_ratio"]
OTHER_WAY = "a way of training that is not available here"
OBJECTIVE = "the loss is the mean over learned tokens; another objective is not available"
HOST = "rows are tokenized on every core, and kept in a cache"
EXPORT = "it concerns an export: `pronghorn export RUN --to merged`"
GENERATION = "it concerns answers, not training"


def convert(draft: Draft, folder: Path, dataset_info: Path | None) -> None:
    _refuse(draft)
    as_text = draft.get("stage") == "pt"
    _method(draft)
    newer = "model_class" in draft.values
    micro = "micro_batch_size" if newer else "per_device_train_batch_size"
    batch(draft, micro=micro, accumulation="gradient_accumulation_steps", length="cutoff_len", packed=as_text,
          packing=("packing", "neat_packing"), defaults=(1 if newer else 8, 1, 2048),
          total="global_batch_size")
    epochs = duration(draft, epochs="num_train_epochs", steps="max_steps", default=3)
    warmup(draft, scheduler="lr_scheduler_type", steps="warmup_steps", ratio="warmup_ratio", default=0.0)
    precision(draft, bf16=("bf16", "pure_bf16"), fp16=("fp16",))
    if is_on(draft.get("pure_bf16")) and draft.targets["method"] == "full":
        draft.not_honoured("pure_bf16", "products are in bf16, and trained weights are kept in fp32: bf16 loses small updates")
    convert_data(draft, folder, dataset_info, as_text=as_text)
    newer_data(draft, folder)
    draft.default("data.long", "split" if as_text else "truncate", "long rows are cut there, too")
    _template(draft, as_text)
    _loss_on(draft)
    fraction_held_out(draft, "val_size")
    held_out_first(draft, patience="early_stopping_steps")
    _how_often(draft, epochs)
    betas(draft)
    for target, value in (("train.lr", 5e-5), ("train.schedule", "linear"), ("train.seed", 42)):
        if not any(draft.get(key) is not None for key in {"train.lr": ("learning_rate",), "train.schedule": (
                "lr_scheduler_type",), "train.seed": ("seed", "data_seed")}[target]):
            draft.default(target, value)


def _refuse(draft: Draft) -> None:
    stage = draft.get("stage")
    if stage is not None and stage not in ("sft", "pt"):
        draft.refuse("stage", PREFERENCE, PREFERENCE_FIX)
    training = draft.get("do_train")
    if not any(draft.get(key) is not None for key in TRAINS) or (training is not None and not is_on(training)) or (
            training is None and (draft.get("do_predict") or draft.get("export_dir"))):
        key = next((key for key in ("do_train", "do_predict", "export_dir", "infer_backend") if key in draft.values),
                   next(iter(draft.values)))
        draft.refuse(key, "it does not train: it answers, exports or predicts",
                     "convert the config that trains; `pronghorn chat` and `pronghorn export` do the rest")


def _method(draft: Draft) -> None:
    peft = draft.get("peft_config")
    if isinstance(peft, dict):
        _peft_config(draft, peft)
        return
    kind = str(draft.get("finetuning_type", "lora" if "model_class" not in draft.values else "full"))
    bits = draft.get("quantization_bit")
    if kind == "full":
        draft.set("method", "full", "finetuning_type")
        draft.targets["method"] = "full"
        adapter_off(draft, LORA_KEYS, "all of the model is trained (method: full)")
        if bits is not None:
            draft.not_honoured("quantization_bit", "trained weights are never stored in few bits; set method: qlora")
        return
    method = "lora"
    if bits is not None and str(bits) == "4":
        method = "qlora"
        draft.set("method", method, "quantization_bit")
    elif bits is not None:
        draft.not_honoured("quantization_bit", f"{BITS}; the recipe has method: lora")
    if kind == "lora":
        draft.set("method", method, "finetuning_type")
    else:
        draft.nearest("method", method, "finetuning_type", "an adapter (LoRA) or the whole model is trained")
    _lora(draft)


def _lora(draft: Draft) -> None:
    """LLaMA-Factory's own defaults: rank 8, alpha twice the rank."""
    try:
        rank = whole(draft.get("lora_rank", 8))
    except UnfitError:
        rank = 8
    draft.default("lora.r", rank)
    if draft.get("lora_alpha") is None:
        draft.default("lora.alpha", max(1, 2 * rank), "twice the rank")
    targets = draft.get("lora_target")
    if targets is None:
        return
    try:
        names = words(targets)
    except UnfitError as error:
        draft.not_honoured("lora_target", str(error))
        return
    draft.set("lora.targets", "all-linear" if names == ["all"] else names, "lora_target")


def _peft_config(draft: Draft, peft: dict[str, object]) -> None:
    """Of the newer form of a config."""
    kind = plain(peft.get("name"))
    if kind not in ("lora", "qlora"):
        draft.nearest("method", "lora", "peft_config", "an adapter (LoRA) or the whole model is trained")
        return
    quant = draft.get("quant_config")
    few = isinstance(quant, dict) and str(quant.get("quantization_bit")) == "4"
    draft.set("method", "qlora" if few else "lora", "peft_config", *(["quant_config"] if few else []))
    rows = {"r": ("lora.r", whole), "lora_alpha": ("lora.alpha", number), "lora_dropout": ("lora.dropout", number)}
    for name, value in peft.items():
        at = f"peft_config.{name}"
        try:
            if name in rows:
                target, read = rows[name]
                draft.set(target, read(value), at)
            elif name == "target_modules":
                names = words(value)
                draft.set("lora.targets", "all-linear" if names == ["all"] else names, at)
            elif name == "name":
                draft.fates[at] = ("mapped", f"method: {draft.targets['method']}")
            else:
                draft.not_honoured(at, "the adapter has r, alpha, targets and dropout")
        except UnfitError as error:
            draft.not_honoured(at, str(error))


def _template(draft: Draft, as_text: bool) -> None:
    name = draft.get("template")
    if name is None:
        return
    if as_text:
        draft.no_effect("template", "plain text has no template")
    else:
        set_template(draft, "template", str(name), TEMPLATES.get(str(name), ""))


def _loss_on(draft: Draft) -> None:
    for key, ours in (("train_on_prompt", "all"), ("mask_history", "completion")):
        if is_on(draft.get(key)):
            draft.set("data.loss_on", ours, key)
        elif draft.get(key) is not None:
            draft.no_effect(key, "answers are learned, as here by default")


def _how_often(draft: Draft, epochs: float) -> None:
    strategy = "eval_strategy" if draft.get("eval_strategy") is not None else "evaluation_strategy"
    if draft.targets.get("data.eval") is None:
        adapter_off(draft, ["eval_steps", "eval_strategy", "evaluation_strategy", "do_eval"], "there is no held-out data")
    else:
        every(draft, "eval.every", steps="eval_steps", strategy=strategy, per_epoch="", epochs=epochs, best="")
    every(draft, "checkpoint.every", steps="save_steps", strategy="save_strategy", per_epoch="", epochs=epochs,
          best="the best checkpoint is always kept")
    draft.default("checkpoint.every", 500)


def _freeze(draft: Draft, key: str) -> None:
    draft.no_effect(key, "the vision tower is frozen and the text is trained, whatever it says")


def _report(draft: Draft, key: str) -> None:
    draft.no_effect(key, NOTHING_SENT)


ROWS: dict[str, Row] = {
    # model
    "model_name_or_path": to("model", text), "model": to("model", text), "model_class": nothing(MODEL),
    "trust_remote_code": not_here(NO_CODE, "no code of a model's repository runs here either"),
    "model_revision": lambda draft, key: draft.no_effect(key, "the newest, as here") if draft.get(key) == "main" else
    draft.not_honoured(key, "the newest revision is read; download that one and name its folder"),
    "adapter_name_or_path": not_here("training begins with a new adapter; merge that one into the model first"),
    "adapter_folder": not_here("training begins with a new adapter; merge that one into the model first"),
    "create_new_adapter": nothing("training begins with a new adapter, as here"),
    "cache_dir": nothing("HF_HOME says where models are kept"), "use_fast_tokenizer": nothing("tokenizer.json is read"),
    "resize_vocab": not_here(NEW_TOKENS), "split_special_tokens": not_here("special tokens are one token each"),
    "add_tokens": not_here(NEW_TOKENS), "add_special_tokens": not_here(NEW_TOKENS),
    "new_special_tokens_config": not_here(NEW_TOKENS), "init_special_tokens": nothing("no tokens are added"),
    "rope_scaling": not_here("the model's own config.json counts"), "shift_attn": not_here("attention is whole"),
    "mixture_of_depths": not_here(OTHER_WAY), "moe_aux_loss_coef": not_here("the model's own config.json counts"),
    "train_from_scratch": not_here("training begins with the model's weights"), "init_config": nothing(PLAN),
    "low_cpu_mem_usage": nothing(PLAN), "device_map": nothing(PLAN), "upcast_layernorm": nothing("sums are in fp32 anyway"),
    "upcast_lmhead_output": nothing("the loss is computed in fp32 anyway"), "print_param_status": nothing("`check` tells"),
    "use_kv_cache": nothing(GENERATION), "block_diag_attn": nothing(PACKED), "compute_dtype": nothing("`precision` says it"),
    "model_max_length": nothing("data.max_length says it"), "quantization_method": nothing("NF4 has its own layout here"),
    "quantization_type": nothing("NF4"), "double_quantization": nothing("NF4 has its own layout here"),
    "quantization_device_map": nothing(PLAN), "quant_config": not_here("method: qlora (NF4) or fp8"),
    # method
    "stage": lambda draft, key: draft.no_effect(key, "on plain text" if draft.get(key) == "pt" else "on answers, as here"),
    "do_train": nothing("`pronghorn train`"),
    "lora_rank": to("lora.r", whole), "lora_alpha": to("lora.alpha", number), "lora_dropout": to("lora.dropout", number),
    "use_dora": to("lora.dora", is_on), "use_rslora": to("lora.rslora", is_on),
    "loraplus_lr_ratio": to("lora.plus_ratio", number),
    "loraplus_lr_embedding": nothing("embeddings have no adapter here"), "additional_target": not_here(FROZEN),
    "fp8": fp8_products, "fp8_backend": nothing(KERNELS), "pissa_convert": nothing("there is no PiSSA to convert"),
    "freeze_vision_tower": _freeze, "freeze_multi_modal_projector": _freeze, "freeze_language_model": not_here(IMAGES),
    # training
    "learning_rate": to("train.lr", decimal),
    "optim": choice("train.optimizer", OPTIMIZERS, NEAR_OPTIMIZERS, OTHER_OPTIMIZER),
    "lr_scheduler_type": choice("train.schedule", SCHEDULES, {}, OTHER_SCHEDULE),
    "lr_scheduler_kwargs": not_here("the schedules have no settings but warm-up"),
    "weight_decay": to("train.weight_decay", decimal), "adam_epsilon": to("train.eps", decimal), "max_grad_norm": clip,
    "optim_args": not_here("AdamW has betas, eps and weight_decay"), "seed": to("train.seed", whole),
    "data_seed": nothing("train.seed is for the order of the rows, too"), "neftune_noise_alpha": not_here(
        "no noise is added to embeddings"), "label_smoothing_factor": not_here(OBJECTIVE),
    "per_device_eval_batch_size": nothing("evaluation takes what fits"), "group_by_length": nothing(PACKED),
    "disable_shuffling": not_here("rows are shuffled anew in each epoch"), "compute_accuracy": not_here(
        "held-out loss and perplexity are measured"), "eval_on_each_dataset": not_here("one held-out loss"),
    # data
    "max_samples": to("data.max_rows", whole, "the first rows of each data set, as there"),
    "packing": nothing(PACKED), "neat_packing": nothing(PACKED), "batching_strategy": nothing(PACKED),
    "mix_strategy": lambda draft, key: draft.no_effect(key, "one after the other, then shuffled, as here") if draft.get(
        key) == "concat" else draft.not_honoured(key, "sources are put together; weighted ones come later"),
    "interleave_probs": not_here("sources are put together; weighted ones come later"),
    "streaming": nothing("rows are read and tokenized once, before training"), "buffer_size": nothing(HOST),
    "overwrite_cache": nothing(HOST), "preprocessing_batch_size": nothing(HOST), "preprocessing_num_workers": nothing(HOST),
    "tokenized_path": nothing(HOST), "data_shared_file_system": nothing(HOST), "dataloader_num_workers": to(
        "data.workers", whole), "ignore_pad_token_for_loss": nothing("padding is never learned"),
    "tool_format": not_here(f"tools are written as the template does; {OWN_TEMPLATE}"),
    "default_system": not_here("a system message stands in the rows, or in a template of your own"),
    "enable_thinking": nothing("reasoning is learned where the rows have it, as the template writes it"),
    "preserve_thinking": not_here("reasoning of earlier turns is what the template keeps"), "media_dir": not_here(IMAGES),
    # run
    "output_dir": to("output", text), "save_total_limit": to("checkpoint.keep", whole), "overwrite_output_dir": nothing(
        "`pronghorn train --fresh` starts over; without it the same command resumes"),
    "resume_from_checkpoint": not_here(RESUME), "logging_steps": nothing("every step is logged"),
    "logging_strategy": nothing("every step is logged"), "logging_dir": nothing(NOTHING_SENT),
    "logging_first_step": nothing("every step is logged"), "plot_loss": nothing("report.html has the curve"),
    "report_to": _report, "run_name": nothing("the output folder is the run's name"), "save_only_model": nothing(
        "a checkpoint has all that a resume needs"), "save_safetensors": nothing("safetensors are written, nothing else"),
    "load_best_model_at_end": nothing("`eval`, `chat` and `export` take the best checkpoint by themselves"),
    "metric_for_best_model": nothing("the held-out loss"), "greater_is_better": nothing("the held-out loss"),
    "do_eval": nothing("held-out data is evaluated"), "do_predict": not_here("`pronghorn eval` and `pronghorn chat`"),
    "predict_with_generate": nothing("eval.generations answers are shown at each evaluation"),
    "include_num_input_tokens_seen": nothing("tokens are counted"), "include_effective_tokens_per_second": nothing(
        "tokens per second are shown"), "push_to_hub": not_here("nothing is uploaded; `pronghorn export` writes the folder"),
    "gradient_checkpointing": nothing(PLAN), "disable_gradient_checkpointing": nothing(PLAN), "use_reentrant_gc": nothing(PLAN),
    "use_unsloth": nothing(KERNELS), "use_unsloth_gc": nothing(PLAN), "enable_liger_kernel": nothing(KERNELS),
    "flash_attn": nothing(KERNELS), "use_v1_kernels": nothing(KERNELS), "kernel_config": nothing(KERNELS),
    "torch_compile": nothing(KERNELS), "use_cce": nothing(KERNELS), "use_kt": not_here(OTHER_WAY),
    "max_new_tokens": nothing(GENERATION),
    "deepspeed": not_here(GPUS), "fsdp": not_here(GPUS), "local_rank": nothing("one GPU"), "dist_config": not_here(GPUS),
    "use_mca": refused(GPUS, "convert a config for one GPU"),
}
PREFIXES: dict[str, Row] = {
    "ddp_": nothing("one GPU"),
    **dict.fromkeys(("fsdp_", "ray_", "master_", "tensor_model_parallel", "pipeline_model_parallel", "expert_model_parallel",
                     "sequence_parallel", "context_parallel", "fp8_enable_fsdp", "use_distributed", "overlap_"),
                    only_if_one(GPUS)),
    **dict.fromkeys(("swanlab_", "use_swanlab", "wandb_", "hub_", "hf_hub", "ms_hub", "om_hub", "profiler_",
                     "enable_torch_profiler", "profile_"), nothing(NOTHING_SENT)),
    **dict.fromkeys(("use_galore", "galore_", "use_apollo", "apollo_", "use_badam", "badam_", "use_adam_mini", "use_muon",
                     "muon_"), not_here(OTHER_OPTIMIZER[1] + "; the recipe has AdamW")),
    **dict.fromkeys(("use_dft", "use_asft", "asft_", "use_eaft", "eaft_"), not_here(OBJECTIVE)),
    **dict.fromkeys(("use_llama_pro", "freeze_", "pissa_", "oft_", "module_dropout", "kt_", "use_hyper", "hyper_"),
                    not_here(OTHER_WAY)),
    **dict.fromkeys(("pref_", "dpo_", "kto_", "ppo_", "ref_model", "reward_model", "simpo_", "ld_alpha"),
                    not_here(PREFERENCE)),
    **dict.fromkeys(("image_", "video_", "audio_", "use_audio", "crop_to"), not_here(IMAGES)),
    "export_": nothing(EXPORT),
    **dict.fromkeys(("infer_", "vllm_", "sglang_", "sample_backend", "do_sample", "temperature", "top_", "num_beams",
                     "max_length", "repetition_", "length_penalty", "skip_special", "eval_num_beams"), nothing(GENERATION)),
    **dict.fromkeys(("offload_", "torch_empty", "bias_activation", "apply_rope", "moe_", "recompute_"), nothing(PLAN)),
    "dataloader_": nothing(HOST),
}
