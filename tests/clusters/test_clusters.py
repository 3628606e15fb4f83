"""`pronghorn launch`: what is written for a cluster. The Slurm script also runs here, between stand-ins for Slurm's programs;
with_slurm.py (`make cluster-test`) runs it under the real ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ruamel.yaml import YAML

from processes import wait_until
from pronghorn.cli import main
from pronghorn.cli.starting import leave_exit_code
from pronghorn.clusters.keys import Training, seconds
from tables import table

RECIPE = "model: m\ndata: {train: d.jsonl}\noutput: runs/mine\n"  # four packs a step
NASTY = """a 'b" $(touch pwned) `touch pwned`; touch pwned #{x} %s é.yaml"""
KUBERNETES = ["--kubernetes", "nodes=2", "gpus=2", "image=here/pronghorn:1", "claim=work"]
SKYPILOT = ["--skypilot", "nodes=2", "gpus=2", "gpu=H100", "install=p.whl", "store=disk"]

# What stands in for Slurm and torchrun. Two nodes are two shells; torchrun's one rank does as $RANK_DOES says.
PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo first; echo second; else echo "$*" >> requeued; fi',
    "squeue": 'echo "$STATE"',
    "scancel": '[ "$*" = "--signal=TERM 7" ] && kill -TERM $(cat node-*)',
    "srun": """while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! > node-$node; done
highest=0
for node in 0 1; do wait $(cat node-$node); code=$?; [ $code -gt $highest ] && highest=$code; done
exit $highest""",
    "torchrun": """(IFS=$'\\n'; printf '%s\\n' "$*" "$MASTER_ADDR" "$MASTER_PORT" $(($(ps -o sid= -p $$) - $$)) \\
    > told-$SLURM_NODEID)
bash -c "$RANK_DOES" & wait $! && exit 0
exit 1""",
}
LEAVE = 'echo {code} > "$PRONGHORN_EXIT_CODE_FILE"; exit {code}'
UNTIL_TERM = "trap 'TAKEN; exit 143' TERM; touch up-$SLURM_NODEID; while :; do sleep 0.05; done"
SAVES = UNTIL_TERM.replace("TAKEN", 'cat step >> runs/mine/run.jsonl; echo 143 > "$PRONGHORN_EXIT_CODE_FILE"')


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(RECIPE)
    return tmp_path


