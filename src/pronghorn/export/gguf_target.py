"""The target `gguf`: one file for llama.cpp and the programs built on it, in 16 bits or quantized, or the adapter alone."""

from __future__ import annotations

import importlib.metadata
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import torch

from pronghorn.data.template.rendering import RowError, applied
from pronghorn.errors import CommandError, ModelError
from pronghorn.export import gguf_lora, llama_cpp, merged
from pronghorn.export.checking import Reference, Scores, Verdict, difference
from pronghorn.export.gguf_convert import INSTALL, Converter, Source, convert, require_convertible, widest
from pronghorn.export.gguf_file import differing, quantized
from pronghorn.export.gguf_mixture import MIXTURES, TYPES, WIDE
from pronghorn.export.job import Job, write_base
from pronghorn.export.quantizer import require_quantizer
from pronghorn.export.usage import Usage, base_name
from pronghorn.hf_types import Tokenizer
from pronghorn.hub import model_folder

ADAPTER = "adapter"
VARIANTS = (*TYPES, ADAPTER)
# What llama.cpp computes with such weights in; of 32 bits it is what it keeps keys and values in.
ARITHMETIC = {"f32": torch.float16, "f16": torch.float16, "bf16": torch.bfloat16}
# Bytes of the file beside those of the merged model in 16 bits.
SHARE = {"q8_0": 0.54, "q6_k": 0.45, "q5_k_m": 0.4, "q5_0": 0.4, "q4_k_m": 0.36, "q4_0": 0.36, "iq4_xs": 0.36, "q3_k_m": 0.36}
SHARE |= {"f32": 2.0}
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello, who are you?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is 2 < 3?"}],
    [
        {"role": "user", "content": "First question"},
        {"role": "assistant", "content": "First answer."},
        {"role": "user", "content": "And the second?\nWith two lines."},
    ],
)
TEXTS = ("Hello world, it's 3.14159 or 1,000,000!", '  indented\n\n\tcode(x) += "é水🙂";', "CamelCase snake_case 'll don't")


def file_name(job: Job) -> str:
    """As such files are called: Name-Q4_K_M.gguf."""
    return f"{title(job)}-{job.variant.upper()}.gguf"


def title(job: Job) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(job.recipe.output).name) or "model"


def refuse(job: Job) -> None:
    merged.refuse(job)
    source = job.checkpoint if not job.has_adapter else model_folder(job.recipe.model)
    require_convertible(source)
    require_quantizer(job.variant)
    if job.variant == ADAPTER:
        if not job.has_adapter:
            raise CommandError("the run has no adapter", why="method: full trains the whole model", fix="use --to gguf:q8_0")
        gguf_lora.refuse(job.checkpoint)


def size(job: Job) -> int:
    """With the merged folder, and the file in 16 or 32 bits that a quantized one is made of."""
    if job.variant == ADAPTER:
        return sum(file.stat().st_size for file in job.checkpoint.glob("adapter_model*"))
    wide = merged.size(job)
    return int(wide * (1 + SHARE.get(job.variant, 1.0) + (job.variant in MIXTURES)))


def write(job: Job) -> None:
    target = job.folder / file_name(job)
    if job.variant == ADAPTER:
        base = model_folder(job.recipe.model)
        converter = require_convertible(base)
        gguf_lora.write(job.checkpoint, base, target, title(job), converter)
    elif job.variant in WIDE:
        converter = _converted(job, target, job.variant)
    else:
        wide = _wide_file(job)
        job.facts["tensors"] = quantized(wide.file, target, job.variant, job.report)
        converter = wide.converter
    if job.merged_onto and job.variant != ADAPTER:
        job.facts["merged_onto"] = job.merged_onto
    job.facts["converter"] = converter.name
    job.facts["gguf"] = importlib.metadata.version("gguf")


@dataclass
class WideFile:
    """What quantized files are made of: one for all of a command."""

    file: Path
    converter: Converter
    scores: list[Scores] | None = None  # llama.cpp's with it


def _wide_file(job: Job) -> WideFile:
    assert job.scratch is not None
    if "gguf" not in job.scratch.made:
        file = job.scratch.place(job, "gguf") / "wide.gguf"
        job.scratch.made["gguf"] = WideFile(file, _converted(job, file, widest(job.merged())))
    found: WideFile = job.scratch.made["gguf"]
    return found


def _converted(job: Job, target: Path, kind: str) -> Converter:
    bos = begins_with_bos(job.trained.tokenizer())
    return convert(Source(job.merged(), title(job), model_folder(job.recipe.model), bos), target, kind, job.report)


