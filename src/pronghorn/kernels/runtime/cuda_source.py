"""CUDA C++ kernels, compiled at first use by NVRTC, which torch ships, and launched by the driver.

For the few kernels that Triton cannot express (tiles shared by two multiprocessors, two alternating warp groups). Sources are
.cu files beside the Python files; variants are preprocessor definitions. Binaries are cached in Triton's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import compile_elsewhere, say_once

_ARCHITECTURE = "sm_90a"  # Hopper, with the instructions that only it has
_MOST_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BF16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_LINES_OF_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
SWIZZLES = {64: 2, 128: 3}  # bytes of a tile's row: CU_TENSOR_MAP_SWIZZLE_64B and _128B


class Source(NamedTuple):
    """A kernel to compile: the file, the replacement of one line, and the definitions."""

    file: str
    line: tuple[str, str]
    definitions: tuple[tuple[str, int], ...]

    def text(self) -> str:
        return (Path(__file__).parent.parent / self.file).read_text(encoding="utf-8").replace(*self.line)


class NotCompiled(Exception):
    """The compiler's output."""


# ---- compiling ---------------------------------------------------------------------------------------------------------------

_compiled: dict[Source, Future[bytes]] = {}
_lock = Lock()


@cache
def _compiler() -> Any:
    """NVRTC; None, with a notice, if it is missing."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    beside = [str(path) for path in Path(sysconfig.get_path("platlib"), "nvidia").glob(f"*/lib/{name}")]
    for place in (*beside, name):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    say_once(f"{name} not found: fused GEMM epilogues are off, a few percent slower on this GPU")
    return None


def available() -> bool:
    return torch.version.cuda is not None and _compiler() is not None


def compiled(source: Source) -> bytes:
    """Machine code; if several threads ask at once, one compiles it."""
    with _lock:
        future = _compiled.get(source)
        mine = future is None
        if future is None:
            future = _compiled[source] = Future()
    if mine:
        try:
            future.set_result(_cached_or_compiled(source))
        except BaseException as error:  # noqa: BLE001  (given to all who ask)
            future.set_exception(error)
            if not isinstance(error, NotCompiled):  # a full disk, Ctrl-C: not the source's fault, so the next call retries
                del _compiled[source]
    return future.result()


def _cached_or_compiled(source: Source) -> bytes:
    from triton.runtime.cache import get_cache_manager

    compiler, version = _compiler(), (ctypes.c_int(), ctypes.c_int())
    compiler.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    definitions = [f"-D{name}={value}" for name, value in source.definitions]
    options = [f"--gpu-architecture={_ARCHITECTURE}", "--std=c++17", *definitions]
    text = source.text()
    key = hashlib.sha256("\0".join([text, *options, *(str(part.value) for part in version)]).encode()).hexdigest()
    files, name = get_cache_manager(key), f"{Path(source.file).name}bin"
    if (place := files.get_file(name)) is not None:
        return Path(place).read_bytes()
    code = _made(compiler, source.file, text, options)
    files.put(code, name, binary=True)
    return code


def _made(compiler: Any, file: str, text: str, options: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()
    code = compiler.nvrtcCreateProgram(ctypes.byref(program), text.encode(), file.encode(), 0, None, None)
    _check(code, "nvrtcCreateProgram")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(program, len(options), given):
            said = _bytes_of(compiler, program, "ProgramLog").decode(errors="replace").rstrip("\0\n")
            raise NotCompiled(f"{file} does not compile: fused GEMM epilogues are off\n{said}")
        return _bytes_of(compiler, program, "CUBIN")
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes_of(compiler: object, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    content = ctypes.create_string_buffer(size.value)
    _check(getattr(compiler, f"nvrtcGet{what}")(program, content), f"nvrtcGet{what}")
    return content.raw


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with status {code}")


# ---- launching ---------------------------------------------------------------------------------------------------------------


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW)


class TensorMap:
    """A TMA descriptor of a bf16 tensor: `sizes` from the innermost dimension (stride 1), `strides` of the others in elements,
    and the `box` of one copy, whose rows are swizzled in shared memory. Out of bounds, reads give zeros and writes are
    dropped."""

    def __init__(self, tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        self._memory = (ctypes.c_uint8 * 192)()
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64  # the driver needs an alignment of 64 bytes
        rank, swizzle = len(sizes), SWIZZLES[box[0] * tensor.element_size()]
        _check(_driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address), _BF16, rank, ctypes.c_void_p(tensor.data_ptr()), (ctypes.c_uint64 * rank)(*sizes),
            (ctypes.c_uint64 * (rank - 1))(*(stride * tensor.element_size() for stride in strides)),
            (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, _LINES_OF_128, 0,
        ), "cuTensorMapEncodeTiled")  # fmt: skip


@cache
def _function(source: Source, name: str, shared_bytes: int, device: int) -> ctypes.c_void_p:
    del device  # modules belong to a context, and each device has one
    module, function, driver = ctypes.c_void_p(), ctypes.c_void_p(), _driver()
    _check(driver.cuModuleLoadData(ctypes.byref(module), compiled(source)), "cuModuleLoadData")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    _check(driver.cuFuncSetAttribute(function, _MOST_SHARED_MEMORY, shared_bytes), "cuFuncSetAttribute")
    return function


def launch(source: Source, name: str, blocks: int, threads: int, shared_bytes: int, arguments: Sequence[Any]) -> bool:
    """Launches on the current stream. Arguments: tensor maps, tensors (by address), and ctypes values. False, with a notice, if
    the source does not compile."""
    known = source in _compiled  # by the layer before, most likely just now: no thread is to wait for that one
    if compile_elsewhere(lambda: None if known else compiled(source)):
        return True
    try:
        compiled(source)
    except NotCompiled as error:
        say_once(str(error))
        return False
    function = _function(source, name, shared_bytes, torch.cuda.current_device())
    held = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
    places = (a.address if isinstance(a, TensorMap) else ctypes.addressof(a) for a in held)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(
        _driver().cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, (ctypes.c_void_p * len(held))(*places), None
        ),
        "cuLaunchKernel",
    )
    return True
