"""What the small files of a model folder may say: JSON within limits, and no key through which a file names code.

transformers and PEFT follow some keys to code or to other files: an attention by the name of a hub repository is fetched and
imported, an adapter beside the weights may be a pickle. No file can make Pronghorn run code, so each such key is refused, by
the table below, before anything else looks at the folder. `auto_map` alone may stand: transformers never follows it without
`trust_remote_code`, and models of a type that it has itself (Phi-3) carry one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import ModelError
from pronghorn.small_files import read_small

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
FILES = (CONFIG, GENERATION, TOKENIZER, "special_tokens_map.json", "added_tokens.json")
ADAPTER = "adapter_config.json"
LARGEST_VOCABULARY = 512_000_000  # bytes of a small file that a library reads whole; the largest tokenizer.json seen has 33 MB
READ_WHOLE = (".json", ".jinja", ".txt", ".model")
DEEPEST = 40  # objects within objects; the deepest config.json seen has 6
NOT_SET: tuple[Any, ...] = (None, False, "", [], {})
OWN_ATTENTION = (None, "eager", "sdpa", "flex_attention")  # transformers' own, where no package has to be found for them
OWN_EXPERTS = (None, "eager", "grouped_mm", "batched_mm")
# tokenizer_class is looked up among all names of transformers: models and pipelines are among them.
TOKENIZER_CLASS = re.compile(
    r"(?!Auto)\w+Tokenizer(Fast)?|PreTrainedTokenizerFast|TokenizersBackend|SentencePieceBackend"
    r"|MistralCommonBackend|PythonBackend"
)
# What Python raises where a value in a file is not what transformers or torch take it for. Caught only around their
# constructors: elsewhere each is a bug of ours.
MALFORMED = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RecursionError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
TEMPLATE_NAME = re.compile(r"\w[\w.-]*")  # becomes the name of a file


@dataclass(frozen=True)
class NamedCode:
    """A key through which a file names code, and the values with which it names none."""

    file: str
    key: str
    allowed: tuple[Any, ...]
    leads_to: str


NAMED_CODE = (
    *(
        NamedCode(CONFIG, f"{dash}{part}_implementation{internal}", own, f"{kind} kernels from a Hub repository")
        for part, own, kind in (("attn", OWN_ATTENTION, "attention"), ("experts", OWN_EXPERTS, "expert"))
        for dash in ("", "_")
        for internal in ("", "_internal")
    ),
    NamedCode(CONFIG, "kernel_config", NOT_SET, "kernels from a Hub repository"),
    NamedCode(CONFIG, "use_kernels", NOT_SET, "kernels from a Hub repository"),
    NamedCode(CONFIG, "fusion_config", NOT_SET, "classes that replace those of transformers"),
    NamedCode(CONFIG, "transformers_weights", NOT_SET, "another weight file, which may be a pickle"),
    NamedCode(CONFIG, "configuration_files", NOT_SET, "another config file, which is not checked"),
    NamedCode(CONFIG, "custom_generate", NOT_SET, "a custom generate function from a Hub repository"),
    NamedCode(GENERATION, "custom_generate", NOT_SET, "a custom generate function from a Hub repository"),
    NamedCode(GENERATION, "constraints", NOT_SET, "the repository transformers-community/constrained-beam-search"),
    NamedCode(GENERATION, "force_words_ids", NOT_SET, "the repository transformers-community/constrained-beam-search"),
    NamedCode(GENERATION, "dola_layers", NOT_SET, "the repository transformers-community/dola"),
    NamedCode(GENERATION, "penalty_alpha", (*NOT_SET, 0), "the repository transformers-community/contrastive-search"),
    NamedCode(GENERATION, "num_beam_groups", (*NOT_SET, 1), "the repository transformers-community/group-beam-search"),
    NamedCode(TOKENIZER, "gguf_file", NOT_SET, "another file, possibly from a Hub repository"),
)


def _broken(file: str, where: str, why: str, what: str = "") -> ModelError:
    return ModelError(what or f"cannot read {file}", where=where, why=why, fix="download the model's files again")


def read_json(file: Path, where: str) -> dict[str, Any]:
    """One JSON object; ModelError names the file and what is wrong with it. `where`: the model, as the user calls it."""
    try:
        found = json.loads(read_small(file))
        json.dumps(found, ensure_ascii=False).encode()  # as a checkpoint will have it
    except OSError as error:
        raise _broken(file.name, where, error.strerror or str(error)) from error
    except UnicodeEncodeError as error:
        raise _broken(file.name, where, "a string in it contains half a character (a lone surrogate)") from error
    except UnicodeDecodeError as error:
        raise _broken(file.name, where, "it is not UTF-8 text") from error
    except RecursionError as error:
        raise _broken(file.name, where, "it is nested too deeply") from error
    except ValueError as error:
        raise _broken(file.name, where, f"it is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise _broken(file.name, where, f"it is a {type(found).__name__}, not an object with keys")
    return found


def require_safe_files(folder: Path, where: str) -> dict[str, Any]:
    """Refuses a folder one of whose small files is no JSON object, names code, or leads elsewhere. Returns config.json; empty
    where there is none (a folder with a tokenizer only)."""
    _require_files(folder, where)
    found = {name: read_json(folder / name, where) for name in FILES if (folder / name).is_file()}
    if CONFIG in found and (folder / ADAPTER).is_file():
        raise ModelError(
            what=f"the folder has {ADAPTER} next to {CONFIG}",
            where=where,
            why="transformers would also load this adapter, from an unchecked file",
            fix="merge the adapter into the model, or move its files to a separate folder",
        )
    for name, content in found.items():
        _refuse_named_code(name, content, where)
    _refuse_tokenizer_tricks(found.get(TOKENIZER, {}), where)
    return found.get(CONFIG, {})


def _require_files(folder: Path, where: str) -> None:
    """transformers reads some of them by itself: a link to a device has no end, and a pipe may have no beginning."""
    for file in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if file.exists() and not (file.is_file() or file.is_dir()):
            why = "it is a device, a pipe or a socket, or a link to one"
        elif file.suffix in READ_WHOLE and file.is_file() and file.stat().st_size > LARGEST_VOCABULARY:
            why = f"it has {file.stat().st_size:,} bytes; the limit is {LARGEST_VOCABULARY:,} bytes"
        else:
            continue
        raise _broken(file.name, where, why)


def _refuse_named_code(file: str, content: dict[str, Any], where: str) -> None:
    rules = {rule.key: rule for rule in NAMED_CODE if rule.file == file}
    for path, key, value in _entries(content, file, where):
        rule = rules.get(key)
        if rule is None:
            continue
        named = list(value.values()) if isinstance(value, dict) and value else [value]  # one name a part of the model
        if strange := [name for name in named if not _among(name, rule.allowed)]:
            raise ModelError(
                what=f"{file} sets `{path}` to {str(strange[0])[:80]!r}",
                where=where,
                why=f"it leads to {rule.leads_to}, and Pronghorn runs no code from model files",
                fix=f"remove `{path}` from {file}",
            )


def _among(value: object, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed) or (
        type(value) in (int, float) and any(value == one for one in allowed if type(one) in (int, float))
    )


def _entries(content: object, file: str, where: str, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Every key at any depth, with its path and value."""
    if depth > DEEPEST:
        raise _broken(file, where, f"objects are nested more than {DEEPEST} levels deep")
    if isinstance(content, dict):
        for key, value in content.items():
            here = f"{path}.{key}" if path else str(key)
            yield here, key, value
            yield from _entries(value, file, where, here, depth + 1)
    elif isinstance(content, list):
        for item in content:
            if isinstance(item, dict | list):
                yield from _entries(item, file, where, path, depth + 1)


