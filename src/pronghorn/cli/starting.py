"""`pronghorn train` on several GPUs: which processes this command starts, or joins."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from pronghorn.cli.evaluating import own_metric
from pronghorn.errors import CommandError, EndedElsewhere, RecipeError, counted
from pronghorn.process import importing
from pronghorn.program import module

if TYPE_CHECKING:
    from pronghorn.recipe import Recipe


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--gpus", metavar="N", help="train on N GPUs of this machine (default: all; docs/scale.md)")
    one.add_argument("--ranks", type=int, metavar="N", help="train in N processes on this machine's CPU, or sharing its GPU")


def own_rewards(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--reward-file",
        type=Path,
        metavar="FILE",
        help="your own rewards: a Python file with def reward(prompts, completions, **columns); the file is executed",
    )
    one.add_argument(
        "--episode-file",
        type=Path,
        metavar="FILE",
        help="conversations of several turns: a Python file with async def episode(row, ask); the file is executed",
    )


def own_files(one: argparse.ArgumentParser) -> None:
    own_metric(one)
    own_rewards(one)


class OwnCode(TypedDict):
    reward_file: Path | None
    episode_file: Path | None


def own_code(arguments: argparse.Namespace) -> OwnCode:
    return {"reward_file": arguments.reward_file, "episode_file": arguments.episode_file}


def launched(arguments: argparse.Namespace, ranks: int, recipe: Recipe) -> bool:
    """Whether this command has run again as so many ranks, which find that they are ranks. `ranks`: those that this process
    is already one of."""
    from pronghorn.train.dist.folder_store import PLACE
    from pronghorn.train.dist.launch import launch, require_packs

    asked = arguments.gpus is not None or arguments.ranks is not None
    if not asked and "WORLD_SIZE" in os.environ:  # whoever started this process has decided
        _started_elsewhere(ranks, recipe)
        return False
    if ranks > 1:
        if PLACE in os.environ:  # one of them
            return False
        raise CommandError(
            what=f"this process is already one of {ranks} ranks",
            why="--gpus and --ranks start ranks, but WORLD_SIZE is set: another launcher has already started them",
            fix="remove the option; if your scheduler starts one process per machine, run torchrun in that process",
        )
    wanted = _wanted(arguments) if asked else _by_itself(recipe)
    require_packs(recipe, wanted)
    if wanted == 1:
        return False
    launch(wanted, [*module("pronghorn.cli"), *arguments.given])
    return True


def leave_exit_code(code: int) -> None:
    """For a script that started torchrun, which ends with 1 on any failure."""
    if place := os.environ.get("PRONGHORN_EXIT_CODE_FILE"):
        with suppress(OSError):
            Path(place).write_text(f"{code}\n", encoding="utf-8")


def _started_elsewhere(ranks: int, recipe: Recipe) -> None:
    """By torchrun or a scheduler: what ranks that this command starts have behind them."""
    from pronghorn.train.dist.launch import on_loopback, require_packs

    try:
        require_packs(recipe, ranks)
    except RecipeError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise EndedElsewhere(error.what, exit_code=error.exit_code, told=True) from None
    if ranks > 1 and os.environ.get("LOCAL_WORLD_SIZE") == str(ranks):  # all on this machine
        for name, value in on_loopback().items():
            os.environ.setdefault(name, value)


def _wanted(arguments: argparse.Namespace) -> int:
    if arguments.gpus is None:
        if arguments.ranks < 1:
            raise CommandError(what=f"--ranks {arguments.ranks} is not a number of processes", fix="use --ranks 1 or more")
        return int(arguments.ranks)
    if arguments.ranks is not None:
        raise CommandError(what="--gpus and --ranks cannot be combined", fix="use --gpus on GPUs, --ranks on a CPU")
    there = _there()
    if arguments.gpus != "all" and not (arguments.gpus.isdecimal() and int(arguments.gpus) > 0):
        raise CommandError(what=f"--gpus {arguments.gpus} is not a number of GPUs", fix="use --gpus 2, or --gpus all")
    wanted = max(1, there) if arguments.gpus == "all" else int(arguments.gpus)
    if wanted > there:
        raise CommandError(
            what=f"--gpus {arguments.gpus}: this machine has {counted(there, 'GPU') if there else 'no GPU'}",
            why="every rank needs its own GPU; CUDA_VISIBLE_DEVICES may hide some",
            fix=f"use --gpus {there} or fewer; --ranks {wanted} trains on the CPU" if there else f"use --ranks {wanted}",
        )
    return wanted


def _by_itself(recipe: Recipe) -> int:
    """All GPUs, or as many as the run can use; says which."""
    there = _there() if _may_be_several() else 1
    if there < 2:
        return 1
    packs, rows, context = recipe.step_packs(), recipe.train.batch_rows, recipe.world.context
    wanted, why = (
        max(1, min(there // context, packs) * context),
        f"train.batch_tokens / train.capacity = {counted(packs, 'pack')} per step",
    )
    if recipe.rollouts is not None:
        wanted, why = min(there, recipe.rollouts.prompts), f"a step has rollouts.prompts: {recipe.rollouts.prompts}"
    if rows:
        why = f"train.batch_rows: {rows} of up to {recipe.data.max_length} tokens are {counted(packs, 'pack')} per step"
    if problem := _why_not_together(there):
        wanted, why = 1, problem
    told = f"{wanted} of {there} GPUs: {why}" if wanted < there else f"{there} GPUs; --gpus 1 uses one"
    print(f"training on {told} (docs/scale.md)", file=sys.stderr)
    return wanted


def _may_be_several() -> bool:
    """Without torch, which takes seconds to import; where the driver does not tell (WSL), there may."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1 or Path("/dev/dxg").exists()


def _why_not_together(there: int) -> str:
    import torch

    names = list(dict.fromkeys(torch.cuda.get_device_name(gpu) for gpu in range(there)))
    if len(names) > 1:
        return f"the GPUs differ ({', '.join(names)}), and each step waits for the slowest; --gpus {there} uses all"
    if not torch.distributed.is_nccl_available():
        return "this torch build has no NCCL, which is needed to all-reduce gradients between GPUs"
    return ""


def _there() -> int:
    with importing():
        import torch
    return int(torch.cuda.device_count())
