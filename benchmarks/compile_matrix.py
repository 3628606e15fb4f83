"""Every Triton kernel, as training launches it, compiled for chips that are not here: shared memory and spilled registers.

    python -m benchmarks.compile_matrix [--chips 86 120] [--cases qlora] [--kernels grouped] [--write]

Nothing is listed by hand: for each case below a whole training step of a published model's sizes (one layer) is gone through as
on that chip (compile_for.py), without numbers (without_numbers.py), and each launch is compiled. `--write` puts the
table into benchmarks/results/compile-matrix.json and .md, where other chips stay as they are. A chip takes two to three minutes
of a core; what Triton has in its cache is not compiled again. Ends with 1 if a kernel asks for more shared memory than the chip
has, spills registers, or does not compile.

Cases are chosen so that every kernel meets its widest tiles: head widths 64, 80, 96, 128, 192 and 256, ranks 8 to 128, model
widths 2,048 to 8,192, each method, each way to store weights and experts. What runs on 9.0 alone (CUDA C++: hopper_gemm.cu)
is not Triton's; other chips launch the kernels of this table in its place.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.bench.meter import machine
from benchmarks.bench.pairs import Pair, PairTable
from benchmarks.bench.workloads import MODELS
from benchmarks.compile_for import Build, compiling_for
from benchmarks.compile_pieces import convert, decode, delta_net, mamba
from benchmarks.ops import replaced
from benchmarks.without_numbers import WithoutNumbers
from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.kernels.loss import cross_entropy_powers
from pronghorn.kernels.quant.fp8_cast import fp8_supported
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER, Chip, as_on
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.load import DTYPES
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedBatch
from pronghorn.recipe_parts import Lora
from pronghorn.train.objectives import Supervised
from pronghorn.train.objectives.cpo import SimPo
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep

RESULTS = Path(__file__).parent / "results"
NAME = "compile-matrix"
_LLAMA = MODELS["llama-8b"]
SIZES: dict[str, dict[str, Any]] = MODELS | {  # more published sizes; Gemma 2 has heads of 128 at 27B and of 256 at 9B
    "llama-70b": _LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "qwen3-8b": MODELS["qwen3-14b"] | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "gemma-2-9b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 32,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 32,
    },
    "gemma-4-12b": {  # a global layer, of assumed numbers of heads; the others have heads like Gemma 3
        "model_type": "gemma4_unified_text",
        "vocab_size": 262144,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "layer_types": ["full_attention"],
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma-4-e2b": {  # of assumed sizes; layers of both kinds, with their own keys and with those of an earlier one
        "model_type": "gemma4_text",
        "vocab_size": 65536,
        "vocab_size_per_layer_input": 1024,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 30.0,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 0,
    },
    "apertus-8b": _LLAMA | {"model_type": "apertus", "intermediate_size": 21504, "hidden_act": "xielu"},
    "arcee-4.5b": _LLAMA
    | {
        "model_type": "arcee",
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "hidden_act": "relu2",
    },
    "hunyuan-7b": _LLAMA | {"model_type": "hunyuan_v1_dense"},
    "command-r7b": {
        "model_type": "cohere2",
        "vocab_size": 256000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 32,
        "layer_types": ["sliding_attention"],
    },
    "trinity-mini": {
        "model_type": "afmoe",
        "vocab_size": 200192,
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "num_dense_layers": 0,
        "sliding_window": 32,
        "layer_types": ["sliding_attention"],
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "mlp_layer_types": ["sparse"],
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": ["conv"],
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention"],
    },
    "falcon-h1-1.5b": {
        "model_type": "falcon_h1",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 48,
        "mamba_d_state": 256,
        "ssm_multipliers": [0.5, 0.25, 0.25, 0.5, 0.5],
        "mlp_multipliers": [0.5, 0.25],
    },
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "layers_block_type": ["linear_attention"],
    },
}


class Case(NamedTuple):
    model: str
    method: Literal["lora", "qlora", "fp8", "full"] = "lora"
    rank: int = 16
    changes: dict[str, Any] = {}  # noqa: RUF012  (of the model's sizes)
    experts: bool = False  # adapters on them, too
    compute_fp8: bool = False
    storage: str = "nf4"  # of method qlora
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    tokens: int = 2048
    optimizer: tuple[bool, bool] = (False, False)  # moments in 8 bits, in host memory
    pieces: int = 1  # in which MLPs are done, as where memory is short: embeddings wait on the host then, too
    balance: bool = False  # the routers' auxiliary loss
    shared: bool = False  # pairs of answers that share their prompts

    @property
    def fp8(self) -> bool:
        return self.method == "fp8" or self.compute_fp8

    def __str__(self) -> str:
        told = [self.model, self.method, *(f"{key}={value}" for key, value in self.changes.items())]
        told += [f"r={self.rank}"] * (self.method != "full") + ["on experts"] * self.experts
        told += [self.storage] * (self.storage != "nf4") + ["compute fp8"] * self.compute_fp8
        told += [self.precision] * (self.precision != "bf16") + ["shared prompts"] * self.shared
        return ", ".join(told + [f"{self.tokens} tokens"] * (self.tokens != self._field_defaults["tokens"]))


def heads(width: int, queries: int = 16, keys: int = 4) -> dict[str, Any]:
    return {"head_dim": width, "num_attention_heads": queries, "num_key_value_heads": keys}


CASES = (  # sizes are shared where they do not matter: a constant that differs is another build
    *(Case("llama-8b", rank=rank) for rank in (8, 16, 32, 64, 128)),
    *(Case("llama-8b", changes=changes) for changes in (heads(80), heads(96, 16, 16), heads(192), heads(256))),
    *(Case("llama-8b", changes=heads(64, 32, 8), tokens=tokens, optimizer=(True, False)) for tokens in (2048, 1000)),
    Case("llama-8b", changes=heads(64, 32, 8), precision="fp32"), Case("llama-70b", pieces=2, optimizer=(False, True)),
    Case("gemma-2-9b"), Case("gemma-3-4b", "full"), Case("qwen3-8b", "full"), Case("llama-8b", "full"),
    Case("llama-8b", "full", compute_fp8=True), Case("llama-8b", "qlora"), Case("llama-8b", "qlora", rank=64, pieces=2),
    Case("llama-8b", "qlora", compute_fp8=True), Case("llama-8b", "fp8"), Case("llama-8b", "fp8", rank=64),
    *(Case("gpt-oss-20b-4layers", method, experts=True) for method in ("lora", "qlora", "fp8")),
    *(Case("qwen3-30b-a3b-4layers", method, experts=True, balance=True) for method in ("lora", "qlora", "fp8")),
    Case("qwen3-30b-a3b-4layers", "qlora", experts=True, storage="nvfp4"),
    Case("qwen3-30b-a3b-4layers", "lora", rank=128, experts=True), Case("qwen3-30b-a3b-4layers", "qlora", tokens=256),
    Case("llama-8b", changes=heads(64, 32, 8), shared=True), Case("llama-8b", shared=True),
    Case("gemma-3-4b", shared=True), Case("gemma-2-9b", changes={"head_dim": 256}, shared=True),
    Case("gpt-oss-20b-4layers", shared=True), Case("glm-4.5-air"), Case("glm-4.5-air", changes={"n_group": 8, "topk_group": 4}),
    Case("lfm2-1.2b"), Case("lfm2-1.2b", "full"), Case("apertus-8b", "full"), Case("arcee-4.5b"), Case("hunyuan-7b", "full"),
    Case("gemma-4-12b"), Case("gemma-4-12b", "full", tokens=1000), Case("gemma-4-12b", shared=True), Case("glm-4.7-flash"),
    *(
        Case("gemma-4-26b-a4b-6layers", method, experts=True, changes={"layer_types": ["full_attention"]})
        for method in ("lora", "qlora", "fp8")
    ),
    Case("gemma-4-26b-a4b-6layers", "full", changes={"layer_types": ["full_attention"], "num_experts": 8}),
    Case("gemma-4-e2b", changes={"num_hidden_layers": 4}), Case("gemma-4-e2b", "full", changes={"num_hidden_layers": 4}),
    Case("lfm2-1.2b", shared=True), Case("lfm2-1.2b", "full", shared=True),
    Case("glm-4.7-flash", changes={"qk_nope_head_dim": 128, "v_head_dim": 128}),  # DeepSeek-V3's heads
    Case("command-r7b"), Case("command-r7b", "full"), Case("trinity-mini"),
    Case("qwen3.5-9b"), Case("qwen3.5-9b", "full"), Case("qwen3.5-9b", changes={"layer_types": ["full_attention"]}),
    Case("nemotron-3-nano"), Case("nemotron-3-nano", "full"), Case("falcon-h1-1.5b"), Case("falcon-h1-1.5b", "full"),
    *(Case("nemotron-3-nano", method, experts=True, changes={"layers_block_type": ["moe"]}) for method in ("lora", "qlora")),
    Case("gpt-oss-20b-4layers", "full", changes={"num_local_experts": 8}), Case("qwen3-30b-a3b-4layers", "full", tokens=256),
)  # fmt: skip


def batch(tokens: int) -> PackedBatch:
    """Documents of 125 tokens, every second token with a loss; the last one is padding."""
    length = 125
    positions = torch.arange(tokens) % length
    bounds = torch.tensor([*range(0, tokens, length), tokens], dtype=torch.int32)
    rows = torch.arange(0, tokens - length, 2)
    labels = torch.full((tokens,), -100).index_fill(0, rows, 1)
    return PackedBatch(
        ids_T=torch.ones(tokens, dtype=torch.int64),
        labels_T=labels,
        positions_T=positions,
        cu_seqlens=bounds,
        loss_rows=rows,
        longest=128,
        typical=length,
        tokens=tokens,
        loss_tokens=len(rows),
        documents=tuple(range(len(bounds) - 1)),
    )


def pairs(tokens: int) -> PackedBatch:
    """Prompts of 100 tokens with answers of 60 and 65."""
    parts = Pair(*(np.ones(length, np.int32) for length in (100, 60, 65)))
    table = PairTable([parts] * (tokens // parts.tokens), shared=True)
    packs = pack_in_order(groups_of(table), tokens)
    return build_batch(table, packs[0], tokens, shapes=Shapes.planned(table, packs, tokens))


def built(case: Case) -> Any:
    settings = {
        key: value
        for key, value in (SIZES[case.model] | {"num_hidden_layers": 1} | case.changes).items()
        if key != "quantization_config"
    }
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    dtype = torch.float32 if case.method == "full" else DTYPES[case.precision]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if case.balance:
        model.config.output_router_logits = True
    if case.method == "qlora":
        store_linears_(model, FORMATS[case.storage])
    if case.method == "fp8":
        store_linears_(model, FORMATS["fp8"])
    if case.method in ("qlora", "fp8"):
        store_experts_(model, FORMATS["fp8" if case.method == "fp8" else case.storage])
    if case.method != "full":
        targets = ("all-linear", "experts") if case.experts else "all-linear"
        model = add_adapter(model, Lora(r=case.rank, targets=targets), seed=0)
    if why := install(model, fp8=case.compute_fp8):
        raise RuntimeError(f"{case}: {why}")
    return model.train()


def take_step(case: Case) -> None:
    """All that a training step launches, and what loading launches before it."""
    model = built(case)
    engine = engine_of(model)
    assert engine is not None
    if case.pieces > 1:
        engine.embed.on_host = not engine.backbone.embed_tokens.weight.requires_grad
        for layer in engine.layers:
            layer.level, layer.mlp_chunks = "gate_up", case.pieces
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = FusedAdamW(trained, eight_bit=case.optimizer[0], paged=case.optimizer[1])
    objective = SimPo() if case.shared else Supervised()
    options: dict[str, Any] = {"device": torch.device("cpu"), "precision": case.precision, "clip": 1.0, "say": print}
    step = GraphedStep(model, optimizer, objective=objective, **options)
    one = pairs(case.tokens) if case.shared else batch(case.tokens)
    step._set_up(one)
    step._run_dry(one)


class Work(NamedTuple):
    name: str
    run: Callable[[], None]


def works(chip: Chip) -> Iterator[Work]:
    """What training can be on this chip."""
    with as_on(chip):
        has_fp8 = fp8_supported("cpu") is None
    yield Work("formats", convert)
    yield Work("decoding", decode)
    yield Work("gated deltanet", delta_net)
    yield Work("mamba-2", mamba)
    for case in CASES:
        if has_fp8 or not case.fp8:
            yield Work(str(case), partial(take_step, case))


def named(words: Sequence[str]) -> Callable[[str], bool]:
    """Names that have one of these words; all, where there are none."""
    return lambda name: not words or any(word in name for word in words)


class Line(NamedTuple):
    """A build and the first work that needs it."""

    build: Build
    work: str


def compile_all(
    chip: Chip, cases: Callable[[str], bool], kernels: Callable[[str], bool], say: Callable[[str], None]
) -> tuple[list[Line], set[str]]:
    """(one line for each of these kernels in each way it is launched, names of all kernels that are launched)"""
    lines: list[Line] = []
    with compiling_for(chip, kernels) as builds, ExitStack() as stack:
        if chip == HOPPER:  # its product that gives powers is CUDA C++; the kernels around it are Triton's
            for name in ("covered", "powers_mm"):
                stack.enter_context(replaced(cross_entropy_powers, name, lambda *_, **__: True))
        stack.enter_context(WithoutNumbers())
        for work in (work for work in works(chip) if cases(work.name)):
            began = time.perf_counter()
            work.run()
            gc.collect()  # a model and its layers know each other
            new = builds.found[len(lines) :]
            lines += [Line(build, work.name) for build in new]
            say(f"sm_{chip.sm} {work.name}: {len(new)} kernels, {time.perf_counter() - began:.0f} s")
    return lines, builds.launched


def table(lines: list[Line]) -> dict[str, dict[str, dict[str, Any]]]:
    """By kernel and chip: the most shared memory and registers of all cases, bytes spilled in all, and what is wrong."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for build, work in sorted(lines):
        cell = found.setdefault(build.kernel, {}).setdefault(
            f"sm_{build.chip.sm}", {"builds": 0, "shared": -1, "registers": 0, "spilled": 0, "wrong": []}
        )
        cell["builds"] += 1
        cell["registers"] = max(cell["registers"], build.registers)
        cell["spilled"] += build.spilled
        if build.shared > cell["shared"]:
            cell |= {"shared": build.shared, "most": f"{work}: {build.options}"}
        if build.wrong:
            cell["wrong"].append(f"{work}: {build.wrong} ({build.options})")
    return found


