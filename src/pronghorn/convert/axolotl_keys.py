"""Axolotl's keys that stand alone: a row for each, and one for each prefix. Those of both tools: both_tools.py."""

from __future__ import annotations

from pronghorn.convert import both_tools, shared, values
from pronghorn.convert.draft import Draft, Row, not_here, nothing, only_if_one, refused, rows, to
from pronghorn.convert.objectives import ONLINE, REFERENCE

OURS_INSTEAD = ("liger", "cut_cross_entropy", "CutCrossEntropy", "KernelsPlugin", "fused_attn")  # plugins of kernels
CACHE = "Pronghorn caches tokenized rows itself (PRONGHORN_CACHE)"
METRICS = "eval.metrics scores answers to held-out rows: exact_match, rouge_l, ..."


def _plugins(draft: Draft, key: str) -> None:
    others = [name for name in values.words(draft.get(key)) if not any(part.lower() in name.lower() for part in OURS_INSTEAD)]
    if others:
        draft.not_honoured(key, f"plugins are not supported: {', '.join(others[:3])}; Pronghorn uses its own kernels")
    else:
        draft.no_effect(key, shared.KERNELS)


def _loss_on(draft: Draft, key: str) -> None:
    if values.is_on(draft.get(key)):
        draft.set("data.loss_on", "all", key)
    else:
        draft.no_effect(key, "only answers carry loss, as by default in Pronghorn")


def _tokenizer(draft: Draft, key: str) -> None:
    if draft.get(key) == draft.get("base_model"):
        draft.no_effect(key, "same as Pronghorn: the model's own files are used")
    else:
        draft.not_honoured(key, "config and tokenizer come from the model folder; put other files into a copy of it")


def _shuffle(draft: Draft, key: str) -> None:
    if values.is_on(draft.get(key)):
        draft.no_effect(key, "same as Pronghorn: rows are reshuffled every epoch")
    else:
        draft.not_honoured(key, "Pronghorn reshuffles the rows every epoch")


