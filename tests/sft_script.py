"""The script people know, on a small random model: loss curve beside plain transformers + PEFT on the same batches.

    python tests/sft_script.py                 # as a user writes it: FastLanguageModel, get_peft_model, SFTTrainer, packing
    python tests/sft_script.py --plain         # the same with AutoModelForCausalLM and PEFT
    python tests/sft_script.py --compare       # both, from the same adapter weights: every step's loss within 1 %

100 steps in bf16 on a GPU, 6 in fp32 without one. Needs no network: model and tokenizer are made here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from pronghorn import FastLanguageModel
from pronghorn.model.causal_lm import engine_of
from samples import chat_rows, make_tokenizer

CUDA = torch.cuda.is_available()
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_LENGTH = 1024 if CUDA else 128
TOLERANCE = 0.01


class TorchLogProbs:
    """What TRL's fused head computes, in plain torch: TRL has it as a Triton kernel only, which needs a GPU."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, chunk: int, softcap: float | None,
              scale: float, outputs: tuple[str, ...]) -> tuple[Any, ...]:
        logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
        logits = (torch.tanh(logits / softcap) * softcap if softcap else logits) / temperature
        everything = logits.log_softmax(-1)
        entropy = -(everything.exp() * everything).sum(-1).detach()
        return everything.gather(1, targets[:, None])[:, 0], entropy, None, None, logits.argmax(-1) == targets


def write_model(folder: Path) -> None:
    """Random weights large enough that an adapter alone can lower the loss of a model that never learned anything."""
    torch.manual_seed(0)
    width, layers = (512, 8) if CUDA else (64, 2)
    config = Qwen3Config(
        vocab_size=4096 if CUDA else 259, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8 if CUDA else 4, num_key_value_heads=4 if CUDA else 2, head_dim=64 if CUDA else 16,
        max_position_embeddings=2048, initializer_range=1.2 / width**0.5, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16 if CUDA else torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def dataset(tokenizer: Any) -> Dataset:
    """Sums of two numbers, asked and answered."""
    rows = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in chat_rows(4000 if CUDA else 60)]
    return Dataset.from_list([{"text": row} for row in rows])


def fast_model(folder: Path, adapter: Path) -> tuple[Any, Any]:
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=MAX_LENGTH,
        load_in_4bit=False,
        load_in_8bit=False,
        full_finetuning=False,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=LINEARS,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        use_rslora=False,
        loftq_config=None,
    )
    assert engine_of(model) is not None, "the fast layers are in place"
    model.save_pretrained(adapter)  # for the other run to start from
    return model, tokenizer


def plain_model(folder: Path, adapter: Path) -> tuple[Any, Any]:
    from importlib.util import find_spec

    from peft import LoraConfig, PeftModel, get_peft_model

    attention = "flash_attention_2" if CUDA and find_spec("flash_attn") else "sdpa"
    base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=attention)
    base = base.to("cuda" if CUDA else "cpu")
    if (adapter / "adapter_config.json").is_file():
        model: Any = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    else:
        torch.manual_seed(3407)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, target_modules=LINEARS))
    print(f"plain: {attention}, adapter weights in {next(p.dtype for p in model.parameters() if p.requires_grad)}")
    return model, AutoTokenizer.from_pretrained(folder)


def train(model: Any, tokenizer: Any, steps: int, output: Path) -> list[float]:
    trainer = SFTTrainer(
        model=model,
        train_dataset=dataset(tokenizer),
        processing_class=tokenizer,
        args=SFTConfig(
            max_length=MAX_LENGTH,
            packing=True,
            per_device_train_batch_size=4 if CUDA else 2,
            gradient_accumulation_steps=2,
            warmup_steps=5,
            max_steps=steps,
            learning_rate=2e-3,
            logging_steps=1,
            optim="adamw_torch",
            weight_decay=0.01,
            lr_scheduler_type="linear",
            seed=3407,
            output_dir=str(output),
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            use_cpu=not CUDA,
            bf16=CUDA,
        ),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def compared(fast: list[float], plain: list[float]) -> float:
    """The largest relative difference of a step's loss; says it, and fails over the tolerance."""
    assert len(fast) == len(plain)
    differences = [abs(one - other) / other for one, other in zip(fast, plain, strict=True)]
    worst = max(differences)
    print(f"{len(fast)} steps: loss {plain[0]:.4f} -> {plain[-1]:.4f} plain, {fast[0]:.4f} -> {fast[-1]:.4f} fast; relative "
          f"difference at most {worst:.2e} (step {differences.index(worst) + 1}), mean {sum(differences) / len(fast):.2e}")
    assert plain[-1] < 0.9 * plain[0] or len(plain) < 50, "the loss falls"
    assert worst <= TOLERANCE, f"over {TOLERANCE:.0%}"
    return worst


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="transformers + PEFT alone")
    parser.add_argument("--compare", action="store_true", help="both, and their difference")
    parser.add_argument("--steps", type=int, default=100 if CUDA else 6)
    options = parser.parse_args(arguments)
    disable_progress_bars()
    if not CUDA:
        import trl.trainer.utils

        trl.trainer.utils._ChunkedLogProbFunction = TorchLogProbs
    with tempfile.TemporaryDirectory() as work:
        folder, adapter = Path(work) / "model", Path(work) / "adapter"
        write_model(folder)
        curves = {}
        for name, build in (("fast", fast_model), ("plain", plain_model)):
            if options.compare or (name == "plain") == options.plain:
                curves[name] = train(*build(folder, adapter), options.steps, Path(work) / name)
                print(f"{name}: {' '.join(f'{loss:.4f}' for loss in curves[name])}", flush=True)
        if options.compare:
            compared(curves["fast"], curves["plain"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
