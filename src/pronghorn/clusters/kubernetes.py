"""A TrainJob of Kubeflow Trainer 2.2 (trainer.kubeflow.org/v1alpha1): torchrun in every pod, the working folder on a volume.

Trainer tells torchrun of its place in PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and so on. Strings are written as JSON, which
every YAML reader takes for strings; the command is a list, so no shell reads the recipe's name or keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pronghorn.clusters.keys import Key, Training, asked, count, matching, require, require_below

_LABEL = matching(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "my-run (lower case letters, digits, -)")
KEYS = {
    "nodes": Key(count, "number of pods", 1),
    "gpus": Key(count, "GPUs per pod", 1),
    "image": Key(matching(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "registry/pronghorn:1"), "container image with pronghorn in it"),
    "claim": Key(_LABEL, "PersistentVolumeClaim (ReadWriteMany for several pods) with a copy of the working folder"),
    "mount": Key(matching(r"(/[A-Za-z0-9._-]+)+", "/workspace"), "where pods see the volume", "/workspace"),
    "runtime": Key(_LABEL, "ClusterTrainingRuntime", "torch-distributed"),
    "namespace": Key(_LABEL, "namespace"),
    "name": Key(_LABEL, "name of the TrainJob"),
    "cpus": Key(count, "CPUs per pod"),
    "memory": Key(matching(r"\d+[KMGT]i", "200Gi"), "memory per pod"),
}
_START = 'cd "$0" && exec torchrun --no-python "$@"'
MANIFEST = """\
# {source}
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {metadata}
spec:
  runtimeRef: {{name: {runtime}}}
  trainer:
    image: {image}
    numNodes: {nodes}
    numProcPerNode: {gpus}
    resourcesPerNode: {{requests: {resources}, limits: {resources}}}
    env:
      - {{name: PRONGHORN_CACHE, value: {cache}}}
      - {{name: HF_HOME, value: {hub}}}
    command: {command}
  runtimePatches:
    - manager: pronghorn/launch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        volumes:
                          - {{name: work, persistentVolumeClaim: {{claimName: {claim}}}}}
                          - {{name: shm, emptyDir: {{medium: Memory}}}}   # NCCL needs more than the 64 MB of a pod
                        containers:
                          - name: node
                            volumeMounts:
                              - {{name: work, mountPath: {mount}}}
                              - {{name: shm, mountPath: /dev/shm}}
"""


def script(words: Sequence[str], training: Training) -> tuple[str, int]:
    """The text, and the number of ranks."""
    found = asked("kubernetes", words, KEYS)
    require("kubernetes", found, "image", why="the pods run a container, and Pronghorn publishes none")
    require("kubernetes", found, "claim", why="checkpoints must outlive a pod, and every pod must see them")
    require_below("kubernetes", *training.paths)
    wanted: dict[str, Any] = {"nvidia.com/gpu": found["gpus"], "cpu": found["cpus"], "memory": found["memory"]}
    named = {"name": found["name"] or training.name, "namespace": found["namespace"]}
    mount = found["mount"]
    values = {
        "metadata": {name: value for name, value in named.items() if value},
        "runtime": found["runtime"],
        "image": found["image"],
        "nodes": found["nodes"],
        "gpus": found["gpus"],
        "resources": {name: value for name, value in wanted.items() if value},
        "cache": f"{mount}/.cache/pronghorn",
        "hub": f"{mount}/.cache/huggingface",
        "command": ["bash", "-c", _START, mount, *training.words],
        "claim": found["claim"],
        "mount": mount,
    }
    text = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    return MANIFEST.format(source=training.source, **text), found["nodes"] * found["gpus"]
