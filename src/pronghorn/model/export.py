"""Exports of a run: the adapter in PEFT's layout, or one merged Hugging Face folder, each with a model card."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from pronghorn.errors import CommandError, EnvironmentFault, ModelError
from pronghorn.model.config import read_config
from pronghorn.model.families import text_config
from pronghorn.model.load import DTYPES, load_model, pick_device, resolve_precision, without_progress_bars
from pronghorn.model.lora import ADAPTER_WEIGHTS, PICKLED, load_adapter, require_adapter
from pronghorn.model.merge import save_merged
from pronghorn.model.text_stack import auto_class, copy_processor_files
from pronghorn.recipe import Recipe, named

# Training state, which others do not need.
NOT_EXPORTED = ("manifest.json", "training_state.safetensors", "README.md")


def export(checkpoint: Path, recipe: Recipe, target: Path, to: Literal["adapter", "merged"], figures: dict[str, Any]) -> None:
    """`figures` go into the model card. The target is written to a sibling first, so it is complete or absent."""
    try:
        target = target.resolve()  # `.` has no name for a temporary sibling
    except RuntimeError as error:  # Python's word, until 3.12, for a link to itself
        raise CommandError(
            what="cannot write there: the path is a loop of symbolic links",
            where=str(target),
            fix="choose another folder with --target",
        ) from error
    _refuse_existing(target)
    if to == "adapter" and recipe.method == "full":
        raise CommandError(what="the run has no adapter", why="method: full trains the whole model", fix="use --to merged")
    if recipe.method != "full":
        require_adapter(checkpoint)
    with _beside(target) as beside:
        _refuse_existing(target)  # another export may just have ended
        try:
            config = read_config(recipe.model)
            if merging := to == "merged" and recipe.method != "full":
                _save_merged(checkpoint, recipe, beside)
            _copy(checkpoint, beside, lambda name: not (merging and name.startswith("adapter_")))
            card = model_card(recipe, to, figures, auto_class(config).__name__)
            (beside / "README.md").write_text(card, encoding="utf-8")
            if to == "merged" and text_config(config) is not config:
                copy_processor_files(recipe.model, beside)
            beside.replace(target)
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or str(error).removeprefix("Error while serializing: ")
            raise EnvironmentFault(
                what="cannot write the export",
                where=str(target),
                why=why,
                fix="free some disk space, or choose another folder with --target",
            ) from error


def _refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(
            what="the target folder already exists",
            where=str(target),
            why="an export never overwrites files",
            fix="choose another folder, or remove this one",
        )


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """An empty sibling to write into, held by a lock (flock) on the folder itself: the second of two exports to one
    target is refused; a killed one's folder is reused."""
    beside = target.with_name(f".{target.name}.tmp")
    lock = -1
    try:
        while True:
            beside.mkdir(parents=True, exist_ok=True)
            lock = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), beside.stat()):
                    break
            os.close(lock)  # its holder has just put it in place
    except BlockingIOError as error:
        os.close(lock)
        raise CommandError(
            what="another export is writing to this folder",
            where=str(target),
            why="two exports would mix their files",
            fix="wait for it, or choose another folder with --target",
        ) from error
    except OSError as error:
        raise CommandError(
            what=f"cannot write there: {error.strerror}", where=str(target), fix="choose another folder with --target"
        ) from error
    try:
        for left in beside.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        os.close(lock)


def save_model(model: Any, folder: Path) -> None:
    """An adapter in PEFT's layout, or the whole model in Hugging Face's. Without network access."""
    with without_progress_bars():
        if isinstance(model, PeftModel):
            model.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            model.save_pretrained(str(folder))


@dataclass(frozen=True)
class AdapterFiles:
    """The files of `save_model` and the tokenizer: tensors by reference, everything else as bytes."""

    name: str  # of the file with the tensors
    tensors: dict[str, torch.nn.Parameter]  # by stored name
    metadata: dict[str, str]
    small: dict[str, bytes]  # every other file


