"""`--push-to-hub NAME`: an export as a repository of the hub. Nothing is sent without a token, and nothing that failed its
check. The token is HF_TOKEN's, or the one that `hf auth login` has left. A new repository is private; an existing one stays as
it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, EnvironmentFault, ModelError
from pronghorn.export.job import Report
from pronghorn.hub import REPOSITORY, hub_api, hub_errors, quiet


def require_push(name: str, targets: int) -> None:
    """Before anything is written."""
    from huggingface_hub import constants, get_token

    if "/" not in name or not REPOSITORY.fullmatch(name):
        raise CommandError(what=f"--push-to-hub {name} is not a valid Hub name", fix="use OWNER/NAME")
    if targets > 1:
        raise CommandError(
            what="--push-to-hub takes one target", why="a repository holds one export", fix="run one command per target"
        )
    if not get_token():
        raise CommandError(
            what="--push-to-hub needs a token",
            why="neither HF_TOKEN nor a login was found",
            fix=f"set HF_TOKEN to a token with write access from {constants.ENDPOINT}/settings/tokens",
        )
    if constants.HF_HUB_OFFLINE:
        raise CommandError(what="--push-to-hub: access to the Hub is disabled", why="HF_HUB_OFFLINE is set", fix="unset it")


def push(folder: Path, name: str, report: Report) -> str:
    """The address of what was uploaded."""
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    report("uploading", 0, total)
    try:
        sent = send(folder, name, private=True, commit_message=f"Export of {folder.name}")
    except (ModelError, EnvironmentFault) as error:
        raise type(error)(
            what=f"the export is written, but not uploaded: {error.what}",
            where=str(folder),
            why=error.why,
            fix=f"{error.fix}; then upload the folder: hf upload NAME {folder}",
        ) from error
    report("uploading", total, total)
    return str(sent.repo_url)


def send(folder: Path, name: str, *, token: str | bool | None = None, private: bool | None = None, **commit: object) -> Any:
    """In one commit: all of it or nothing. Returns what upload_folder of huggingface_hub returns, which also takes `commit`."""
    api = hub_api(token or None)  # type: ignore[arg-type]  # True: the token of the login
    try:
        with quiet():
            repository = api.create_repo(name, private=private, exist_ok=True).repo_id
            return api.upload_folder(repo_id=repository, folder_path=str(folder), **commit)
    except hub_errors() as error:
        raise _not_sent(error, name) from error


def _not_sent(error: Exception, name: str) -> ModelError | EnvironmentFault:
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if status in (401, 403):
        return ModelError(
            what=f"the Hub refused the upload ({status})",
            where=name,
            why=first,
            fix="use a token with write access: HF_TOKEN, or token=... in Python",
        )
    if isinstance(error, ValueError) or 400 <= status < 500:
        return ModelError(
            what="the Hub refused the upload", where=name, why=first, fix="check the repository name: account/model"
        )
    return EnvironmentFault(what="the upload to the Hub failed", where=name, why=first, fix="check the network, then try again")
