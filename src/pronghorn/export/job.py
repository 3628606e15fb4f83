"""One export on its way: where it is written until it is whole, what it is made of, and how far it has come.

An export writes into a hidden sibling of its target, held by a lock, which is renamed when all is done: the target is whole or
not there. The run's own files are only read.

An export that is interrupted (Ctrl-C, a kill, a full disk) after it has written whole weight files leaves that sibling, with a
note of what it was made of; the same command goes on from there. Nothing else is ever left.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from pronghorn import __version__
from pronghorn.digests import file_digest
from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.export.checking import EXACT, GROSS, Reference, Scores, Tolerance, Verdict, difference, score
from pronghorn.model.config import read_config
from pronghorn.model.export import NOT_EXPORTED
from pronghorn.model.fingerprint import fingerprint
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.load import DTYPES, ModelFacts, inspect_model, pick_device, resolve_precision
from pronghorn.model.lora import PICKLED
from pronghorn.model.merge_stream import MergedWeights, merging, write_config
from pronghorn.model.rank_files import in_rank_files
from pronghorn.model.sharded import write_sharded
from pronghorn.model.stock import stock_adapter, stock_model
from pronghorn.recipe import Recipe
from pronghorn.report.number_format import size
from pronghorn.small_files import read_small
from pronghorn.train.run.trained_run import Trained

NOTE = ".made-of"
SHARDS = "model-*-of-*.safetensors"
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
        """The dtype of the weights in a merged folder."""
        if self.options.dtype:
            return DTYPES[self.options.dtype]  # type: ignore[index]
        if self.recipe.stored_as != "bf16":
            return DTYPES[resolve_precision(self.recipe.precision, pick_device())]
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.recipe.precision, torch.float32)

    @cached_property
    def model_facts(self) -> ModelFacts:
        """Facts about the adapter's base or the trained model, from its config alone."""
        name = self.recipe.model if self.has_adapter else str(self.checkpoint)
        return inspect_model(name, storage=self.recipe.stored_as, head=self.trained.head.name)

    @property
    def loaded_with(self) -> str:
        """transformers' class that loads the model."""
        return str(self.trained.head.auto_class(read_config(self.recipe.model)).__name__)

    @property
    def merged_onto(self) -> str:
        """The base of a merge, in words; empty where there is no choice."""
        if not self.has_adapter or self.recipe.stored_as == "bf16":
            return ""
        if self.options.base == "original":
            return "the base model's original weights, not the quantized ones it was trained on"
        return f"the weights it was trained on: the base model in {FORMATS[self.recipe.stored_as].title}, dequantized"

    def key(self, name: str) -> str:
        """Digest of all that decides the bytes of this export: only files with the same key are continued."""
        files = [file for file in sorted(self.checkpoint.iterdir()) if file.is_file() and file.name not in NOT_EXPORTED]
        made_of = {
            "checkpoint": {file.name: file_digest(file) for file in files},
            "base": fingerprint(self.recipe.model) if self.has_adapter else "",
            "recipe": self.recipe.model_dump(mode="json"),
            "options": asdict(self.options) | {"check": None},
            "target": name,
            "version": __version__,
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()

    @property
    def base_recipe(self) -> Recipe:
        """With the base that a merge is made onto."""
        return self.recipe.model_copy(update={"method": "lora"}) if self.options.base == "original" else self.recipe

    def coarser(self, dtype: torch.dtype) -> torch.dtype:
        """The coarser of a file's dtype and the run's compute dtype."""
        kinds = {dtype, DTYPES[resolve_precision(self.recipe.precision, pick_device())]}
        if torch.bfloat16 in kinds or torch.cuda.is_available():
            return torch.bfloat16
        return torch.float16 if torch.float16 in kinds else torch.float32

    def tolerance(self, reference: Reference, dtype: torch.dtype) -> Tolerance:
        """The difference allowed to a file that has the trained weights in `dtype`."""
        coarser = self.coarser(dtype)
        return EXACT if coarser == torch.float32 else reference.tolerance(coarser)

    def expected(self, reference: Reference, recipe: Recipe) -> Sequence[Scores]:
        """What the trained weights say: the trained model's scores, unless it rounds activations, or another base was asked
        for. Then they are computed by stock libraries."""
        if not recipe.fp8 and recipe == self.recipe:
            return reference.scores
        model = stock_adapter(recipe, self.checkpoint) if self.has_adapter else stock_model(self.checkpoint)
        self.trained.set_padding(model)
        return score(model, reference.rows, self.report)

    def limit(self) -> Tolerance:
        """The limit of the loss against the trained model. On another base it is another model, as asked: the difference
        is reported, not judged."""
        return GROSS if self.options.base == "trained" else Tolerance()

    def judged(self, reference: Reference, found: Sequence[Scores], loaded_with: str, recipe: Recipe) -> Verdict:
        """The verdict on an export that has the trained weights in `dtype`."""
        expected, tolerance = self.expected(reference, recipe), self.tolerance(reference, self.dtype)
        if expected is reference.scores:
            return reference.verdict(found, tolerance, loaded_with)
        beyond = difference(expected, found)
        return reference.verdict(found, self.limit(), loaded_with, wrong=tolerance.exceeded(beyond), beyond=beyond)

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
    """What several targets of one command start from: the merged model, and what converters make of it."""

    def __init__(self, beside: Path, stack: ExitStack) -> None:
        self.beside, self.stack = beside, stack  # a target of the command; it is given back when the command ends
        self.folder: Path | None = None
        self.made: dict[str, Any] = {}  # by other targets than `merged`, for others of their kind

    def place(self, job: Job, name: str) -> Path:
        """An empty folder that goes when the command ends."""
        return self.stack.enter_context(workplace(self.beside.with_name(f"{self.beside.name}.{name}"), job.key(name)))

    def merged(self, job: Job) -> Path:
        if self.folder is None:
            folder = self.place(job, "merged")
            write_merged(job, folder)
            self.folder = folder
        return self.folder


def write_merged(job: Job, folder: Path) -> None:
    """Shards of 5 GB, a layer in memory at a time. Weights that several ranks saved are put together, in their own type."""
    of_ranks = bool(in_rank_files(job.checkpoint))
    whole = job.has_adapter or job.options.dtype is not None or of_ranks
    if whole:
        dtype = torch.float32 if of_ranks and job.options.dtype is None else job.dtype
        source = merging(job.checkpoint, job.recipe, dtype, original=job.options.base == "original")
        job.trained.set_padding(source.model)
        write_sharded(folder, source, job.report, label="merging")
        write_config(source, folder, dtype)
    copy_files(job.checkpoint, folder, lambda name: not (whole and name.startswith(("adapter_", "model"))))


def write_base(job: Job, folder: Path) -> None:
    """The base as it was trained on, dequantized."""
    storage, device = FORMATS[job.recipe.stored_as], pick_device()
    source = MergedWeights(job.recipe.model, storage, job.dtype, compute=job.dtype, device=device)
    write_sharded(folder, source, job.report, label="writing the base")
    write_config(source, folder, job.dtype)
    copy_files(job.checkpoint, folder, lambda name: not name.startswith(("adapter_", "model")))


def resolved(target: Path) -> Path:
    """Refuses what cannot be a folder: a name that is too long, one below a folder that may not be entered, a loop of links."""
    try:
        found = target.resolve()  # `.` has no name for a temporary sibling
        unfinished(found).exists()
    except (OSError, RuntimeError) as error:  # RuntimeError: Python's word, until 3.12, for a link to itself
        why = getattr(error, "strerror", None) or "the path is a loop of symbolic links"
        shown = str(target) if len(str(target)) < 200 else f"{str(target)[:150]}..."
        raise CommandError(what=f"cannot write there: {why}", where=shown, fix="choose another folder with --target") from error
    return found


def refuse_existing(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CommandError(
            what="the target folder already exists",
            where=str(target),
            why="an export never overwrites files",
            fix="choose another folder, or remove this one",
        )


def unfinished(target: Path) -> Path:
    """Where it is until it is whole."""
    return target.parent / f".{target.name}.tmp"


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
def workplace(target: Path, key: str) -> Iterator[Path]:
    """A sibling to write into, held by a lock (flock) on the folder itself: the second of two exports to one target is refused.
    It is empty, but for the weight files of an interrupted export of the same `key`."""
    beside = unfinished(target)
    lock = _locked(beside, target)
    try:
        _tidy(beside, key)
        yield beside
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt | EnvironmentFault) and any(beside.glob(SHARDS))):
            shutil.rmtree(beside, ignore_errors=True)
        raise
    else:
        shutil.rmtree(beside, ignore_errors=True)  # where it was not put in place
    finally:
        os.close(lock)


