"""CUDA C++ compiled and launched, with Python in place of NVRTC and of the driver."""

from __future__ import annotations

import ctypes
import importlib
import re
import sysconfig
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from pronghorn.kernels.runtime import cuda_source, dispatch
from pronghorn.kernels.runtime.cuda_source import NotCompiled, Source, TensorMap, available, compiled, launch

ASKING = 4  # threads
SOURCE = Source("small.cu", ("@LINE@", "  multiply();"), (("GATED", 1), ("HALF", 96)))
TEXT = "first\n@LINE@\nlast\n"
BROKEN = "no such instruction"


class Library:
    """Functions by the names that C has for them. As ctypes does without declared types, pointers come as ctypes' own."""

    fails = ""  # the function that gives an error

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.fails:
            return lambda *_: 719
        method = object.__getattribute__(self, re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower())
        return lambda *arguments: method(*arguments) or 0


class Program(NamedTuple):
    file: str
    text: str
    options: list[str]

    @property
    def code(self) -> bytes:
        """As machine code does, it has zeros in it."""
        return b"\x7fELF\0" + repr(self).encode() + b"\0"


class FakeCompiler(Library):
    def __init__(self) -> None:
        self.version = (13, 0)
        self.alive: dict[int, Program] = {}  # what was created and not destroyed
        self.compiled: list[Program] = []

    def nvrtc_version(self, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = self.version

    def nvrtc_create_program(self, program: Any, text: bytes, file: bytes, count: int, headers: None, names: None) -> None:
        assert (count, headers, names) == (0, None, None)
        program._obj.value = 1 + max(self.alive, default=0)
        self.alive[program._obj.value] = Program(file.decode(), text.decode(), [])

    def nvrtc_compile_program(self, program: Any, count: int, options: Any) -> int:
        found = self._of(program)
        found.options.extend(option.decode() for option in options[:count])
        self.compiled.append(found)
        return 6 if BROKEN in found.text else 0

    def nvrtc_destroy_program(self, program: Any) -> None:
        del self.alive[program._obj.value]

    def nvrtc_get_program_log_size(self, program: Any, size: Any) -> None:
        size._obj.value = len(self._log(program))

    def nvrtc_get_program_log(self, program: Any, content: Any) -> None:
        content.raw = self._log(program)

    def nvrtc_get_cubinsize(self, program: Any, size: Any) -> None:
        size._obj.value = len(self._of(program).code)

    def nvrtc_get_cubin(self, program: Any, content: Any) -> None:
        content.raw = self._of(program).code

    def _of(self, program: Any) -> Program:
        return self.alive[program.value]

    def _log(self, program: Any) -> bytes:
        return f"{self._of(program).file}(2): error: {BROKEN}\n\0".encode()


class Launch(NamedTuple):
    function: int
    grid: list[int]
    stream: int
    arguments: list[Any]


class FakeDriver(Library):
    def __init__(self) -> None:
        self.kinds: list[Any] = []  # of the arguments, as the kernel reads them
        self.loaded: list[bytes] = []
        self.functions: list[tuple[int, bytes]] = []  # module and name
        self.attributes: list[tuple[int, int, int]] = []
        self.launches: list[Launch] = []
        self.maps: list[tuple[Any, ...]] = []

    def cu_module_load_data(self, module: Any, code: bytes) -> None:
        self.loaded.append(code)
        module._obj.value = len(self.loaded)

    def cu_module_get_function(self, function: Any, module: Any, name: bytes) -> None:
        self.functions.append((module.value, name))
        function._obj.value = 100 + len(self.functions)

    def cu_func_set_attribute(self, function: Any, attribute: int, value: int) -> None:
        self.attributes.append((function.value, attribute, value))

    def cu_launch_kernel(self, function: Any, *rest: Any) -> None:
        *grid, stream, places, more = rest
        assert more is None
        read = [kind.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(kind)))
                for kind, place in zip(self.kinds, places, strict=True)]  # fmt: skip
        self.launches.append(Launch(function.value, grid, stream.value, [getattr(value, "value", value) for value in read]))

    def cu_tensor_map_encode_tiled(self, place: Any, kind: int, rank: int, tensor: Any, *rest: Any) -> None:
        self.maps.append((kind, rank, tensor.value, *(list(part) if isinstance(part, ctypes.Array) else part for part in rest)))
        ctypes.c_uint64.from_address(place.value).value = len(self.maps)


