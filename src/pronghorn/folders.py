"""Where things that can be made again are kept between runs, and whether a name is that of a folder here."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`PRONGHORN_CACHE`, or `pronghorn` under the user's cache folder."""
    chosen = os.environ.get("PRONGHORN_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pronghorn"


def folder_of(name: str) -> Path | None:
    """The folder with this name, `~` opened. None: a hub name, then, or a mistake; also a name that is too long, one below a
    folder that may not be entered, and the `~` of nobody."""
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):
        return None
