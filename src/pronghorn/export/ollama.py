"""The target `ollama`: the GGUF file, and a Modelfile with template, stop strings, parameters and the system prompt."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pronghorn.data.prepare import prepare
from pronghorn.errors import PronghornError
from pronghorn.export import gguf_target
from pronghorn.export.gguf_mixture import TYPES
from pronghorn.export.job import Job
from pronghorn.export.ollama_template import Turns, turns_of
from pronghorn.export.usage import Usage
from pronghorn.hf_types import Tokenizer

MODELFILE = "Modelfile"
VARIANTS = TYPES
CONTEXT = 4096  # tokens, unless the model has fewer, or was trained on more
ROWS = 100  # of the data, among which the system prompt is one, if it is
# Ollama's word -> generation_config.json's
SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
check, size = gguf_target.check, gguf_target.size


def refuse(job: Job) -> None:
    gguf_target.refuse(job)
    _turns(job.trained.tokenizer())


def _turns(tokenizer: Tokenizer) -> Turns:
    return turns_of(tokenizer, gguf_target.begins_with_bos(tokenizer))


def write(job: Job) -> None:
    gguf_target.write(job)
    tokenizer = job.trained.tokenizer()
    turns = _turns(tokenizer)
    config = json.loads((job.merged() / "config.json").read_text(encoding="utf-8"))
    longest = config.get("max_position_embeddings") or CONTEXT
    parameters: list[tuple[str, str]] = [("stop", json.dumps(stop)) for stop in stops(tokenizer, turns)]
    parameters.append(("num_ctx", str(min(longest, max(CONTEXT, job.recipe.data.max_length)))))
    parameters += sampling(job.merged())
    system = system_prompt(job, tokenizer) if "system" in turns.around else None
    dated = "strftime_now" in str(tokenizer.chat_template)
    text = "# The date in the template is that of the export.\n" if dated else ""
    text += modelfile(gguf_target.file_name(job), turns, parameters, system)
    (job.folder / MODELFILE).write_text(text, encoding="utf-8")
    job.facts["ollama"] = {"system_prompt": system or "", "parameters": [" ".join(one) for one in parameters]}


def modelfile(file: str, turns: Turns, parameters: list[tuple[str, str]], system: str | None) -> str:
    lines = [f"FROM ./{file}", f'TEMPLATE """{turns.go_template()}"""']
    lines += [f"PARAMETER {name} {value}" for name, value in parameters]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"


def stops(tokenizer: Tokenizer, turns: Turns) -> list[str]:
    """The token that ends a text, and the one that ends an answer, if it is another."""
    special = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)
    ends = turns.ends.lstrip()
    found = [tokenizer.eos_token, *(token for token in special if ends.startswith(token))]
    return list(dict.fromkeys(str(one) for one in found if one))


def sampling(folder: Path) -> list[tuple[str, str]]:
    """What the model's own settings say. No penalty for repetition otherwise: Ollama's default is not what was trained."""
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = [(name, f"{settings[key]:g}") for name, key in SAMPLING.items() if settings.get(key) is not None]
    return [*found, ("repeat_penalty", f"{settings.get('repetition_penalty') or 1:g}")]


def system_prompt(job: Job, tokenizer: Tokenizer) -> str | None:
    """The one that all rows of the data begin with."""
    data = job.recipe.data
    try:
        files = (data.eval,) if isinstance(data.eval, str) else data.train
        table = prepare(files, data, tokenizer, progress=job.report).tokens
    except PronghornError:
        return None  # the data is gone
    found = set()
    for text in table.examples_json(0, min(ROWS, len(table))):
        messages = json.loads(text).get("messages") or [{}]
        found.add(messages[0].get("content") if messages[0].get("role") == "system" else None)
    (only,) = found if len(found) == 1 else (None,)
    return only if isinstance(only, str) and '"""' not in only else None


def usage(job: Job) -> list[Usage]:
    name = re.sub(r"[^a-z0-9._-]+", "-", gguf_target.title(job).lower()).strip("-._") or "model"
    return [Usage("Ollama", f"ollama create {name} -f path/to/this/folder/{MODELFILE}\nollama run {name}")]
