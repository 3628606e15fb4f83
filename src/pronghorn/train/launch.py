"""Starts the ranks of a run on this machine, by torch's elastic agent; ends with the exit code of the one that failed first.

The agent watches the ranks: when one of them ends with an error, the others are asked to end and, if they do not, killed. A
signal to this process is passed on to all of them.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pronghorn.errors import EndedElsewhere, EnvironmentFault, PronghornError
from pronghorn.train.heartbeat import TOLD

PATIENCE = 600  # seconds after a signal for ranks to finish their step and save, before they are killed; after an error, 30


def launch(ranks: int, command: Sequence[str]) -> None:
    """Raises where not every rank ended well; ranks show their own messages."""
    # On a CPU as many threads as there are cores for each; on a GPU it matters little.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    for name in ("agent.server.api", "multiprocessing.api"):  # a page of their own for every failure
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        **_patience(),
    )
    with TemporaryDirectory() as folder:
        told = Path(folder) / "told"
        os.environ[TOLD] = str(told)
        try:
            elastic_launch(config, command[0])(*command[1:])
        except SignalException as stopped:
            raise EndedElsewhere("all ranks have ended", exit_code=128 + int(stopped.sigval), told=True) from None
        except ChildFailedError as failed:
            raise _first(failed, told.exists()) from None
        finally:
            del os.environ[TOLD]


def _patience() -> dict[str, Any]:
    """torch 2.11 cannot be told: it kills ranks 30 s after a signal."""
    known = "shutdown_timeout" in inspect.signature(LaunchConfig).parameters
    return {"shutdown_timeout": PATIENCE} if known else {}


def _first(failed: ChildFailedError, told: bool) -> PronghornError:
    """`told`: a rank has shown what happened, and to whom."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode < 0:
        if told:
            return EndedElsewhere(f"rank {rank} was killed", told=True)
        name = signal.Signals(-failure.exitcode).name
        return EnvironmentFault(
            what=f"rank {rank} was killed by {name}",
            why="the operating system kills processes when memory runs out",
            fix="check the system log (dmesg), then run the same command again: it resumes",
        )
    return EndedElsewhere(f"rank {rank} ended with exit code {failure.exitcode}", exit_code=failure.exitcode, told=True)
