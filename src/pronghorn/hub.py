"""Models from the hub: their files come into the hub's cache, all of one revision, and everything else reads them there.

Fetched are JSON, tokenizer files, templates and safetensors: nothing that could be code. Nothing is sent but the requests for
them, with the names and versions of Pronghorn, huggingface_hub and Python. A hub that is asked and does not answer is given up
after `PATIENCE` seconds, three times; a download that stands still after `SILENCE` seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from pronghorn.errors import DataError, EnvironmentFault, ModelError, PronghornError
from pronghorn.folders import folder_of

HUB = "https://huggingface.co"
PATIENCE = 10.0  # seconds for an answer
TRIES, PAUSE = 3, 1.0  # seconds before the second try; twice as many before the third
SILENCE = 180.0  # seconds without a byte
SILENT = "PRONGHORN_HUB_SILENT"  # why the hub was not reached, where this process found that out (process.py)
REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
SMALL = (".json", ".model", ".txt", ".jinja", ".tiktoken")
TEMPLATES = "additional_chat_templates"
CONFIG = "config.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX, SINGLE, WEIGHTS, PICKLED = "model.safetensors.index.json", "model.safetensors", ".safetensors", (".bin", ".pt", ".pth")
BUSY = (408, 425, 429)  # and all from 500 on: the same request may be answered later

_answered: dict[tuple[str, str | None], tuple[str, list[str]]] = {}  # (name, token): commit and files, asked once a process


NO_PICKLES = "a pickle can run arbitrary code when it is opened, so Pronghorn never opens one"


def no_such_model(name: str) -> ModelError:
    return ModelError(
        what="no such model folder",
        where=name,
        why="it is neither a local folder nor a Hub name (org/name)",
        fix="check the path in `model:`, or use a Hub name",
    )


def pickled_weights(file: str, name: str, fix: str) -> ModelError:
    return ModelError(f"the weights are pickled ({file})", where=name, why=NO_PICKLES, fix=fix)


def model_folder(name: str, *, weights: bool = False, token: str | None = None) -> Path:
    """The folder of this name, or where the hub's cache has the model's small files, with `weights` those too, fetched if they
    are not there yet."""
    if folder := folder_of(name):
        return folder
    if not REPOSITORY.fullmatch(name):
        raise no_such_model(name)
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _from_cache(name)
    with quiet():
        try:
            commit, files = _ask(name, token)
            return _fetch(name, commit, files, weights, token)
        except hub_errors() as error:
            told = refusal(error, name, token=token)
            if not isinstance(told, EnvironmentFault) or (cached := cached_folder(name)) is None:
                raise told from error
            return cached


class _IsAdapterError(ModelError):
    """Where a model was asked for. `files`: what the repository has."""

    files: tuple[str, ...] = ()


def adapter_folder(name: str, *, token: str | None = None) -> Path | None:
    """Where the hub's cache has the adapter of this name, fetched if it is not there yet. None: it is a model, or no name."""
    from huggingface_hub import constants

    if not REPOSITORY.fullmatch(name) or cached_folder(name) is not None:
        return None
    if constants.HF_HUB_OFFLINE:
        return cached_folder(name, ADAPTER)
    with quiet():
        try:
            _ask(name, token)
        except _IsAdapterError as adapter:
            if ADAPTER_WEIGHTS not in adapter.files:
                pickled = [file for file in adapter.files if file.startswith("adapter_model.") and file.endswith(PICKLED)]
                why, fix = NO_PICKLES if pickled else "", "use a repository with the adapter as safetensors"
                raise ModelError(f"{ADAPTER_WEIGHTS} is missing", where=name, why=why, fix=fix) from adapter
            folder = _download(name, ADAPTER, None, token).parent
            for file in adapter.files:
                if file.endswith(SMALL) or file == ADAPTER_WEIGHTS:
                    _download(name, file, folder.name, token)
            return folder
        except hub_errors() as error:
            told = refusal(error, name, token=token)
            if isinstance(told, EnvironmentFault) and (cached := cached_folder(name, ADAPTER)) is not None:
                return cached
            raise told from error
    return None


