"""Fixtures every test can use; the parts they are made of are in samples.py."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes on two cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As in an activated environment: commands are printed as `pronghorn ...` (program.py).
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script's `&` turns Ctrl-C off, for all that tests start and stop, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

import tables
from gpu_gate import speaks_of_a_gpu
from imported_python import ImportedPython, forks_have_threads
from order import long_first
from pronghorn.process import importing
from samples import chat_rows, make_model, make_tokenizer, write_rows

KERNELS = Path(__file__).parent / "kernels"


def _interpreted_kernels(config: pytest.Config, wanted: bool) -> None:
    plugin = config.pluginmanager.get_plugin(str(KERNELS / "conftest.py"))
    if plugin is not None:  # the kernel tests are among those of this session
        plugin.use_interpreted(wanted)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Test files are imported now: those of kernels beside interpreted kernels, all others beside the usual ones."""
    _interpreted_kernels(collector.config, KERNELS in (collector.path, *collector.path.parents))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-cpu-path", action="store_true", help="leave out cases of the `device` fixture that are plain torch")
    parser.addoption(
        "--every-case",
        action="store_true",
        help="all uses of a trainer with all kinds of model, all golden steps, what is marked later: minutes",
    )


def pytest_configure(config: pytest.Config) -> None:
    tables.EVERY_CASE = config.getoption("--every-case")


# Files with tests of several seconds: they come first in every process, so that none is alone with one in the end.
LONG = ("test_kill_and_resume.py", "test_nothing_is_patched.py", "test_run_script.py", "test_compile_matrix.py",
        "test_compile_ahead.py", "test_heartbeat.py", "test_ranks_on_a_gpu.py",
        "test_rope.py", "test_rms_norm.py", "test_routing.py")  # fmt: skip


def _has_a_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(trylast=True)  # what is deselected is gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--no-cpu-path"):
        plain = {item for item in items if getattr(item, "callspec", None) and item.callspec.params.get("device") == "torch"}
        config.hook.pytest_deselected(items=list(plain))
        items[:] = [item for item in items if item not in plain]
    if not config.getoption("--every-case") and any(item.get_closest_marker("later") for item in items) and not _has_a_gpu():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("later")])
        items[:] = [item for item in items if not item.get_closest_marker("later")]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = long_first(items, lambda item: item.path.name in LONG, processes)


@pytest.fixture(autouse=True)
def _gpu_memory_is_given_back() -> Iterator[None]:
    """Several processes share the GPU: what torch keeps of a large test (132 GB were seen) is missing in the others."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2e9:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What the files bring along (600,000 objects) stays until the end: it is looked through for garbage neither while it grows
    (3 of 12 seconds in each process) nor in every full collection later on (0.3 s each)."""
    with importing():
        return (yield)


_BEGAN = time.monotonic()
_seconds: Counter[str] = Counter()  # by file
LIMIT = 360  # seconds that the whole suite may take on two cores


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (took := time.monotonic() - _BEGAN) > LIMIT:
        terminalreporter.write_line(f"{took:.0f} s, more than {LIMIT}: the slowest files, in seconds of one process")
        for file, seconds in _seconds.most_common(10):
            terminalreporter.write_line(f"{seconds:7.1f} {file}")


def pytest_collection_finish(session: pytest.Session) -> None:
    _interpreted_kernels(session.config, False)
    if "torch" in sys.modules:
        from cpu_products import quicken_products
        from quick_runs import quicken_runs

        quicken_products()
        quicken_runs()
        forks_have_threads()


_imported: list[ImportedPython] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Between the imports and the first test, in every process that runs tests."""
    if any("imported_python" in getattr(item, "fixturenames", ()) for item in session.items):
        _imported.append(ImportedPython())
    try:
        return (yield)
    finally:
        while _imported:
            _imported.pop().close()


@pytest.fixture
def imported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a test starts as `[sys.executable, ...]` has torch and all else imported already (imported_python.py). On
    a GPU it is a real one: there is no CUDA in a fork."""
    import torch

    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "executable", str(_imported[0].executable))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never see or fill the user's cache."""
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path_factory.getbasetemp() / "pronghorn-cache"))


def _written(folder: Path, **changes: Any) -> Path:
    make_model(**changes).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 20,000 parameters with a byte tokenizer and a chat template, in Hugging Face's layout."""
    return _written(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def one_layer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one layer, for whole runs, which it makes a third shorter."""
    return _written(tmp_path_factory.mktemp("one-layer-llama"), num_hidden_layers=1)


@pytest.fixture
def short_export_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is compared with its model on two rows instead of eight. For files whose point is what is exported: the check
    itself is in tests/export."""
    from pronghorn.export import checking

    monkeypatch.setattr(checking, "ROWS", 2)


@pytest.fixture
def recipe_for(recipes: Callable[..., Any], _no_gpu: None) -> Callable[..., Any]:
    """As `recipes`, on the CPU. tests/train/test_runs_on_a_gpu.py has runs on a GPU."""
    return recipes


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and runs take the CPU, whose numbers are the same bit for bit whatever this machine has; so do other processes."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


_speaks_of_a_gpu = functools.cache(speaks_of_a_gpu)


@pytest.fixture(autouse=True)
def _cpu_unless_asked_for(request: pytest.FixtureRequest) -> None:
    """Tests in files that do not speak of a GPU have the CPU's numbers in mind: `make gpu-test` leaves those files out."""
    if not _speaks_of_a_gpu(request.path):
        request.getfixturevalue("_no_gpu")


@pytest.fixture
def recipes(one_layer_model: Path, tmp_path: Path) -> Callable[..., Any]:
    """`recipes(train={"lr": 1e-3})`: a complete recipe over small data, with some keys changed. Answers to held-out prompts are
    3 tokens long: with 64 they took a third of all runs' time, with 8 still a seventh."""
    from pronghorn.recipe import Recipe

    def build(**changes: Any) -> Recipe:
        train = write_rows(tmp_path / "train.jsonl", chat_rows(40))
        held_out = write_rows(tmp_path / "eval.jsonl", chat_rows(8, seed=1))
        base: dict[str, Any] = {
            "model": str(one_layer_model),
            "precision": "fp32",
            "lora": {"r": 4},
            "data": {"train": [str(train)], "eval": str(held_out), "max_length": 128, "workers": 0},
            "train": {"epochs": 2, "batch_tokens": 512, "capacity": 256, "lr": 1e-2},
            "eval": {"every": 4, "generations": 1, "max_new_tokens": 3},
            "checkpoint": {"every": 3, "keep": 2},
            "output": str(tmp_path / "run"),
        }
        for key, value in changes.items():
            base[key] = {**base[key], **value} if isinstance(value, dict) and key in base else value
        return Recipe.model_validate(base)

    return build


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def place(one_layer_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two trained runs (cli_parts.Place). Tests leave them as they are."""
    from cli_parts import Place, write_recipe
    from pronghorn.cli import main

    folder = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PRONGHORN_CACHE", str(folder / "cache"))
        place = Place(folder, one_layer_model)
        assert main(["train", str(place.recipe), "--json"]) == 0
        assert main(["train", str(write_recipe(folder, one_layer_model, "slow", lr=1e-4)), "--json"]) == 0
    return place
