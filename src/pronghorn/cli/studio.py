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
    one.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only); others need a password, and TLS or --without-tls",
    )
    one.add_argument(
        "--name",
        action="append",
        default=[],
        help="a name of this machine that browsers may use beside the address of --host; can be repeated",
    )
    one.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="file with the password, 12 characters or more, that only you may read (or set PRONGHORN_STUDIO_PASSWORD)",
    )
    one.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate in PEM, with those between it and the root")
    one.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key in PEM")
    one.add_argument(
        "--without-tls",
        action="store_true",
        help="beyond this machine without encryption: whoever is on the way can read the password and start commands as you",
    )
    one.add_argument("--no-browser", action="store_true", help="print the link only")
    one.add_argument("--demo", action="store_true", help="start `pronghorn demo` and show its run")


def studio(arguments: argparse.Namespace) -> None:
    try:
        from pronghorn.studio.server import Entry, serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise EnvironmentFault(
            what="pronghorn studio needs starlette and uvicorn",
            why=f"{error.name} is not installed",
            fix="install the extra: pip install 'pronghorn[studio]'",
        ) from None
    asked = vars(arguments)
    files = {name: asked[name] for name in ("password_file", "tls_cert", "tls_key")}
    entry = Entry(arguments.host, tuple(arguments.name), without_tls=arguments.without_tls, **files)
    runs = arguments.runs or [Path("runs")]
    serve(
        Path.cwd(),
        runs,
        arguments.also,
        entry,
        arguments.port,
        browse=not (arguments.no_browser or arguments.json),
        demo=arguments.demo,
        as_json=arguments.json,
    )