class Answer(Future[bytes]):
    """One that nobody gives is an error, and no test that hangs."""

    def result(self, timeout: float | None = 20) -> bytes:
        return super().result(timeout)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    """Sources lie in tmp_path, what is made of them in a folder there. All that is kept in the process is put aside."""
    pytest.importorskip("triton")  # keeps the files
    fake = FakeCompiler()
    (tmp_path / SOURCE.file).write_text(TEXT, encoding="utf-8")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(cuda_source, "__file__", str(tmp_path / "runtime" / "cuda_source.py"))
    monkeypatch.setattr(cuda_source, "_compiler", lambda: fake)
    monkeypatch.setattr(cuda_source, "_compiled", {})
    monkeypatch.setattr(cuda_source, "Future", Answer)
    monkeypatch.setattr(dispatch, "_said", set())
    return fake


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_source, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_source, "_function", cache(cuda_source._function.__wrapped__))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return fake


def go(source: Source = SOURCE, arguments: tuple[Any, ...] = ()) -> bool:
    return launch(source, "a_kernel", 132, 384, 5000, arguments)


def kept(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob("*") if file.is_file()]


# ---- compiling ---------------------------------------------------------------------------------------------------------------


class CountingLock:
    """Says how often it was left."""

    def __init__(self) -> None:
        self.lock, self.left = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        self.left.release()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """The sources that were made; the first is done when all threads have asked for it."""
    lock = CountingLock()
    found: list[Source] = []

    def make(source: Source) -> bytes:
        found.append(source)
        if len(found) == 1:
            assert all(lock.left.acquire(timeout=20) for _ in range(ASKING))
        if source.file == "broken.cu":
            raise NotCompiled(BROKEN)
        return source.file.encode()

    monkeypatch.setattr(cuda_source, "_lock", lock)
    monkeypatch.setattr(cuda_source, "Future", Answer)
    monkeypatch.setattr(cuda_source, "_compiled", {})
    monkeypatch.setattr(cuda_source, "_cached_or_compiled", make)
    return found


def test_of_threads_that_ask_at_once_one_compiles(made: list[Source]) -> None:
    with ThreadPoolExecutor(ASKING) as threads:
        assert list(threads.map(compiled, [SOURCE] * ASKING)) == [b"small.cu"] * ASKING
    assert made == [SOURCE]
    other = SOURCE._replace(definitions=(("GATED", 0),))
    compiled(other)
    compiled(SOURCE)
    assert made == [SOURCE, other]


def test_all_who_ask_are_given_the_error(made: list[Source]) -> None:
    broken = SOURCE._replace(file="broken.cu")
    with ThreadPoolExecutor(ASKING) as threads:
        asked = [threads.submit(compiled, broken) for _ in range(ASKING)]
    for question in asked:
        with pytest.raises(NotCompiled, match=BROKEN):
            question.result()
    with pytest.raises(NotCompiled, match=BROKEN):
        compiled(broken)
    assert made == [broken]


def test_the_compiler_is_given_all_of_the_text_and_the_definitions(compiler: FakeCompiler) -> None:
    code = compiled(SOURCE)
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "-DGATED=1", "-DHALF=96"]
    assert compiler.compiled == [Program("small.cu", "first\n  multiply();\nlast\n", options)]
    assert code == compiler.compiled[0].code
    assert not compiler.alive


def test_another_process_finds_it_on_disk(compiler: FakeCompiler, tmp_path: Path) -> None:
    code = compiled(SOURCE)
    assert kept(tmp_path / "kept") == ["small.cubin"]
    cuda_source._compiled.clear()
    assert compiled(SOURCE) == code
    assert len(compiler.compiled) == 1


