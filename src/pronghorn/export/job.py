"""One export on its way: where it is written until it is whole, what it is made of, and how far it has come.

An export writes into a hidden sibling of its target, held by a lock, which is renamed when all is done: the target is whole or
not there. The run's own files are only read.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.export.checking import Tolerance, tolerance_of
from pronghorn.model.export import NOT_EXPORTED, merge_into
from pronghorn.model.load import DTYPES, pick_device, resolve_precision
from pronghorn.model.lora import PICKLED
from pronghorn.recipe import Recipe
from pronghorn.train.trained_run import Trained

Report = Callable[[str, int, int], None]  # label, done, total; bytes where the label says so
Base = Literal["trained", "original"]


@dataclass(frozen=True)
class Options:
    """What the command line says of every target."""

    dtype: str | None = None  # bf16, fp16, fp32; None: as the recipe says
    base: Base = "trained"  # of a merge: the weights as they were trained on, or as they are published
    check: bool = True


@dataclass
class Job:
    trained: Trained
    target: Path  # its place once it is whole
    folder: Path  # where it is written
    options: Options = field(default_factory=Options)
    variant: str = ""
    report: Report = lambda *_: None
    scratch: Scratch | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # for export.json

    @property
    def checkpoint(self) -> Path:
        return self.trained.path

    @property
    def recipe(self) -> Recipe:
        return self.trained.recipe

    @property
    def has_adapter(self) -> bool:
        return self.recipe.method != "full"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in a merged folder."""
        if self.options.dtype:
            return DTYPES[self.options.dtype]  # type: ignore[index]
        if self.recipe.stored_as != "bf16":
            return DTYPES[resolve_precision(self.recipe.precision, pick_device())]
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.recipe.precision, torch.float32)

    def tolerance(self) -> Tolerance:
        """Of a file that has the trained weights, rounded to `dtype` at most."""
        return tolerance_of(self.recipe, self.dtype)

    def merged(self) -> Path:
        """A Hugging Face folder with the merged model and the tokenizer: this command's own export, or one in a scratch folder
        that goes when the command ends. Not to be changed."""
        assert self.scratch is not None
        return self.scratch.merged(self)

    def copy_tokenizer(self) -> None:
        copy_files(
            self.checkpoint, self.folder, lambda name: not name.startswith(("adapter_", "model", "config", "generation"))
        )


def copy_files(source: Path, target: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
    """A checkpoint's files that others can use, without those that are there already."""
    for file in source.iterdir():
        of_use = file.is_file() and file.name not in NOT_EXPORTED and file.suffix not in PICKLED and wanted(file.name)
        if of_use and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


class Scratch:
    """The merged model that several targets of one command start from."""

    def __init__(self, beside: Path) -> None:
        self.beside = beside  # a target of the command
        self.folder: Path | None = None

    def merged(self, job: Job) -> Path:
        if self.folder is None:
            self.made = workplace(self.beside.with_name(f"{self.beside.name}.merged"))
            folder = self.made.__enter__()
            write_merged(job, folder)
            self.folder = folder
        return self.folder

    def close(self) -> None:
        if self.folder is not None:
            self.made.__exit__(None, None, None)


def write_merged(job: Job, folder: Path) -> None:
    if job.has_adapter:
        merge_into(folder, job.checkpoint, job.recipe)
    copy_files(job.checkpoint, folder, lambda name: not (job.has_adapter and name.startswith("adapter_")))


def resolved(target: Path) -> Path:
    try:
        return target.resolve()  # `.` has no name for a temporary sibling
    except RuntimeError as error:  # Python's word, until 3.12, for a link to itself
        raise CommandError(
            what="cannot write there: the path is a loop of symbolic links",
            where=str(target),
            fix="choose another folder with --target",
        ) from error


def refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(
            what="the target folder already exists",
            where=str(target),
            why="an export never overwrites files",
            fix="choose another folder, or remove this one",
        )


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Around what writes: a full disk is a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error).removeprefix("Error while serializing: ")
        raise EnvironmentFault(
            what="cannot write the export",
            where=str(target),
            why=why,
            fix="free some disk space, or choose another folder with --target",
        ) from error


@contextmanager
def workplace(target: Path) -> Iterator[Path]:
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
