"""The other systems, each through its public interface, as its own users call it, and ours as a stand-in for Unsloth.

Unsloth through its `FastLanguageModel` and trl's `SFTTrainer` with packing, and Pronghorn by the same lines with another
import, the trainer's defaults untouched; Liger through `AutoLigerKernelForCausalLM`; plain transformers through
`AutoModelForCausalLM`; the latter two with transformers' own `Trainer` and its padding-free collator (FlashAttention-2 where it
is installed), on the very packs that Pronghorn trains on, or padded. Adapters of these are in the model's precision, which is
faster than float32 copies. Losses are read after the run, so that reading them costs nothing.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from benchmarks.bench.meter import Meter
from benchmarks.bench.pairs import LETTER_A, Pair, pairs, pairs_a_step
from benchmarks.bench.weights import model_folder
from benchmarks.bench.workloads import CLIP, EXPERTS, LEARNING_RATE, SEED, SYSTEMS, System, Workload, documents
from pronghorn.data.pack.packing import pack

PADDED_DOCUMENTS = 8  # in a padded micro-batch; a step accumulates as many of them as make the workload's tokens
# Unsloth's trainer ignores `packing` for these ("unsupported model type"), and takes rows for documents: it gets as many in one
# padded micro-batch as make the workload's tokens, since small ones leave the GPU waiting for the host.
UNSLOTH_PADS = ("gpt_oss",)
OWN_ATTENTION = {  # in plain transformers
    "gpt_oss": "eager",  # the others have no sinks
    "gemma4_unified_text": "sdpa",  # FlashAttention-2 ends at heads of 256
}
CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
Rows = list[npt.NDArray[Any]]


def measure(name: str, workload: Workload, meter: Meter, lengths: Path | None) -> dict[str, Any]:
    system = SYSTEMS[name]
    meter.mark("imports")
    if workload.pairs:
        trainer, facts = _preference(system, workload, meter)
    elif system.script:
        trainer, facts = _script(system, workload, meter, lengths)
    else:
        trainer, facts = _transformers(system, workload, meter, lengths)
    seen = _watch(trainer, meter, pairs=workload.pairs)
    meter.ready(trainer.model.parameters())
    trainer.train()
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return meter.result([float(loss) for loss in seen.losses], norms) | facts


class _Seen:
    """Losses and real tokens, as tensors nobody has waited for."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.loss: Any = 0.0
        self.tokens: Any = 0
        self.pairs = 0


def _watch(trainer: Any, meter: Meter, *, pairs: bool = False) -> _Seen:
    """Counts tokens and losses on this trainer instance, and tells the meter when a step ends."""
    from transformers import TrainerCallback

    seen, inner = _Seen(), trainer.training_step

    def counted(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        mask = inputs.get("attention_mask")
        whole = mask is None or mask.dim() != 2
        if pairs:  # a row for each answer, under whatever name the trainer has them
            ids = next(value for name, value in inputs.items() if name.endswith("input_ids") and "prompt" not in name)
            seen.pairs += len(ids) if any(name.startswith("chosen") for name in inputs) else len(ids) // 2
        else:
            seen.tokens = seen.tokens + (inputs["input_ids"].numel() if whole else mask.sum())
        loss = inner(model, inputs, *rest, **named)
        seen.loss = seen.loss + loss.detach()
        return loss

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.step_ended(seen.tokens, seen.pairs)
            seen.losses.append(seen.loss)
            seen.tokens, seen.loss, seen.pairs = 0, 0.0, 0

    trainer.training_step = counted
    trainer.add_callback(Clock())
    return seen


def _arguments(workload: Workload, meter: Meter) -> dict[str, Any]:
    """What transformers' and trl's trainers both take."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="pronghorn-bench-"),
        "max_steps": meter.total,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "optim": "adamw_8bit" if workload.method == "qlora" else "adamw_torch_fused",
        "bf16": CUDA,
        "use_cpu": not CUDA,
        "logging_steps": meter.total,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": SEED,
        "dataloader_num_workers": 2 if CUDA else 0,
        "dataloader_prefetch_factor": 4 if CUDA else None,
    }


def _script_model(system: System, workload: Workload) -> tuple[Any, Any]:
    """(model, tokenizer) as a script for Unsloth makes them."""
    fast: Any = importlib.import_module(system.script).FastLanguageModel
    nf4, full = workload.method == "qlora", workload.method == "full"
    model, tokenizer = fast.from_pretrained(
        str(model_folder(workload.model)),
        max_seq_length=workload.row,
        dtype=DTYPE,
        load_in_4bit=nf4,
        load_in_16bit=CUDA and not (nf4 or full),
        full_finetuning=full,
        use_gradient_checkpointing=system.recompute,
        local_files_only=True,
    )
    if not full:
        model = fast.get_peft_model(
            model,
            r=workload.rank,
            lora_alpha=workload.rank,
            lora_dropout=0,
            bias="none",
            target_modules=list(_names(workload)),
            random_state=SEED,
            use_gradient_checkpointing=system.recompute,
        )
    return model, tokenizer


def _script(system: System, workload: Workload, meter: Meter, lengths: Path | None) -> tuple[Any, dict[str, Any]]:
    dataset: Any = importlib.import_module("datasets").Dataset
    trl: Any = importlib.import_module("trl")
    model, tokenizer = _script_model(system, workload)
    meter.mark("model")
    rows = documents(workload, meter.total, lengths)

    def made(*, packs: bool) -> Any:
        settings = _arguments(workload, meter) | {
            "per_device_train_batch_size": workload.tokens // workload.row if packs else _documents_a_step(rows, workload),
            "gradient_accumulation_steps": 1,
            "packing": packs,
            "max_length": workload.row,
            "dataset_num_proc": 1,
        }
        return trl.SFTTrainer(
            model=model,
            processing_class=tokenizer,
            args=trl.SFTConfig(**settings),
            train_dataset=dataset.from_list([{"input_ids": ids.tolist()} for ids in rows]),
        )

    packs = workload.config["model_type"] not in UNSLOTH_PADS
    trainer = made(packs=packs)
    if packs and len(trainer.train_dataset) == len(rows):  # it ignores `packing` for this model
        packs, trainer = False, made(packs=False)
    return trainer, {"trainer": "trl", "batches": "packed" if packs else "padded", "precision": _precision()}


def _transformers(system: System, workload: Workload, meter: Meter, lengths: Path | None) -> tuple[Any, dict[str, Any]]:
    from transformers import Trainer, TrainingArguments
    from transformers.utils import is_flash_attn_2_available

    attention = "flash_attention_2" if CUDA and is_flash_attn_2_available() and not system.padded else "sdpa"
    attention = OWN_ATTENTION.get(workload.config["model_type"], attention)
    model = _adapted(system, workload, attention)
    meter.mark("model")
    rows = documents(workload, meter.total, lengths)
    data: list[Any]
    if system.padded:
        fitting = _documents_a_step(rows, workload)
        data, size = rows, min(PADDED_DOCUMENTS, fitting)
        accumulate = max(1, round(fitting / size))
        collate: Any = _pad
    else:
        data, size, accumulate = _packs(rows, workload), 1, 1
        collate = _flattener(flash=attention == "flash_attention_2")
    settings = _arguments(workload, meter) | {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulate,
        "remove_unused_columns": False,
        "gradient_checkpointing": bool(system.recompute),
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if bool(system.recompute) else None,
    }
    trainer = Trainer(model=model, args=TrainingArguments(**settings), train_dataset=data, data_collator=collate)
    return trainer, {"trainer": "transformers", "attention": attention, "precision": _precision()}


def _preference(system: System, workload: Workload, meter: Meter) -> tuple[Any, dict[str, Any]]:
    """TRL's DPOTrainer, its defaults but for lengths and recomputing."""
    from transformers import AutoTokenizer
    from transformers.utils import is_flash_attn_2_available

    dataset: Any = importlib.import_module("datasets").Dataset
    trl: Any = importlib.import_module("trl")
    attention = "flash_attention_2" if CUDA and is_flash_attn_2_available() else "sdpa"
    if system.script:
        model, tokenizer = _script_model(system, workload)
    else:
        model, tokenizer = _adapted(system, workload, attention), AutoTokenizer.from_pretrained(model_folder(workload.model))
    meter.mark("model")
    settings = _arguments(workload, meter) | {
        "per_device_train_batch_size": pairs_a_step(workload),
        "gradient_accumulation_steps": 1,
        "max_length": workload.row,
        "beta": 0.1,
        "gradient_checkpointing": bool(system.recompute),
    }
    known = inspect.signature(trl.DPOConfig).parameters
    trainer = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(**{name: value for name, value in settings.items() if name in known}),
        train_dataset=dataset.from_list([pair_row(pair) for pair in pairs(workload, meter.total)]),
        processing_class=tokenizer,
    )
    return trainer, {"trainer": "trl", "batches": "padded", "precision": _precision()}


