"""Tells whether a base model is still the one an adapter was trained on.

An adapter fits the weights it was trained on and no others, and nothing in its shapes would show that they were replaced: by a
newer revision of a hub name, by another run's export into the same folder, by one edited number of config.json. So a checkpoint
keeps a digest of every byte of the weight files (digests.py: at the speed of the disk, and remembered) and every value of
config.json. generation_config.json decides answers that are shown and no number of the run: its change is told, not refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pronghorn.digests import file_digest
from pronghorn.errors import CheckpointError, EnvironmentFault
from pronghorn.folders import folder_of
from pronghorn.small_files import read_small

NO_NUMBERS = ("_name_or_path", "transformers_version")  # of config.json
MOST_SHOWN = 3  # changed values that a message names


def base_of(name: str) -> dict[str, Any]:
    """What a checkpoint keeps of the frozen model: its weights and its settings."""
    return {
        "weights": fingerprint(name),
        "config": settings(name, "config.json"),
        "generation": settings(name, "generation_config.json"),
    }


def fingerprint(name: str) -> str:
    """Digest of a folder's weights, or of a Hub model's in the cache; empty where its files are somewhere else."""
    folder = local_files(name)
    files = [] if folder is None else sorted([*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(f"{file.name}\0{file_digest(file)}\0".encode())
        except OSError as error:
            fix = "check the disk, then run the same command again"
            raise EnvironmentFault.of(error, "cannot read a weight file", file, fix) from error
    return "sha256:" + digest.hexdigest() if files else ""


def settings(name: str, file: str) -> dict[str, str]:
    """Every value of a model's JSON file, as JSON, under its path; none where there is no such file, or it is not JSON."""
    folder = local_files(name)
    try:
        values = json.loads(read_small(folder / file)) if folder is not None else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return dict(_flat(values, "")) if isinstance(values, dict) else {}


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif key not in NO_NUMBERS:
            yield prefix + key, json.dumps(value, sort_keys=True)


def require_same_base(name: str, then: dict[str, Any], checkpoint: str) -> list[str]:
    """`then`: what `base_of` gave when the checkpoint was saved. What was not known then or is not now is no difference.
    Returns what should be told."""
    weights, config, generation = then.get("weights", ""), then.get("config"), then.get("generation")
    if weights and (now := fingerprint(name)) and now != weights:
        why = "an adapter works only with the weights it was trained on"
        raise _another("the model's weights differ from those", name, checkpoint, why)
    if config and (changed := _changes(config, settings(name, "config.json"))):
        why = f"{changed}; with these settings the same weights give different results"
        raise _another("the model's config.json differs from that", name, checkpoint, why)
    if generation is not None and (changed := _changes(generation, settings(name, "generation_config.json"))):
        return [f"generation_config.json of {name} changed since {checkpoint} ({changed}): generated answers may differ"]
    return []


def _changes(then: dict[str, str], now: dict[str, str]) -> str:
    """`rope_theta 10000.0 -> 500000.0`, some of them; empty where nothing changed, or nothing is known now."""
    changed = [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)] if now else []
    shown = [f"{key} {then.get(key, 'unset')[:40]} -> {now.get(key, 'unset')[:40]}" for key in changed[:MOST_SHOWN]]
    return ", ".join(shown) + ", ..." * (len(changed) > MOST_SHOWN)


def _another(what: str, name: str, checkpoint: str, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"{what} of {checkpoint}",
        where=name,
        why=why,
        fix="restore the model's files, or start over: pronghorn train RECIPE --fresh (the old folder is renamed, not deleted)",
    )


def local_files(name: str) -> Path | None:
    """A model's folder, or where it lies in the hub's cache; None: it is not there, and nothing is fetched."""
    if folder := folder_of(name):
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