@pytest.mark.parametrize("changed", ["text", "line", "definitions", "major version", "minor version"])
def test_what_is_on_disk_is_of_this_text_and_compiler(compiler: FakeCompiler, tmp_path: Path, changed: str) -> None:
    compiled(SOURCE)
    cuda_source._compiled.clear()
    source = SOURCE
    if changed == "text":
        (tmp_path / SOURCE.file).write_text(TEXT + "more\n", encoding="utf-8")
    elif changed == "line":
        source = SOURCE._replace(line=("@LINE@", "  divide();"))
    elif changed == "definitions":
        source = SOURCE._replace(definitions=(("GATED", 1), ("HALF", 64)))
    else:
        compiler.version = (12, 0) if changed == "major version" else (13, 1)
    assert compiled(source) == compiler.compiled[-1].code
    assert len(compiler.compiled) == 2
    assert kept(tmp_path / "kept") == ["small.cubin"] * 2


@pytest.mark.parametrize("call", ["nvrtcCreateProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"])
def test_an_error_that_is_not_the_sources_is_no_fallback(compiler: FakeCompiler, driver: FakeDriver, call: str) -> None:
    compiler.fails = call
    with pytest.raises(RuntimeError, match=f"^{call} failed with status 719$"):
        go()
    assert not compiler.alive
    assert not driver.loaded


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """What can be opened by its name or place; nothing yet."""
    there: dict[str, object] = {}

    def library(place: str, **_: object) -> object:
        if place not in there:
            raise OSError(f"{place}: cannot open shared object file")
        return there[place]

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "_said", set())
    monkeypatch.setattr(cuda_source, "_compiler", cache(cuda_source._compiler.__wrapped__))
    return there


def test_where_there_is_no_compiler_it_is_said_once(opened: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    assert not available()
    assert not available()
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["libnvrtc.so.13 not found"]


@pytest.mark.parametrize("beside", [False, True])
def test_the_compiler_is_found_by_its_name_or_beside_torch(
    opened: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: bool
) -> None:
    file = tmp_path / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    file.parent.mkdir(parents=True)
    file.touch()
    opened[str(file) if beside else file.name] = "the library"
    assert available()
    assert cuda_source._compiler() == "the library"
    assert capsys.readouterr().err == ""


# ---- launching ---------------------------------------------------------------------------------------------------------------


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("rows", "columns")]


def test_arguments_reach_the_kernel_in_their_order(compiler: FakeCompiler, driver: FakeDriver) -> None:
    x, y = torch.zeros(4, 64).bfloat16(), torch.zeros(3)
    maps = [TensorMap(x, (64, 4), (64,), (64, 4)) for _ in range(2)]
    word = ctypes.c_uint64
    driver.kinds = [word, word, ctypes.c_float, word, word, word * 2, word, Sizes]
    assert go(arguments=(maps[1], y, ctypes.c_float(0.5), maps[0], x, (ctypes.c_void_p * 2)(7, 9), ctypes.c_void_p(0),
                         Sizes(300, 200)))  # fmt: skip
    [launched] = driver.launches
    assert launched[:3] == (101, [132, 1, 1, 384, 1, 1, 5000], 77)
    second, of_y, half, first, of_x, both, none, sizes = launched.arguments
    assert (first, second) == (1, 2)  # as they were numbered when they were made
    assert (of_y, half, of_x, list(both), none) == (y.data_ptr(), 0.5, x.data_ptr(), [7, 9], 0)
    assert (sizes.rows, sizes.columns) == (300, 200)