ROWS: dict[str, Row] = {
    **both_tools.AXOLOTL,
    **rows("base_model_config tokenizer_config", _tokenizer),
    **rows(
        "model_type tokenizer_type is_falcon_derived_model is_llama_derived_model is_mistral_derived_model "
        "is_qwen_derived_model type_of_model tokenizer_use_fast tokenizer_legacy cls_model_config",
        nothing(shared.MODEL),
    ),
    "base_model_ignore_patterns": nothing("Pronghorn reads safetensors only"),
    "tokenizer_use_mistral_common": not_here("Pronghorn uses tokenizer.json"),
    "revision_of_model": not_here(shared.REVISION),
    **rows("model_config overrides_of_model_config", not_here(shared.CONFIG)),
    "overrides_of_model_kwargs": not_here("loading options of the model are not supported"),
    **rows(
        "model_quantization_config model_quantization_config_kwargs",
        nothing("quantized checkpoints are read as their config specifies"),
    ),
    "hf_use_auth_token": nothing("your huggingface_hub login is used"),
    **rows(
        "auto_find_batch_size gradient_checkpointing_kwargs tiled_mlp "
        "activation_offloading layer_offloading ple_cpu_offload experimental_skip_move_to_device",
        nothing(shared.PLAN),
    ),
    "processor_type": not_here(shared.IMAGES),
    **rows("resize_token_embeddings_to_32x shrink_embeddings", not_here("the vocabulary is not changed")),
    **rows("fix_untrained_tokens added_tokens_overrides mean_resizing_embeddings", not_here(shared.NEW_TOKENS)),
    "device_map": nothing(
        "each GPU holds the model or a shard of it (world.shard); the memory plan decides what is offloaded to host RAM"
    ),
    "device": nothing("the GPU is used if there is one"),
    "max_memory": nothing("set by memory.budget"),
    "gpu_memory_limit": not_here("set memory.budget, such as 20GB"),
    "lora_fan_in_fan_out": not_here("detected from the layers"),
    "lora_target_parameters": not_here("to adapt experts, set lora.targets: [all-linear, experts]"),
    "lora_on_cpu": nothing("it affects merging only"),
    "merge_lora": nothing("use `pronghorn export RUN --to merged`"),
    "gptq": not_here("GPTQ checkpoints are not supported; use the original model with method: qlora"),
    "peft": not_here("LoftQ and similar adapter initializations are not supported"),
    "unfrozen_parameters": not_here("Pronghorn trains an adapter or the whole model, not selected weights"),
    "quantize_moe_experts": nothing("method: qlora and fp8 quantize experts as well"),
    "qat": not_here(
        "quantization-aware training is not supported; method: fp8, or compute: fp8 with method: full, trains in FP8"
    ),
    "quantization": not_here("training writes no quantized model; `pronghorn export --to` writes fp8, nvfp4 and gguf"),
    **rows("cosine_min_lr_ratio cosine_constant_lr_ratio", not_here("cosine decays to zero")),
    "eta_min": not_here("schedules decay to zero"),
    "lr_quadratic_warmup": not_here("warmup is linear"),
    "adam_eps": to("train.eps", values.decimal),
    "optim_target_modules": not_here(shared.OTHER_OPTIMIZER[1]),
    **rows("embedding_lr embedding_lr_scale lr_groups", not_here("all parameters use one learning rate")),
    "train_on_inputs": _loss_on,
    **rows(
        "loss_watchdog_threshold loss_watchdog_patience", not_here("set health.spike: skip or rewind to react to loss spikes")
    ),
    **rows(
        "pad_to_sequence_len sample_packing eval_sample_packing batch_flattening "
        "max_packed_sequence_len multipack_real_batches remove_unused_columns dpo_padding_free",
        nothing(shared.PACKED),
    ),
    "min_sample_len": not_here("short rows are kept; remove them from the data"),
    "eval_sequence_len": nothing("data.max_length also applies to held-out rows"),
    **rows("total_num_tokens total_supervised_tokens", nothing("counted")),
    "skip_prepare_dataset": nothing("Pronghorn always prepares the rows"),
    **rows("shuffle_merged_datasets shuffle_before_merging_datasets", _shuffle),
    "dataset_exact_deduplication": lambda draft, key: draft.set(
        "data.duplicates", "drop-exact" if values.is_on(draft.get(key)) else "keep", key
    ),
    "chat_template_kwargs": not_here("templates receive messages and tools only"),
    "eot_tokens": to("data.eot_tokens", values.words),
    "role_boundaries": nothing("the loss mask is derived from the template"),
    "preprocess_iterable": nothing(CACHE),
    "auto_resume_from_checkpoints": nothing(shared.RESUME),
    "save_first_step": nothing("Pronghorn checks before training that it can save"),
    "metric_for_best_model": nothing("the best checkpoint has the lowest held-out loss; eval.best selects another metric"),
    "greater_is_better": nothing("each metric has a fixed direction"),
    "eval_table_size": nothing("eval.generations answers are shown"),
    "eval_max_new_tokens": to("eval.max_new_tokens", values.whole),
    **rows("do_causal_lm_eval eval_causal_lm_metrics", not_here(METRICS)),
    "strict": nothing("Pronghorn checks every key"),
    "debug": nothing("use `pronghorn data show`"),
    "plugins": _plugins,
    "test_value": nothing("it is a test option of Axolotl"),
    **rows("cut_cross_entropy dpo_use_liger_kernel", nothing(shared.KERNELS)),
    **rows("ddp use_ray", not_here(shared.GPUS)),
    **rows("world_size ray_num_workers", only_if_one(shared.GPUS)),
    "accelerator_config": nothing("the loss is the mean over all loss tokens of a step"),
    **{f"use_{name}": shared.use_logger(name) for name in shared.LOGGERS},
    "wandb_project": shared.logger_project("wandb"),
    "mlflow_experiment_name": shared.logger_project("mlflow"),
    "trackio_project_name": shared.logger_project("trackio"),
    **rows("rl_adapter_ref_model precompute_ref_log_probs", nothing(REFERENCE)),
    "max_prompt_len": nothing("data.max_length limits a prompt together with one answer"),
    **rows("reward_model process_reward_model", nothing("off; the config trains a language model")),
    "num_labels": refused("classifiers are not supported", "convert a config of a language model"),
    "diffusion": refused("diffusion models are not supported", "convert a config of a causal language model"),
    "kd_trainer": refused("distillation is not supported", "convert a config that trains on dataset rows"),
    **rows("trl ebft vllm", not_here(ONLINE)),
    "use_pose": not_here("position ids are not changed"),
    "relora": not_here("ReLoRA restarts are not supported"),
    "llmcompressor": not_here("weight pruning is not supported"),
    "use_onebitllms": not_here("1-bit weights are not supported"),
    "llama4_linearized_experts": nothing("experts are read as stored in the checkpoint"),
}
PREFIXES: dict[str, Row] = {
    **rows(
        "wandb_ swanlab_ use_swanlab mlflow_ hf_mlflow comet_ use_comet trackio_ otel_ use_otel include_tkps "
        "include_tokens gradio_ profiler_",
        nothing(shared.NOTHING_SENT),
    ),
    "ddp_": nothing(shared.RANKS),
    **rows(
        "fsdp deepcompile dp_ qlora_sharded ring_attn heads_k_stride resources_per ray_ expert_parallel fp8_enable_fsdp",
        only_if_one(shared.GPUS),
    ),
    **rows("context_parallel_size sequence_parallel_degree", only_if_one(shared.CONTEXT)),
    "tensor_parallel_size": only_if_one(shared.GPUS),
    **rows(
        "liger_ flash_ flex_ sdp_attention sdpa_varlen xformers_ sage_attention eager_ attn_implementation "
        "s2_attention torch_compile lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels "
        "use_scattermoe use_sonicmoe use_dsv4 use_glm dsv4_ nvfp4_ moe_ experts_implementation expert_backend "
        "fused_attn gemma4_ chunked_cross_entropy large_head gc_ torch_empty pretrain_multipack streaming_multipack "
        "sample_packing_ nonexpert_",
        nothing(shared.KERNELS),
    ),
    **rows("dataset_ dataloader_ num_dataset_shards excess_token pretraining_sample", nothing(CACHE)),
    **rows("gptq_ torchdistx sample_packing_eff", not_here("Pronghorn has no equivalent")),
    **rows("peft_ lora_", not_here(shared.ADAPTERS)),
    **rows("dpo_ kto_ orpo_ cpo_ simpo_ rpo_", not_here("this variant of the loss is not supported")),
    **rows(
        "lisa_ relora_ jagged_ eaft_ pose_ kd_ dion_ qgalore_ grokfast_ spectrum_ mora diffusion scaling_softmax "
        "adam_beta3 adam_epsilon2 dense_mixer",
        not_here("this training method is not supported"),
    ),
    **rows("image_ processor_", not_here(shared.IMAGES)),
    **rows(
        "lm_eval_ bench_ do_bench generate_samples generation_ num_generation",
        not_here("held-out loss, perplexity and eval.generations answers are reported"),
    ),
    **rows("selective_checkpointing dynamic_checkpoint embeddings_skip fp32_norm", nothing(shared.PLAN)),
}
