"""Keys that mean the same in Axolotl and LLaMA-Factory, and stand alone: a row for each."""

from __future__ import annotations

from pronghorn.convert import shared, values
from pronghorn.convert.draft import Row, choice, not_here, nothing, rows, to
from pronghorn.recipe_keys import OPTIMIZERS, SCHEDULES

SAME: dict[str, Row] = {  # that have the same name, too
    "trust_remote_code": not_here(shared.NO_CODE, "Pronghorn runs no code from model repositories either"),
    "rope_scaling": not_here(shared.CONFIG),
    **rows("low_cpu_mem_usage gradient_checkpointing", nothing(shared.PLAN)),
    "lora_alpha": to("lora.alpha", values.number),
    "lora_dropout": to("lora.dropout", values.number),
    "loraplus_lr_ratio": to("lora.plus_ratio", values.number),
    "loraplus_lr_embedding": nothing("embeddings cannot have an adapter"),
    "fp8": shared.fp8_products,
    "learning_rate": to("train.lr", values.decimal),
    "lr_scheduler_kwargs": not_here("schedules have no settings except train.warmup and train.decay"),
    "weight_decay": to("train.weight_decay", values.decimal),
    "adam_epsilon": to("train.eps", values.decimal),
    "max_grad_norm": shared.clip,
    "optim_args": not_here("AdamW has betas, eps and weight_decay only"),
    "seed": to("train.seed", values.whole),
    "group_by_length": nothing(shared.PACKED),
    "streaming": nothing("rows are read and tokenized once, before training"),
    "output_dir": to("output", values.text),
    "save_total_limit": to("checkpoint.keep", values.whole),
    "resume_from_checkpoint": not_here(shared.RESUME),
    "save_only_model": nothing("every checkpoint can be resumed"),
    "save_safetensors": nothing("Pronghorn writes safetensors only"),
    "load_best_model_at_end": nothing("`eval`, `chat` and `export` use the best checkpoint by default"),
    "deepspeed": not_here(shared.GPUS),
    "local_rank": nothing(shared.RANKS),
}
# Axolotl's names, LLaMA-Factory's names, what they become.
NAMED: tuple[tuple[str, str, Row], ...] = (
    ("base_model", "model_name_or_path model", to("model", values.text)),
    ("torch_dtype", "compute_dtype", nothing("set by `precision`")),
    ("reinit_weights", "train_from_scratch", not_here("training starts from the model's weights")),
    ("lora_r", "lora_rank", to("lora.r", values.whole)),
    ("peft_use_dora", "use_dora", to("lora.dora", values.is_on)),
    ("peft_use_rslora", "use_rslora", to("lora.rslora", values.is_on)),
    ("lora_modules_to_save", "additional_target", not_here(shared.FROZEN)),
    ("lora_model_dir", "adapter_name_or_path adapter_folder", not_here(shared.NEW_ADAPTER)),
    ("bnb_config_kwargs", "quantization_method double_quantization", nothing("Pronghorn's NF4 layout is fixed")),
    ("optimizer", "optim", choice("train.optimizer", OPTIMIZERS, shared.NEAR_OPTIMIZERS, shared.OTHER_OPTIMIZER)),
    ("lr_scheduler", "lr_scheduler_type", choice("train.schedule", SCHEDULES, shared.NEAR_SCHEDULES, shared.OTHER_SCHEDULE)),
    ("eval_batch_size", "per_device_eval_batch_size", nothing("evaluation chooses its batch size itself")),
    (
        "neftune_noise_alpha noisy_embedding_alpha",
        "neftune_noise_alpha",
        not_here("embedding noise (NEFTune) is not supported"),
    ),
    ("sample_packing_sequentially curriculum_sampling", "disable_shuffling", not_here("rows are reshuffled every epoch")),
    ("default_system_message", "default_system", not_here(shared.SYSTEM)),
    ("logging_steps", "logging_steps logging_strategy logging_first_step", nothing("every step is logged")),
    ("hub_model_id hub_strategy hub_revision push_dataset_to_hub", "push_to_hub", not_here(shared.HUB)),
    ("secrets", "logging_dir", nothing(shared.NOTHING_SENT)),
    ("use_eaft", "label_smoothing_factor", not_here(shared.OBJECTIVE)),
    ("freeze_mm_modules", "freeze_vision_tower freeze_multi_modal_projector", nothing(shared.TOWER)),
)
AXOLOTL = SAME | {key: row for keys, _, row in NAMED for key in keys.split()}
LLAMAFACTORY = SAME | {key: row for _, keys, row in NAMED for key in keys.split()}
