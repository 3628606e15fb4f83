"""`pronghorn export`: its options, and what it prints."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.cli.output import displaying, say
from pronghorn.errors import CheckFailed
from pronghorn.export.gguf_mixture import TYPES
from pronghorn.process import importing

if TYPE_CHECKING:
    from pronghorn.export.run import Written

TEXT = "export the trained model for another program, load the export there, and compare it with the trained model"
NAMES = "adapter, merged, gguf, ollama, vllm, fp8, nvfp4"  # of export/targets.py, which imports torch
EXPORTING, TICK = "exporting", 2.0  # seconds
Report = Callable[[str, int, int], None]


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--to",
        metavar="A,B",
        help=f"formats to write, separated by commas: {NAMES}; gguf and ollama with a type (gguf:q4_k_m): {', '.join(TYPES)} "
        f"(default: {TYPES[0]}); gguf:adapter, fp8:base",
    )
    one.add_argument(
        "--sizes", action="store_true", help="only tell how large each export would be, and what cannot be written"
    )
    one.add_argument("--target", help="output folder; several formats get one subfolder each (default: RUN/export-A)")
    one.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="data type of merged weights (default: the recipe's precision)"
    )
    one.add_argument(
        "--base",
        choices=("trained", "original"),
        default="trained",
        help="after method: qlora or fp8, merge the adapter into the dequantized weights it was trained on (trained) or "
        "into the base model's original weights (original) (default: %(default)s)",
    )
    one.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="upload the export as a private model, with the token in HF_TOKEN"
    )
    one.add_argument(
        "--no-check", action="store_true", help="skip the check that loads the export and compares it with the trained model"
    )


def export(
    arguments: argparse.Namespace, base_of: Callable[[Path], str], loading: Callable[[str], AbstractContextManager[None]]
) -> None:
    run, target = Path(arguments.run), Path(arguments.target) if arguments.target else None
    if arguments.sizes:
        _sizes(arguments, run)
        return
    if arguments.to is None:
        arguments.parser.error("the following arguments are required: --to")
    with displaying(arguments, label=EXPORTING) as display, ticking(display.progress) as report:
        with importing():
            from pronghorn.export.job import Options
            from pronghorn.export.push import push, require_push
            from pronghorn.export.targets import asked_for
        asked = asked_for(arguments.to)
        if arguments.push_to_hub:
            require_push(arguments.push_to_hub, len(asked))
        with loading(base_of(run)):
            from pronghorn.export.run import export_run
        chosen = Options(arguments.dtype, arguments.base, check=not arguments.no_check)
        written = export_run(run, arguments.checkpoint, target, arguments.to, options=chosen, report=report)
        pushed = ""
        if arguments.push_to_hub and written[0].verdict.passed is not False:
            pushed = push(written[0].folder, arguments.push_to_hub, report)
    for one in written:
        more = {"pushed": pushed} if pushed else {}
        say(arguments, as_dict(one) | more, "\n".join([text(one), *(f"{key}: {value}" for key, value in more.items())]))
    if failed := [one for one in written if one.verdict.passed is False]:
        raise CheckFailed(
            what="the export does not match the trained model",
            where=str(failed[0].folder),
            why=failed[0].verdict.sentence,
            fix="do not use this export; export again, and report a bug if it happens again",
        )


def _sizes(arguments: argparse.Namespace, run: Path) -> None:
    with displaying(arguments, label="reading shapes"):
        with importing():
            from pronghorn.export.sizes import sizes
            from pronghorn.report.number_format import size
        found = sizes(run, arguments.checkpoint)
    lines = [f"{one['to']:16} " + (one["refused"] or f"about {size(one['bytes'])}") for one in found]
    say(arguments, {"sizes": found}, "\n".join(lines))


@contextmanager
def ticking(progress: Report) -> Iterator[Report]:
    """`progress`, and every 2 s again what it was told last: some parts of an export (loading a model, hashing its files) say
    nothing for minutes, and lines of plain text appear only when something is said."""
    lock, over, last = threading.Lock(), threading.Event(), [(EXPORTING, 0, 0)]

    def report(label: str, done: int, total: int) -> None:
        with lock:
            last[0] = (label, done, total) if not total or done < total else (EXPORTING, 0, 0)
            progress(label, done, total)

    def again() -> None:
        while not over.wait(TICK):
            with lock:
                progress(*last[0])

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield report
    finally:
        over.set()
        thread.join()


def as_dict(one: Written) -> dict[str, Any]:
    return {"written": str(one.folder), "target": one.name, "check": one.verdict.as_dict()}


def text(one: Written) -> str:
    """With the commands that run it; a program's lines are in the model card."""
    lines = [f"wrote {one.folder}", f"check: {one.verdict.sentence}"]
    for usage in one.usages if one.verdict.passed is not False else []:
        if usage.language == "bash":
            lines += [f"to run it with {usage.program}:", *(f"  {line}" for line in usage.in_folder(one.folder).splitlines())]
    return "\n".join(lines)
