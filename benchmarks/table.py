"""The tables and the picture of README.md and docs/results.md, from the files in benchmarks/results; the list of docs/log.

    python -m benchmarks.table                 # print them
    python -m benchmarks.table --write         # put them between their markers in these pages
    python -m benchmarks.table --take FILE     # first take over rows of another side-by-side.json, where there are none yet

A block begins with `<!-- NAME: python -m benchmarks.table --write -->` and ends with `<!-- end of NAME -->`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.bench.picture import draw
from benchmarks.bench.results import CEILING, NAME, Results, Row, rate, unsloths_best
from benchmarks.bench.side_by_side import PICTURE
from benchmarks.bench.table import dates
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS
from benchmarks.hours_tables import BLOCKS as HOURS
from benchmarks.record import RESULTS, ROOT, read
from benchmarks.result_tables import BLOCKS
from benchmarks.side_by_side_tables import IN_TRL, brief, in_trl, markdown, summary

LOG = ROOT / "docs" / "log"
EVERY_STEP = ("losses",)  # one number per step: left out where rows of several runs are kept together
VERSIONS = ("torch", "triton", "transformers", "unsloth", "liger_kernel")
# What a reader sees first: a model that fits easily, a large one, long documents, small memory, FP8, experts.
FEW = (
    "qwen3-0.6b",
    "llama-1b",
    "llama-8b",
    "llama-8b-32k",
    "llama-8b-20gb",
    "qwen3-14b-12gib",
    "llama-8b-fp8",
    "qwen3-30b-a3b-4layers-experts",
    "gpt-oss-20b-4layers-experts",
)
DRAWN = ("llama-1b", "llama-8b", "llama-8b-20gb", "qwen3-14b-12gib", "qwen3-30b-a3b-4layers-experts")


def begin(name: str) -> str:
    return f"<!-- {name}: python -m benchmarks.table --write -->"


def end(name: str) -> str:
    return f"<!-- end of {name} -->"


def measured_rows(folder: Path) -> list[Row]:
    rows = [row for row in Results(folder / NAME).rows if not row["workload"].startswith("tiny")]
    if not any(row.get("machine") for row in rows):
        raise SystemExit(f"no measurements in {folder / NAME}: run `make bench` on a GPU machine first")
    return rows


def of_pairs(row: Row) -> bool:
    """Preference tuning, which is counted in pairs."""
    return row["workload"] in WORKLOADS and WORKLOADS[row["workload"]].pairs


def conditions(rows: list[Row]) -> str:
    """Hardware, versions and dates of some rows, as a sentence."""
    machines = [row["machine"] for row in rows if row.get("machine")]
    versions = {name: text for one in machines for name, text in one["versions"].items()}
    said = ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions)
    return f"One {machines[0]['hardware']}, {said}, {dates(machines)}."


def readme(folder: Path) -> str:
    """The short table. The picture is drawn anew, to fit it."""
    rows = measured_rows(folder)
    drawn = [row for row in rows if row["workload"] in DRAWN and row["system"].startswith(("pronghorn", "unsloth", CEILING))]
    (folder / PICTURE).write_text(draw(drawn or rows), encoding="utf-8")
    return f"{brief(rows, FEW)}\n\n{conditions([row for row in rows if row['workload'] in FEW] or rows)}"


def faster(folder: Path) -> str:
    """How much faster, in five lines."""
    rows = measured_rows(folder)
    found = {(row["workload"], row["system"]): rate(row) for row in rows}

    def span(pairs: Iterable[tuple[float | None, float | None]]) -> str:
        both = sorted(ours / theirs for ours, theirs in pairs if ours and theirs)
        return f"{both[0]:.2f} to {both[-1]:.2f} times" if both else "not measured"

    def ratios(*names: str) -> str:
        return span((found.get((name, "pronghorn")), rate(unsloths_best(rows, name))) for name in names)

    dense, small = ratios("qwen3-0.6b", "llama-1b", "llama-8b", "llama-8b-32k"), ratios("llama-8b-20gb", "qwen3-14b-12gib")
    experts = ratios(*(name + more for name in ("qwen3-30b-a3b-4layers", "gpt-oss-20b-4layers") for more in ("", "-experts")))
    same_memory = IN_TRL[:2]  # in the third setting Pronghorn uses what memory there is
    script = span(
        (found.get((name, ours)), found.get((name, theirs)))
        for name in {row["workload"] for row in rows if not of_pairs(row)}
        for _, ours, theirs in same_memory
    )
    peers = [found.get(("dpo-1b", name)) for name in ("trl", "trl-ckpt", "unsloth", "unsloth-ckpt")]
    ours, theirs = found.get(("dpo-1b", "pronghorn")), max(speed or 0.0 for speed in peers)
    dpo = f"{ours / theirs:.1f} times" if ours and theirs else "not measured"
    return f"""Training speed on one NVIDIA H200 in real tokens per second, relative to Unsloth in TRL's `SFTTrainer`:

- `pronghorn train`, LoRA in bf16 on dense models of 0.6B to 8B parameters: **{dense}**
- `pronghorn train` within the memory that Unsloth needs with its checkpointing (8B LoRA, 14B QLoRA): **{small}**
- `pronghorn train`, LoRA in bf16 on mixtures of experts (4 layers at full width): **{experts}**
- the same `SFTTrainer` script with only its import changed (1B and 8B, LoRA and QLoRA): **{script}**
- DPO of a 1B model in `pronghorn train`, in pairs per second, relative to the faster of Unsloth and TRL: **{dpo}**"""


def side_by_side(folder: Path) -> str:
    rows = [row for row in measured_rows(folder) if not of_pairs(row)]
    return f"{summary(rows)}\n\n{conditions(rows)} {read(folder / NAME)['what']}."


def every_row(folder: Path) -> str:
    return markdown(measured_rows(folder))


def trl(folder: Path) -> str:
    rows = [row for row in measured_rows(folder) if row["workload"].endswith(("-trl", "-trl-qlora"))]
    return f"{in_trl(rows)}\n\n{conditions(rows)}" if rows else "Not measured."


def preference(folder: Path) -> str:
    rows = [row for row in measured_rows(folder) if of_pairs(row) and rate(row)]
    if not rows:
        return "Not measured."
    lines = ["| workload | system | pairs/s | ratio to Unsloth | peak memory |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        speed, unsloth = rate(row) or 0.0, rate(unsloths_best(rows, row["workload"]))
        ratio = f"{speed / unsloth:.2f}" if unsloth else ""
        memory, system = f"{row['peak_gib']:.1f} GiB", SYSTEMS[row["system"]].label
        lines.append(f"| {WORKLOADS[row['workload']].describe()} | {system} | {speed:,.1f} | {ratio} | {memory} |")
    return "\n".join(lines) + f"\n\n{conditions(rows)}"


def log_entries(_: Path) -> str:
    titles = {file.name: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in LOG.glob("20*.md")}
    return "\n".join(f"- {name[:10]} [{title}]({name})" for name, title in sorted(titles.items()))


Block = Callable[[Path], str]
PAGES: dict[Path, dict[str, Block]] = {
    ROOT / "README.md": {"faster": faster, "measured": readme},
    ROOT / "docs" / "results.md": {
        "side-by-side": side_by_side,
        "every-row": every_row,
        "trl": trl,
        "preference": preference,
        **BLOCKS,
        **HOURS,
    },
    LOG / "README.md": {"entries": log_entries},
}


def filled(text: str, name: str, content: str) -> str:
    before, found, rest = text.partition(begin(name))
    if not found or end(name) not in rest:
        raise SystemExit(f"the markers {begin(name)} and {end(name)} are gone")
    return f"{before}{found}\n{content}\n{rest[rest.index(end(name)) :]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--take", type=Path, nargs="*", default=[], metavar="FILE")
    options = parser.parse_args()
    if options.take:
        results = Results(RESULTS / NAME)
        for file in options.take:
            results.take_over(file)
        results.rows = [{name: value for name, value in row.items() if name not in EVERY_STEP} for row in results.rows]
        results.save()
    for page, blocks in PAGES.items():
        text = page.read_text(encoding="utf-8")
        for name, block in blocks.items():
            text = filled(text, name, block(RESULTS))
            if not options.write:
                print(f"{begin(name)}\n{block(RESULTS)}\n")
        if options.write:
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
