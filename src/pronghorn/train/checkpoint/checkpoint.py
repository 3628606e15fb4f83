"""A checkpoint: a folder that is either whole or not there, with a checksum of every file, and nothing to unpickle.

    checkpoint-N/
      (the model's files)             written by the caller: PEFT's adapter layout, or a Hugging Face model folder
      training_state.safetensors      optimizer moments and whatever else is a tensor
      training_state/                 of a run whose weights ranks shard: moments, in a file of each rank (model/rank_files.py)
      manifest.json                   version, step, size and SHA-256 of every file, recipe, values, RNG state, own SHA-256

Saving writes `.checkpoint-N.tmp-PID`, syncs every file, writes and syncs the manifest, syncs the folder, renames it, syncs
the parent, and only then prunes. Deleting renames first (`.checkpoint-N.gone-PID`). So at any instant, whatever kills the
process, a folder named `checkpoint-N` is whole. The caller holds the run's lock (run_folder.py): only one saves.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from pronghorn.errors import CheckpointError, EnvironmentFault
from pronghorn.small_files import read_small_text
from pronghorn.train.run.run_folder import require_free_disk

if TYPE_CHECKING:
    import torch

VERSION = 1
MANIFEST = "manifest.json"
TENSORS, STATE = "training_state.safetensors", "training_state"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
# Kept free beyond the estimate: the manifest (40 kB), the file system's own blocks, log and report, which grow meanwhile.
LEAST_MARGIN, MOST_MARGIN = 1_000_000, 64_000_000

# `.replaced`: complete as well, about to be removed because the same step was saved again.
_COMPLETE = re.compile(r"(?P<name>checkpoint-(?P<step>0|[1-9]\d*))(?P<replaced>\.replaced)?")
_TEMPORARY = re.compile(r"\.checkpoint-\d+\.(tmp|gone)-\d+")


@dataclass(frozen=True)
class TrainState:
    """Everything beside the model's own files."""

    step: int
    tensors: Mapping[str, Any]  # names like "optimizer/exp_avg/<parameter>"; tensors, or Rows that are read when asked for
    values: dict[str, Any]  # plain JSON: schedule, data cursor, early stopping, scaler, ...
    recipe: dict[str, Any]  # plain JSON: recipe.model_dump(mode="json")
    rng: dict[str, Any] = field(default_factory=dict)  # capture_rng()


def save_checkpoint(
    run: Path,
    state: TrainState,
    write_model: Callable[[Path], None],
    *,
    keep: int,
    best_step: int | None,
    stable_step: int | None = None,
    needed_bytes: int = 0,
) -> Path:
    """Save `checkpoint-<step>`, then prune older ones beyond `keep`; those of the best step and of the stable one (after which
    the decay begins) stay and do not count.

    `write_model` writes the model's files into the folder it is given, about `needed_bytes` of them.
    """
    from safetensors.torch import save_file

    def fill(folder: Path) -> None:
        write_model(folder)
        refuse_foreign(_file_names(folder))
        save_file(storable(state.tensors), folder / TENSORS)

    needed_bytes += sum(tensor.nbytes for tensor in state.tensors.values())
    beside = (best_step, stable_step)
    return write_checkpoint(run, manifest_of(state), fill, keep=keep, beside=beside, needed_bytes=needed_bytes)


def manifest_of(state: TrainState) -> dict[str, Any]:
    """Everything but the files, checked: what JSON would change is refused here, before anything is written."""
    manifest = {
        "version": VERSION,
        "step": state.step,
        "files": {},
        "recipe": state.recipe,
        "values": state.values,
        "rng": state.rng,
    }
    if json.loads(_as_text(manifest)) != manifest:
        raise TypeError("recipe, values and rng must be plain JSON (string keys, lists, no tuples): else a resume differs")
    return manifest


def write_checkpoint(
    run: Path,
    manifest: dict[str, Any],
    fill: Callable[[Path], None],
    *,
    keep: int,
    beside: Collection[int | None],
    needed_bytes: int,
) -> Path:
    """The protocol, whoever follows it: `fill` writes every file but the manifest, `needed_bytes` in all. `beside`: steps whose
    checkpoints stay, and do not count."""
    if keep < 1:
        raise ValueError(f"keep is {keep}; the newest checkpoint is always kept")
    folder = begin_checkpoint(run, manifest["step"], needed_bytes)
    try:
        with disk_faults(run, f"cannot write checkpoint-{manifest['step']}"):
            fill(folder)
        return finish_checkpoint(folder, manifest, {}, keep=keep, beside=beside)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already, unless something failed