def pair_row(pair: Pair) -> dict[str, str]:
    """As text, which every version of the trainer takes; its tokens are the pair's own."""
    prompt, chosen, rejected = ("".join(chr(ord("a") + int(i) - LETTER_A) for i in part) for part in pair)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _documents_a_step(rows: Rows, workload: Workload) -> int:
    """How many make the workload's tokens, padding not counted."""
    return max(1, round(workload.tokens * len(rows) / sum(len(row) for row in rows)))


def _names(workload: Workload) -> tuple[str, ...]:
    """What Unsloth's users write."""
    return EXPERTS if workload.adapters == "experts" else workload.linears


def _adapted(system: System, workload: Workload, attention: str) -> Any:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    loader: Any = AutoModelForCausalLM
    if system.name.startswith("liger"):
        loader = importlib.import_module("liger_kernel.transformers").AutoLigerKernelForCausalLM
    settings: dict[str, Any] = {"dtype": DTYPE, "attn_implementation": attention}
    if CUDA:
        settings["device_map"] = {"": 0}
    if workload.method == "qlora":
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=DTYPE
        )
    model = loader.from_pretrained(str(model_folder(workload.model)), **settings)
    model.config.use_cache = False
    if workload.method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=bool(system.recompute))
    if workload.method == "full":
        return model.train()
    experts = ["experts.gate_up_proj", "experts.down_proj"] if workload.adapters == "experts" else None
    adapter = LoraConfig(
        task_type="CAUSAL_LM",
        r=workload.rank,
        lora_alpha=workload.rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(workload.linears),
        target_parameters=experts,
    )
    torch.manual_seed(SEED)
    return get_peft_model(model, adapter, autocast_adapter_dtype=False)


def _packs(rows: Rows, workload: Workload) -> list[Rows]:
    """The packs of Pronghorn's loader, in its order: step n trains on the same documents in both."""
    lengths = torch.tensor([len(row) for row in rows]).numpy()
    return [[rows[int(i)] for i in members] for members in pack(lengths, workload.tokens, seed=SEED, epoch=0)]


def _flattener(*, flash: bool) -> Any:
    from transformers import DataCollatorWithFlattening

    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=flash)

    def collate(batch: list[Rows]) -> Any:
        (rows,) = batch
        return flatten([{"input_ids": row.tolist()} for row in rows])

    return collate


def _pad(batch: Rows) -> dict[str, torch.Tensor]:
    longest = max(len(row) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(batch):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _precision() -> str:
    return "bf16" if CUDA else "fp32"
