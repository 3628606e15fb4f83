"""`make cluster-test`: what `pronghorn launch` writes for Kubernetes and SkyPilot, read by the packages of their publishers.

A TrainJob must come back from the types of kubeflow-trainer-api as it was written: they drop unknown fields. A task is
loaded by SkyPilot itself, which refuses one. A file with a misspelt field shows that both do. Where the packages cannot be
installed it says so and ends with 0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PACKAGES = ("kubeflow-trainer-api>=2.2", "skypilot>=0.10", "pyyaml")
RECIPE = "model: m\ndata: {train: d.jsonl}\noutput: runs/mine\n"
KUBERNETES = ("--kubernetes", "nodes=2", "gpus=2", "image=registry/pronghorn:1", "claim=work")
SKYPILOT = ("--skypilot", "gpus=2", "gpu=H100")
CASES = {
    "trainjob": KUBERNETES,
    "trainjob-more": (*KUBERNETES, "namespace=no", "name=on", "runtime=yes", "cpus=16", "memory=200Gi", "mount=/data/x"),
    "task": (*SKYPILOT, "nodes=2", "store=my-volume", "install=dist/p-0.1.0-py3-none-any.whl"),
    "task-git": (*SKYPILOT, "store=s3://bucket/x", "install=git+https://host/us/pronghorn", "spot=yes", "infra=aws/us-east-1"),
    "task-image": (*SKYPILOT, "nodes=2", "store=disk", "image=docker:a/b:1", "name=on"),
}
READER = """
import json, pathlib, sys, yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

def trainjob(found):
    assert TrainerV1alpha1TrainJob.from_dict(found).to_dict() == found, "fields are lost"

def task(found):
    import sky
    sky.Task.from_yaml_config(found)

def refuses(read, found):
    try:
        read(found)
    except Exception:
        return
    raise SystemExit(f"{read.__name__}: a field that does not exist is not refused")

for file in sorted(pathlib.Path(sys.argv[1]).glob("*.yaml")):
    read = trainjob if file.name.startswith("trainjob") else task
    read(yaml.safe_load(file.read_text()))
    found = yaml.safe_load(file.read_text())
    refuses(read, found | {"num_nodez": 2})
    if read is trainjob:
        found["spec"]["trainer"]["numNodez"] = 2
        refuses(read, found)
    print(f"{file.stem}: read by its publisher's package: yes", flush=True)
"""


def installed(home: Path) -> Path | None:
    """A Python with the packages."""
    venv.create(home / "venv", with_pip=True)
    python = home / "venv" / "bin" / "python"
    words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        print(f"files of launch: left out, pip does not install {' '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")
    return None if done.returncode else python


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="publishers-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        if (python := installed(home)) is None:
            return
        (files := home / "files").mkdir()
        (home / "mine.yaml").write_text(RECIPE)
        for case, words in CASES.items():
            command = [sys.executable, "-m", "pronghorn.cli", "launch", "mine.yaml", *words, "--json"]
            told = subprocess.run(command, cwd=home, stdout=subprocess.PIPE, text=True, check=True).stdout
            (files / f"{case}.yaml").write_text(json.loads(told)["script"])
        (home / "read.py").write_text(READER)
        # SkyPilot keeps its files in the home folder, and would send what is used.
        environment = os.environ | {"HOME": name, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
        subprocess.run([python, home / "read.py", files], env=environment, check=True, timeout=300)


if __name__ == "__main__":
    main()
