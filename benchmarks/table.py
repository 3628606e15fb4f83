"""The README's measured tables, from the results that the benchmarks wrote.

    python -m benchmarks.table            # print them
    python -m benchmarks.table --write    # put them into README.md, between its two markers
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: python -m benchmarks.table --write -->", "<!-- end of measured -->"
KERNELS = (  # of the many cases, those of an 8B model
    ("op-rms_norm-linear_cross_entropy.json", "T=16384 D=4096 bf16 forward+residual"),
    ("op-rms_norm-linear_cross_entropy.json", "T=16384 D=4096 bf16 backward+add"),
    ("op-gated_mlp-rope.json", "T=16384 N=32 K=8 H=128 bf16 forward"),
    ("op-gated_mlp-rope.json", "T=16384 N=32 K=8 H=128 bf16 norm backward"),
    ("op-gated_mlp-rope.json", "T=16384 F=14336 bf16 silu forward"),
    ("op-gated_mlp-rope.json", "T=16384 F=14336 bf16 silu backward"),
    ("op-rms_norm-linear_cross_entropy.json", "T=16384 D=4096 V=128256 bf16 trained"),
)


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def training_table() -> str:
    run = load("train-side-by-side.json")
    rows = ["| model | system | real tokens/s | peak memory | loss after the run |", "|---|---|---|---|---|"]
    for result in sorted(run["results"], key=lambda r: (r["model"], -r["tokens_per_second"])):
        rows.append(f"| {result['model']} | {result['system']} | {result['tokens_per_second']:,} | {result['peak_gb']} GB"
                    f" | {result['loss_last']:.2f} |")
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "triton", "transformers"))
    head = f"One {run['hardware']}, {versions}, {run['date'][:10]}. {run['what']}."
    return f"{head}\n\n" + "\n".join(rows)


def kernel_table() -> str:
    rows = ["| kernel | ours | torch.compile | Liger |", "|---|---|---|---|"]
    for name, case in KERNELS:
        lines = {line["impl"]: line for line in load(name)["lines"] if line["case"] == case}
        cells = [_cell(lines.get(system)) for system in ("ours", "torch.compile", "liger")]
        rows.append(f"| {lines['ours']['op']} {case} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    share = line.get("share_of_copy")
    of_copy = f", {share:.0%} of a copy's rate" if share else f", {line['rate']:.0f} {line['unit']}"
    return f"{line['ms']:.3f} ms{of_copy}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    text = f"{BEGIN}\n{training_table()}\n\n{kernel_table()}\n{END}"
    if not parser.parse_args().write:
        print(text)
        return
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    readme.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