def markdown(content: dict[str, Any]) -> str:
    chips: dict[str, Any] = content["chips"]
    rows = [
        "# Kernels by chip\n\nEvery Triton kernel as training launches it, compiled for each chip on a machine without a "
        "GPU: `python -m benchmarks.compile_matrix --write`. Shared memory in KB, the most of all cases; "
        "`-`: not launched.\n",
        "| chip | GPUs | shared memory of a program | builds | made |",
        "|---|---|---|---|---|",
    ]
    for name, chip in chips.items():
        versions = ", ".join(f"{package} {version}" for package, version in chip["versions"].items())
        builds = sum(cells[name]["builds"] for cells in content["kernels"].values() if name in cells)
        rows.append(
            f"| {name} | {chip['gpus']} | {chip['shared'] // 1024} KB | {builds} | {chip['date']}, git tree of kernels "
            f"{chip['tree']}, {versions} |"
        )
    rows += ["", "| kernel | " + " | ".join(chips) + " | registers | bytes spilled |", "|---" * (len(chips) + 3) + "|"]
    for kernel, cells in content["kernels"].items():
        shown = [
            f"{cells[name]['shared'] / 1024:.1f}" + " **wrong**" * bool(cells[name]["wrong"]) if name in cells else "-"
            for name in chips
        ]
        most, spilled = (pick(cell[key] for cell in cells.values()) for pick, key in ((max, "registers"), (sum, "spilled")))
        rows.append(f"| {kernel} | {' | '.join(shown)} | {most} | {spilled} |")
    wrong = [line for cells in content["kernels"].values() for cell in cells.values() for line in cell["wrong"]]
    rows.append(
        f"\n{len(content['kernels'])} kernels; {len(wrong)} builds over a limit, spilling or not compiled. Registers: "
        "the most of a thread, on any chip."
    )
    cases = dict.fromkeys(case for chip in chips.values() for case in chip["cases"])
    return "\n".join([*rows, "", "Cases (one layer of a published model's sizes, 2,048 tokens; FP8 where the chip has it):", "",
                      *(f"- {case}" for case in cases), ""])  # fmt: skip