def written(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    return found.err


# Keys ------------------------------------------------------------------------------------------------------------------------


@table(
    ("text", "found"),
    [("4h", 14_400), ("30m", 1_800), ("1d12h", 129_600), ("90s", 90), ("1-12:00:00", 129_600), ("04:00:00", 14_400)],
)
def test_times(text: str, found: int) -> None:
    assert seconds(text) == found


@table("text", ["4", "", "h", "4 h", "-4h", "0m", "1:00", "4h;", "00:00:00", "4h\n"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="a time: 4h"):
        seconds(text)


@table(
    ("words", "said"),
    [
        (["--slurm", "node=2"], "no key `node`"),
        (["--slurm", "nodes"], "no key `nodes`"),
        (["--slurm", "train.lr=1"], "recipe keys go before it"),
        (["--slurm", "nodes=1", "nodes=2"], "given twice"),
        (["--slurm", "nodes=0"], "nodes=0 is not a whole number from 1"),
        (["--slurm", "time=4"], "time=4 is not a time"),
        (["--slurm", "time=5m"], "leaves no time to train"),
        (["--slurm", "partition=a b"], "partition=a b is not"),
        (["--slurm", "account=x\n#SBATCH --uid=0"], "a control character"),
        (["--slurm", "name=-x"], "name=-x is not"),
        (["--slurm", "memory=lots"], "memory=lots is not"),
        (["--slurm", "ranks=2"], "ranks= is for nodes without GPUs"),
        (["--slurm", "nodes=3", "gpus=2"], "4 packs for 6 ranks"),
        (["train.lr=fast", "--slurm"], "train.lr"),
        (["output=a\nb", "--slurm"], "a control character"),
        (["--reward-file", "none.py", "--slurm"], "no such file: none.py"),
        (KUBERNETES[:-1], "needs claim="),
        ([*KUBERNETES, "name=My_Run"], "name=My_Run is not"),
        ([*KUBERNETES, "mount=/a b"], "mount=/a b is not"),
        (["output=/big/run", *KUBERNETES], "/big/run is outside"),
        ([*KUBERNETES, "--submit"], "--submit is for Slurm"),
        (SKYPILOT[:-1], "needs store="),
        (["output=../run", *SKYPILOT], "../run is outside"),
        ([*SKYPILOT, "spot=maybe"], "spot=maybe is not"),
        ([word for word in SKYPILOT if "whl" not in word], "needs install= or image="),
        ([word.replace("p.whl", "../p.whl") for word in SKYPILOT], "../p.whl is outside"),
        ([word.replace("p.whl", "pronghorn") for word in SKYPILOT], "install=pronghorn is not"),
        ([*SKYPILOT[:-1], "store=s3://bucket"], "s3://bucket on 2 nodes"),
        ([], "--slurm --kubernetes --skypilot"),
    ],
)
def test_what_is_refused_before_a_file_is_written(
    words: list[str], said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not words:  # argparse's own
        with pytest.raises(SystemExit):
            main(["launch", "my.yaml"])
        assert said in capsys.readouterr().err
        return
    told = refused(capsys, "my.yaml", "-o", "file", *words)
    assert said in told
    assert not Path("file").exists()


def test_the_allowed_keys_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "my.yaml", "--slurm", "hours=4")
    for key in ("nodes", "gpus", "time", "save", "partition", "account", "qos"):
        assert f"{key}: " in told


@table(("output", "name"), [("runs/My Run!", "my-run"), ("runs/3b", "run-3b"), ("é", "run"), ("a" * 60, "a" * 40)])
def test_a_name_that_every_cluster_takes(output: str, name: str) -> None:
    assert Training((), (), "", output, "").name == name


def test_a_file_is_never_overwritten(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = written(capsys, "my.yaml", "-o", "my job.sh", "--slurm")
    assert told == "wrote my job.sh; next: sbatch 'my job.sh'\n"
    before = Path("my job.sh").read_text()
    assert "already exists" in refused(capsys, "my.yaml", "-o", "my job.sh", "--slurm", "nodes=2")
    assert Path("my job.sh").read_text() == before


# Slurm -----------------------------------------------------------------------------------------------------------------------


def test_what_is_asked_of_slurm(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nodes=2", "gpus=2", "gpu=h100", "time=1d2h", "save=10m", "partition=a,b", "memory=200G"]
    found = [line.removeprefix("#SBATCH --") for line in written(capsys, "my.yaml", "--slurm", *words).splitlines()]
    for option in ("job-name=mine", "nodes=2", "ntasks-per-node=1", "gpus-per-node=h100:2", "cpus-per-task=16", "mem=200G",
                   "time=1-02:00:00", "signal=B:USR1@600", "requeue", "open-mode=append", "partition=a,b"):  # fmt: skip
        assert option in found, option
    cpu = written(capsys, "my.yaml", "--slurm", "gpus=0", "ranks=3")
    assert "gpus-per-node" not in cpu
    assert "#SBATCH --time" not in cpu
    assert "--nproc-per-node 3" in cpu


def run_script(text: str, place: Path, **environment: str) -> subprocess.Popen[str]:
    stand_ins = place / "programs"
    stand_ins.mkdir(exist_ok=True)
    for name, body in PROGRAMS.items():
        (stand_ins / name).write_text(f"#!/bin/bash\n{body}\n")
        (stand_ins / name).chmod(0o755)
    (place / "job.sh").write_text(text)
    assert subprocess.run(["bash", "-n", "job.sh"], cwd=place, check=False).returncode == 0
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x", "STATE": "RUNNING", "TMPDIR": str(place), **environment}
    path = f"{stand_ins}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(["bash", str(place / "job.sh")], cwd="/", env=os.environ | given | {"PATH": path}, text=True)


@pytest.fixture
def own_python(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script finds programs beside this one first, and torchrun is beside the real one."""
    monkeypatch.setattr(sys, "executable", str(place / "programs" / "python"))


@pytest.mark.usefixtures("own_python")
def test_no_name_reaches_a_shell(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place / NASTY.removesuffix(".yaml")
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path(NASTY).write_text(RECIPE)
    words = [NASTY, f"output=runs/{NASTY}"]
    text = written(capsys, *words, "--slurm", "nodes=2", "gpus=2")
    assert run_script(text, place, RANK_DOES="exit 0").wait(60) == 0
    for node in ("0", "1"):
        *told, address, port, session = (folder / f"told-{node}").read_text().splitlines()
        assert told[-4:] == ["pronghorn", "train", *words]
        assert told[told.index("--node-rank") + 1] == node
        assert (address, port) == ("first", "20007")
        assert session == "0"  # its own, where Slurm's signals to the node do not reach it
    assert list(place.rglob("pwned")) == []


@table(
    ("does", "signals", "state", "code", "queued"),
    [
        ("exit 0", [], "RUNNING", 0, False),
        ("exit 1", [], "RUNNING", 1, False),
        (LEAVE.format(code=2), [], "RUNNING", 2, False),  # a wrong recipe
        (LEAVE.format(code=4), [], "RUNNING", 4, False),  # a health stop
        (LEAVE.format(code=137), [], "RUNNING", 137, False),
        (SAVES, [signal.SIGUSR1], "RUNNING", 143, True),  # the time limit
        (SAVES, [signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM], "RUNNING", 143, True),
        (SAVES, ["nodes"], "RUNNING", 143, True),  # preempted, with time to save
        (SAVES, ["nodes", signal.SIGTERM], "CANCELLED", 143, False),  # scancel
        (UNTIL_TERM.replace("TAKEN", "true"), ["nodes"], "RUNNING", 143, True),  # preempted while the model loads
        (UNTIL_TERM.replace("TAKEN", "true"), [signal.SIGUSR1], "RUNNING", 143, False),  # no step in all its time
        (UNTIL_TERM.replace("TAKEN", LEAVE.format(code=3)), [signal.SIGUSR1], "RUNNING", 3, False),  # could not save
        (UNTIL_TERM.replace("TAKEN", "exit 0"), [signal.SIGUSR1], "RUNNING", 0, False),  # the last step
    ],
)
def test_how_the_job_ends(
    does: str, signals: list[Any], state: str, code: int, queued: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "executable", str(tmp_path / "programs" / "python"))
        Path("my.yaml").write_text(RECIPE)
        Path("runs/mine").mkdir(parents=True)
        for name in ("step", "runs/mine/run.jsonl"):
            Path(name).write_text('{"event":"step"}\n')
        job = run_script(written(capsys, "my.yaml", "--slurm", "nodes=2"), tmp_path, RANK_DOES=does, STATE=state)
        if signals:
            wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2 or job.poll() is not None)
        for one in signals:
            if one == "nodes":
                for node in tmp_path.glob("node-*"):
                    os.kill(int(node.read_text()), signal.SIGTERM)
            else:
                job.send_signal(one)
        assert job.wait(60) == code
        requeued = tmp_path / "requeued"
        assert (requeued.read_text() if requeued.exists() else "") == "requeue 7\n" * queued
        assert list(tmp_path.glob("tmp.*")) == []  # the files of exit codes are gone


@pytest.mark.usefixtures("own_python")
def test_submitting(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    assert main(["launch", "my.yaml", "--submit", "--slurm"]) == 3
    assert "there is no sbatch here" in capsys.readouterr().err
    cat, sbatch = shutil.which("cat", path="/bin:/usr/bin"), place / "sbatch"
    sbatch.write_text(f'#!/bin/sh\n{cat} "$@" > got\necho Submitted batch job 5\n')
    sbatch.chmod(0o755)
    assert written(capsys, "my.yaml", "--submit", "--slurm") == "Submitted batch job 5\n"
    assert "#SBATCH --nodes=1" in Path("got").read_text()
    found = json.loads(written(capsys, "my.yaml", "--submit", "-o", "job.sh", "--json", "--slurm"))
    assert (found["job"], found["written"]) == ("Submitted batch job 5", "job.sh")
    assert Path("got").read_text() == Path("job.sh").read_text()
    sbatch.write_text("#!/bin/sh\necho no such partition >&2\nexit 1\n")
    assert main(["launch", "my.yaml", "--submit", "--slurm"]) == 3
    assert "no such partition" in capsys.readouterr().err


def test_a_rank_leaves_its_exit_code(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_EXIT_CODE_FILE", "code")
    assert main(["train", "no.yaml"]) == 2
    assert Path("code").read_text() == "2\n"
    monkeypatch.setenv("PRONGHORN_EXIT_CODE_FILE", "no/such/folder")
    leave_exit_code(3)


# Kubernetes and SkyPilot -----------------------------------------------------------------------------------------------------

# Kept by hand, from kubeflow/trainer's trainjob_types.go and skypilot's schemas.py as of November 2026: of the fields that they
# have, those that are used here. A dict's keys are all that may be there, `!` marks those that must; [x] is a list of x.
_VALUES: dict[str, Any] = {"nvidia.com/gpu": int, "cpu": int, "memory": str}
_VOLUME = {"name!": str, "persistentVolumeClaim": {"claimName!": str}, "emptyDir": {"medium": str}}
_CONTAINER = {"name!": str, "volumeMounts": [{"name!": str, "mountPath!": str}]}
_POD = {"spec": {"volumes": [_VOLUME], "containers": [_CONTAINER]}}
_JOB = {"name!": str, "template": {"spec": {"template": _POD}}}
TRAINJOB = {
    "apiVersion!": str,
    "kind!": str,
    "metadata!": {"name!": str, "namespace": str},
    "spec!": {
        "runtimeRef!": {"name!": str},
        "trainer": {
            "image": str,
            "command": [str],
            "env": [{"name!": str, "value": str}],
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": {"requests": _VALUES, "limits": _VALUES},
        },
        "runtimePatches": [{"manager!": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [_JOB]}}}}],
    },
}
TASK = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": {"accelerators": str, "use_spot": bool, "job_recovery": {"strategy": str}, "infra": str, "image_id": str},
    "volumes": {"/pronghorn": str},
    "file_mounts": {"/pronghorn": {"source": str, "mode": str}},
    "envs": {"PRONGHORN_CACHE": str, "HF_HOME": str},
    "setup": str,
    "run": str,
}


def misfits(value: Any, schema: Any, place: str = "") -> list[str]:
    if isinstance(schema, list):
        return [bad for one in value for bad in misfits(one, schema[0], f"{place}[]")] if isinstance(value, list) else [place]
    if not isinstance(schema, dict):
        return [] if type(value) is schema else [place]
    if not isinstance(value, dict):
        return [place]
    known = {name.removesuffix("!"): kind for name, kind in schema.items()}
    lacking = [f"{place}.{name[:-1]}" for name in schema if name.endswith("!") and name[:-1] not in value]
    strange = [f"{place}.{name}" for name in value if name not in known]
    inside = {name: one for name, one in value.items() if name in known}
    return lacking + strange + [bad for name in inside for bad in misfits(inside[name], known[name], f"{place}.{name}")]


def read(text: str) -> Any:
    """As readers of YAML 1.1 (SkyPilot's, and nearly Kubernetes') and of 1.2 do, which must agree."""
    found = yaml.safe_load(text)
    assert YAML(typ="safe", pure=True).load(text) == found
    return found


@table(
    "more",
    [[], ["namespace=no", "name=on", "runtime=yes"], ["cpus=16", "memory=200Gi", "mount=/data/x"], ["image=a.b/c/d@sha256:1"]],
)
def test_a_trainjob(more: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(NASTY).write_text(RECIPE)
    words = KUBERNETES[:3] + [word for word in KUBERNETES[3:] if word.split("=")[0] not in str(more)]
    found = read(written(capsys, NASTY, "train.lr=1e-3", *words, *more))
    assert misfits(found, TRAINJOB) == []
    assert found["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    trainer, asked = found["spec"]["trainer"], dict(word.split("=") for word in more)
    assert found["metadata"].get("namespace") == asked.get("namespace")
    shell, option, start, mount, *told = trainer["command"]
    assert (shell, option, told) == ("bash", "-c", ["pronghorn", "train", NASTY, "train.lr=1e-3"])
    (job,) = found["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "work"
    assert pod["containers"][0]["volumeMounts"][0] == {"name": "work", "mountPath": mount}
    stand_in = 'torchrun() { printf \'%s\\n\' "$PWD" "$@"; }; '
    ran = subprocess.run(
        ["bash", "-c", stand_in + start.replace("exec ", ""), str(place), *told], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines() == [str(place), "--no-python", *told]


@table("more", [[], ["spot=yes", "infra=aws/us-east-1"], ["store=s3://bucket/x", "nodes=1"], ["image=docker:a/b:1", "name=on"]])
def test_a_task_of_skypilot(more: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path(NASTY).write_text(RECIPE)
    words = SKYPILOT[:1] + [word for word in SKYPILOT[1:] if word.split("=")[0] not in str(more)]
    found = read(written(capsys, NASTY, *words, *more))
    assert misfits(found, TASK) == []
    assert found["resources"]["accelerators"] == "H100:2"
    assert found["resources"]["use_spot"] == ("spot=yes" in more)
    assert ("file_mounts" in found) == ("store=s3://bucket/x" in more) != ("volumes" in found)
    assert ("setup" in found) == ("image" not in str(more))
    stand_in = "torchrun() { printf '%s\\n' \"$@\"; }; "
    environment = os.environ | {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    ran = subprocess.run(
        ["bash", "-c", stand_in + found["run"]], capture_output=True, text=True, check=True, env=environment, cwd=place
    )
    options, told = ran.stdout.splitlines()[:-4], ran.stdout.splitlines()[-4:]
    assert told == ["pronghorn", "train", NASTY, "output=/pronghorn/runs/mine"]
    assert options == ["--nnodes", str(found["num_nodes"]), "--nproc-per-node", "2", "--node-rank", "1",
                       "--master-addr", "10.0.0.1", "--master-port", "29500", "--no-python"]  # fmt: skip
    assert list(place.rglob("pwned")) == []


def test_the_schemas_can_refuse() -> None:
    assert misfits({"name": "x", "ports": 1}, TASK) == [".ports"]
    assert misfits({"name": 1}, TASK) == [".name"]
    assert ".spec" in misfits({"apiVersion": "x", "kind": "y", "metadata": {"name": "z"}}, TRAINJOB)
