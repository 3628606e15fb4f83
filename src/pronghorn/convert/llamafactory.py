"""LLaMA-Factory's config: a row for each key that stands alone (those that Axolotl has, too: both_tools.py), and functions for
those that say something together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.convert import both_tools, shared, values
from pronghorn.convert.data_sets import OWN_TEMPLATE, set_template
from pronghorn.convert.draft import Draft, Row, apply, not_here, nothing, only, only_if_one, refused, rows, to
from pronghorn.convert.llamafactory_data import convert_data, newer_data
from pronghorn.convert.objectives import ONLINE, REFERENCE, llamafactory_objective

NAME = "LLaMA-Factory"
MARKS = (
    "model_name_or_path",
    "stage",
    "finetuning_type",
    "template",
    "cutoff_len",
    "do_train",
    "dataset",
    "per_device_train_batch_size",
    "train_dataset",
    "model_class",
    "num_train_epochs",
    "peft_config",
)
TRAINS = ("do_train", "train_dataset", "dataset", "num_train_epochs", "max_steps")
TEMPLATES = {  # LLaMA-Factory's names: ours
    "llama2": "llama-2", "llama3": "llama-3", "gemma": "gemma", "gemma2": "gemma-2", "gemma3": "gemma-3", "gemma3n": "gemma-3",
    "gemma4": "gemma-4", "qwen": "qwen-2.5", "qwen3": "qwen3", "qwen3_nothink": "qwen3-instruct", "chatml": "chatml",
    "phi": "phi-3", "phi4": "phi-4", "mistral": "mistral", "alpaca": "alpaca", "vicuna": "vicuna", "zephyr": "zephyr",
}  # fmt: skip
LORA_KEYS = ["lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_dora", "use_rslora", "loraplus_lr_ratio"]
DEFAULTS: tuple[Any, ...] = (  # target, value, keys that say another
    ("train.lr", 5e-5, "learning_rate"),
    ("train.schedule", "linear", "lr_scheduler_type"),
    ("train.seed", 42, "seed", "data_seed"),
)
OTHER_WAY = "this training method is not supported"
HOST = "rows are tokenized on all cores and cached"
EXPORT = "it affects export only: use `pronghorn export RUN --to merged`"
WEIGHTS = "sources are concatenated; set weights in data.train"
GENERATION = "it affects generation, not training"


def convert(draft: Draft, folder: Path, dataset_info: Path | None) -> None:
    _refuse(draft)
    objective = llamafactory_objective(draft)
    as_text = draft.get("stage") == "pt"
    _method(draft)
    newer = "model_class" in draft.values
    micro = "micro_batch_size" if newer else "per_device_train_batch_size"
    shared.batch(
        draft,
        micro=micro,
        accumulation="gradient_accumulation_steps",
        length="cutoff_len",
        packed=as_text,
        packing=("packing", "neat_packing"),
        defaults=(1 if newer else 8, 1, 2048),
        total="global_batch_size",
        answers=2 if objective not in ("", "kto") else 1,
    )
    epochs = shared.duration(draft, epochs="num_train_epochs", steps="max_steps", default=3)
    shared.warmup(draft, scheduler="lr_scheduler_type", steps="warmup_steps", ratio="warmup_ratio", default=0.0)
    shared.precision(draft, bf16=("bf16", "pure_bf16"), fp16=("fp16",))
    if values.is_on(draft.get("pure_bf16")) and draft.targets["method"] == "full":
        draft.not_honoured("pure_bf16", "GEMMs run in bf16, trained weights are fp32: bf16 weights lose small updates")
    convert_data(draft, folder, dataset_info, as_text=as_text, objective=objective)
    newer_data(draft, folder)
    draft.default("data.long", "split" if as_text else "truncate", "long rows are truncated, as in LLaMA-Factory")
    _template(draft, as_text)
    _loss_on(draft)
    shared.fraction_held_out(draft, "val_size")
    shared.held_out_first(draft, patience="early_stopping_steps")
    shared.how_often(draft, epochs, also="do_eval")
    draft.default("checkpoint.every", 500)
    shared.betas(draft)
    for target, value, *keys in DEFAULTS:
        if not any(draft.get(key) is not None for key in keys):
            draft.default(target, value)


def _refuse(draft: Draft) -> None:
    training = draft.get("do_train")
    if (
        not any(draft.get(key) is not None for key in TRAINS)
        or (training is not None and not values.is_on(training))
        or (training is None and (draft.get("do_predict") or draft.get("export_dir")))
    ):
        key = next(
            (key for key in ("do_train", "do_predict", "export_dir", "infer_backend") if key in draft.values),
            next(iter(draft.values)),
        )
        draft.refuse(
            key,
            "the config does not train: it generates, exports or predicts",
            "convert the training config; then use `pronghorn chat` and `pronghorn export`",
        )


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
        shared.unused(draft, LORA_KEYS, "all weights are trained (method: full)")
        if bits is not None:
            draft.not_honoured("quantization_bit", "method: full does not quantize trained weights; set method: qlora")
        return
    method = "lora"
    if bits is not None and str(bits) == "4":
        method = "qlora"
        draft.set("method", method, "quantization_bit")
    elif bits is not None:
        draft.not_honoured("quantization_bit", f"{shared.BITS}; the recipe has method: lora")
    if kind == "lora":
        draft.set("method", method, "finetuning_type")
    else:
        draft.nearest("method", method, "finetuning_type", "Pronghorn trains a LoRA adapter or the whole model")
    _lora(draft)


def _lora(draft: Draft) -> None:
    """LLaMA-Factory's own defaults: rank 8, alpha twice the rank."""
    asked = draft.read("lora_rank", values.whole)
    rank = 8 if asked is None else asked
    draft.default("lora.r", rank)
    if draft.get("lora_alpha") is None:
        draft.default("lora.alpha", max(1, 2 * rank), "twice the rank")


