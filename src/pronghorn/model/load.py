"""Loads a model by name or folder, in the requested precision, after all checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR, LogRecord
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Mxfp4Config, PreTrainedModel
from transformers.utils import logging

from pronghorn.errors import ModelError, RecipeError, counted
from pronghorn.hf_types import HFConfig, HFModel, Tokenizer
from pronghorn.hub import model_folder, no_such_model, pickled_weights
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.model.carried import remember_folder
from pronghorn.model.config import constructed, empty_model, generation_config, guarded, no_config, place, read_config
from pronghorn.model.config_check import require_enough_weights, require_weights_for
from pronghorn.model.families import FAMILIES, num_experts, text_config
from pronghorn.model.formats.checkpoint import load_stored, published_format, refuse_unreadable
from pronghorn.model.formats.table import FORMATS, require_fp8
from pronghorn.model.heads import HEADS, auto_class, require_head
from pronghorn.model.lora import PICKLED, add_adapter
from pronghorn.model.rank_files import in_rank_files
from pronghorn.model.text_stack import decoder_layers, keep_softcap, set_cache
from pronghorn.model.weight_files import stored_weights, wrong_weights
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora

Precision = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model from its config alone."""

    model_type: str
    text_type: str  # of the text model inside, or the same
    parameters: int
    adapter_parameters: int  # 0 when no adapter was asked for
    vocabulary: int
    longest: int  # context length; 0 if the config does not say
    experts: int = 0  # of a layer that has some


