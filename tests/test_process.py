from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pronghorn import process
from pronghorn.errors import CommandError
from pronghorn.hub import SILENT
from pronghorn.process import PROXIES, offline_without_hub, set_defaults, started_as
from tables import table


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", raising=False)
    set_defaults()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash-attn-4")
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


def test_the_hub_s_libraries_send_nothing_but_requests_for_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"PRONGHORN_CACHE": str(tmp_path)})
    set_defaults()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] == "0"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "0"
    set_defaults()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"  # whoever has decided


@pytest.mark.later  # 3 s for a detail
def test_a_process_ends_without_a_word_about_what_was_set_aside() -> None:
    """Triton's bindings tell of everything that nobody collected."""
    code = "from pronghorn.process import importing\nwith importing():\n    import pronghorn.kernels.attention.rope"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Something that listens, as the hub; in a process that has decided nothing and imported nothing yet."""
    for name in (*PROXIES, "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SILENT, "")
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield listening
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_a_hub_that_answers_is_asked(endpoint: socket.socket) -> None:
    assert offline_without_hub("somebody/model") == ""
    assert "HF_HUB_OFFLINE" not in os.environ


def test_without_a_hub_its_library_is_told_to_look_into_its_cache_only(endpoint: socket.socket) -> None:
    endpoint.close()
    assert "(Connection refused)" in offline_without_hub("somebody/model")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert offline_without_hub("somebody/model") == ""  # told once


def test_a_name_that_is_looked_up_for_ever(endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def forever(*_: object) -> None:
        over.wait(20)
        raise OSError

    monkeypatch.setattr(process, "PATIENCE", 0.05)
    monkeypatch.setattr(socket, "create_connection", forever)
    assert "no answer within" in offline_without_hub("somebody/model")
    over.set()


@table("why", ["folder", "path", "proxy", "decided"])
def test_nobody_is_asked_where_it_does_not_matter(
    endpoint: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    endpoint.close()
    name = {"folder": str(tmp_path), "path": "./not/there"}.get(why, "somebody/model")
    if why == "proxy":
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    if why == "decided":
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert offline_without_hub(name) == ""
    assert os.environ.get("HF_HUB_OFFLINE") == ("0" if why == "decided" else None)


SRUN = {"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}  # fmt: skip


@table(
    ("given", "rank", "ranks"),
    [
        ({}, 0, 1),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3, 4),  # torchrun, PyTorchJob
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0, 1),
        (SRUN | {"MASTER_ADDR": "first"}, 5, 8),
        (SRUN | {"RANK": "2", "WORLD_SIZE": "4"}, 2, 4),  # torchrun under srun
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, 0, 1),
        ({name: value for name, value in SRUN.items() if "STEP" not in name}, 0, 1),  # a batch script without srun
    ],
)
def test_who_started_this_process(given: dict[str, str], rank: int, ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(given))
        assert started_as() == (rank, ranks)


def test_tasks_of_srun_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", SRUN | {"MASTER_ADDR": "first"})
    started_as()
    assert {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")} == {
        "MASTER_ADDR": "first",
        "MASTER_PORT": "20287",
        "LOCAL_RANK": "1",
    }
    monkeypatch.setattr(os, "environ", dict(SRUN))
    with pytest.raises(CommandError, match="MASTER_ADDR is not set") as refused:
        started_as()
    assert "scontrol show hostnames" in refused.value.fix
    monkeypatch.setattr(os, "environ", SRUN | {"SLURM_STEP_NUM_NODES": "1"})
    started_as()
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