def _targets(value: object) -> str | list[str]:
    names = values.words(value)
    return "all-linear" if names == ["all"] else names


def _peft_config(draft: Draft, peft: dict[str, object]) -> None:
    """The section `peft` of newer configs."""
    kind = values.plain(peft.get("name"))
    if kind not in ("lora", "qlora"):
        draft.nearest("method", "lora", "peft_config", "Pronghorn trains a LoRA adapter or the whole model")
        return
    quant = draft.get("quant_config")
    few = isinstance(quant, dict) and str(quant.get("quantization_bit")) == "4"
    draft.set("method", "qlora" if few else "lora", "peft_config", *(["quant_config"] if few else []))
    draft.fates["peft_config.name"] = ("mapped", f"method: {draft.targets['method']}")
    rows = {
        "r": to("lora.r", values.whole),
        "lora_alpha": to("lora.alpha", values.number),
        "lora_dropout": to("lora.dropout", values.number),
        "target_modules": to("lora.targets", _targets),
    }
    apply(draft, rows, {}, "peft_config", unknown=shared.ADAPTERS)


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
        if values.is_on(draft.get(key)):
            draft.set("data.loss_on", ours, key)
        elif draft.get(key) is not None:
            draft.no_effect(key, "only answers carry loss, as by default in Pronghorn")


def _report(draft: Draft, key: str) -> None:
    value = draft.get(key)
    names = [str(name).strip().lower() for name in (value if isinstance(value, list) else [value])]
    if not values.is_on(value) or names in (["none"], []):
        draft.no_effect(key, shared.NOTHING_SENT)
    elif names == ["all"]:
        draft.not_honoured(key, "report.to lists loggers by name; it stays empty")
    else:
        shared.loggers(draft, key, names)


