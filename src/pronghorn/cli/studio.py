"""`pronghorn studio`: its options, and what is said where its extra is missing."""

from __future__ import annotations

import argparse
from pathlib import Path

from pronghorn.errors import EnvironmentFault

TEXT = "runs, recipes, data and plans in the browser, on this machine"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--runs",
        action="append",
        type=Path,
        metavar="FOLDER",
        help="folder to search for runs; can be repeated (default: runs)",
    )
    one.add_argument(
        "--also",
        action="append",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="another folder whose files may be used; without it, only the working folder and those of --runs",
    )
    one.add_argument("--port", type=int, default=8765, help="port to listen on; 0: any free port (default: %(default)s)")
    one.add_argument("--host", default="127.0.0.1", help="a loopback address (default: %(default)s)")
    one.add_argument("--no-browser", action="store_true", help="print the link only")
    one.add_argument("--demo", action="store_true", help="start `pronghorn demo` and show its run")


def studio(arguments: argparse.Namespace) -> None:
    try:
        from pronghorn.studio.server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise EnvironmentFault(
            what="pronghorn studio needs starlette and uvicorn",
            why=f"{error.name} is not installed",
            fix="install the extra: pip install 'pronghorn[studio]'",
        ) from None
    runs = arguments.runs or [Path("runs")]
    serve(
        Path.cwd(),
        runs,
        arguments.also,
        arguments.host,
        arguments.port,
        browse=not (arguments.no_browser or arguments.json),
        demo=arguments.demo,
        as_json=arguments.json,
    )
