"""The target `gguf`: one file for llama.cpp and the programs built on it, in 16 bits or quantized, or the adapter alone."""

from __future__ import annotations

import importlib.metadata
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, ModelError
from pronghorn.export import gguf_lora, llama_cpp, merged
from pronghorn.export.checking import HALF, Reference, Scores, Tolerance, Verdict
from pronghorn.export.gguf_convert import INSTALL, Source, architecture_of, convert, require_converter, widest
from pronghorn.export.gguf_file import quantized
from pronghorn.export.gguf_mixture import MIXTURES
from pronghorn.export.job import Job
from pronghorn.export.usage import Usage, base_name
from pronghorn.hub import model_folder

ADAPTER = "adapter"
WIDE = ("f16", "bf16", "f32")
VARIANTS = ("q8_0", "q4_k_m", "q5_k_m", "q6_k", *WIDE, ADAPTER)
# What a file may differ by from the trained model. llama.cpp keeps keys and values in 16 bits by default.
# Seen: q4_k_m 0.62 for the largest difference and 1 % of the likeliest tokens in the demo's model. In a model that has learned
# nothing, whose likeliest tokens are hardly likelier than others: q6_k 0.18 (mean 0.07) and 17 %, q5_k_m 0.56 (0.16) and 29 %.
TOLERANCES = {
    "q8_0": Tolerance(1.0, 0.03, 0.85, mean=0.2),
    "q6_k": Tolerance(2.0, 0.05, 0.7, mean=0.3),
    "q5_k_m": Tolerance(3.0, 0.1, 0.6, mean=0.5),
    "q4_k_m": Tolerance(5.0, 0.2, 0.5, mean=0.8),
}
# Bytes of the file beside those of the merged model in 16 bits.
SHARE = {"q8_0": 0.54, "q6_k": 0.45, "q5_k_m": 0.4, "q4_k_m": 0.36, "f32": 2.0}
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
    require_converter(architecture_of(source))
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
    base = model_folder(job.recipe.model)
    if job.variant == ADAPTER:
        converter = require_converter(architecture_of(base))
        gguf_lora.write(job.checkpoint, base, target, title(job), converter)
    else:
        wide = target if job.variant in WIDE else job.folder / ".wide.gguf"
        source = Source(job.merged(), title(job), base, begins_with_bos(job.trained.tokenizer()))
        converter = convert(source, wide, job.variant if job.variant in WIDE else widest(source.folder), job.report)
        if wide != target:
            job.facts["tensors"] = quantized(wide, target, job.variant, job.report)
            wide.unlink()
        if job.merged_onto:
            job.facts["merged_onto"] = job.merged_onto
    job.facts["converter"] = converter.name
    job.facts["gguf"] = importlib.metadata.version("gguf")


def begins_with_bos(tokenizer: Any) -> bool:
    """Whether llama.cpp is to put that token before every text. It would, in some families (those with sentencepiece), unless
    the file says otherwise; in a chat that was one token more than the model was trained with."""
    texts = [tokenizer("a")["input_ids"], rendered(tokenizer, CHATS[0])]
    return tokenizer.bos_token_id is not None and all(ids[0] == tokenizer.bos_token_id for ids in texts if ids)


def check(job: Job, reference: Reference) -> Verdict:
    loaded_with = llama_cpp.version()
    if loaded_with is None:
        return Verdict.skipped(f"{llama_cpp.PACKAGE} is not installed ({INSTALL})")
    tokenizer = job.trained.tokenizer()
    chats = [(chat, ids) for chat in CHATS if (ids := rendered(tokenizer, chat)) is not None]
    texts = [(text, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    asked = llama_cpp.Asked(
        [chat for chat, _ in chats],
        [text for text, _ in texts],
        [{"ids": list(row.ids), "start": row.start} for row in reference.rows],
    )
    if job.variant == ADAPTER:
        try:
            found = _beside_its_base(job, asked)
        except ModelError as error:  # a base in a format that the converter does not read
            return Verdict.skipped(f"the base has no GGUF form to load it beside: {error.why or error.what}")
    else:
        found = llama_cpp.ask(job.folder / file_name(job), asked, job.report)
    scores = [Scores(tuple(one["best"]), tuple(one["log_probs"])) for one in found.scores]
    verdict = reference.verdict(scores, tolerance(job), loaded_with)
    same_chats = [one["ids"] == ids for one, (_, ids) in zip(found.rendered, chats, strict=True)]
    same_texts = [ids == expected for ids, (_, expected) in zip(found.tokens, texts, strict=True)]
    job.facts["same_chat_template"] = f"{sum(same_chats)} of {len(same_chats)} chats have the same tokens"
    job.facts["same_tokenizer"] = f"{sum(same_texts)} of {len(same_texts)} texts have the same tokens"
    wrong = []
    if not all(same_chats):
        wrong.append("llama.cpp renders the chat template to other tokens")
    if not all(same_texts):
        wrong.append("llama.cpp splits text into other tokens")
    return replace(verdict, passed=False, sentence="; ".join([*wrong, verdict.sentence])) if wrong else verdict


def tolerance(job: Job) -> Tolerance:
    if job.options.base != "trained":
        return merged.OTHER_BASE
    if job.variant == ADAPTER and job.recipe.stored_as != "bf16":
        return TOLERANCES["q4_k_m"]  # the base that it is loaded beside is not the one, in 4 or 8 bits, that it was trained on
    return TOLERANCES.get(job.variant, HALF)


def rendered(tokenizer: Any, chat: list[dict[str, str]]) -> list[int] | None:
    """None: there is no template, or it refuses (a system prompt, often)."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        return None
    try:
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))
    except TemplateError:
        return None


def _beside_its_base(job: Job, asked: llama_cpp.Asked) -> llama_cpp.Answers:
    """The base as a GGUF file, for this check only."""
    base = model_folder(job.recipe.model, weights=True)
    with tempfile.TemporaryDirectory(dir=job.folder, prefix=".base-") as name:
        file = Path(name) / "base.gguf"
        convert(Source(base, "base", base, begins_with_bos(job.trained.tokenizer())), file, widest(base), job.report)
        return llama_cpp.ask(file, asked, job.report, lora=job.folder / file_name(job))


def usage(job: Job) -> list[Usage]:
    file = f"path/to/this/folder/{file_name(job)}"
    if job.variant == ADAPTER:
        base = Path(base_name(job.recipe.model)).name
        return [Usage("llama.cpp", f"llama-server -m path/to/{base}.gguf --lora {file} --jinja")]
    return [Usage("llama.cpp", f"llama-server -m {file} --jinja")]
