"""A first evening with Pronghorn, as a terminal session: real commands, one process each, on a tiny model that is made here.

    python -m benchmarks.first_evening            # print it
    python -m benchmarks.first_evening --write    # docs/first-evening.md

It needs neither a GPU nor a network and takes two to five minutes on two cores. Paths are the same everywhere; times and speeds
are this machine's.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.samples import chat_rows, make_model, make_tokenizer, write_rows

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "first-evening.md"
MOST_LINES = 60  # of one command
RECIPE = """\
model: models/tiny
method: full
data: {train: rows.jsonl, eval: 0.1, max_length: 128}
train: {epochs: 8, batch_tokens: 512, capacity: 512, lr: 1e-2}
eval: {every: 50, metrics: exact_match, samples: 8, max_new_tokens: 16}
output: runs/first
"""
HEAD = """\
# A first evening

`python -m benchmarks.first_evening --write` recorded this terminal session on a CPU. The model has 27 thousand random weights,
so its answers are nonsense. With a real model, only names and numbers change. While a run trains, `runs/first/report.html`
shows its progress in a browser.
"""
# What is said before a command, and the command. A word behind # is for this script alone.
STEPS = (
    ("Without a command, `pronghorn` prints its help.", "pronghorn"),
    ("For a typo, it suggests a command.", "pronghorn tran my.yaml"),
    ("`pronghorn new my.yaml` writes every key. This recipe has only the keys that differ from the defaults.", "cat my.yaml"),
    ("Check the recipe, the model and the data before training.", "pronghorn check my.yaml"),
    ("Show which tokens carry loss: those in « », which a terminal shows in green.", "pronghorn data show my.yaml --row 3"),
    ("Show statistics of the data.", "pronghorn data stats my.yaml"),
    ("Predict memory, time and cost on another GPU.", "pronghorn plan my.yaml --gpu rtx4090 --host 32GB"),
    ("Train, and interrupt with Ctrl-C.", "pronghorn train my.yaml # interrupted"),
    ("The same command resumes.", "pronghorn train my.yaml"),
    ("A changed recipe cannot resume in the same folder.", "pronghorn train my.yaml train.lr=1e-3"),
    ("Train it into another folder.", "pronghorn train my.yaml train.lr=1e-3 output=runs/slower --json # silent"),
    ("Compare the result with the base model.", "pronghorn eval runs/first --metrics exact_match --base"),
    ("Ask the model a question.", 'pronghorn chat runs/first --prompt "add 2 and 3" --max-tokens 16'),
    ("Export a merged model for transformers, vLLM and other programs.", "pronghorn export runs/first --to merged"),
    ("List runs, then compare two.", "pronghorn runs"),
    ("", "pronghorn runs runs/first runs/slower"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help=f"write {TARGET.name}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = session(Path(folder))
    if arguments.write:
        TARGET.write_text(text, encoding="utf-8")
    print(text)


def session(folder: Path) -> str:
    prepare(folder)
    parts = [HEAD]
    for said, command in STEPS:
        line, _, note = command.partition(" # ")
        output = ran(folder, line, interrupt=note == "interrupted")
        shown = [] if note == "silent" else output.rstrip().splitlines()
        if len(shown) > MOST_LINES:
            shown = [*shown[:MOST_LINES], f"... {len(shown) - MOST_LINES} more lines"]
        block = "\n".join([f"$ {line}" + (" > log.jsonl" if note == "silent" else ""), *(one.rstrip() for one in shown)])
        parts.append("\n".join(filter(None, [said, f"\n```\n{block}\n```"])))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def prepare(folder: Path) -> None:
    model = make_model()
    model.save_pretrained(folder / "models" / "tiny")
    make_tokenizer().save_pretrained(folder / "models" / "tiny")
    write_rows(folder / "rows.jsonl", chat_rows(200))
    (folder / "my.yaml").write_text(RECIPE, encoding="utf-8")


def ran(folder: Path, line: str, *, interrupt: bool = False) -> str:
    """What the command prints; with `interrupt`, Ctrl-C comes once it has made a few steps."""
    words = shlex.split(line)
    if words[0] == "pronghorn":
        words = [sys.executable, "-m", "pronghorn.cli", *words[1:]]
    environment = os.environ | {
        "PRONGHORN_CACHE": str(folder / "cache"),
        "COLUMNS": "100",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # where `pronghorn` is
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT / "src"),
    }
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    assert process.stdout is not None
    said: list[str] = []
    for text in process.stdout:
        said.append(text)
        if interrupt and text.startswith("step "):
            time.sleep(0.5)  # a few more steps
            process.send_signal(signal.SIGINT)
            interrupt = False
    process.wait()
    return "".join(said).replace(f"{folder.resolve()}/", "/home/me/")


if __name__ == "__main__":
    main()
