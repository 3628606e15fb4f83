"""What a process of our own (the command line, a benchmark) does about libraries before it imports them, and meanwhile.

Only there: as a library, Pronghorn leaves the process alone. What the user has set in the environment stays.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from pronghorn.errors import CommandError
from pronghorn.folders import cache_folder, folder_of
from pronghorn.hub import HUB, SILENT

PATIENCE = 5.0  # seconds for the hub to answer
PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def set_defaults() -> None:
    # Memory in pieces that grow, instead of blocks of the size that was first asked for: an 8B step of 17.7 GB left 1.5 GB of
    # fragments, more than a budget of 18 GB forgives.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # How long an idle OpenMP thread spins before it sleeps. By default long enough that a step on two busy CPU cores takes
    # 7 to 40 s instead of 2 (each thread spins while the other waits for its turn); with 1,000 rounds 4.5 s, and 2.3 s on
    # idle cores. Read by libgomp when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # flash-attn-4 compiles its kernels for 9 s (1B shapes) in every process, unless it is told to keep them.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attn-4"))
    # Nothing is sent but requests for files: huggingface_hub would ask the hub which agents there are, to tell it whether one
    # of them called, and add torch's version; datasets would have its downloads counted apart.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")


def trace_captured_kernels() -> None:
    """The profiler's library stays loaded from before the first capture on: unloaded and loaded again, it does not get on with
    CUDA graphs (torch sets the same for its own graphs). Before torch is imported."""
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells standard error when it starts and stops


def started_as() -> tuple[int, int]:
    """(rank, ranks) as torchrun, Kubernetes' PyTorchJob or Slurm's srun started this process; (0, 1): alone."""
    _name_as_torch_does()
    rank, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(ranks)) if rank.isdecimal() and ranks.isdecimal() else (0, 1)


def _name_as_torch_does() -> None:
    """A task of srun's has names of Slurm's own. A batch script has most of them too, but is no step: it stays alone."""
    env = os.environ
    tasks = env.get("SLURM_STEP_NUM_TASKS", "")
    if "RANK" in env or "SLURM_STEP_ID" not in env or not tasks.isdecimal() or int(tasks) < 2:
        return
    nodes = env.get("SLURM_STEP_NUM_NODES", "1")
    if "MASTER_ADDR" not in env and nodes != "1":
        raise CommandError(
            what=f"MASTER_ADDR is not set, and this job step runs on {nodes} machines",
            why="the ranks connect to each other through the first machine",
            fix='put this before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        )
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    # One of 20,000, the same for all tasks of a step: several jobs may share a machine.
    number = int(env.get("SLURM_JOB_ID", "0")) * 7 + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(20_000 + number % 20_000))
    env.update(WORLD_SIZE=tasks, RANK=env["SLURM_PROCID"], LOCAL_RANK=env.get("SLURM_LOCALID", "0"))
    if nodes == "1":
        env.setdefault("LOCAL_WORLD_SIZE", tasks)


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of torch and transformers: the garbage collector rests. What modules make stays for good, and it would
    look through all of it many times (1.1 of 7.3 s, two CPU cores) and again during the run, 0.2 s a time. So what is there
    afterwards is set aside, until the process ends: libraries complain of what nobody collected."""
    if not gc.isenabled():  # someone else's decision, or an import in an import
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)


def offline_without_hub(model: str) -> str:
    """Where a model is to come from the hub and nobody answers there, the hub's library is told to look into its cache only: by
    itself it tries for 24 s, and prints every try. Before it is imported. Returns what to tell people; empty: nothing is new.

    Behind a proxy, which knows the way where we do not, and for who has decided already, it is left alone.
    """
    decided = "HF_HUB_OFFLINE" in os.environ or "huggingface_hub" in sys.modules
    if decided or folder_of(model) or model.startswith(("/", ".", "~")) or any(os.environ.get(name) for name in PROXIES):
        return ""
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    if not (why := _why_silent(endpoint)):
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ[SILENT] = why
    return f"cannot reach {endpoint} ({why}): only models in the Hub cache are available"


def _why_silent(endpoint: str) -> str:
    """Why no connection comes about; empty if one does. In a thread, because looking up a name knows no time limit."""
    place, found = urlsplit(endpoint), list[str]()

    def connect() -> None:
        try:
            socket.create_connection((place.hostname, place.port or (80 if place.scheme == "http" else 443)), PATIENCE).close()
            found.append("")
        except OSError as error:
            found.append(error.strerror or str(error))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else f"no answer within {PATIENCE:.0f} s"