def begin_checkpoint(run: Path, step: int, needed_bytes: int, unique: str = "") -> Path:
    """A folder to write into. `unique`: digits that no other start of the run uses, where several ranks do."""
    name = f"checkpoint-{step}"
    with disk_faults(run, f"cannot write {name}"):
        clean_leftovers(run)
        require_free_disk(run, needed_bytes + margin_bytes(needed_bytes), name, then=what_resumes(run))
        folder = run / f".{name}.tmp-{os.getpid()}{unique}"
        folder.mkdir()
        return folder


def finish_checkpoint(
    folder: Path, manifest: dict[str, Any], others: dict[str, Any], *, keep: int, beside: Collection[int | None]
) -> Path:
    """The folder gets its manifest and its name. `others`: files that other ranks wrote and synced, as they describe them."""
    run, final = folder.parent, folder.parent / f"checkpoint-{manifest['step']}"
    with disk_faults(run, f"cannot write {final.name}"):
        for name, expected in others.items():
            if (there := (folder / name).stat().st_size) != expected["bytes"]:
                raise OSError(f"{name} has {there} bytes here, and {expected['bytes']} where it was written")
        own = {name: _sealed(folder / name) for name in _file_names(folder) if name not in others}
        (folder / MANIFEST).write_text(_as_text(_with_checksum(manifest | {"files": own | others})), encoding="utf-8")
        _sync(folder / MANIFEST)
        for inner in [path for path in folder.rglob("*") if path.is_dir()]:
            _sync(inner)
        _sync(folder)
        _put_in_place(folder, final)
        older = _older_ones(run, final, keep, beside)
    with disk_faults(run, f"{final.name} is written, but an older checkpoint cannot be removed"):
        for path in older:
            _remove(path)
    return final