def _locked(beside: Path, target: Path) -> int:
    lock = -1
    try:
        while True:
            beside.mkdir(parents=True, exist_ok=True)
            lock = os.open(beside, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), beside.stat()):
                    return lock
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


def _tidy(beside: Path, key: str) -> None:
    """Whole weight files of the same export stay."""
    note = beside / NOTE
    try:
        same = read_small(note) == key.encode()
    except OSError:
        same = False
    kept = set(beside.glob(SHARDS)) if same else set()
    for left in beside.iterdir():
        if left in kept and left.is_file() and not left.is_symlink():
            continue
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()
    note.write_text(key, encoding="utf-8")


def put_in_place(folder: Path, target: Path) -> None:
    (folder / NOTE).unlink(missing_ok=True)
    folder.replace(target)


def require_space(target: Path, needed: int) -> None:
    """Before anything is written. What an interrupted export left there counts as written."""
    place = next(folder for folder in (target, *target.parents) if folder.exists())
    beside = unfinished(target)
    there = sum(file.stat().st_size for file in beside.glob(SHARDS)) if beside.is_dir() else 0
    total, _, free = shutil.disk_usage(place)
    if total and needed - there > free:  # some that are no disks have no size
        raise EnvironmentFault(
            what=f"the export needs {size(needed - there)} of disk space, but only {size(free)} are free",
            where=str(target),
            why="it would stop halfway",
            fix="free some disk space, or choose another folder with --target",
        )