def begins_with_bos(tokenizer: Tokenizer) -> bool:
    """Whether llama.cpp is to put that token before every text. It would, in some families (those with sentencepiece), unless
    the file says otherwise; in a chat that was one token more than the model was trained with."""
    texts = [tokenizer("a")["input_ids"], rendered(tokenizer, CHATS[0])]
    return tokenizer.bos_token_id is not None and all(ids[0] == tokenizer.bos_token_id for ids in texts if ids)


def check(job: Job, reference: Reference) -> Verdict:
    """A quantized file in three steps: llama.cpp with the file that it was made of, which is to say what was trained; every
    weight, read by the package gguf, beside that file's; and llama.cpp with the file itself, for what the format loses."""
    loaded_with = llama_cpp.version()
    if loaded_with is None:
        return Verdict.skipped(f"{llama_cpp.PACKAGE} is not installed ({INSTALL})")
    tokenizer = job.trained.tokenizer()
    chats = [(chat, ids) for chat in CHATS if (ids := rendered(tokenizer, chat)) is not None]
    texts = [(text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    rows = [{"ids": list(row.ids), "start": row.start} for row in reference.rows]
    asked = llama_cpp.Questions([chat for chat, _ in chats], [text for text, _ in texts], rows)
    if job.variant == ADAPTER:
        try:
            found, kind = _beside_its_base(job, asked)
        except ModelError as error:  # a base in a format that the converter does not read
            return Verdict.skipped(f"llama.cpp needs the base model as GGUF to load the adapter: {error.why or error.what}")
    else:
        found = llama_cpp.ask(job.folder / file_name(job), asked, job.report)
        kind = job.variant if job.variant in WIDE else widest(job.merged())
    same_chats = [one["ids"] == ids for one, (_, ids) in zip(found.rendered, chats, strict=True)]
    same_texts = [ids == expected for ids, (_, expected) in zip(found.tokens, texts, strict=True)]
    job.facts["same_chat_template"] = f"{sum(same_chats)} of {len(same_chats)} chats have the same tokens"
    job.facts["same_tokenizer"] = f"{sum(same_texts)} of {len(same_texts)} texts have the same tokens"
    wrong = []
    if not all(same_chats):
        wrong.append("llama.cpp renders the chat template to different tokens")
    if not all(same_texts):
        wrong.append("llama.cpp splits text into different tokens")
    scores = unrounded = _scores(found)
    if job.variant in MIXTURES:
        wide = _wide_file(job)
        wrong += differing(wide.file, job.folder / file_name(job), job.report)
        wide.scores = wide.scores or _scores(llama_cpp.ask(wide.file, llama_cpp.Questions(rows=rows), job.report))
        unrounded = wide.scores
    beyond = difference(job.expected(reference, job.recipe if job.variant == ADAPTER else job.base_recipe), unrounded)
    wrong += job.tolerance(reference, ARITHMETIC[kind]).exceeded(beyond)
    return reference.verdict(scores, job.limit(), loaded_with, wrong=wrong, beyond=beyond)


def _scores(found: llama_cpp.Answers) -> list[Scores]:
    return [Scores(tuple(one["best"]), tuple(one["log_probs"])) for one in found.scores]


def rendered(tokenizer: Tokenizer, chat: list[dict[str, str]]) -> list[int] | None:
    """None: there is no template, or it refuses (a system prompt, often)."""
    if not tokenizer.chat_template:
        return None
    try:
        return list(applied(tokenizer, chat))
    except RowError:
        return None


def _beside_its_base(job: Job, asked: llama_cpp.Questions) -> tuple[llama_cpp.Answers, str]:
    """The base as a GGUF file, for this check only: with the weights that the adapter was trained on. And that file's type."""
    original = model_folder(job.recipe.model, weights=True)
    with tempfile.TemporaryDirectory(dir=job.folder, prefix=".base-") as name:
        base, file = original, Path(name) / "base.gguf"
        if job.recipe.stored_as != "bf16":
            base = Path(name)
            write_base(job, base)
        kind = widest(base)
        convert(Source(base, "base", original, begins_with_bos(job.trained.tokenizer())), file, kind, job.report)
        return llama_cpp.ask(file, asked, job.report, lora=job.folder / file_name(job)), kind


def usage(job: Job) -> list[Usage]:
    file = f"path/to/this/folder/{file_name(job)}"
    if job.variant == ADAPTER:
        base = quote(Path(base_name(job.recipe.model)).name)
        return [Usage("llama.cpp", f"llama-server -m path/to/{base}.gguf --lora {file} --jinja")]
    return [Usage("llama.cpp", f"llama-server -m {file} --jinja")]