def require_data_set(name: str) -> None:
    """Refuses a data set that the hub does not have, does not give, or does not answer for. By itself `datasets` tries a silent
    hub for minutes, and prints every try. Who is offline is not asked: what is in the cache is found there."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    with quiet():
        try:
            _tried(lambda: hub_api(None).dataset_info(name, timeout=PATIENCE))
        except hub_errors() as error:
            told = refusal(error, name, kind="data set")
            if isinstance(told, EnvironmentFault):
                told.fix += "; with HF_HUB_OFFLINE=1, a dataset loaded before is read from the cache"
            raise told from error


def data_set_revision(name: str) -> str:
    """The commit that a data set's name stands for now."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise DataError(
            what="streaming a dataset needs the Hub, but HF_HUB_OFFLINE is set",
            where=name,
            fix="unset HF_HUB_OFFLINE, or use the dataset's files",
        )
    with quiet():
        try:
            return str(_tried(lambda: hub_api(None).dataset_info(name, timeout=PATIENCE)).sha)
        except hub_errors() as error:
            raise refusal(error, name, kind="data set") from error


def _from_cache(name: str) -> Path:
    if (folder := cached_folder(name)) is not None:
        return folder
    what = "the model is not in the Hub cache"
    if why := os.environ.get(SILENT):
        fix = "check the network and the spelling, or use a local folder"
        raise EnvironmentFault(f"{what}, and the Hub cannot be reached", where=name, why=why, fix=fix)
    why = "HF_HUB_OFFLINE is set, so nothing is downloaded"
    fix = "check the name; without network access, the model must be a folder or already in the Hub cache"
    raise ModelError(what, where=name, why=why, fix=fix)


