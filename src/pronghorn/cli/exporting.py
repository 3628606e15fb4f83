"""`pronghorn export`: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.cli.output import displaying, say
from pronghorn.errors import CheckFailed
from pronghorn.process import importing

if TYPE_CHECKING:
    from pronghorn.export.run import Written

TEXT = "write what was trained for the program that is to run it, and compare it there with the trained model"
NAMES = "adapter, merged, gguf, ollama, vllm, fp8, nvfp4"  # of export/targets.py, which imports torch


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--to", metavar="A,B", required=True, help=f"what to write: {NAMES}; several at once")
    one.add_argument(
        "--target", help="output folder, which has one folder a target if there are several (default: RUN/export-A)"
    )
    one.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="of merged weights (default: the recipe's precision)")
    one.add_argument(
        "--base",
        choices=("trained", "original"),
        default="trained",
        help="of a merge after method: qlora or fp8: the weights it was trained on, dequantized, or the base model's original "
        "ones (default: %(default)s)",
    )
    one.add_argument(
        "--push-to-hub", metavar="OWNER/NAME", help="upload the export with the token in HF_TOKEN, as a private model"
    )
    one.add_argument("--no-check", action="store_true", help="do not load the export and compare it with the trained model")


def export(
    arguments: argparse.Namespace, base_of: Callable[[Path], str], loading: Callable[[str], AbstractContextManager[None]]
) -> None:
    run, target = Path(arguments.run), Path(arguments.target) if arguments.target else None
    with displaying(arguments, label="exporting") as display:
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
        written = export_run(run, arguments.checkpoint, target, arguments.to, options=chosen, report=display.progress)
        pushed = ""
        if arguments.push_to_hub and written[0].verdict.passed is not False:
            pushed = push(written[0].folder, arguments.push_to_hub, display.progress)
    for one in written:
        more = {"pushed": pushed} if pushed else {}
        say(arguments, as_dict(one) | more, "\n".join([text(one), *(f"{key}: {value}" for key, value in more.items())]))
    if failed := [one for one in written if one.verdict.passed is False]:
        raise CheckFailed(
            what="the export does not say what the trained model says",
            where=str(failed[0].folder),
            why=failed[0].verdict.sentence,
            fix="do not use it; export again, and report this if it happens again",
        )


def as_dict(one: Written) -> dict[str, Any]:
    return {"written": str(one.folder), "target": one.name, "check": one.verdict.as_dict()}


def text(one: Written) -> str:
    runs = [f"{usage.program}: {line}" for usage in one.usages if "\n" not in (line := usage.in_folder(one.folder))]
    return "\n".join([f"wrote {one.folder}", f"check: {one.verdict.sentence}", *runs])
