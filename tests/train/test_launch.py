"""Ranks that are started here: what they exit with is what the command exits with, and none outlives the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pronghorn.errors import EndedElsewhere
from pronghorn.train.dist.launch import launch

RANK = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"  # quick to start: nothing else is imported


def command(script: str) -> list[str]:
    return [sys.executable, "-c", RANK + script]


def test_folders_of_killed_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name, pid, age in (("gone", gone.pid, 7200), ("saving", gone.pid, 60), ("runs", os.getpid(), 7200)):
        (folder := tmp_path / f"pronghorn-ranks-{name}").mkdir()
        (folder / "launcher").write_text(str(pid))
        for path in (folder / "launcher", folder):
            os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "pronghorn-ranks-empty").mkdir()
    launch(1, ["true"])
    assert sorted(path.name.rpartition("-")[2] for path in tmp_path.iterdir()) == ["empty", "runs", "saving"]


def test_every_rank_is_told_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ranks alone; gloo and NCCL are on the loopback interface, whatever the user's own environment says."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    before = dict(os.environ)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    told = f"' '.join(os.environ[name] for name in {names!r})"
    launch(3, command(f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write({told})"))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {f"{n}": f"{n} {n} 3 3 lo =lo" for n in range(3)}
    assert dict(os.environ) == before


def test_the_exit_code_of_the_rank_that_failed_first_is_kept(tmp_path: Path) -> None:
    """The other would run for minutes; it is asked to end, and does."""
    asked = tmp_path / "asked"
    other = (
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(asked)!r}, 'w').close(), sys.exit(3)))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close(); time.sleep(300)"
    )
    failing = f"while not os.path.exists({str(tmp_path / 'ready')!r}): time.sleep(0.01)\nsys.exit(4)"
    script = f"exec({failing!r} if rank else {other!r})"
    with pytest.raises(EndedElsewhere, match="rank 1") as ended:
        launch(2, command(script))
    assert ended.value.exit_code == 4
    assert ended.value.told
    assert asked.exists()


def test_who_has_told_what_happened_is_not_repeated() -> None:
    """A rank that was stopped is killed by the one that found it, which says so itself."""
    told = "open(os.environ['PRONGHORN_RANKS'] + '/told', 'w').close()\n"
    with pytest.raises(EndedElsewhere) as ended:
        launch(2, command(f"{told}os.kill(os.getpid(), 9) if rank else time.sleep(300)"))
    assert (ended.value.told, ended.value.exit_code) == (True, 3)


@pytest.mark.usefixtures("imported_python")
def test_a_signal_is_passed_on_and_its_code_kept(tmp_path: Path) -> None:
    """A process of its own, because signals are for a main thread."""
    saving = (
        "signal.signal(signal.SIGTERM, lambda *_: (open(folder + f'saved-{rank}', 'w').close(), sys.exit(143)))\n"
        "open(folder + f'ready-{rank}', 'w').close(); time.sleep(300)"
    )
    script = (
        "from pronghorn.train.dist.launch import launch; from pronghorn.errors import EndedElsewhere; import sys\n"
        f"try: launch(2, {command(f'folder = {str(tmp_path) + chr(47)!r}' + chr(10) + saving)!r})\n"
        "except EndedElsewhere as ended: sys.exit(ended.exit_code)"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as started:
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        started.send_signal(signal.SIGTERM)
    assert started.returncode == 143
    assert len(list(tmp_path.glob("saved-*"))) == 2
