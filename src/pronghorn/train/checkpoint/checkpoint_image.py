"""A checkpoint's files in memory, byte for byte as they will be on disk, where another process can read them.

    small file | small file | ... | safetensors header, tensor, tensor, ... | safetensors header, tensor, tensor, ...

So whoever writes it needs to know nothing about tensors, and a tensor is moved once: from the device straight to its place
in the file. Small files and headers stay the same for a whole run and are put there once; only tensors are copied again.

The memory is a memfd: shared with a process that was started before its size was known, not limited by /dev/shm (64 MB in
many containers), gone with its last user. For a CUDA device it is pinned, once, so that copies run beside the kernels.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pronghorn.errors import EnvironmentFault
from pronghorn.train.run.run_folder import readable_bytes
from pronghorn.train.step.health import not_finite

# In the order in which safetensors stores them, widest first, so that every tensor is aligned.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPES)}
_PAGE = 4096
_CUDA_HOST_REGISTER_PORTABLE = 1


@dataclass(frozen=True)
class TensorFile:
    name: str
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Layout:
    """Where everything is in the image: [start, stop) in bytes."""

    size: int
    files: dict[str, tuple[int, int]]
    constant: list[tuple[int, bytes]]  # small files and headers: where they start, and what they are
    tensors: list[tuple[int, str, int]]  # index of the file, name, start


def plan(small: Mapping[str, bytes], files: Sequence[TensorFile]) -> Layout:
    end, places, constant, tensors = 0, {}, [], []
    for name, content in small.items():
        places[name] = (end, end + len(content))
        constant.append((end, content))
        end = _aligned(end + len(content))
    for index, file in enumerate(files):
        header, starts = safetensors_header(file)
        constant.append((end, header))
        tensors += [(index, name, end + len(header) + start) for name, start in starts.items()]
        stop = end + len(header) + sum(tensor.nbytes for tensor in file.tensors.values())
        places[file.name] = (end, stop)
        end = _aligned(stop)
    if len(places) != len(small) + len(files):
        raise RuntimeError(f"two checkpoint files have the same name: {sorted(small)}, {[file.name for file in files]}")
    return Layout(end, places, constant, tensors)


def safetensors_header(file: TensorFile) -> tuple[bytes, dict[str, int]]:
    """What safetensors puts before the tensors' bytes (a test holds that it is the same), and where each of them starts."""
    for name, tensor in file.tensors.items():
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{file.name}: {name} has dtype {tensor.dtype}, which checkpoints do not support")
    entries: dict[str, object] = {"__metadata__": dict(file.metadata)} if file.metadata else {}
    starts, end = {}, 0
    for name, tensor in sorted(file.tensors.items(), key=lambda item: (_RANK[item[1].dtype], item[0])):
        starts[name], end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