def pick_device() -> torch.device:
    """With its number: some functions of torch.cuda refuse a device without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def resolve_precision(asked: Literal["auto"] | Precision, device: torch.device) -> Precision:
    """`auto` is bf16 on a GPU that has it and fp32 elsewhere; anything else is honoured or refused, never changed."""
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "auto":
        return "bf16" if has_bf16 else "fp32"
    if asked == "bf16" and device.type == "cuda" and not has_bf16:
        raise RecipeError(
            what=f"precision: bf16 is not supported by {torch.cuda.get_device_name(device)}",
            why="the GPU has no bf16 arithmetic",
            fix="set precision: fp16 or fp32",
        )
    return asked


def require_fp8_precision(device: torch.device, precision: Precision) -> None:
    """Before anything is loaded: whether linears can be multiplied in FP8 here. A CPU emulates it in float32, for tests."""
    require_fp8(device)
    if device.type == "cuda" and precision != "bf16":
        raise RecipeError(
            what=f"FP8 layers cannot compute in {precision}",
            why="FP8 GEMMs return bf16",
            fix="set precision: bf16 (in Python: dtype=torch.bfloat16)",
        )


def require_fp8_products(recipe: Recipe, facts: ModelFacts) -> None:
    """Before anything is loaded: experts multiply in FP8 only if stored in FP8."""
    if recipe.compute != "fp8" or recipe.method == "fp8" or not facts.experts:
        return
    why = "4-bit experts" if recipe.method == "qlora" else "trained experts"
    instead = ", or set method: fp8, which stores and multiplies experts in FP8" if recipe.method == "qlora" else ""
    raise RecipeError(
        what=f"compute: fp8 cannot be combined with method: {recipe.method} for {facts.model_type}",
        why=f"{why} are multiplied in 16 bits",
        fix=f"remove compute{instead}",
    )


def inspect_model(name: str, lora: Lora | None = None, *, storage: str = "bf16", head: str = "lm") -> ModelFacts:
    """Reads the config, allocates nothing. With `lora`, also counts the adapter and refuses targets that match nothing.
    `head`: a name of model/heads/."""
    _refuse_unreadable_folder(name)
    config = read_config(name)
    require_head(config, name, head)
    refuse_unreadable(config, FORMATS[storage], name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # its sizes are those of the original model
    stored = stored_weights(model_folder(name))
    require_weights_for(config, stored, name)
    model: HFModel = empty_model(name, config)
    text, parameters = text_config(config), sum(p.numel() for p in model.parameters())
    require_enough_weights(parameters, stored, name)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    model = HEADS[head].attach(model, seed=0)
    if lora:
        with torch.device("meta"):
            model = add_adapter(model, lora, seed=0)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad) if lora else 0
    return ModelFacts(
        config.model_type,
        text.model_type,
        parameters,
        adapters,
        vocabulary,
        int(getattr(text, "max_position_embeddings", 0) or 0),
        num_experts(text) if text.model_type in FAMILIES else 0,
    )


def load_model(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    storage: str = "bf16",
    progress: Callable[[str, int, int], None] | None = None,
    keep: Callable[[str, torch.nn.Module], None] | None = None,
    experts: Callable[[int], slice] | None = None,
    head: str = "lm",
    seed: int = 0,
) -> PreTrainedModel:
    """The family's own layers, weights from safetensors only. No code from the model's folder is ever run.

    `storage`: a row of model/formats/table.py, in which linears and stacks of experts are stored. `keep`: gets each decoder
    layer as soon as it is read, in host memory, or quantized on the device, and before the next one is; it need not leave it
    whole (model/shards.py). Files that are not read layer by layer (formats/checkpoint.py) it gets from a model that is whole.
    `experts`: of so many of a layer, those that `keep` needs.
    `head`: a name of model/heads/; drawn from the seed where the files have none.
    """
    _refuse_unreadable_folder(name)
    config, row = read_config(name), FORMATS[storage]
    require_head(config, name, head)
    refuse_unreadable(config, row, name)
    folder = model_folder(name, weights=True)
    _refuse_unreadable_folder(str(folder))
    require_weights_for(config, stored_weights(folder), name)
    generation_config(name, folder)  # refused before the weights are read

    def with_head(model: HFModel) -> Any:
        return HEADS[head].attach(model, seed, device)

    of_ranks = in_rank_files(folder)
    if row.quantize is not None or keep or of_ranks:
        onto = device if row.quantize is not None else torch.device("cpu")
        options: Any = {"progress": progress, "keep": keep, "experts": experts, "head": with_head}
        read = guarded(name, lambda: load_stored(folder, row, dtype, onto, **options))
        if read is not None:
            read.config._name_or_path = read.name_or_path = place(name)  # adapters name their base by it
            remember_folder(read, folder)
            return with_head(read).to(device)  # type: ignore[no-any-return]  # a score that was in the files, in float32
        if of_ranks:
            raise _not_read_by_others(name)
        say_once(f"{name}: every rank reads all weights into host memory, because the files have them in another form")
    mxfp4 = published_format(config) == "mxfp4"
    _require_enough_weights_for(config, folder, name)

    def from_files() -> tuple[Any, dict[str, Any]]:
        with without_progress_bars(), without_load_report(name):
            return auto_class(config).from_pretrained(  # type: ignore[no-any-return]
                str(folder),
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **({"quantization_config": Mxfp4Config(dequantize=True)} if mxfp4 else {}),
            )

    model, found = constructed(name, "cannot load the model", from_files)
    _refuse_made_up_weights(name, found)
    if unused := sorted(found["unexpected_keys"]):
        say_once(
            f"{name}: the model does not use {counted(len(unused), 'weight')} of its files: {unused[0]}"
            + ", ..." * (len(unused) > 1)
        )
    if mxfp4:
        _forget_mxfp4(model, dtype)
    model.config._name_or_path = model.name_or_path = place(name)
    remember_folder(model, folder)
    set_cache(model, False)
    keep_softcap(model)
    for layer in decoder_layers(model).items() if keep else ():
        keep(*layer)  # type: ignore[misc]
    return with_head(model).to(device)  # type: ignore[no-any-return]  # an LM head that another replaces stays behind


def _not_read_by_others(name: str) -> ModelError:
    return ModelError(
        what="the checkpoint of several ranks cannot be loaded in fp16",
        where=name,
        why="parts of this model stay in float32 then, and only transformers knows which",
        fix="export the run (pronghorn export RUN --to merged), and load that",
    )


def load_base(recipe: Recipe, dtype: torch.dtype, device: torch.device, **options: Any) -> PreTrainedModel:
    """The model that a recipe's adapter is for, with the head of its objective. `options`: as of `load_model`."""
    head, seed = recipe.objective.kind.head, recipe.train.seed
    return load_model(recipe.model, dtype, device, storage=recipe.stored_as, head=head, seed=seed, **options)


