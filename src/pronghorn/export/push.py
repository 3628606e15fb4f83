"""`--push-to-hub NAME`: an export as a repository of the hub. Nothing is sent without a token, and nothing that failed its
check. The token is HF_TOKEN's, or the one that `hf auth login` has left. A new repository is private; an existing one stays as
it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, PronghornError
from pronghorn.export.job import Report
from pronghorn.hub import REPOSITORY, hub_api, hub_errors, quiet, refusal


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
    """The address of what was uploaded, in one commit: all of it or nothing."""
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    report("uploading", 0, total)
    with quiet():
        api: Any = hub_api(None)
        try:
            api.create_repo(name, private=True, exist_ok=True)
            found = api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=f"Export of {folder.name}")
        except hub_errors() as error:
            raise _told(refusal(error, name), folder) from error
    report("uploading", total, total)
    return str(getattr(found, "repo_url", None) or f"{api.endpoint}/{name}")


def _told(error: PronghornError, folder: Path) -> PronghornError:
    return type(error)(
        what=f"the export is written, but not uploaded: {error.what}",
        where=str(folder),
        why=error.why,
        fix=f"{error.fix}; then upload the folder: hf upload NAME {folder}",
    )