def test_a_function_is_loaded_once_for_each_device_and_source(
    compiler: FakeCompiler, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SOURCE._replace(definitions=())
    for source in (SOURCE, SOURCE, other):
        assert go(source)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert go()
    codes = [program.code for program in compiler.compiled]
    assert driver.loaded == [codes[0], codes[1], codes[0]]
    assert driver.functions == [(module, b"a_kernel") for module in (1, 2, 3)]
    assert driver.attributes == [(function, 8, 5000) for function in (101, 102, 103)]  # the most shared memory
    assert [launched.function for launched in driver.launches] == [101, 101, 102, 103]


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"])
def test_an_error_of_the_driver_names_the_call(compiler: FakeCompiler, driver: FakeDriver, call: str) -> None:
    driver.fails = call
    with pytest.raises(RuntimeError, match=f"^{call} failed with status 719$"):
        go()
    assert not driver.launches


def test_a_source_that_does_not_compile_is_told_once_and_nothing_is_launched(
    compiler: FakeCompiler, driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SOURCE._replace(line=("@LINE@", BROKEN))
    assert not go(broken)
    assert not go(broken)
    said = capsys.readouterr().err
    assert said.count("small.cu does not compile") == 1
    assert f"small.cu(2): error: {BROKEN}" in said
    assert "\0" not in said
    assert len(compiler.compiled) == 1
    assert not compiler.alive
    assert not driver.loaded
    assert not driver.launches


@pytest.mark.parametrize("line", ["  multiply();", BROKEN])
def test_while_kernels_are_compiled_ahead_nothing_is_launched(
    compiler: FakeCompiler, driver: FakeDriver, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    """What is wrong is said by the first launch after that."""
    ahead, source = importlib.import_module("pronghorn.kernels.runtime.compile_ahead"), SOURCE._replace(line=("@LINE@", line))
    done: list[bool] = []
    ahead.compile_ahead(lambda: done.extend(go(source) for _ in range(3)))
    assert done == [True] * 3
    assert len(compiler.compiled) == 1
    assert not driver.loaded
    assert not driver.launches
    assert capsys.readouterr().err == ""
    assert go(source) == (line != BROKEN)
    assert len(compiler.compiled) == 1
    assert len(driver.launches) == (line != BROKEN)


def test_no_thread_waits_for_what_another_compiles_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, a source that every layer asks for, and one after it that must be done before the first is."""
    ahead, others = importlib.import_module("pronghorn.kernels.runtime.compile_ahead"), SOURCE._replace(file="other.cu")
    begun, done = threading.Event(), threading.Event()

    def make(source: Source) -> bytes:
        begun.set()
        if source == others:
            done.set()
        assert done.wait(timeout=5)
        return b""

    def work() -> None:
        assert go()
        assert begun.wait(timeout=20)
        assert all(go() for _ in range(8))
        assert go(others)

    monkeypatch.setattr(cuda_source, "_compiled", {})
    monkeypatch.setattr(cuda_source, "_cached_or_compiled", make)
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 2)
    ahead.compile_ahead(work)
    assert [future.exception() for future in cuda_source._compiled.values()] == [None, None]


def test_what_was_not_the_sources_fault_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError("no space left"), b"code"]

    def make(_: Source) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr(cuda_source, "_compiled", {})
    monkeypatch.setattr(cuda_source, "_cached_or_compiled", make)
    with pytest.raises(OSError, match="no space left"):
        compiled(SOURCE)
    assert compiled(SOURCE) == b"code"


def test_a_tensor_map_lies_where_a_line_of_64_bytes_begins(driver: FakeDriver) -> None:
    x = torch.zeros(6, 5, 64).bfloat16()
    maps = [TensorMap(x, (64, 5), (64,), (32, 4)) for _ in range(20)]
    for one in maps:
        memory = ctypes.addressof(one._memory)
        assert one.address % 64 == 0
        assert memory <= one.address <= one.address + 128 <= memory + ctypes.sizeof(one._memory)


@pytest.mark.parametrize(("box", "swizzle"), [((32, 1, 4), 2), ((64, 1, 4), 3)])
def test_a_tensor_map_has_its_strides_in_bytes(driver: FakeDriver, box: tuple[int, ...], swizzle: int) -> None:
    x = torch.zeros(6, 5, 72).bfloat16()[:, :, :64]
    TensorMap(x, (64, 5, 6), (72, 360), box)
    bf16, lines_of_128 = 9, 2
    assert driver.maps == [(bf16, 3, x.data_ptr(), [64, 5, 6], [144, 720], list(box), [1, 1, 1], 0, swizzle, lines_of_128, 0)]
    driver.fails = "cuTensorMapEncodeTiled"
    with pytest.raises(RuntimeError, match=r"^cuTensorMapEncodeTiled failed with status 719$"):
        TensorMap(x, (64, 5, 6), (72, 360), box)
