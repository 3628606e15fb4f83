"""A batch script for Slurm: torchrun on every node. Before the time limit, and when Slurm takes the nodes back, the run saves,
and the job queues itself again.

What was found out about signals, with Slurm 22.05 and torch 2.13:

- torchrun kills its ranks 30 s after it gets SIGTERM, and stops waiting for them at a second one. Slurm repeats signals. So
  torchrun runs in a session of its own, which Slurm's signals do not reach, and the ranks get SIGTERM from the script.
- torchrun ends with 1 whatever the ranks end with. They leave their code in a file.
- A job that `scancel` or an administrator's `scontrol requeue` ended is not RUNNING any more: only one that is queues itself.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pronghorn.clusters.keys import Key, Training, asked, count, count_or_none, matching, seconds
from pronghorn.errors import CommandError

CPUS_PER_GPU = 8
EARLY = 60  # seconds that Slurm may send the signal before it was asked to
_NAME = matching(r"[A-Za-z0-9][A-Za-z0-9._,-]*", "a100 (letters, digits, . _ , -)")
KEYS = {
    "nodes": Key(count, "number of nodes", 1),
    "gpus": Key(count_or_none, "GPUs per node; 0: none", 1),
    "gpu": Key(_NAME, "type of GPU, as the cluster calls it"),
    "ranks": Key(count, "processes per node without GPUs", 1),
    "time": Key(seconds, "time limit: 4h, 30m, 1-12:00:00"),
    "save": Key(seconds, "how long before the limit the run saves", 300),
    "cpus": Key(count, f"CPUs per node; by default {CPUS_PER_GPU} per GPU, or one per rank"),
    "memory": Key(matching(r"\d+[KMGT]?", "200G"), "host memory per node"),
    "partition": Key(_NAME, "partition"),
    "account": Key(_NAME, "account"),
    "qos": Key(_NAME, "quality of service"),
    "constraint": Key(_NAME, "features that nodes must have"),
    "name": Key(_NAME, "name of the job"),
}

SCRIPT = r"""
cd {folder} || exit 2
export PATH={programs}:"$PATH"
train=({train})
log={log}

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# On every node. Slurm's signals reach this shell and not torchrun, which would kill the ranks 30 s later: they get SIGTERM from
# here, finish their step and save. torchrun ends with 1 in any case; the ranks leave their exit code in a file.
node='
    export PRONGHORN_EXIT_CODE_FILE=$(mktemp)
    setsid torchrun --nnodes {nodes} --nproc-per-node {ranks} --node-rank "$SLURM_NODEID" \
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --no-python "$@" < /dev/null &
    torchrun=$!
    trap "stopped=1; pkill -TERM -P $torchrun || kill -TERM $torchrun" TERM
    while kill -0 "$torchrun" 2> /dev/null; do wait "$torchrun"; done   # a signal ends `wait` early
    wait "$torchrun"
    code=$?
    if [ "$code" != 0 ] && [ -s "$PRONGHORN_EXIT_CODE_FILE" ]; then code=$(< "$PRONGHORN_EXIT_CODE_FILE")
    elif [ "$code" != 0 ] && [ -n "$stopped" ]; then code=143   # before the ranks could save anything
    fi
    rm -f "$PRONGHORN_EXIT_CODE_FILE"
    exit "$code"
'
steps() {{ grep -s '"event":"step"' "$log" | wc -l; }}

before=$(steps)
stop() {{ scancel --signal=TERM "$SLURM_JOB_ID"; }}   # to all nodes; ranks that are saving overlook another one
trap 'limit=1; stop' USR1                            # the time limit comes
trap stop TERM                                       # both do it: of signals that come together, bash may lose one
setsid srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=0 bash -c "$node" node "${{train[@]}}" &
srun=$!
while kill -0 "$srun" 2> /dev/null; do wait "$srun"; done
wait "$srun"
code=$?

# 143: stopped by a signal, and saved. Anything else is the run's own end.
[ "$code" = 143 ] || exit "$code"
if [ -n "$limit" ] && [ "$(steps)" = "$before" ]; then
    echo "no step within the time limit, so the job is not queued again; ask for more time" >&2
    exit "$code"
fi
if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def script(words: Sequence[str], training: Training) -> tuple[str, int]:
    """The text, and the number of ranks."""
    found = asked("slurm", words, KEYS)
    if found["gpus"] and "ranks" in {word.partition("=")[0] for word in words}:
        raise CommandError(what="--slurm: ranks= is for nodes without GPUs", why="each GPU has a rank", fix="add gpus=0")
    limit, save, ranks = found["time"], found["save"], found["gpus"] or found["ranks"]
    if limit and limit < save + EARLY:
        raise CommandError(
            what=f"--slurm: time= is {limit} s, and save= {save} s",
            why=f"Slurm may send its signal {EARLY} s early, which leaves no time to train",
            fix=f"ask for {save + 2 * EARLY}s or more, or set save= to less",
        )
    cpus = found["cpus"] or (CPUS_PER_GPU * found["gpus"] or ranks)
    gpus = f"{found['gpu']}:{found['gpus']}" if found["gpu"] else found["gpus"]
    options = {
        "job-name": found["name"] or training.name,
        "nodes": found["nodes"],
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gpus-per-node": gpus if found["gpus"] else None,
        "mem": found["memory"],
        "time": limit and _clock(limit),
        **{name: found[name] for name in ("partition", "account", "qos", "constraint")},
        "signal": f"B:USR1@{save}",
        "requeue": "",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}" + (f"={value}" if value != "" else "") for name, value in options.items() if value is not None]
    body = SCRIPT.format(
        folder=shlex.quote(training.folder),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        train=shlex.join(training.words),
        log=shlex.quote(f"{training.output}/run.jsonl"),
        nodes=found["nodes"],
        ranks=ranks,
        cpus=cpus,
    )
    return "\n".join(["#!/bin/bash", f"# {training.source}", *lines]) + "\n" + body, found["nodes"] * ranks


def _clock(limit: int) -> str:
    minutes, rest = divmod(limit, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{rest:02}"
