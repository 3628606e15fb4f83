"""`make cluster-test`: a run under a real Slurm, by the script that `pronghorn launch --slurm` writes.

Debian's slurm-wlm and munge on this machine, as two nodes with one gloo rank each. The job meets its time limit, then a
preemption (SIGTERM to its nodes), then an administrator's requeue. Each time it saves, waits in the queue and goes on. Losses
and gradient norms of all steps must equal those of an undisturbed run to the bit. A recipe that fails and a job that is
cancelled must not be queued again. Where Slurm is missing and cannot be installed it says so and ends with 0.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS)]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue", "pkill", "setsid")
PATIENCE = 600.0  # seconds for anything, so that nothing hangs
SOME = 30  # steps whose time is measured
LONG = 120.0  # seconds of an undisturbed run; the signal comes 50 to 80 s after the job starts
SLURM = ("--slurm", "nodes=2", "gpus=0", "ranks=1")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
# Two nodes of one machine need names that it finds itself by.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes={host},localhost Default=YES State=UP
"""
RECIPE = """\
model: model
precision: fp32
lora: {r: 4}
data: {train: rows.jsonl, eval: 0.05, max_length: 128, workers: 0}
train: {steps: 30, batch_tokens: 512, capacity: 256, lr: 1e-3}
eval: {every: 100000, generations: 0}
checkpoint: {every: 100000}
output: runs/measured
"""


class LeftOutError(Exception):
    """Why there can be no test on this machine."""


def wait(found: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE
    while not (one := found()):
        assert time.monotonic() < until, what
        time.sleep(0.5)
    return one


def said(*words: str, **more: Any) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, **more).stdout.strip()


# Slurm -----------------------------------------------------------------------------------------------------------------------


def install() -> None:
    os.environ["PATH"] += f"{os.pathsep}/usr/sbin"  # where Debian has the daemons

    def missing() -> list[str]:
        return [name for name in PROGRAMS if shutil.which(name) is None]

    if missing() and shutil.which("apt-get") and os.geteuid() == 0:
        packages = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge", "procps"]
        for command in (packages, ["apt-get", "update", "-qq"], packages):
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, capture_output=True, timeout=600, check=False)
            if not missing():
                break
    if missing():
        raise LeftOutError(f"no {', '.join(missing())} here, and apt-get does not install slurm-wlm and munge")
    if socket.gethostname().partition(".")[0] == "localhost":
        raise LeftOutError("this machine has no name but localhost, and two nodes need two names")
    with suppress(OSError):
        socket.gethostbyname(socket.gethostname().partition(".")[0])
        return
    raise LeftOutError(f"this machine does not find itself as {socket.gethostname()}")