def margin_bytes(needed: int) -> int:
    """A quarter of a checkpoint, within limits: 64 MB for one of 0.4 MB would refuse a disk that holds a hundred of them."""
    return min(MOST_MARGIN, max(LEAST_MARGIN, needed // 4))


def list_checkpoints(run: Path) -> list[Path]:
    """The complete ones, oldest first. Only looks: safe while another process saves."""
    found: dict[int, Path] = {}
    try:
        for path in sorted(run.iterdir(), reverse=True):  # `checkpoint-7.replaced` before `checkpoint-7`, which wins
            match = _COMPLETE.fullmatch(path.name)
            if match and path.is_dir():
                found[int(match["step"])] = path
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
    return [found[step] for step in sorted(found)]


def step_of(path: Path) -> int:
    """The step that a checkpoint's name tells."""
    match = _COMPLETE.fullmatch(path.name)
    assert match
    return int(match["step"])


def latest_checkpoint(run: Path) -> Path | None:
    """The newest by name; loading it tells whether it is intact."""
    return next(reversed(list_checkpoints(run)), None)


def verify_checkpoint(path: Path, *, content: bool = True) -> dict[str, Any]:
    """The manifest of an intact checkpoint; CheckpointError otherwise. Without `content`, sizes are looked at, and no sums."""
    try:
        return _intact_manifest(path, content=content)
    except _DamageError as damage:
        kind = OtherVersionError if damage.what == _OTHER_VERSION else CheckpointError
        raise kind(damage.what, where=str(damage.file), why=damage.why, fix=way_out(path)) from damage


def is_intact(file: Path, expected: dict[str, Any]) -> bool:
    """Whether a file is what a manifest says of it."""
    try:
        _check_file(file, expected, content=True)
    except _DamageError:
        return False
    return True


def copy_checkpoint(path: Path, to: Path, changed: dict[str, Any]) -> None:
    """Into the folder `to`, with other parts of the manifest."""
    manifest = verify_checkpoint(path)
    shutil.copytree(path, to / path.name)
    (to / path.name / MANIFEST).write_text(_as_text(_with_checksum(manifest | changed)), encoding="utf-8")


def clean_leftovers(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted. Only with the run's lock: it says that the process is
    dead, which the process id in the name does not (containers give the same few ids to every start)."""
    for path in list(run.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif (match := _COMPLETE.fullmatch(path.name)) and match["replaced"]:
            final = run / match["name"]
            if final.exists():
                _remove(path)
            else:
                path.rename(final)


def capture_rng() -> dict[str, Any]:
    """The state of every global generator as plain JSON: `torch` and `cuda` (one a device) the raw bytes in base64,
    `python` [version, 625 integers, next Gauss value], `numpy` [name, 624 integers, position, has Gauss, Gauss value]."""
    import numpy as np
    import torch

    version, words, gauss_next = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached_gaussian = numpy_state
    # Without a context nobody has drawn from a device, and asking would create one.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "torch": _as_base64(torch.get_rng_state()),
        "cuda": [_as_base64(state) for state in cuda],
        "python": [version, list(words), gauss_next],
        "numpy": [name, keys.tolist(), int(position), int(has_gauss), float(cached_gaussian)],
    }


def restore_rng(rng: dict[str, Any]) -> None:
    """Undo everything drawn since `capture_rng`. States of CUDA devices that this machine does not have are passed over."""
    import numpy as np
    import torch

    torch.set_rng_state(_from_base64(rng["torch"]))
    if torch.cuda.is_available():
        for device, state in enumerate(rng["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_from_base64(state), device)
    version, words, gauss_next = rng["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, position, has_gauss, cached_gaussian = rng["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached_gaussian))


# Writing


def storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """safetensors stores contiguous tensors that share no memory: copy those that are not, and only those."""
    seen: set[int] = set()
    storable = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        storable[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return storable


def refuse_foreign(names: Iterable[str]) -> None:
    """What must not be among the model's files; if it is, that is our bug, hence no PronghornError."""
    for name in names:
        if name.endswith(PICKLED):
            raise RuntimeError(f"the model's save function wrote {name}: checkpoints hold safetensors and JSON only, no pickle")
        if name in (MANIFEST, TENSORS):
            raise RuntimeError(f"the model's save function wrote {name}, a name the checkpoint uses itself")


def _file_names(folder: Path) -> list[str]:
    """Every file below `folder`, as `sub/name`."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _sealed(file: Path) -> dict[str, Any]:
    """Sync one file and describe it."""
    _sync(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    # 730 MB/s on one shared core of a 2-core Xeon with SHA instructions. Saving 1 GiB there takes 3.3 s, 1.4 s of them
    # for this, after the write, from the page cache; verifying it takes 1.4 s.
    # 16 MB at a time: between two of them the background writer's thread waits for Python's lock, 5 ms beside a busy run.
    digest, buffer = hashlib.sha256(), memoryview(bytearray(1 << 24))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(folder: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step steps aside under a name that `list_checkpoints` still finds."""
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        final.rename(replaced)
    folder.rename(final)
    _sync(final.parent)
    if replaced.exists():
        _remove(replaced)


def _older_ones(run: Path, newest: Path, keep: int, beside: Collection[int | None]) -> list[Path]:
    """Checkpoints that are not to be kept beside the newest."""
    stay = [run / f"checkpoint-{step}" for step in beside]
    ours = list_checkpoints(run)
    if newest not in ours:  # somebody moved or removed the run's folder since
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(newest))
    older = [path for path in ours[: ours.index(newest)] if path not in stay]
    kept = keep if newest in stay else keep - 1
    return older[: max(0, len(older) - kept)]


def _remove(checkpoint: Path) -> None:
    """Rename first: killed halfway, the rest does not look like a checkpoint."""
    gone = checkpoint.with_name(f".{checkpoint.name.removesuffix('.replaced')}.gone-{os.getpid()}")
    checkpoint.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)  # what cannot be removed now is a leftover for the next save


@contextlib.contextmanager
def disk_faults(run: Path, what: str) -> Iterator[None]:
    """A failing disk is the environment's fault, also when safetensors reports it in its own way."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        if isinstance(error, SafetensorError):
            found = re.search(r"\(os error (\d+)\)", str(error))
            if not found:
                raise
            number = int(found[1])
        repair = "free some disk space" if number in (errno.ENOSPC, errno.EDQUOT) else "fix the reported system error"
        raise EnvironmentFault(what, where=str(run), why=str(error), fix=f"{repair}, then {what_resumes(run)}") from error


def what_resumes(run: Path) -> str:
    """For the end of a fix."""
    latest = latest_checkpoint(run)
    return "run the same command again: it " + (f"resumes from {latest.name}" if latest else "starts from the beginning")


# The manifest


def _as_text(manifest: dict[str, Any]) -> str:
    """One top-level key a line: readable, without a line for each of the 1,249 integers of the generators."""
    lines = [f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in manifest.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _with_checksum(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest | {"sha256": hashlib.sha256(_as_text(manifest).encode()).hexdigest()}


# Verifying

_OTHER_VERSION = "the checkpoint was written by a different version of Pronghorn"
# What a manifest holds beside its own sum: a file that is whole may still be somebody else's.
_KINDS = {"step": int, "files": dict, "recipe": dict, "values": dict, "rng": dict}


class OtherVersionError(CheckpointError):
    """Whole, but not for this version to read."""


class _DamageError(Exception):
    """Becomes a CheckpointError as soon as the way out is known."""

    def __init__(self, file: Path, what: str, why: str) -> None:
        super().__init__(what)
        self.file, self.what, self.why = file, what, why


def _intact_manifest(path: Path, *, content: bool = True) -> dict[str, Any]:
    if not path.is_dir():
        raise _DamageError(path, "checkpoint not found", "the folder does not exist")
    manifest = _read_manifest(path)
    there, listed = set(_file_names(path)) - {MANIFEST}, manifest["files"]
    for name in listed:
        if name not in there:
            raise _DamageError(path / name, "the checkpoint is damaged: a file is missing", f"{MANIFEST} lists it")
    for name in sorted(there - listed.keys()):
        # Loaders choose files by what is there, so one more can change the model. Hidden names they never read.
        if not Path(name).name.startswith("."):
            raise _DamageError(path / name, "the checkpoint contains an unknown file", f"{MANIFEST} does not list it")
    for name, expected in listed.items():
        _check_file(path / name, expected, content=content)
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        text = read_small_text(file)
        manifest = json.loads(text)
    except FileNotFoundError:
        raise _DamageError(
            file, "the checkpoint has no manifest", "every checkpoint is saved with one, so it was removed later"
        ) from None
    except OSError as error:
        raise _DamageError(file, "cannot read the manifest", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _DamageError(file, "the manifest is damaged", f"it is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise _DamageError(file, "the manifest is damaged", "it is not an object")
    if manifest.get("version", VERSION) != VERSION:
        raise _DamageError(
            file, _OTHER_VERSION, f"its manifest has version {manifest['version']}, this Pronghorn reads version {VERSION}"
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    try:
        same = _as_text(_with_checksum(body)) == text
    except (ValueError, RecursionError):  # NaN, or nested deeper than we ever write
        same = False
    # Comparing the text as well finds a changed bit that parses to the same content.
    if not same:
        raise _DamageError(file, "the manifest is damaged", "its content does not match its own SHA-256")
    for key, kind in _KINDS.items():
        if not isinstance(body.get(key), kind) or isinstance(body[key], bool):
            raise _DamageError(file, "the manifest is damaged", f"`{key}` is missing or has the wrong type")
    for listed, facts in {TENSORS: None, **body["files"]}.items():
        if not isinstance(facts, dict) or not isinstance(facts.get("bytes"), int) or not isinstance(facts.get("sha256"), str):
            raise _DamageError(file, "the manifest is damaged", f"it has no valid entry for {listed}")
    name = _COMPLETE.fullmatch(path.name)
    if name and int(name["step"]) != body["step"]:
        raise _DamageError(path, "the checkpoint was renamed", f"its manifest says step {body['step']}")
    return body


def _check_file(file: Path, expected: dict[str, Any], *, content: bool) -> None:
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise _DamageError(
                file, "the checkpoint is damaged: a file has the wrong size", f"{size} bytes, expected {expected['bytes']}"
            )
        if content and _sha256(file) != expected["sha256"]:
            raise _DamageError(
                file, "the checkpoint is damaged: a file's content changed", f"its SHA-256 differs from the one in {MANIFEST}"
            )
    except OSError as error:
        raise _DamageError(file, "the checkpoint is damaged: a file is unreadable", error.strerror or str(error)) from error


def way_out(damaged: Path) -> str:
    """Which earlier checkpoint is intact, and what to move away so that the same command finds it."""
    run, away = damaged.parent, [damaged]
    all_of_them = list_checkpoints(run)
    earlier = all_of_them[: all_of_them.index(damaged)] if damaged in all_of_them else []
    for candidate in reversed(earlier):
        try:
            _intact_manifest(candidate)
        except _DamageError:
            away.append(candidate)
            continue
        moves = "; ".join(shlex.join(["mv", str(path), f"{path}.damaged"]) for path in away)
        return f"{candidate.name} is intact; to resume from it, run the same command again after: {moves}"
    return (
        "no earlier checkpoint is intact; restore a backup, or start over with --fresh (the old folder is renamed, not deleted)"
    )


def _as_base64(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _from_base64(text: str) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
