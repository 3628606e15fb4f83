"""The tables of docs/results.md that are not the side-by-side, each from its file in benchmarks/results. For table.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import read

KERNELS = (  # of the many cases, those of an 8B model
    ("rms_norm", "T=16384 D=4096 bf16 forward+residual"),
    ("rms_norm", "T=16384 D=4096 bf16 backward+add"),
    ("rope", "T=16384 N=32 K=8 H=128 bf16 forward"),
    ("rope", "T=16384 N=32 K=8 H=128 bf16 norm backward"),
    ("gated_mlp", "T=16384 F=14336 bf16 silu forward"),
    ("gated_mlp", "T=16384 F=14336 bf16 silu backward"),
    ("linear_cross_entropy", "T=16384 D=4096 V=128256 bf16 trained"),
)
FORMS = {
    "fp32": "float32",
    "bf16": "bf16",
    "fp8": "FP8",
    "nf4-base": "NF4 weights, dequantized once to bf16",
    "nf4": "NF4, products in bf16",
    "nf4-fp8": "NF4, products in FP8",
}
LEVELS = {
    "keep": "keep all",
    "gate/up again": "recompute gate and up",
    "recompute gate/up": "recompute gate and up",
    "attention kept": "recompute all but attention",
    "all again": "recompute all",
}  # also as older files have them


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def source(content: dict[str, Any]) -> str:
    """The line below a table: where its figures come from."""
    machine = content["machine"]
    versions = ", ".join(
        f"{name} {machine['versions'][name]}" for name in ("torch", "triton", "transformers") if name in machine["versions"]
    )
    parts = [machine["hardware"], versions, machine["date"][:10], f"`{content['command']}`"]
    return "\n\n" + ", ".join(part for part in parts if part) + "."


def kernels(folder: Path) -> str:
    found = {
        (line["op"], line["case"], line.get("impl", "ours")): line
        for run in read(folder / "ops.json")["runs"]
        for line in run["lines"]
    }
    rows = [
        [f"{op} {case}", *(_time(found.get((op, case, system))) for system in ("ours", "torch.compile", "liger"))]
        for op, case in KERNELS
        if (op, case, "ours") in found
    ]
    return table(("kernel", "Pronghorn", "torch.compile", "Liger"), rows)


def _time(line: dict[str, Any] | None) -> str:
    if line is None or not line.get("ms"):
        return ""
    share = line.get("share_of_copy")
    of_copy = f", {share:.0%} of a copy's rate" if share else f", {line['rate']:.0f} {line['unit']}"
    return f"{line['ms']:.3f} ms{of_copy}"


def budgets(folder: Path) -> str:
    content = read(folder / "budgets-llama-8b.json")
    rows = []
    for row in content["results"]:
        plan, memory = row["plan"], row["memory"]
        layers = "; ".join(f"{count} {_level(name)}" for name, count in Counter(plan["levels"]).items())
        if plan["pieces"] > 1:
            layers += f"; MLP in {plan['pieces']} chunks"
        if plan["host_embeddings"]:
            layers += "; embeddings on the host"
        rows.append(
            (
                row["budget_asked"].replace("GB", " GB"),
                layers,
                f"{memory['planned_peak_bytes'] / 1e9:.2f} GB",
                f"{memory['peak_bytes'] / 1e9:.2f} GB",
                f"{1000 * memory['planned_step_seconds']:,.0f}",
                f"{row['ms_per_step']:,.0f}",
                f"{row['tokens_per_second']:,.0f}",
            )
        )
    return table(("budget", "layers", "peak planned", "measured", "ms planned", "measured", "tokens/s"), rows) + source(content)


def _level(name: str) -> str:
    level, _, offloaded = name.partition(", ")
    return LEVELS.get(level, level) + " and offload" * bool(offloaded)


def context(folder: Path) -> str:
    content = read(folder / "context-llama-8b.json")
    rows = []
    for budget, longest in content["longest"].items():
        for system, label in (("pronghorn", "Pronghorn"), ("unsloth-ckpt", "Unsloth, its checkpointing")):
            of_both = [row for row in content["results"] if (row["budget"], row["system"]) == (budget, system)]
            best = next(row for row in of_both if row["tokens"] == longest[system])
            longer = [row for row in of_both if row["tokens"] > longest[system]]
            stop = min(longer, key=lambda row: row["tokens"], default=None)
            ended = f"{stop['tokens']:,}: {stop['status']}" if stop else "none tried"
            rows.append(
                (
                    budget.replace("GB", " GB"),
                    label,
                    f"{best['tokens']:,}",
                    f"{best['peak_bytes'] / 1e9:.1f} GB",
                    f"{best['seconds']:.0f} s",
                    ended.replace("killed", "killed, host memory full"),
                )
            )
    machine = next(row["machine"] for row in content["results"] if row.get("machine"))
    first = {"machine": machine, "command": "python -m benchmarks.context --budget 24GB --systems pronghorn,unsloth"}
    return table(("budget", "system", "longest document, tokens", "peak", "step", "next length"), rows) + source(first)


def quality(folder: Path) -> str:
    content = read(folder / "quality-smollm2.json")
    verdicts = {one["form"]: one for one in content["verdicts"]}
    rows = []
    for run in content["results"]:
        one = verdicts.get(run["form"])
        against = (
            (
                FORMS[one["against"]],
                f"{100 * one['difference']:+.3f} %",
                f"{100 * one['allowed']:.1f} %" if one["allowed"] else "",
            )
            if one
            else ("", "", "")
        )
        rows.append((FORMS[run["form"]], f"{run['held_out'][0][1]:.4f}", f"{run['held_out'][-1][1]:.4f}", *against))
    head = ("arithmetic", "held-out loss before", "after", "compared with", "difference", "allowed")
    return table(head, rows) + source(content)


def pipeline(folder: Path) -> str:
    content = read(folder / "pipeline-llama-1b.json")
    found = content["figures"]
    rows = [
        ("GPU busy", f"{found['gpu_busy_share']:.1%}"),
        ("main thread, share of one core", f"{found['main_thread_share']:.1%}"),
        ("all threads, share of one core", f"{found['process_share']:.1%}"),
        ("tokens/s", f"{found['tokens_per_second']:,.0f}"),
        (
            f"tokens/s with a checkpoint every {found['checkpoint_every']} steps",
            f"{found['tokens_per_second_with_checkpoints']:,.0f}",
        ),
    ]
    return table((f"steps {found['steps'][0]} to {found['steps'][1]}", ""), rows) + source(content)


def moe_layer(folder: Path) -> str:
    content = read(folder / "moe-layer.json")
    rows = [
        (str(row["experts"]), *(f"{row['ms'][way]:.1f} ms" for way in ("loop", "grouped", "ours", "graph")))
        for row in content["results"]
    ]
    head = ("experts", "transformers, loop", "transformers, grouped products", "Pronghorn, eager", "Pronghorn, CUDA graph")
    return table(head, rows) + source(content)


def methods(folder: Path) -> str:
    content = read(folder / "methods.json")
    found = {(row["model"], row["method"]): row for row in content["results"]}
    names = sorted({method for _, method in found}, key=["lora", "qlora", "fp8", "qlora in fp8", "full"].index)
    rows = [[model, *(_method(found.get((model, name))) for name in names)] for model in dict.fromkeys(m for m, _ in found)]
    return table(("model", *names), rows) + source(content)


def _method(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return "stopped: disk too small" if "disk space" in row.get("said", "") else str(row["verdict"])


def data_speed(folder: Path) -> str:
    content = read(folder / "data-speed.json")
    part = {one["part"]: one for one in content["results"]}
    work, stats = part["tokenizing"], part["stats"]
    base = work["least_cpu_seconds"]["prepare"]
    rows = []
    for name, runs in work["runs"].items():
        best = min(runs, key=lambda run: float(run["cpu_seconds"]))
        ratio = f"{base / best['cpu_seconds']:.2f}" if name != "prepare" else ""
        rows.append((f"{name}, {work['rows']:,} rows", f"{best['cpu_seconds']:.1f}", f"{best['wall_seconds']:.1f}", ratio))
    for name, text in (("first", ""), ("again", ", cached")):
        one = stats[name]
        rows.append(
            (
                f"`pronghorn data stats`, {stats['rows']:,} rows{text}",
                f"{one['cpu_seconds']:.1f}",
                f"{one['wall_seconds']:.1f}",
                "",
            )
        )
    return table(("work", "CPU seconds", "wall-clock seconds", "`prepare` relative to it, CPU"), rows) + source(content)


def data_audit(folder: Path) -> str:
    content = read(folder / "data-audit.json")
    audit, sets = content["results"]
    rows = [
        (
            f"{name} of {audit['rows']:,} rows, recall and precision",
            f"{audit[name]['recall']:.3f}, {audit[name]['precision']:.3f}",
        )
        for name in ("copies", "leaks")
    ]
    for name, text in (("first", ""), ("again", ", tokens cached")):
        one = audit[name]
        rows.append((f"CPU and wall-clock seconds{text}", f"{one['cpu_seconds']:.1f}, {one['wall_seconds']:.1f}"))
    rows.append(
        (
            f"random data sets of {sets['sets']:,} with a copy of a held-out row among those trained on",
            f"{sets['sets_with_a_leak']}",
        )
    )
    return table(("`pronghorn data audit`, planted rows", ""), rows) + source(content)


def chat_templates(folder: Path) -> str:
    content = read(folder / "chat-templates.json")
    results = ("exact", "refused", "refused without need", "wrong")
    rows = [
        (str(content["templates"]), name, *(f"{content[key].get(result, 0):,}" for result in results))
        for name, key in (("49 kinds", "total"), (f"{content['odd']['a template']} rows with odd texts", "odd"))
    ]
    heads = ("templates", "conversations", "exact", "refused with the reason", "refused without need", "wrong")
    return table(heads, rows) + source(content)


def compile_matrix(folder: Path) -> str:
    content = read(folder / "compile-matrix.json")
    rows = []
    for name, chip in content["chips"].items():
        cells = {kernel: cell[name] for kernel, cell in content["kernels"].items() if name in cell}
        spilled = [kernel for kernel, cell in cells.items() if cell["spilled"]]
        rows.append(
            (
                name,
                chip["gpus"],
                str(len(cells)),
                f"{max(cell['shared'] for cell in cells.values()) // 1024} KB",
                f"{chip['shared'] // 1024} KB",
                ", ".join(f"`{kernel}`" for kernel in spilled) or "none",
                chip["date"],
            )
        )
    head = ("chip", "GPUs", "kernels", "most shared memory", "the chip's", "kernels that spill registers", "compiled")
    return table(head, rows) + f"\n\n`{content['command']}`."


def fuzz(folder: Path) -> str:
    rows = [
        (
            name.replace("_", " "),
            f"{found['mutations']:,}",
            f"{found['same']:,}",
            f"{found['refused']:,}",
            f"{found['rebuilt']:,}",
            str(sum(found[bad] for bad in ("traceback", "crash", "hang", "silent"))),
        )
        for name, found in read(folder / "fuzz.json")["subjects"].items()
    ]
    return table(("damaged", "files", "no effect", "refused", "rebuilt", "traceback, crash, hang or silent damage"), rows)


BLOCKS = {"kernels": kernels, "budgets": budgets, "context": context, "quality": quality, "pipeline": pipeline,
          "moe-layer": moe_layer, "methods": methods, "data-speed": data_speed, "data-audit": data_audit,
          "chat-templates": chat_templates,
          "compile-matrix": compile_matrix, "fuzz": fuzz}  # fmt: skip