class Image:
    """Memory for one checkpoint, used again for every next one."""

    def __init__(self, device: torch.device, descriptor: int | None, say: Callable[[str], None]) -> None:
        """`descriptor`: an empty memfd, or None for memory that only this process sees."""
        self.layout = Layout(0, {}, [], [])
        self.memory: mmap.mmap | None = None
        self._device, self._descriptor, self._say = device, descriptor, say
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._shown_to: tuple[object, ...] = ()
        self._places: list[torch.Tensor] = []  # of the layout's tensors, as tensors
        self._sources: list[torch.Tensor] = []  # kept until they are copied: their memory must not be used for others
        self._event: torch.cuda.Event | None = None
        self._pinned: int | None = None  # address
        self._largest: torch.Tensor | None = None  # absolute value in what was taken, in host memory; NaN if one is NaN

    def take(self, small: Mapping[str, bytes], files: Sequence[TensorFile]) -> torch.cuda.Event | None:
        """Start to copy; on CUDA, returns the event of its end without waiting for anything, except when the memory has to
        be allocated first: the first time, or when tensors have other names or shapes than the last time."""
        self.settle()
        self._fit(small, files)
        self._sources = [files[index].tensors[name].detach() for index, name, _ in self.layout.tensors]
        if self._stream is None:
            self._copy()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy()
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(self._stream)
        return self._event

    def settle(self) -> None:
        """Wait for the copy, and let go of what was copied."""
        if self._event is not None:
            self._event.synchronize()
        self._event = None
        self._sources = []

    def not_finite(self) -> list[str]:
        """Names of the tensors that hold NaN or infinity, once it is settled. The device has looked; the host reads one number,
        and only if that is not finite all of them."""
        if self._largest is None or bool(torch.isfinite(self._largest).all()):
            return []
        return not_finite({name: place for (_, name, _), place in zip(self.layout.tensors, self._places, strict=True)})

    def free(self) -> None:
        self.settle()
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
        self._pinned = None
        self._places = []
        self.memory = None  # unmapped with the last tensor that lies in it
        self._shown_to = ()

    def _copy(self) -> None:
        with torch.no_grad():
            for place, source in zip(self._places, self._sources, strict=True):
                place.copy_(source, non_blocking=True)
            self._largest = _largest(self._sources, pin=self._stream is not None)
        if self._stream is None:
            self._sources = []

    def _fit(self, small: Mapping[str, bytes], files: Sequence[TensorFile]) -> None:
        shapes = [(file.name, file.metadata, [(name, t.dtype, t.shape) for name, t in file.tensors.items()]) for file in files]
        shown_to = (dict(small), shapes)
        if shown_to == self._shown_to:  # 17 MB of tokenizer are the same object, and so not compared
            return
        layout = plan(small, files)
        if self.memory is None or layout.size > len(self.memory):
            self.free()
            self.memory = self._allocate(layout.size)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        for start, content in layout.constant:
            self.memory[start : start + len(content)] = content
        if self._stream is not None and self._pinned is None:
            self._pin(whole)
        self._places = []
        for index, name, start in layout.tensors:
            tensor = files[index].tensors[name]
            self._places.append(whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        self.layout, self._shown_to = layout, shown_to

    def _allocate(self, size: int) -> mmap.mmap:
        try:
            if self._descriptor is None:
                return mmap.mmap(-1, size)
            os.posix_fallocate(self._descriptor, 0, size)  # now, and not as a SIGBUS in the middle of a copy
            return mmap.mmap(self._descriptor, size)
        except OSError as error:
            what = f"not enough host RAM to copy the checkpoint: it needs {readable_bytes(size)}"
            raise EnvironmentFault.of(error, what, fix="free host RAM, then run the same command again") from error

    def _pin(self, whole: torch.Tensor) -> None:
        """Without it, copies are right as well, but the run waits for them."""
        code = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, _CUDA_HOST_REGISTER_PORTABLE))
        if code == 0:
            self._pinned = whole.data_ptr()
            return
        self._say(f"checkpoints: cannot pin {readable_bytes(whole.nbytes)} of host RAM (CUDA error {code}); copies are slower")
        # CUDA keeps the error for whoever asks next, which would be some kernel of the run: ask now.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


def _largest(tensors: Sequence[torch.Tensor], *, pin: bool) -> torch.Tensor | None:
    """One a device (moments may be paged into host memory), on the host, once the stream is there. Everything is read once:
    0.2 ms for the 0.5 GB of an 8B model's adapter and moments (computed, at 3 TB/s). Quantized moments are whole numbers."""
    of_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            of_device.setdefault(tensor.device, []).append(tensor)
    if not of_device:
        return None
    found = torch.empty(len(of_device), pin_memory=pin)
    for place, members in zip(found, of_device.values(), strict=True):
        norms = torch._foreach_norm(members, float("inf"))
        place.copy_(torch.stack([norm.float() for norm in norms]).amax(), non_blocking=True)
    return found


def _aligned(position: int) -> int:
    return -(-position // _PAGE) * _PAGE
