"""The README's measured tables and picture, from the results that `make bench` wrote.

    python -m benchmarks.table            # print them
    python -m benchmarks.table --write    # put them into README.md, between its two markers, and every row into a file beside
                                          # the results
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pronghorn.bench.picture import draw
from pronghorn.bench.results import NAME, Results
from pronghorn.bench.side_by_side import PICTURE
from pronghorn.bench.table import markdown, summary

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EVERY_ROW = "side-by-side.md"
BEGIN, END = "<!-- measured: python -m benchmarks.table --write -->", "<!-- end of measured -->"
VERSIONS = ("torch", "triton", "transformers", "unsloth", "liger_kernel")
KERNELS = (  # of the many cases, those of an 8B model
    ("rms_norm", "T=16384 D=4096 bf16 forward+residual"),
    ("rms_norm", "T=16384 D=4096 bf16 backward+add"),
    ("rope", "T=16384 N=32 K=8 H=128 bf16 forward"),
    ("rope", "T=16384 N=32 K=8 H=128 bf16 norm backward"),
    ("gated_mlp", "T=16384 F=14336 bf16 silu forward"),
    ("gated_mlp", "T=16384 F=14336 bf16 silu backward"),
    ("linear_cross_entropy", "T=16384 D=4096 V=128256 bf16 trained"),
)


def training_part(folder: Path = RESULTS) -> tuple[str, str]:
    """Of `pronghorn bench --out benchmarks/results`: (picture and a line for each piece of work, the same with every row). The
    picture is drawn anew, to fit the table."""
    results = Results(folder / NAME)
    rows = [row for row in results.rows if row["workload"] != "tiny"]
    measured = [row["machine"] for row in rows if row.get("machine")]
    if not measured:
        raise SystemExit(f"no measurements in {folder / NAME}: run `make bench` on a GPU machine first")
    (folder / PICTURE).write_text(draw(rows), encoding="utf-8")
    versions = {name: text for one in measured for name, text in one["versions"].items()}
    said = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)
    dates = sorted({one["date"][:10] for one in measured})
    what = json.loads((folder / NAME).read_text(encoding="utf-8"))["what"]
    head = f"One {measured[0]['hardware']}, {said}, {' and '.join(dates)}. {what}."
    place = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    short = (f"![real tokens per second, side by side]({place / PICTURE})\n\n{summary(rows)}\n\n{head} [Every row]({place}/"
             f"{EVERY_ROW}), with losses.")
    return short, f"# Side by side\n\n{head}\n\n{markdown(rows)}\n"


def kernel_table(folder: Path = RESULTS) -> str:
    rows = ["| kernel | ours | torch.compile | Liger |", "|---|---|---|---|"]
    files = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("op*.json")]
    newest = sorted(files, key=lambda content: str(content["date"]))
    for op, case in KERNELS:
        lines: dict[str, Any] = {}
        for content in newest:
            found = {line["impl"]: line for line in content["lines"] if (line["op"], line["case"]) == (op, case)}
            lines = found or lines
        if lines:
            cells = [_cell(lines.get(system)) for system in ("ours", "torch.compile", "liger")]
            rows.append(f"| {op} {case} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(line: dict[str, Any] | None) -> str:
    if line is None or not line.get("ms"):
        return ""
    share = line.get("share_of_copy")
    of_copy = f", {share:.0%} of a copy's rate" if share else f", {line['rate']:.0f} {line['unit']}"
    return f"{line['ms']:.3f} ms{of_copy}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    training, every_row = training_part()
    text = f"{BEGIN}\n{training}\n\n{kernel_table()}\n{END}"
    if not write:
        print(text)
        return
    (RESULTS / EVERY_ROW).write_text(every_row, encoding="utf-8")
    readme = ROOT / "README.md"
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    if not begin or END not in rest:
        raise SystemExit(f"README.md has lost its markers {BEGIN} and {END}")
    readme.write_text(before + text + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
