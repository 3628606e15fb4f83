"""The process beside the run that writes checkpoints. Started by checkpoint_writer.py, never by a user.

It gets the image of a checkpoint's files in shared memory (checkpoint_image.py), puts it on disk by the protocol of
checkpoint.py, and answers; one job at a time. It imports neither torch nor numpy: it is ready 0.1 s after its start, and
takes 22 MB. It lives exactly as long as the run: the kernel kills it with its parent, and Ctrl-C does not reach it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pronghorn.errors import EnvironmentFault
from pronghorn.train.checkpoint.checkpoint import write_checkpoint

END = "end"  # beside closing the pipe: a data worker forked from the parent still holds its end of it
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_NICENESS = 10  # the run's own threads and data workers come first


def main(arguments: list[str]) -> None:
    """Arguments: the parent's process id, the descriptor of the pipe, the descriptors of the images."""
    parent, pipe, *images = (int(argument) for argument in arguments)
    _die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    connection: Connection[Any, Any] = Connection(pipe)
    while True:
        try:
            job = json.loads(connection.recv_bytes())
        except EOFError:
            return
        if job == END:
            return
        connection.send_bytes(json.dumps(_answer(job, images[job["image"]])).encode())


def write_image(job: dict[str, Any], memory: mmap.mmap) -> dict[str, Any]:
    """One checkpoint, from its image; returns the fields of `Written`."""
    began = time.perf_counter()
    places: dict[str, list[int]] = job["files"]

    def fill(folder: Path) -> None:
        with memoryview(memory) as image:
            for name, (start, stop) in places.items():
                file = folder / name
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("wb") as stream, image[start:stop] as content:
                    stream.write(content)

    path = write_checkpoint(
        Path(job["run"]),
        job["manifest"],
        fill,
        keep=job["keep"],
        best_step=job["best_step"],
        needed_bytes=sum(stop - start for start, stop in places.values()),
    )
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"step": job["manifest"]["step"], "path": str(path), "bytes": written, "seconds": time.perf_counter() - began}


def _answer(job: dict[str, Any], descriptor: int) -> dict[str, Any]:
    try:
        # Mapped anew for each job, 6 µs: the parent may have made the image larger.
        with mmap.mmap(descriptor, job["size"], access=mmap.ACCESS_READ) as memory:
            return {"written": write_image(job, memory)}
    except EnvironmentFault as fault:
        return {"fault": {"what": fault.what, "where": fault.where, "why": fault.why, "fix": fault.fix}}
    except OSError as error:  # moved away between its last write and the count of its bytes
        return {
            "fault": {
                "what": f"cannot write checkpoint-{job['manifest']['step']}",
                "where": job["run"],
                "why": f"it disappeared after it was written ({error.strerror})",
                "fix": "do not move the output folder while a run writes to it",
            }
        }
    except Exception:  # noqa: BLE001  our bug: the parent raises it, with this traceback
        return {"bug": traceback.format_exc()}


def _die_with(parent: int) -> None:
    """The kernel kills this process as soon as the thread that started it is gone, also in the middle of a write."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # it died before we could say so
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
