"""The run's folder: lock between real processes, unwritable places, disk space, --fresh, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pronghorn.errors import CommandError
from pronghorn.train.run.run_folder import LOCK_NAME, RunFolder, set_aside
from tables import table

HOLD = """
import sys, time
from pronghorn.train.run.run_folder import RunFolder
with RunFolder(sys.argv[1]) as run:
    (run.path / "run.jsonl").write_text("{}\\n")
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path: Path, code: str = HOLD) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.iterdir()}


def test_second_run_is_refused_with_the_first_ones_process_id_and_touches_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = hold(run)
    try:
        before = contents(run)
        assert json.loads(before[LOCK_NAME][1])["pid"] == first.pid
        with pytest.raises(CommandError) as refused, RunFolder(run):
            pass
        assert f"process {first.pid} on {socket.gethostname()}" in refused.value.what
        assert f"kill {first.pid}" in refused.value.fix
        assert contents(run) == before
        with pytest.raises(CommandError, match=f"process {first.pid}"):
            set_aside(run)
        assert contents(run) == before
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    finally:
        end(first)


def test_kill_9_frees_the_folder_at_once(tmp_path: Path) -> None:
    end(hold(tmp_path / "run"))
    assert (tmp_path / "run" / LOCK_NAME).exists()  # a killed process removes nothing; the file alone locks nothing
    with RunFolder(tmp_path / "run") as run:
        assert json.loads((run.path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_worker_that_outlives_its_killed_parent_does_not_hold_the_folder(tmp_path: Path) -> None:
    forking = HOLD.replace(
        '    print("held"',
        """    import os
    if (child := os.fork()) == 0:
        time.sleep(60)
    (run.path / "worker").write_text(str(child))
    print("held\"""",
    )
    end(hold(tmp_path / "run", forking))
    worker = int((tmp_path / "run" / "worker").read_text())
    try:
        os.kill(worker, 0)  # it does live
        with RunFolder(tmp_path / "run"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


RACE = """
import sys, time
from pathlib import Path
from pronghorn.errors import CommandError
from pronghorn.train.run.run_folder import RunFolder
folder, mark, won = Path(sys.argv[1]), Path(sys.argv[2]), 0
print("ready", flush=True)
sys.stdin.readline()
while won < 50:
    try:
        with RunFolder(folder):
            mark.touch(exist_ok=False)  # fails if another holds the folder as well
            time.sleep(0.001)  # without the lock, the first two who meet do it here
            mark.unlink()
            won += 1
    except CommandError:
        pass
"""


def test_never_two_holders_although_the_lock_file_comes_and_goes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(tmp_path / "a" / "run"), str(tmp_path / "mark")]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    racers = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 3
    for racer in racers:  # they start together, however long their imports took
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=120) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], results


def unwritable(kind: str, tmp_path: Path) -> Path:
    """Root passes permission bits, so these are places where nobody can write."""
    if kind == "a file is there":
        (tmp_path / "run").write_text("mine")
        return tmp_path / "run"
    if kind == "a file is its parent":
        (tmp_path / "file").write_text("mine")
        return tmp_path / "file" / "run"
    if kind == "a system's file tree":
        return Path("/proc/run")
    return tmp_path / ("x" * 300)


@table("kind", ["a file is there", "a file is its parent", "a system's file tree", "name too long"])
def test_unwritable_output_is_a_bad_command(kind: str, tmp_path: Path) -> None:
    path = unwritable(kind, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CommandError) as refused, RunFolder(path):
        pass
    assert refused.value.where == str(path)
    assert refused.value.why
    assert "output=" in refused.value.fix
    assert sorted(tmp_path.rglob("*")) == before


def test_set_aside_keeps_every_old_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert set_aside(path) is None
    for number in (1, 2, 3):
        with RunFolder(path) as run:
            (run.path / "run.jsonl").write_text(str(number))
        assert set_aside(path) == tmp_path / f"run.old-{number}"
        assert not path.exists()
    assert [(tmp_path / f"run.old-{n}" / "run.jsonl").read_text() for n in (1, 2, 3)] == ["1", "2", "3"]
    assert sorted(file.name for file in tmp_path.rglob(LOCK_NAME)) == []


def test_set_aside_leaves_what_is_not_a_run_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CommandError, match="renames run folders only"):
        set_aside(tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("inside", [".", "notes"])
def test_the_folder_a_command_runs_in_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    """It would be renamed with everything in it, and the run would go on inside: on the old run's checkpoints."""
    (tmp_path / "work" / "notes").mkdir(parents=True)
    (tmp_path / "work" / "run.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path / "work" / inside)
    with pytest.raises(CommandError, match="current working directory"):
        set_aside(os.path.relpath(tmp_path / "work"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["work"]


def test_a_link_to_another_disk_stays_one(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "big" / "run")
    with RunFolder(link) as run:
        (run.path / "run.jsonl").write_text("{}")
    assert set_aside(link) == tmp_path / "big" / "run.old-1"
    with RunFolder(link) as run:
        (run.path / "run.jsonl").write_text("{}")
    assert (tmp_path / "big" / "run" / "run.jsonl").exists()
