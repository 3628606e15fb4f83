"""Where things that can be made again are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`PRONGHORN_CACHE`, or `pronghorn` under the user's cache folder."""
    chosen = os.environ.get("PRONGHORN_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pronghorn"
