"""`pronghorn plan`: on one GPU, on each that there is, or on several together."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pronghorn.cli.output import say
from pronghorn.errors import CommandError
from pronghorn.process import importing
from pronghorn.program import runnable

if TYPE_CHECKING:
    from pronghorn.recipe import Recipe


def options(one: argparse.ArgumentParser) -> None:
    from pronghorn.memory.gpus import GPUS

    one.add_argument(
        "--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: this machine's GPU; without a GPU, all of these)"
    )
    one.add_argument(
        "--host",
        metavar="SIZE",
        help="host RAM of that machine, such as 32GB, used for offloading (default: this machine's; for another machine, 64 GB "
        "that can be pinned, beside the plan without)",
    )
    one.add_argument("--longest", action="store_true", help="find the longest document that fits, with one document per step")
    one.add_argument("--price", type=float, metavar="USD", help="price per GPU hour in USD (default: a list price)")
    one.add_argument("--tokens", type=int, metavar="N", help="total training tokens (default: counted from the prepared data)")
    one.add_argument("--verbose", action="store_true", help="also show the bytes and the time of each recompute level")
    one.add_argument(
        "--gpus", metavar="NxNAME", help="plan for several GPUs per machine, such as 8xh100, with every world.shard"
    )
    one.add_argument("--nodes", type=int, metavar="N", help="with --gpus: number of machines (default: 1)")
    one.add_argument(
        "--link",
        metavar="LINK",
        help="with --gpus: nvlink or pcie in a machine, network per GPU such as 400gbit, or both: pcie,100gbit",
    )


def plan(arguments: argparse.Namespace, recipe: Recipe) -> None:
    if arguments.gpus is not None:
        _plan_many(arguments, recipe)
        return
    if arguments.nodes is not None or arguments.link is not None:
        raise CommandError(what="--nodes and --link need --gpus", fix="add --gpus 8xh100")
    with importing():
        from pronghorn.train.run.run_forecast import comparison, forecast
    found = forecast(
        recipe,
        gpu=arguments.gpu,
        price=arguments.price,
        tokens=arguments.tokens,
        longest=arguments.longest,
        host=arguments.host,
    )
    verbose = arguments.verbose
    if arguments.longest:
        tokens = found[0].step_tokens
        say(
            arguments,
            found[0].as_dict(),
            f"{found[0].text(verbose=verbose)}\nlongest     one document of {tokens:,} tokens; to train it: "
            f"data.max_length={tokens} train.capacity={tokens} train.batch_"
            f"{'rows=1' if recipe.train.batch_rows else f'tokens={tokens}'}"
            + (f" world.context={recipe.world.context}" if recipe.world.context > 1 else ""),
        )
        return
    unknown = (
        ""
        if found[0].tokens is not None
        else ("\nrun time and cost are unknown: the token count is not known yet. Set --tokens, or run `pronghorn check` first")
    )
    text = (found[0].text(verbose=verbose) if len(found) == 1 else comparison(found)) + runnable(unknown)
    say(arguments, found[0].as_dict() if len(found) == 1 else {"gpus": [one.as_dict() for one in found]}, text)


def _plan_many(arguments: argparse.Namespace, recipe: Recipe) -> None:
    ignored = [name for name in ("gpu", "longest", "price", "tokens", "verbose") if getattr(arguments, name)]
    if ignored:
        raise CommandError(what=f"--{ignored[0]} cannot be combined with --gpus", fix="remove one of them")
    with importing():
        from pronghorn.train.run.run_forecast import forecast_of_many
    found = forecast_of_many(
        recipe,
        arguments.gpus,
        machines=1 if arguments.nodes is None else arguments.nodes,
        link=arguments.link or "",
        host=arguments.host,
    )
    say(arguments, found.as_dict(), found.text())