ROWS: dict[str, Row] = {
    **both_tools.LLAMAFACTORY,
    "model_class": nothing(shared.MODEL),
    "model_revision": only(["main"], "same as Pronghorn: the main revision is used", shared.REVISION),
    "create_new_adapter": nothing("same as Pronghorn: training starts from a new adapter"),
    "cache_dir": nothing("HF_HOME sets the model cache"),
    "use_fast_tokenizer": nothing("tokenizer.json is used"),
    **rows("resize_vocab add_tokens add_special_tokens new_special_tokens_config", not_here(shared.NEW_TOKENS)),
    "split_special_tokens": not_here("special tokens always stay single tokens"),
    "init_special_tokens": nothing("adding tokens is not supported"),
    "moe_aux_loss_coef": not_here(shared.CONFIG),
    "shift_attn": not_here("shifted sparse attention is not supported"),
    **rows("mixture_of_depths use_kt", not_here(OTHER_WAY)),
    **rows(
        "init_config device_map quantization_device_map disable_gradient_checkpointing use_reentrant_gc use_unsloth_gc",
        nothing(shared.PLAN),
    ),
    "upcast_layernorm": nothing("accumulation is always in fp32"),
    "upcast_lmhead_output": nothing("the loss is always computed in fp32"),
    "print_param_status": nothing("use `pronghorn check`"),
    **rows("use_kv_cache max_new_tokens", nothing(GENERATION)),
    **rows("block_diag_attn packing neat_packing batching_strategy", nothing(shared.PACKED)),
    "model_max_length": nothing("set by data.max_length"),
    "quantization_type": nothing("NF4"),
    "quant_config": not_here("use method: qlora (NF4) or fp8"),
    "stage": lambda draft, key: draft.no_effect(
        key, "trains on plain text" if draft.get(key) == "pt" else "trains on answers, same as Pronghorn"
    ),
    "lora_target": to("lora.targets", _targets),
    "do_train": nothing("use `pronghorn train`"),
    **rows(
        "fp8_backend use_unsloth enable_liger_kernel flash_attn use_v1_kernels kernel_config torch_compile use_cce",
        nothing(shared.KERNELS),
    ),
    "pissa_convert": nothing("the adapter is not a PiSSA adapter"),
    **rows("freeze_language_model media_dir", not_here(shared.IMAGES)),
    "data_seed": nothing("train.seed also seeds the row order"),
    "compute_accuracy": not_here("held-out loss and perplexity are reported"),
    "eval_on_each_dataset": not_here("one held-out loss is reported"),
    "max_samples": to("data.max_rows", values.whole, "the first rows of each dataset, as in LLaMA-Factory"),
    "mix_strategy": only(["concat"], "same as Pronghorn: sources are concatenated, then shuffled", WEIGHTS),
    "interleave_probs": not_here(WEIGHTS),
    **rows(
        "buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers tokenized_path data_shared_file_system",
        nothing(HOST),
    ),
    "dataloader_num_workers": to("data.workers", values.whole),
    "ignore_pad_token_for_loss": nothing("padding never carries loss"),
    "tool_format": not_here(f"the chat template renders tools; {OWN_TEMPLATE}"),
    "enable_thinking": nothing("reasoning in the rows carries loss as the template renders it"),
    "preserve_thinking": not_here("the chat template decides which earlier reasoning is kept"),
    "overwrite_output_dir": nothing("the same command resumes; `pronghorn train --fresh` starts over"),
    "plot_loss": nothing("report.html shows the curve"),
    "report_to": _report,
    "run_name": nothing("the output folder names the run"),
    **rows("metric_for_best_model greater_is_better", nothing("the best checkpoint has the lowest held-out loss")),
    "do_eval": nothing("held-out data is always evaluated"),
    "do_predict": not_here("use `pronghorn eval` and `pronghorn chat`"),
    "predict_with_generate": nothing("eval.generations answers are shown at each evaluation"),
    "include_num_input_tokens_seen": nothing("Pronghorn counts tokens"),
    "include_effective_tokens_per_second": nothing("Pronghorn reports tokens per second"),
    **rows("fsdp dist_config", not_here(shared.GPUS)),
    "use_mca": refused(shared.GPUS, "convert a config without use_mca"),
}
PREFIXES: dict[str, Row] = {
    "ddp_": nothing(shared.RANKS),
    **rows(
        "fsdp_ ray_ master_ tensor_model_parallel pipeline_model_parallel expert_model_parallel fp8_enable_fsdp "
        "use_distributed overlap_",
        only_if_one(shared.GPUS),
    ),
    **rows("sequence_parallel context_parallel", only_if_one(shared.CONTEXT)),
    **rows(
        "swanlab_ use_swanlab wandb_ hub_ hf_hub ms_hub om_hub profiler_ enable_torch_profiler profile_",
        nothing(shared.NOTHING_SENT),
    ),
    **rows(
        "use_galore galore_ use_apollo apollo_ use_badam badam_ use_adam_mini use_muon muon_",
        not_here(shared.OTHER_OPTIMIZER[1] + "; the recipe uses AdamW"),
    ),
    **rows("use_dft use_asft asft_ use_eaft eaft_", not_here(shared.OBJECTIVE)),
    **rows("use_llama_pro freeze_ pissa_ oft_ module_dropout kt_ use_hyper hyper_", not_here(OTHER_WAY)),
    **rows("pref_ dpo_ kto_ simpo_ ld_alpha", not_here("this variant of the loss is not supported")),
    **rows("ppo_ reward_model", not_here(ONLINE)),
    "ref_model": not_here(REFERENCE),
    **rows("image_ video_ audio_ use_audio crop_to", not_here(shared.IMAGES)),
    "export_": nothing(EXPORT),
    **rows(
        "infer_ vllm_ sglang_ sample_backend do_sample temperature top_ num_beams max_length repetition_ "
        "length_penalty skip_special eval_num_beams",
        nothing(GENERATION),
    ),
    **rows("offload_ torch_empty bias_activation apply_rope moe_ recompute_", nothing(shared.PLAN)),
    "dataloader_": nothing(HOST),
}