def _refuse_tokenizer_tricks(content: dict[str, Any], where: str) -> None:
    name = content.get("tokenizer_class")
    if name is not None and not (isinstance(name, str) and TOKENIZER_CLASS.fullmatch(name)):
        sets = f"{TOKENIZER} sets tokenizer_class to {str(name)[:80]!r}"
        raise _broken(TOKENIZER, where, "that is not the name of a tokenizer class", sets)
    templates = content.get("chat_template")
    if isinstance(templates, list):
        if not all(
            isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
            for one in templates
        ):
            raise ModelError(
                what=f"a chat template of {TOKENIZER} has no name or no text",
                where=where,
                fix="give every entry of chat_template a `name` and a `template`",
            )
        require_template_names([one["name"] for one in templates], where)
    elif templates is not None and not isinstance(templates, str):
        raise ModelError(
            what=f"chat_template in {TOKENIZER} is a {type(templates).__name__}",
            where=where,
            fix="make it a string, or a list of named templates",
        )


def require_template_names(names: list[str], where: str) -> None:
    """A checkpoint stores each named template as a file of that name."""
    for name in names:
        if not TEMPLATE_NAME.fullmatch(name):
            raise ModelError(
                what=f"invalid chat template name {name[:80]!r} in the tokenizer",
                where=where,
                why="templates are saved as files, and this is not a valid file name",
                fix=f"rename the template in {TOKENIZER}; use letters, digits, `_`, `-` and `.`",
            )