def tree() -> str:
    """Of the kernels' source, which a rebase leaves as it is."""
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD:src/pronghorn/kernels"], capture_output=True, text=True,
                           check=False, cwd=Path(__file__).parent)  # fmt: skip
    return found.stdout.strip() or "unknown"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def results(chip: Chip, lines: list[Line]) -> dict[str, Any]:
    versions = machine()["versions"]
    about = {
        "gpus": chip.gpus, "shared": chip.shared, "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tree": tree(), "versions": {name: versions[name] for name in ("torch", "triton") if name in versions},
        "cases": [*dict.fromkeys(line.work for line in lines)],
    }  # fmt: skip
    return {"chips": {f"sm_{chip.sm}": about}, "kernels": table(lines)}


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Each chip as the last of the parts has it."""
    chips: dict[str, Any] = {}
    kernels: dict[str, dict[str, Any]] = {}
    for part in parts:
        chips |= part["chips"]
        for cells in kernels.values():
            for name in part["chips"]:
                cells.pop(name, None)
        for kernel, cells in part["kernels"].items():
            kernels.setdefault(kernel, {}).update(cells)
    order = [name for chip in CHIPS.values() if (name := f"sm_{chip.sm}") in chips]
    there = {kernel: cells for kernel, cells in sorted(kernels.items()) if cells}
    return {
        "command": "python -m benchmarks.compile_matrix --write",
        "chips": {name: chips[name] for name in order},
        "kernels": {kernel: {name: cells[name] for name in order if name in cells} for kernel, cells in there.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="*", type=int, choices=[chip.sm for chip in CHIPS.values()], default=[])
    parser.add_argument("--cases", nargs="*", default=[], help="those whose description has one of these texts")
    parser.add_argument("--kernels", nargs="*", default=[], help="those whose name has one of these texts")
    parser.add_argument("--write", action="store_true", help="into the results, where other chips stay as they are")
    options = parser.parse_args(arguments)
    file, parts, wrong = RESULTS / f"{NAME}.json", [], 0
    if options.write and file.exists():
        parts.append(json.loads(file.read_text(encoding="utf-8")))
    for chip in CHIPS.values():
        if options.chips and chip.sm not in options.chips:
            continue
        lines = compile_all(chip, named(options.cases), named(options.kernels), say)[0]
        parts.append(results(chip, lines))
        for line in lines:
            if line.build.wrong:
                wrong += 1
                say(f"sm_{chip.sm} {line.build.kernel}: {line.build.wrong}; {line.work} ({line.build.options})")
    content = joined(parts)
    text = markdown(content)
    print(text)
    if options.write:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        file.with_suffix(".md").write_text(text, encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
