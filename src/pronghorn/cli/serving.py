"""`pronghorn serve`: its options, and the server until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from pronghorn.cli.output import displaying, say
from pronghorn.errors import CommandError, printable
from pronghorn.program import command

TEXT = "serve trained runs on this machine with OpenAI's API, to try them out; one request at a time"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "runs", nargs="+", metavar="run", help="a run's output folder; several runs must be adapters of the same base model"
    )
    one.add_argument("--checkpoint", default="best", help="best, last or a step number (default: %(default)s)")
    one.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")


def serve(
    arguments: argparse.Namespace, base_of: Callable[[Path], str], loading: Callable[[str], AbstractContextManager[None]]
) -> None:
    if not 0 <= arguments.port <= 65535:
        raise CommandError(what=f"--port {arguments.port} is not a port", fix="use 0 to 65535")
    folders = [Path(run) for run in arguments.runs]
    base = base_of(folders[0])
    with displaying(arguments, label="loading the model"):
        with loading(base):
            from pronghorn.serve.models import load
            from pronghorn.serve.server import Server
        models = load(folders, arguments.checkpoint)
    server = Server(models, arguments.host, arguments.port, told=lambda line: print(printable(line), file=sys.stderr))
    if not server.local:
        print(
            f"warning: anyone who can reach {arguments.host} can use the model; there is no API key and no encryption",
            file=sys.stderr,
        )
    names = ", ".join(models.names)
    say(
        arguments,
        {"url": server.url, "models": models.names},
        f"serving {names}\nat {server.url}, one request at a time; Ctrl-C stops it\n"
        f"for many users: {command('export', arguments.runs[0], '--to', 'vllm')}",
    )
    sys.stdout.flush()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    finally:
        server.end()