def cached_folder(name: str, file: str = CONFIG) -> Path | None:
    """The folder of this name in the hub's cache, if it has this file; None, too, for what cannot be a name there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=[file]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if (folder / file).is_file() else None


def _ask(name: str, token: str | None) -> tuple[str, list[str]]:
    """The commit that the name stands for now, and the files it has."""
    if (name, token) not in _answered:
        info = _tried(lambda: hub_api(token).model_info(name, timeout=PATIENCE))
        files = [sibling.rfilename for sibling in info.siblings or [] if _wanted(PurePosixPath(sibling.rfilename))]
        if CONFIG not in files:
            if ADAPTER in files:
                adapter = _IsAdapterError(
                    what="this is an adapter, not a model", where=name, fix="use the base model it was trained on"
                )
                adapter.files = tuple(files)
                raise adapter
            raise ModelError(what="the Hub repository has no config.json", where=name, fix="check the name in `model:`")
        # Without a commit, so that the cache knows later which one the name stood for.
        _answered[name, token] = (_download(name, CONFIG, None, token).parent.name, files)
    return _answered[name, token]


def _wanted(file: PurePosixPath) -> bool:
    beside = len(file.parts) == 1 and not file.name.startswith(".")
    return beside or (len(file.parts) == 2 and file.parts[0] == TEMPLATES and file.suffix == ".jinja")


def _fetch(name: str, commit: str, files: list[str], weights: bool, token: str | None) -> Path:
    folder = _download(name, CONFIG, commit, token).parent
    for file in files:
        if file.endswith(SMALL):
            _download(name, file, commit, token)
    if weights:
        for file in _weight_files(name, folder, files):
            _download(name, file, commit, token)
    return folder


def _weight_files(name: str, folder: Path, files: list[str]) -> list[str]:
    """What loading opens: model.safetensors, or what the index names; not the same weights under other names beside them."""
    if SINGLE in files:
        return [SINGLE]
    found = [file for file in files if file.endswith(WEIGHTS)]
    if INDEX in files:
        try:
            named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return found  # whoever opens the index says what is wrong with it
        return [file for file in found if file in named]
    if found:
        return found
    if pickled := [file for file in files if file.endswith(PICKLED)]:
        raise pickled_weights(pickled[0], name, "use a repository with safetensors files")
    raise ModelError(what="the Hub repository has no *.safetensors files", where=name, fix="check the name in `model:`")


def _download(name: str, file: str, commit: str | None, token: str | None) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    there = try_to_load_from_cache(name, file, revision=commit) if commit else None
    if isinstance(there, str):
        return Path(there)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    return Path(
        _watched(
            lambda: hf_hub_download(name, file, revision=commit, token=token, etag_timeout=PATIENCE, **_names()), folder, name
        )
    )


def _watched(work: Callable[[], Any], folder: Path, name: str) -> Any:
    """In a thread, which is left behind when nothing arrives: huggingface_hub tries a silent server for six minutes."""
    done: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that waits
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    seen, since = -1, time.monotonic()
    while True:
        thread.join(1.0)
        if failed:
            raise failed[0]
        if not thread.is_alive():
            return done[0]
        if (size := _bytes_below(folder)) != seen:
            seen, since = size, time.monotonic()
        elif time.monotonic() - since > SILENCE:
            raise EnvironmentFault(
                what="the download stalled",
                where=name,
                why=f"no data received for {SILENCE:.0f} s",
                fix="run the same command again: it continues the download",
            )


def _bytes_below(folder: Path) -> int:
    total = 0
    for file in folder.glob("blobs/*"):
        try:
            total += file.stat().st_size
        except OSError:  # gone, or renamed meanwhile
            continue
    return total


def _tried(ask: Callable[[], Any]) -> Any:
    """Again after a moment, where the same request may be answered then."""
    pause = PAUSE
    for _ in range(TRIES - 1):
        try:
            return ask()
        except hub_errors() as error:
            if not isinstance(refusal(error, ""), EnvironmentFault):
                raise
            time.sleep(pause)
            pause *= 2
    return ask()


def refusal(error: Exception, name: str, *, token: str | None = None, kind: str = "model") -> PronghornError:
    """What to tell of an error of huggingface_hub: a wrong name, a missing right, or a fault of the network."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    wrong: type[PronghornError] = DataError if kind == "data set" else ModelError
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'data set' else ''}{name}"
    given, tokens = "this token" if token else "HF_TOKEN", f"{constants.ENDPOINT}/settings/tokens"
    answer = getattr(error, "response", None)
    status = int(getattr(answer, "status_code", 0) or 0)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if isinstance(error, GatedRepoError) or status == 403:
        what = f"access to this {kind} is restricted ({status or 403})"
        why = f"the owner of the token ({given}) must accept the licence on {page}"
        fix = f"accept it there, then set HF_TOKEN to a token from {tokens}"
    elif isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        what = f"the Hub has no such {kind}, or it is private ({status or 404})"
        why = f"without access the Hub does not say which; see {page}"
        fix = f"check the spelling; if it is private or gated, set HF_TOKEN to a token from {tokens}"
    elif status in BUSY or status >= 500:
        wrong, what = EnvironmentFault, f"the Hub answers with status {status}"
        why = "it asks to retry later" if status == 429 else "it is a server error"
        fix = "run the same command again later, or use a local folder"
    elif status:
        what, why, fix = f"the Hub refuses the request ({status})", first, "check the name and HF_TOKEN"
    else:
        wrong, what = EnvironmentFault, f"the Hub does not answer, and the {kind} is not in the cache"
        why, fix = f"{constants.ENDPOINT}: {first}", "check the network, or use a local folder"
    return wrong(what, where=name, why=why, fix=fix)


def hub_errors() -> tuple[type[Exception], ...]:
    """Its own errors are all OSErrors or those of its HTTP library, which it has changed once already."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, ValueError, *(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"))


def hub_api(token: str | None) -> Any:
    from huggingface_hub import HfApi

    return HfApi(token=token, **_names())


def _names() -> dict[str, Any]:
    from pronghorn import __version__

    return {"library_name": "pronghorn", "library_version": __version__}


@contextmanager
def quiet() -> Iterator[None]:
    """Neither bars nor a line for every try; what the caller had set is put back."""
    library: Any = importlib.import_module("huggingface_hub.utils")
    shown, level = not library.are_progress_bars_disabled(), library.logging.get_verbosity()
    library.disable_progress_bars()
    library.logging.set_verbosity_error()
    try:
        yield
    finally:
        library.logging.set_verbosity(level)
        if shown:
            library.enable_progress_bars()
