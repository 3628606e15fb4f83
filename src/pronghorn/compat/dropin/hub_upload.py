"""A folder that goes to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.errors import EnvironmentFault, ModelError, PronghornError
from pronghorn.hub import hub_errors, quiet


def send(folder: Path, repo_id: str, token: str | bool | None, private: bool | None, **commit: Any) -> str:
    """Returns its address there. `commit`: what huggingface_hub's upload_folder knows of it."""
    from huggingface_hub import HfApi

    api: Any = HfApi(token=token or None)
    try:
        with quiet():
            repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            sent = api.upload_folder(repo_id=repository, folder_path=str(folder), **commit)
    except hub_errors() as error:
        raise _not_sent(error, repo_id) from error
    return str(getattr(sent, "commit_url", sent))


def _not_sent(error: Exception, name: str) -> PronghornError:
    status = int(getattr(getattr(error, "response", None), "status_code", 0) or 0)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    if status in (401, 403):
        return ModelError(
            what=f"the Hub refused the upload ({status})",
            where=name,
            why=first,
            fix="pass a token with write access: token=... or HF_TOKEN",
        )
    if isinstance(error, ValueError) or 400 <= status < 500:
        return ModelError(
            what="the Hub refused the upload", where=name, why=first, fix="check the repository name: account/model"
        )
    return EnvironmentFault(
        what="the upload to the Hub failed", where=name, why=first, fix="check the network, then call it again"
    )
