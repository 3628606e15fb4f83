"""Tells whether a model's files are still those an adapter was trained on.

An adapter fits the weights it was trained on and no others, and nothing in its shapes would show that they were replaced: by a
newer revision of a hub name, or by another run's export into the same folder. To be sure, all of the files would have to be
read. The digest is of each one's name, its size, and 256 blocks of 4 KB spread evenly over it: a change that touches no more
than a 256th of a file in one place can go unnoticed, one of a whole model cannot.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pronghorn.errors import CheckpointError
from pronghorn.folders import folder_of

BLOCKS, BLOCK = 256, 4096


def fingerprint(name: str) -> str:
    """Of a folder, or of a hub model as it lies in the cache; empty where its files are somewhere else."""
    folder = local_files(name)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for number in range(BLOCKS):
                opened.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
                digest.update(opened.read(BLOCK))
    return digest.hexdigest() if files else ""


def require_same_weights(name: str, then: str, checkpoint: str) -> None:
    """`then`: the fingerprint when the checkpoint was saved. What was not known then or is not now is no difference."""
    if then and (now := fingerprint(name)) and now != then:
        raise CheckpointError(
            what=f"the model's weights are not those of {checkpoint}", where=name,
            why="an adapter fits the weights it was trained on, and no others",
            fix="put the model's files back, or start over: pronghorn train RECIPE --fresh (the old folder is kept aside)")


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
