"""The target `adapter`: the run's adapter in PEFT's layout, as training wrote it."""

from __future__ import annotations

from pronghorn.data.encode.tokens import padding_id
from pronghorn.errors import CommandError
from pronghorn.export.checking import Reference, Verdict, score
from pronghorn.export.job import Job, copy_files
from pronghorn.export.usage import Usage, base_name
from pronghorn.model.lora import require_adapter
from pronghorn.model.stock import stock_adapter


def refuse(job: Job) -> None:
    if not job.has_adapter:
        raise CommandError(what="the run has no adapter", why="method: full trains the whole model", fix="use --to merged")
    require_adapter(job.checkpoint)


def size(job: Job) -> int:
    return sum(file.stat().st_size for file in job.checkpoint.iterdir() if file.is_file())


def write(job: Job) -> None:
    copy_files(job.checkpoint, job.folder)


def check(job: Job, reference: Reference) -> Verdict:
    """On the base as it was trained on: a stock library has no NF4 or FP8 of ours, but loads the dequantized weights."""
    model = stock_adapter(job.recipe, job.folder)
    job.trained.set_padding(model)
    return job.judged(reference, score(model, reference.rows, job.report), "transformers and PEFT", job.recipe)


def usage(job: Job) -> list[Usage]:
    kind, head = job.loaded_with, job.trained.head
    options = "" if head.generates else head.loading_options(padding_id(job.trained.tokenizer()))
    text = f"""\
from peft import PeftModel
from transformers import {kind}, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
base = {kind}.from_pretrained("{base_name(job.recipe.model)}"{options})
model = PeftModel.from_pretrained(base, folder)"""
    return [Usage("PEFT", "\n".join(filter(None, (text, head.usage))), "python")]
