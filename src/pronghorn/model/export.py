"""A model's files as others read them: the adapter in PEFT's layout, or the whole model in Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open

from pronghorn.errors import EnvironmentFault, ModelError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.model.carried import generation_apart, write_generation
from pronghorn.model.config import read_config
from pronghorn.model.load import load_base, load_model, without_progress_bars
from pronghorn.model.lora import ADAPTER_WEIGHTS, load_adapter
from pronghorn.recipe import Recipe

# Training state, which others do not need.
NOT_EXPORTED = ("manifest.json", "training_state.safetensors", "README.md")


def save_model(model: HFModel, folder: Path, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """An adapter in PEFT's layout, or the whole model in Hugging Face's, perhaps with other `weights` than it holds, by the
    names of its parameters. Without network access."""
    with without_progress_bars():
        if isinstance(model, PeftModel):
            chosen = weights and {name: weights.get(name, p.detach()) for name, p in model.named_parameters()}
            model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=chosen)
            return
        chosen = None
        if weights is not None:
            names = {id(p): name for name, p in model.named_parameters()}
            held = model.state_dict(keep_vars=True)  # a tied head has a name of its own there
            chosen = {key: weights.get(names.get(id(tensor), ""), tensor.detach()) for key, tensor in held.items()}
        with generation_apart(model, folder):
            model.save_pretrained(str(folder), state_dict=chosen)


@dataclass(frozen=True)
class AdapterFiles:
    """The files of `save_model` and the tokenizer: tensors by reference, everything else as bytes."""

    name: str  # of the file with the tensors
    tensors: dict[str, torch.nn.Parameter]  # by stored name
    metadata: dict[str, str]
    small: dict[str, bytes]  # every other file


def adapter_files(model: PeftModel, tokenizer: Tokenizer, folder: Path) -> AdapterFiles:
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


def save_small_files(model: HFModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Everything in a full model's folder except the weights."""
    model.config.save_pretrained(str(folder))
    write_generation(model, folder)
    tokenizer.save_pretrained(str(folder))


def try_small_files(name: str, tokenizer: Tokenizer, folder: Path) -> None:
    """What a checkpoint and a merged export need of the base model beside its weights, before these are loaded."""
    with savable("the tokenizer", name):
        tokenizer.save_pretrained(str(folder))
    with savable("the model's config", name):
        read_config(name).save_pretrained(str(folder))


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
            what=f"cannot save {what}, so no checkpoint or export could be written",
            where=model,
            why=str(error).strip().split("\n")[0] or type(error).__name__,
            fix="repair the model's files (tokenizer_config.json, config.json, generation_config.json)",
        ) from error


def trained_model(checkpoint: Path, recipe: Recipe, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with what was trained, for evaluation and chat."""
    if recipe.method == "full":
        return load_model(str(checkpoint), dtype, device, head=recipe.objective.kind.head)
    base = load_base(recipe, dtype, device)
    return load_adapter(base, checkpoint, recipe.lora, recipe.train.seed)