def _require_enough_weights_for(config: HFConfig, folder: Path, name: str) -> None:
    """transformers allocates whatever the files lack, however much it is."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    require_enough_weights(sum(p.numel() for p in empty_model(name, plain).parameters()), stored_weights(folder), name)


def _forget_mxfp4(model: HFModel, dtype: torch.dtype) -> None:
    """transformers (5.22) dequantizes experts to bf16 whatever the config, and would save them in 16 bits under their 4-bit
    names, which nothing reads."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.ndim == 3 else parameter.data
    kept = [
        rule
        for rule in getattr(model, "_weight_conversions", None) or []
        if not any(name.endswith("_blocks") for name in rule.source_patterns)
    ]
    model._weight_conversions = kept or None


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers' bars would break our display; its setting is restored afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def without_load_report(name: str) -> Iterator[None]:
    """transformers prints a table of weights that do not fit before we raise our error. A temporary filter: with a higher log
    level it (5.22) talks about tensor parallelism instead."""
    logger = logging.get_logger("transformers.modeling_utils")

    def errors_only(record: LogRecord) -> bool:
        return record.levelno >= ERROR

    logger.addFilter(errors_only)
    try:
        yield
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        why = "they cannot be stacked: experts of one layer may have different shapes"
        raise wrong_weights("the weights do not match each other", name, why) from error
    finally:
        logger.removeFilter(errors_only)


def require_tokenizer_fits(tokenizer: Tokenizer, vocabulary: int, name: str) -> None:
    """A token id beyond the embeddings would read out of bounds on a GPU."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise ModelError(
            what=f"the tokenizer has ids up to {largest:,}, but the model has embeddings for {vocabulary:,} tokens only",
            where=name,
            why="tokens without an embedding cannot be trained",
            fix="use the tokenizer published with the model, or a model with resized embeddings",
        )


def _refuse_made_up_weights(name: str, found: dict[str, Any]) -> None:
    """transformers fills what a file lacks with random numbers, and only warns."""
    spoilt = dict.fromkeys(found["missing_keys"], "is not in its files")
    spoilt |= {key: f"has the shape {tuple(there)} instead of {tuple(asked)}" for key, there, asked in found["mismatched_keys"]}
    if spoilt:
        first = min(spoilt)
        others = f" (and {counted(len(spoilt) - 1, 'more weight')})" if len(spoilt) > 1 else ""
        raise wrong_weights(f"{first} {spoilt[first]}{others}", name)


def _refuse_unreadable_folder(name: str) -> None:
    try:
        _refuse_folder_without_weights(name)
    except (OSError, RuntimeError) as error:  # no permission, a name that is too long, an unknown `~user`
        why = str(getattr(error, "strerror", "") or error)
        raise ModelError(
            what="cannot open the model folder", where=name, why=why, fix="check the path in `model:` and its permissions"
        ) from error


def _refuse_folder_without_weights(name: str) -> None:
    folder = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or folder.exists()
    if not looks_local:
        return  # a hub name: org/model
    if not folder.is_dir():
        if "/" not in name:
            return  # an old-style hub name: gpt2
        raise no_such_model(name)
    if not (folder / "config.json").is_file():
        raise no_config(name)
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled:
        fix = "download the model's safetensors files, or convert them if you trust their origin"
        raise pickled_weights(pickled[0], name, fix)
    raise ModelError(what="the folder has no *.safetensors files", where=name, fix="download the model's weights into it")
