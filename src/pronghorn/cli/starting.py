"""`pronghorn train` on several GPUs: which processes this command starts, or joins."""

from __future__ import annotations

import argparse
import os
import sys

from pronghorn.errors import CommandError, counted
from pronghorn.process import importing


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--gpus", metavar="N", help="train on N GPUs of this machine, or `all` (default: 1; docs/scale.md)")
    one.add_argument("--ranks", type=int, metavar="N", help="train in N processes on this machine's CPU, or sharing its GPU")


def launched(arguments: argparse.Namespace, ranks: int) -> bool:
    """Whether this command has run again as so many ranks, which find that they are ranks. `ranks`: those that this process
    is already one of."""
    from pronghorn.train.heartbeat import TOLD

    if arguments.gpus is None and arguments.ranks is None:
        return False
    if ranks > 1:
        if TOLD in os.environ:  # one of them
            return False
        raise CommandError(
            what=f"this process is already one of {ranks} ranks",
            why="--gpus and --ranks start the ranks of one machine, and WORLD_SIZE says that something else has",
            fix="remove the option; or, where a scheduler starts one process for each machine, start torchrun in it",
        )
    wanted = _wanted(arguments)
    if wanted == 1:
        return False
    with importing():
        from pronghorn.train.launch import launch
    launch(wanted, [sys.executable, "-m", "pronghorn.cli", *arguments.given])
    return True


def _wanted(arguments: argparse.Namespace) -> int:
    if arguments.gpus is None:
        if arguments.ranks < 1:
            raise CommandError(what=f"--ranks {arguments.ranks} is not a number of processes", fix="use --ranks 1 or more")
        return int(arguments.ranks)
    if arguments.ranks is not None:
        raise CommandError(what="--gpus and --ranks exclude each other", fix="use --gpus on GPUs, --ranks on a CPU")
    there = _there()
    if arguments.gpus != "all" and not (arguments.gpus.isdecimal() and int(arguments.gpus) > 0):
        raise CommandError(what=f"--gpus {arguments.gpus} is not a number of GPUs", fix="use --gpus 2, or --gpus all")
    wanted = max(1, there) if arguments.gpus == "all" else int(arguments.gpus)
    if wanted > there:
        raise CommandError(
            what=f"--gpus {arguments.gpus}: this machine has {counted(there, 'GPU') if there else 'no GPU'}",
            why="every rank needs a GPU of its own; CUDA_VISIBLE_DEVICES may hide some",
            fix=f"use --gpus {there} or fewer; --ranks {wanted} trains on the CPU" if there else f"use --ranks {wanted}",
        )
    return wanted


def _there() -> int:
    with importing():
        import torch
    return int(torch.cuda.device_count())


def tell_of_others(arguments: argparse.Namespace, ranks: int) -> None:
    """One line, where there are GPUs that this run does not use. Only called when torch is there already."""
    if ranks == 1 and arguments.gpus is None and arguments.ranks is None and (there := _there()) > 1:
        print(f"this run uses 1 of {there} GPUs; to use all of them: --gpus {there} (docs/scale.md)", file=sys.stderr)