def adapter_files(model: PeftModel, tokenizer: Any, folder: Path) -> AdapterFiles:
    """Once per run, before its first step. PEFT writes its files with empty tensors, which gives the names. `folder`: empty."""
    empty = {name: torch.empty(0) for name, _ in model.named_parameters()}
    with without_progress_bars():
        model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=empty)
    tokenizer.save_pretrained(str(folder))
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as stored:
        names, metadata = set(stored.keys()), stored.metadata()
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / ADAPTER_WEIGHTS]
    small = {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
    parameters = {(parameter.data_ptr(), parameter.shape): parameter for parameter in model.parameters()}
    places = {
        name: (tensor.data_ptr(), tensor.shape)
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    tensors = {name: parameters[place] for name, place in places.items() if place in parameters}
    if strange := (names | places.keys()) - (names & tensors.keys()):
        raise RuntimeError(f"PEFT stores tensors that are not model parameters: {sorted(strange)}")
    return AdapterFiles(ADAPTER_WEIGHTS, tensors, metadata, small)


def save_small_files(model: Any, tokenizer: Any, folder: Path) -> None:
    """Everything in a full model's folder except the weights."""
    model.config.save_pretrained(str(folder))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


@contextmanager
def savable(what: str, model: str) -> Iterator[None]:
    """Around writes of transformers, PEFT and tokenizers, whose errors differ."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EnvironmentFault(
            what=f"cannot save {what}",
            where=str(getattr(error, "filename", None) or ""),
            why=why,
            fix="free some disk space, or fix the reported system error; then run the same command again",
        ) from error
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, (ValueError, TypeError, KeyError, AttributeError)):
            raise  # tokenizers raises plain exceptions
        raise ModelError(
            what=f"cannot save {what}, so no checkpoint could be written",
            where=model,
            why=str(error).strip().split("\n")[0] or type(error).__name__,
            fix="repair the model's files (tokenizer_config.json, config.json, generation_config.json)",
        ) from error


def trained_model(checkpoint: Path, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with what was trained, for evaluation and chat."""
    if recipe.method == "full":
        return load_model(str(checkpoint), dtype, device)
    base = load_model(recipe.model, dtype, device, storage=recipe.stored_as)
    return load_adapter(base, checkpoint, recipe.lora, recipe.train.seed)


def _save_merged(checkpoint: Path, recipe: Recipe, folder: Path) -> None:
    """Base weights plus adapter, added in float32; rounded once where the recipe asks for bf16 or fp16.

    A quantized base in the precision of the run, and quantized where the run did it, on the GPU if there is one: its
    reciprocals differ in the last bit, which decides some of the quantized numbers.
    """
    device, wide = torch.device("cpu"), torch.float32
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision, wide)
    if recipe.stored_as != "bf16":
        device = pick_device()
        wide = dtype = DTYPES[resolve_precision(recipe.precision, device)]
    save_merged(trained_model(checkpoint, recipe, wide, device), folder, dtype)


def _copy(source: Path, target: Path, wanted: Any) -> None:
    for file in source.iterdir():
        of_use = file.is_file() and file.name not in NOT_EXPORTED and file.suffix not in PICKLED and wanted(file.name)
        if of_use and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


def model_card(recipe: Recipe, to: str, figures: dict[str, Any], kind: str = "AutoModelForCausalLM") -> str:
    """`kind`: transformers' class that loads the base. Paths are reduced to their last part."""
    adapter = to == "adapter"
    base, local = _public_name(recipe.model), _is_local(recipe.model)
    data = ", ".join(_public_name(named(one)) for one in recipe.data.train)
    rows = "\n".join(f"| {name} | {f'{value:.4f}' if isinstance(value, float) else value} |" for name, value in figures.items())
    imports = (
        f"from peft import PeftModel\nfrom transformers import {kind}, AutoTokenizer\n"
        if adapter
        else (f"from transformers import {kind}, AutoTokenizer\n")
    )
    load = """\
folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained(folder)
""" + (
        f"""\
base = {kind}.from_pretrained("{f"path/to/{base}" if local else base}")
model = PeftModel.from_pretrained(base, folder)"""
        if adapter
        else f"model = {kind}.from_pretrained(folder)"
    )
    return f"""---
{"" if local else f"base_model: {base}{chr(10)}"}library_name: {"peft" if adapter else "transformers"}
pipeline_tag: text-generation
tags: [pronghorn, {recipe.method}]
---
# {Path(recipe.output).name}

{base}, fine-tuned with Pronghorn ({recipe.method}) on {data}.

| | |
|---|---|
{rows}

```python
{imports}
{load}
```
"""


def _is_local(name: str) -> bool:
    return Path(name).exists() or name.startswith(("/", "./", "../", "~"))


def _public_name(name: str) -> str:
    """The last part of a local path; a hub name unchanged."""
    return Path(name).resolve().name if _is_local(name) else name
