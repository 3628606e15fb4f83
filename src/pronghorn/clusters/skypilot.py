"""A task for SkyPilot's managed jobs: torchrun on every node, the run's folder on a disk or in a bucket that outlives them. A
preempted job starts again on other nodes with the same command, which resumes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from pronghorn import __version__
from pronghorn.clusters.keys import Key, Training, asked, count, matching, require, require_below
from pronghorn.errors import CommandError

PORT = 29500
_STORE = "/pronghorn"  # where nodes see it
KEYS = {
    "nodes": Key(count, "number of nodes", 1),
    "gpus": Key(count, "GPUs per node", 1),
    "gpu": Key(matching(r"[A-Za-z0-9][A-Za-z0-9-]*", "H100"), "type of GPU, as SkyPilot calls it"),
    "store": Key(
        matching(r"([a-z0-9]+://)?[A-Za-z0-9][A-Za-z0-9._/-]*", "my-volume or s3://my-bucket"),
        "volume or bucket for the run's folder and the cache; several nodes need a volume",
    ),
    "spot": Key(matching(r"yes|no", "yes or no"), "yes: spot machines", "no"),
    "infra": Key(matching(r"[A-Za-z0-9*][A-Za-z0-9._/*:@-]*", "aws/us-east-1 or k8s"), "cloud, region or Kubernetes context"),
    "image": Key(matching(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "docker:registry/pronghorn:1"), "image with pronghorn in it"),
    "install": Key(
        matching(
            r"[^\s'\[\]]+\.whl|(git\+|https://)[^\s'\[\]]+",
            "dist/pronghorn-0.1.0-py3-none-any.whl or git+https://host/us/pronghorn",
        ),
        "without image: what pip installs there, a wheel in the working folder or an address",
    ),
    "name": Key(matching(r"[a-z]([-a-z0-9]*[a-z0-9])?", "my-run"), "name of the job"),
}
TASK = """\
# {source}
name: {name}
workdir: .
num_nodes: {nodes}
resources: {resources}
{disk}
envs:
  PRONGHORN_CACHE: {store}/cache
  HF_HOME: {store}/huggingface
{setup}run: |
  torchrun --nnodes {nodes} --nproc-per-node {gpus} --node-rank "$SKYPILOT_NODE_RANK" \\
      --master-addr "$(head -n 1 <<< "$SKYPILOT_NODE_IPS")" --master-port {port} --no-python {command}
"""


def script(words: Sequence[str], training: Training) -> tuple[str, int]:
    """The text, and the number of ranks."""
    found = asked("skypilot", words, KEYS)
    require("skypilot", found, "gpu", why="SkyPilot chooses machines by their GPU")
    require("skypilot", found, "store", why="a recovered job runs on new machines, with nothing of the old ones")
    require_below("skypilot", *training.paths)
    resources: dict[str, Any] = {
        "accelerators": f"{found['gpu']}:{found['gpus']}",
        "use_spot": found["spot"] == "yes",
        "job_recovery": {"strategy": "FAILOVER"},  # near the store first
        "infra": found["infra"],
        "image_id": found["image"],
    }
    bucket = "://" in found["store"]
    if bucket and found["nodes"] > 1:
        raise CommandError(
            what=f"--skypilot: {found['store']} on {found['nodes']} nodes",
            why="each node would have its own copy for a while, and ranks read what rank 0 has just written",
            fix="use a volume: store=NAME (`sky volumes apply`), or nodes=1",
        )
    # MOUNT_CACHED: a plain mount cannot append to run.jsonl
    mounted: Any = {"source": found["store"], "mode": "MOUNT_CACHED"} if bucket else found["store"]
    run = f"output={_STORE}/{training.output}"  # the last one counts
    return (
        TASK.format(
            source=training.source,
            name=json.dumps(found["name"] or training.name),
            nodes=found["nodes"],
            gpus=found["gpus"],
            resources=json.dumps({name: value for name, value in resources.items() if value is not None}),
            disk=f"{'file_mounts' if bucket else 'volumes'}: {json.dumps({_STORE: mounted})}",
            store=_STORE,
            setup=_setup(found),
            port=PORT,
            command=shlex.join([*training.words, run]),
        ),
        found["nodes"] * found["gpus"],
    )


def _setup(found: Mapping[str, Any]) -> str:
    """A line that installs the same Pronghorn as here on a new machine, where pip knows an address of it."""
    if found["image"]:
        return ""
    wanted = found["install"] or _address()
    if not wanted:
        raise CommandError(
            what="--skypilot needs install= or image=",
            why="SkyPilot's machines are new, and this Pronghorn was not installed from an address that they could use",
            fix=f"pip wheel --no-deps -w . FOLDER_OF_PRONGHORN, then add install=pronghorn-{__version__}-py3-none-any.whl",
        )
    if "://" not in wanted:
        require_below("skypilot", wanted)
    wanted = f"pronghorn[gpu,hub] @ {wanted}" if "://" in wanted else f"./{wanted}[gpu,hub]"
    return f"setup: {json.dumps(f'pip install {shlex.quote(wanted)}')}\n"


def _address() -> str:
    """The commit that pip installed, if it was one of a repository."""
    with suppress(metadata.PackageNotFoundError):
        origin = json.loads(metadata.distribution("pronghorn").read_text("direct_url.json") or "{}")
        if "vcs_info" in origin:
            return f"{origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    return ""
