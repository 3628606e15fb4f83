"""What was taken from others is what they published, with their licences; all of the page is small."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

from pronghorn import studio
from pronghorn.report.html_style import STYLE

STATIC = Path(studio.__file__).parent / "static"
MOST = 200_000  # bytes of the whole page, compressed
# As in the packages of the npm registry: preact/standalone.module.js of htm 3.1.1 (htm and Preact), dist/uPlot.iife.min.js and
# dist/uPlot.min.css of uPlot 1.6.32, and the file LICENSE of each.
VENDORED = {
    "htm-preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uPlot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE-htm": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    "LICENSE-preact": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "LICENSE-uPlot": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_vendored_files_are_as_published() -> None:
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (STATIC / "vendor").iterdir()}
    assert found == VENDORED


def test_the_page_is_small() -> None:
    files = [file.read_bytes() for file in STATIC.rglob("*") if file.is_file()]
    assert sum(len(gzip.compress(content)) for content in [*files, STYLE.encode()]) < MOST


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for file in STATIC.glob("*"):
        if file.is_file():
            assert re.findall(r"""(?:https?:)?//[a-z0-9-]+\.[a-z]""", re.sub(r"(?m)^\s*//.*$", "", file.read_text())) == [], (
                file.name
            )


def test_every_module_that_is_imported_is_there() -> None:
    for file in STATIC.glob("*.js"):
        for name in re.findall(r'from "(\./[^"]+)"', file.read_text()):
            assert (file.parent / name).is_file(), f"{file.name}: {name}"
