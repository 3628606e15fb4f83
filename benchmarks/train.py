"""Our training step on random weights of real architectures: real tokens per second, peak memory, loss, gradient norm.

    python -m benchmarks.train --model llama-1b [--tokens 16384] [--layers fast|own] [--lengths FILE] [--out FILE]

LoRA r=16 on all linear layers, documents of instruction-like lengths packed to `--tokens`, loss on every token, one optimizer
step per micro-batch, nothing recomputed. Prints one JSON line. Asserts that the gradient is there and the loss does not rise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from benchmarks.ops import machine
from pronghorn.data.batches import BatchLoader
from pronghorn.kernels.attention import pick_backend
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from pronghorn.train.step import EagerStep

LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
         "max_position_embeddings": 131072, "rope_theta": 500000.0}
QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_theta": 1e6}
CONFIGS: dict[str, Any] = {
    "llama-1b": lambda: LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
                                    tie_word_embeddings=True, **LLAMA),
    "llama-8b": lambda: LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128, **LLAMA),
    "qwen3-0.6b": lambda: Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                                      tie_word_embeddings=True, **QWEN),
    "tiny": lambda: LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=512,
                                num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4, max_position_embeddings=4096),
}


class RandomDocuments:
    """Token rows with given lengths; every token is trained on."""

    def __init__(self, lengths: np.ndarray, vocabulary: int) -> None:
        self.lengths = lengths.astype(np.int32)
        self.loss_counts = self.lengths - 1
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, i: int) -> np.ndarray:
        return np.random.default_rng(i).integers(300, self._vocabulary, self.lengths[i], dtype=np.int32)

    def loss(self, i: int) -> np.ndarray:
        return np.ones(self.lengths[i], dtype=np.bool_)


def instruction_lengths(count: int) -> np.ndarray:
    """Log-normal with mean 207, median 166 and 95 % below 500 tokens, which is what instruction data looks like."""
    return np.clip(np.random.default_rng(0).lognormal(np.log(166), 0.67, count), 32, 1412).astype(np.int32)


def build(name: str, layers: str, dtype: torch.dtype, device: torch.device) -> Any:
    config = CONFIGS[name]()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with device:
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model = add_adapter(model, Lora(r=16), seed=0)
    if layers == "fast":
        why = install(model)
        assert not why, why
    return model


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bf16" if device.type == "cuda" else "fp32"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began = time.perf_counter()
    model = build(arguments.model, arguments.layers, dtype, device)
    vocabulary = model.get_base_model().config.vocab_size
    lengths = instruction_lengths(20_000)
    if arguments.lengths:
        lengths = np.tile(np.array(json.loads(Path(arguments.lengths).read_text())), 5)
    if arguments.document:
        lengths = np.full(4000, arguments.document)
    table = RandomDocuments(np.minimum(lengths, arguments.tokens), min(vocabulary, 120_000))
    loader = BatchLoader(table, capacity=arguments.tokens, packs_per_step=1, seed=1, workers=2, pin=device.type == "cuda")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, fused=True)
    step = EagerStep(model, optimizer, device=device, precision=precision, clip=1.0)
    losses, norms, tokens, times = [], [], [], []
    steps = iter(loader)
    for number in range(arguments.warmup + arguments.steps):
        batch = next(steps)
        if arguments.profile and number == arguments.warmup:
            _profile(lambda b=batch: step(b, lambda loss, norm: None, lambda _: _NOTHING))
        if number == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result = step(batch, lambda loss, norm: None, lambda _: _NOTHING)
        times.append(time.perf_counter())  # the step has read its loss back, so the device is done
        losses.append(result.loss)
        norms.append(result.grad_norm)
        tokens.append(batch.tokens)
    assert min(norms) > 0, "no gradient: nothing was trained"
    assert losses[-1] < losses[0] + 0.1, f"the loss rose from {losses[0]} to {losses[-1]}"
    seconds = times[-1] - times[arguments.warmup - 1]
    cuda = device.type == "cuda"
    heads = model.get_base_model().config
    return {
        "system": f"pronghorn, {arguments.layers} layers", "model": arguments.model, "tokens_per_step": arguments.tokens,
        "document": arguments.document or "instruction lengths",
        "tokens_per_second": round(sum(tokens[arguments.warmup :]) / seconds),
        "ms_per_step": round(1000 * seconds / arguments.steps, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "attention": pick_backend(device, dtype, heads.head_dim), "loss_first": losses[0], "loss_last": losses[-1],
        "grad_norm_last": norms[-1], "seconds_to_first_step": round(times[0] - began, 1), "steps": arguments.steps,
    }


def _profile(call: Any) -> None:
    """Where one step's time goes, on the device and on the host."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total, e.count, e.key) for e in seen.key_averages() if e.self_device_time_total]
    print(f"device {sum(row[0] for row in rows) / 1000:.1f} ms in {sum(row[1] for row in rows)} kernels")
    for time_us, count, name in sorted(rows, reverse=True)[:28]:
        print(f"{time_us / 1000:8.2f} ms {count:5d} x {name[:110]}")
    host = sorted(((e.self_cpu_time_total, e.count, e.key) for e in seen.key_averages()), reverse=True)
    print("host: " + "; ".join(f"{key} {time / 1000:.1f} ms x{count}" for time, count, key in host[:8]))


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=CONFIGS, default="llama-1b")
    parser.add_argument("--layers", choices=("fast", "own"), default="fast")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--document", type=int, default=0, help="all documents of this many tokens")
    parser.add_argument("--lengths", help="a JSON list of document lengths instead of the built-in distribution")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where one step's time goes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    print("RESULT " + json.dumps(result), flush=True)
    if arguments.out:
        command = "python -m benchmarks.train " + " ".join(sys.argv[1:])
        arguments.out.write_text(json.dumps({**machine(), "command": command, "result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
