"""The target `merged`: one Hugging Face folder with the adapter merged in."""

from __future__ import annotations

from pronghorn.errors import CommandError
from pronghorn.export.checking import Reference, Verdict, score
from pronghorn.export.job import Job, write_merged
from pronghorn.export.usage import Usage
from pronghorn.hub import model_folder
from pronghorn.model.config import read_config
from pronghorn.model.families import text_config
from pronghorn.model.formats.checkpoint import published_format
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import require_adapter
from pronghorn.model.stock import stock_model
from pronghorn.model.text_stack import copy_processor_files


def refuse(job: Job) -> None:
    if job.has_adapter:
        require_adapter(job.checkpoint)
    if job.options.base != "original":
        return
    if not job.merged_onto:
        raise CommandError(
            what="--base original has no effect on this run", why="it was trained on the original weights", fix="remove --base"
        )
    stored = FORMATS.get(published_format(read_config(job.recipe.model)))
    if stored is not None and stored.read is not None:
        raise CommandError(
            what="--base original: the base model has no original weights",
            where=job.recipe.model,
            why=f"it is published in {stored.title}",
            fix="remove --base: the adapter is merged onto the dequantized weights",
        )


def size(job: Job) -> int:
    if not job.has_adapter and job.options.dtype is None:
        return sum(file.stat().st_size for file in job.checkpoint.glob("*.safetensors"))
    return job.model_facts.parameters * job.dtype.itemsize


def write(job: Job) -> None:
    write_merged(job, job.folder)
    if (config := read_config(job.recipe.model)) is not text_config(config):
        copy_processor_files(model_folder(job.recipe.model), job.folder)
    if job.merged_onto:
        job.facts["merged_onto"] = job.merged_onto


def check(job: Job, reference: Reference) -> Verdict:
    found = score(stock_model(job.folder), reference.rows, job.report)
    return job.judged(reference, found, "transformers", job.base_recipe)


def usage(job: Job) -> list[Usage]:
    kind = job.loaded_with
    text = f"""\
from transformers import {kind}, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {kind}.from_pretrained(folder)"""
    head = job.trained.head
    if not head.generates:
        return [Usage("transformers", f"{text}\n{head.usage}", "python")]
    return [Usage("transformers", text, "python"), Usage("vLLM", "vllm serve path/to/this/folder")]
