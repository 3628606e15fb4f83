"""The target `merged`: one Hugging Face folder with the adapter merged in."""

from __future__ import annotations

from pronghorn.export.checking import Reference, Verdict, score
from pronghorn.export.job import Job, write_merged
from pronghorn.export.usage import Usage
from pronghorn.hub import model_folder
from pronghorn.model.config import read_config
from pronghorn.model.families import text_config
from pronghorn.model.stock import stock_model
from pronghorn.model.text_stack import auto_class, copy_processor_files
from pronghorn.model.weight_files import stored_weights


def size(job: Job) -> int:
    source = job.checkpoint if not job.has_adapter else model_folder(job.recipe.model, weights=True)
    found = stored_weights(source)
    return 0 if found is None else found.bytes


def write(job: Job) -> None:
    write_merged(job, job.folder)
    config = read_config(job.recipe.model)
    if text_config(config) is not config:
        copy_processor_files(job.recipe.model, job.folder)


def check(job: Job, reference: Reference) -> Verdict:
    return reference.verdict(score(stock_model(job.folder), reference.rows, job.report), job.tolerance(), "transformers")


def usage(job: Job) -> list[Usage]:
    kind = auto_class(read_config(job.recipe.model)).__name__
    text = f"""\
from transformers import {kind}, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {kind}.from_pretrained(folder)"""
    return [Usage("transformers", text, "python"), Usage("vLLM", "vllm serve path/to/this/folder")]