@contextmanager
def slurm(home: Path) -> Iterator[None]:
    host, sockets = socket.gethostname().partition(".")[0], [socket.socket() for _ in range(3)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    for name in ("state", f"spool-{host}", "spool-localhost"):
        (home / name).mkdir()
    (home / "munge.key").write_bytes(os.urandom(1024))
    (home / "munge.key").chmod(0o400)
    os.environ["SLURM_CONF"] = str(home / "slurm.conf")
    (home / "slurm.conf").write_text(CONFIG.format(host=host, ports=ports, user=said("id", "-un"), home=home))
    munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{name}={home / file}" for name, file in munge.items())],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", name] for name in (host, "localhost")),
    ]
    started = list[subprocess.Popen[bytes]]()
    try:
        for words in daemons:
            with (home / "daemons.log").open("ab") as log:
                started.append(subprocess.Popen(words, stdout=log, stderr=log))
            if words[0] == "munged":
                wait((home / "munge.sock").exists, "munged does not start")
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        wait(lambda: subprocess.run(idle, capture_output=True, text=True, check=False).stdout.strip() == "2", "no idle nodes")
        yield
    except BaseException:
        print((home / "daemons.log").read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        if len(started) == len(daemons):
            subprocess.run(["scancel", f"--user={said('id', '-un')}"], check=False)
            with suppress(AssertionError, subprocess.CalledProcessError):
                wait(lambda: not said("squeue", "--noheader"), "jobs do not end")
        for process in reversed(started):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def state(job: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in said("scontrol", "show", "job", job, "--oneliner").split() if "=" in word)


def restarts(job: str) -> int:
    return int(state(job)["Restarts"])


def submitted(home: Path, *words: str) -> str:
    """The number of a job that `pronghorn launch` hands to sbatch."""
    told = said(*pronghorn("launch", "mine.yaml", *words, "--submit", "--json"), cwd=home)
    return str(json.loads(told)["job"].split()[-1])


# The run ---------------------------------------------------------------------------------------------------------------------


def pronghorn(*words: str) -> list[str]:
    return [sys.executable, "-m", "pronghorn.cli", *words]


def folder(home: Path) -> None:
    from samples import chat_rows, make_model, make_tokenizer, write_rows

    make_model().save_pretrained(home / "model")
    make_tokenizer().save_pretrained(home / "model")
    write_rows(home / "rows.jsonl", chat_rows(300))
    (home / "mine.yaml").write_text(RECIPE)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    if not (run / "run.jsonl").exists():
        return []
    lines = (run / "run.jsonl").read_bytes().split(b"\n")[:-1]
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def curve(run: Path) -> dict[int, tuple[str, str]]:
    """step -> loss and gradient norm, the later ones of steps that were done again."""
    return {event["step"]: (event["loss"].hex(), event["grad_norm"].hex()) for event in events(run, "step")}


def undisturbed(home: Path, steps: int, output: str) -> Path:
    words = pronghorn("train", "mine.yaml", f"train.steps={steps}", f"output=runs/{output}", "--ranks", "2", "--json")
    said(*words, cwd=home)
    return home / "runs" / output


def queued_again(home: Path, job: str, number: int) -> dict[str, Any]:
    """The last event of the run before this restart of the job."""
    wait(lambda: restarts(job) >= number or state(job)["JobState"] in ENDED, "the job is not queued again")
    assert restarts(job) == number, (home / f"slurm-{job}.out").read_text()[-3000:]
    end = wait(lambda: events(home / "runs" / "mine", "end")[number - 1 :], "the run does not save")[0]
    print(f"stopped and queued again: step {end['step']}", flush=True)
    return dict(end)


def disturbed(home: Path, steps: int) -> Path:
    """Ended by the time limit, by a preemption and by an administrator; then it has the time that it needs."""
    run = home / "runs" / "mine"
    job = submitted(home, f"train.steps={steps}", "output=runs/mine", *SLURM, "time=2m", "save=40s")
    at = [queued_again(home, job, 1)]
    said("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    for words in (["scancel", "--signal=TERM", job], ["scontrol", "requeue", job]):
        wait(lambda: len(curve(run)) > at[-1]["step"] + 5, "the job does not go on")
        said(*words)
        at.append(queued_again(home, job, len(at) + 1))
    wait(lambda: state(job)["JobState"] in ENDED, "the job does not end")
    out = (home / f"slurm-{job}.out").read_text()
    assert (state(job)["JobState"], state(job)["ExitCode"], restarts(job)) == ("COMPLETED", "0:0", 3), out[-3000:]
    assert [end["exit_code"] for end in at] == [143] * 3
    stops = [end["step"] for end in at]
    assert 0 < stops[0] < stops[1] < stops[2] < steps, stops
    resumed = [event["resumed_from"] for event in events(run, "start")]
    assert resumed == [None, *stops], (resumed, "nothing that was saved is done again")
    return run


def not_queued_again(home: Path) -> None:
    job = submitted(home, "model=nowhere/at-all", "output=runs/wrong", *SLURM)
    wait(lambda: state(job)["JobState"] == "FAILED", "a wrong recipe does not end the job")
    assert (state(job)["ExitCode"], restarts(job)) == ("2:0", 0), state(job)
    job = submitted(home, "train.steps=100000", "output=runs/cancelled", *SLURM)
    wait(lambda: len(curve(home / "runs" / "cancelled")) > 3, "no steps")
    said("scancel", job)
    wait(lambda: state(job)["JobState"] == "CANCELLED", "scancel does not end the job")
    wait(lambda: events(home / "runs" / "cancelled", "end"), "a cancelled run does not save")
    wait(lambda: not said("squeue", "--noheader", f"--jobs={job}"), "a cancelled job does not leave the queue")
    assert restarts(job) == 0


def main() -> None:
    try:
        install()
    except LeftOutError as error:
        print(f"cluster-test left out: {error}")
        return
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        os.environ["PRONGHORN_CACHE"] = str(home / ".cache")
        folder(home)
        measured = events(undisturbed(home, SOME, "measured"), "step")
        steps = int(LONG / (measured[-1]["time"] - measured[0]["time"]) * SOME)
        with slurm(home):
            print(f"{said('scontrol', '--version')}, two nodes on this machine, {steps} steps", flush=True)
            not_queued_again(home)
            print("a wrong recipe and a cancelled job are not queued again, exit code 2 kept: yes", flush=True)
            run = disturbed(home, steps)
        found, expected = curve(run), curve(undisturbed(home, steps, "alone"))
        wrong = [step for step in expected if found.get(step) != expected[step]]
        assert len(expected) == steps, len(expected)
        assert not wrong, f"steps differ, the first is {wrong[0]}: {found.get(wrong[0])} {expected[wrong[0]]}"
        print(f"losses and gradient norms of all {steps} steps equal an undisturbed run's to the bit: yes")


if __name__ == "__main__":
    main()
