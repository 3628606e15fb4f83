"""`pronghorn queue`: commands that wait for the GPU, in the working folder. The studio there shows the same queue."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pronghorn.cli.output import say
from pronghorn.cli.words import require_recipe
from pronghorn.errors import CommandError
from pronghorn.program import command

TEXT = "commands that wait for the GPU, one after the other: list, add, move, cancel, run"
Parse = Callable[[Sequence[str]], argparse.Namespace]


def options(verbs: Any, verb: Callable[..., argparse.ArgumentParser], parse: Parse) -> None:
    """`parse`: reads a whole command, so that a wrong one is refused now and not in its turn."""
    queue = verbs.add_parser("queue", help=TEXT, description=TEXT)
    group = queue.add_subparsers(title="commands", metavar="COMMAND", required=True)
    verb("list", show_queue, "show what runs, what waits, in its order, and what is over", group)
    one = verb("add", partial(add, parse=parse), "add a command at the end, and start a worker if none is there", group)
    one.add_argument("typed", nargs=argparse.REMAINDER, metavar="COMMAND", help="for instance: train my.yaml train.lr=1e-4")
    one = verb("move", move, "move a waiting command to another place", group)
    one.add_argument("id", help="as `pronghorn queue list` shows it")
    one.add_argument("place", type=int, help="its new place among the waiting ones, from 1")
    one = verb("cancel", cancel, "leave a waiting command out; the running one gets Ctrl-C, so a run saves first", group)
    one.add_argument("id", help="as `pronghorn queue list` shows it")
    one = verb("run", run, "start what waits, one command after the other; `add` does this by itself", group)
    one.add_argument("--keep", action="store_true", help="wait for more when the queue is empty")


def show_queue(arguments: argparse.Namespace) -> None:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = _queue().listed()
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("id", "state", "progress", "command"):
        table.add_column(name, overflow="fold", no_wrap=name == "id")  # which stays whole, to be copied
    for one in found["entries"]:
        state = one["state"] if one["exit"] is None else f"{one['state']}, exit code {one['exit']}"
        table.add_row(one["id"], state, one["progress"], Text(one["command"]))
    waits = any(one["state"] in ("running", "waiting") for one in found["entries"])
    idle = [f"no worker is there; start one: {command('queue', 'run')}"] if waits and not found["worker"] else []
    say(arguments, found, Group(table, *idle) if found["entries"] else "the queue is empty")


def add(arguments: argparse.Namespace, parse: Parse) -> None:
    from pronghorn.studio.places import Places
    from pronghorn.studio.queue import VERBS

    typed = arguments.typed
    if not typed:
        raise CommandError(what="no command to add", fix="for instance: pronghorn queue add train my.yaml")
    given = parse(typed)
    count = 2 if typed[0] == "data" else 1
    verb = " ".join(typed[:count])
    if verb not in VERBS:
        raise CommandError(what=f"`pronghorn {verb}` does not wait in the queue", fix=f"these do: {', '.join(VERBS)}")
    here = Places(Path.cwd())
    about = here.name((here.home / _folder(verb, given)).resolve())
    entry = _queue().add(verb, typed[count:], about)
    say(arguments, entry, f"added as {entry['id']}: {entry['command']}\nits turn: {command('queue', 'list')}")


def _folder(verb: str, given: argparse.Namespace) -> Path:
    """Where the command writes, or the run that it reads. A recipe is read for it, again when its turn comes."""
    if verb in ("export", "eval"):
        return Path(given.run)  # which a command before it may make
    from pronghorn.recipe_file import load_recipe
    from pronghorn.sweep.grid import trials_of

    require_recipe(given.recipe, given.parser)
    if verb == "sweep":
        return trials_of(given.overrides, lambda words: load_recipe(given.recipe, words), given.output)[0]
    recipe = load_recipe(given.recipe, given.overrides)
    return Path(given.output if verb == "data audit" else recipe.output)


def move(arguments: argparse.Namespace) -> None:
    entry = _queue().move(arguments.id, arguments.place)
    say(arguments, entry, f"moved: {entry['command']}")


def cancel(arguments: argparse.Namespace) -> None:
    entry = _queue().cancel(arguments.id)
    say(arguments, entry, f"{'stopping' if entry['state'] == 'running' else 'cancelled'}: {entry['command']}")


def run(arguments: argparse.Namespace) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` turns Ctrl-C off, for what is started here too
    told = (lambda _: None) if arguments.json else partial(print, flush=True)
    if not _queue().work(keep=arguments.keep, tell=told):
        raise CommandError(what="a worker is there already", fix="see what it does: pronghorn queue list")


def _queue() -> Any:
    from pronghorn.studio.queue import Queue

    return Queue(Path.cwd())
