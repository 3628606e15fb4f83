"""Tensors that wait for backward in pinned host memory: out on a stream of their own, back in time through two device buffers.

    forward     layer k:   compute ─┬─ leave(k) ───────────── compute k+1 ─┬─ leave(k+1): waits for copy k, then lets go of it
    copy stream                     └─ copy k out ──────────────┘          └─ copy k+1 out

    backward    back(k): waits for k ── compute k ──────────── back(k-1): its tensors are there
    copy stream          └─ copy k-1 in, into the buffer that k+1 has left

`leave` holds on to the device tensors until the main stream itself has waited for their copy; only then may the allocator give
their memory to somebody else. So no `record_stream` is needed, which a graph's private pool would not honour. Forward waits for
a copy only where it is slower than the layers up to the next `leave`. The layer that takes the last slot would still be here
when backward begins, so it is held and not copied; it may be larger than a slot (as a model's last layer can be).

All buffers have one place for good, nothing asks the host, and both streams fork and join by events within one step: a CUDA
graph captures it. What comes back are the bytes that left. On the CPU the copies are plain and at once: the same order of
calls, for tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.runtime.host_memory import pin, unpin

ALIGNMENT = 256  # bytes: where each tensor begins, as the device's own allocator does at least
BUFFERS = 2  # on the device: one layer computes while the next one's tensors arrive


@dataclass(frozen=True)
class _Part:
    """A stretch of one storage, and where it lies in a slot."""

    source: Tensor  # uint8, flat; only until the tensors are let go of
    start: int
    size: int


@dataclass(frozen=True)
class _View:
    """How one tensor is seen in the slot's bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int  # bytes

    def of(self, slot: Tensor) -> Tensor:
        typed = slot.view(self.dtype)
        return typed.as_strided(self.shape, self.strides, typed.storage_offset() + self.start // self.dtype.itemsize)


@dataclass
class Ticket:
    """What stands for a layer's tensors while they are away."""

    layer: int
    views: tuple[_View | None, ...]
    size: int  # bytes
    host: Tensor
    held: tuple[Tensor | None, ...] | None = None  # the tensors themselves, until their copy was waited for
    copied: Any = None  # events: out
    arrived: Any = None  # in
    buffer: int | None = None  # on its way back, or there


def bytes_needed(tensors: Sequence[Tensor | None]) -> int:
    """What a slot must have for them."""
    return _layout(tensors)[2]


@dataclass(eq=False)
class OffloadPool:
    """`slots` layers of `slot_bytes` each, all but the last of them on the host. One forward, then one backward, at a time:
    layers leave in order and come back in the opposite one. Call `start_prefetch` once between the two, so that the way
    back begins under the head."""

    slots: int
    slot_bytes: int
    device: torch.device
    _away: dict[int, Ticket] = field(default_factory=dict, init=False)  # in the order in which they left
    _tenants: list[int | None] = field(default_factory=lambda: [None] * BUFFERS, init=False)
    _in_use: int | None = field(default=None, init=False)  # the buffer handed out last

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        self.slot_bytes = -(-self.slot_bytes // ALIGNMENT) * ALIGNMENT
        self._cuda = self.device.type == "cuda"
        self._host = torch.empty(max(0, self.slots - 1) * self.slot_bytes, dtype=torch.uint8)
        if self._cuda and self._host.numel():
            pin(self._host, "raise memory.budget")
            weakref.finalize(self, unpin, self._host, self.device).atexit = False  # a process that ends takes it along
        self._buffers = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
        self._copies = torch.cuda.Stream(self.device) if self._cuda else None

    @property
    def host_bytes(self) -> int:
        return self._host.numel()

    # ---- forward -------------------------------------------------------------------------------------------------------------

    def leave(self, layer: int, tensors: Sequence[Tensor | None]) -> Ticket:
        """Copies begin after what the current stream has queued. The caller lets go of the tensors, and
        writes to them no more."""
        if layer in self._away:
            raise RuntimeError(f"layer {layer} is already offloaded and not restored yet")
        if len(self._away) == self.slots:
            raise RuntimeError(f"the pool has {self.slots} slots and all are in use")
        self._let_go()
        if len(self._away) == self.slots - 1:
            ticket = self._away[layer] = Ticket(layer, (), 0, self._host[:0], held=tuple(tensors))
            return ticket
        views, parts, size = _layout(tensors)
        if size > self.slot_bytes:
            raise RuntimeError(f"layer {layer} has {size:,} bytes to offload, but a slot holds {self.slot_bytes:,}")
        place = len(self._away) * self.slot_bytes  # layers come back in the opposite order: the free slots are the last ones
        host = self._host[place : place + self.slot_bytes]
        ticket = Ticket(layer, views, size, host, held=tuple(tensors))
        self._fork()
        with self._on_copies():
            for part in parts:
                host[part.start : part.start + part.size].copy_(part.source, non_blocking=True)
            ticket.copied = self._recorded()
        self._away[layer] = ticket
        return ticket

    def _let_go(self) -> None:
        """The main stream waits for the copies under way, which a layer's compute hid, and gives up their tensors."""
        for ticket in self._away.values():
            if ticket.held is not None:
                self._wait(ticket.copied)
                ticket.held = None

    # ---- backward ------------------------------------------------------------------------------------------------------------

    def start_prefetch(self) -> None:
        """After the last layer's forward: as many layers as there are buffers start to come back."""
        for layer in list(reversed(self._away))[: BUFFERS + 1]:  # the latest one is still here, and needs none
            self.prefetch(layer)

    def prefetch(self, layer: int) -> None:
        """Starts a layer's way back, if a buffer is free. `back` and `turn` do it by themselves."""
        ticket = self._away[layer]
        if ticket.held is not None or ticket.buffer is not None or None not in self._tenants:
            return
        ticket.buffer = self._tenants.index(None)
        self._tenants[ticket.buffer] = layer
        self._fork()  # whoever had the buffer has done all its work on the main stream
        with self._on_copies():
            self._buffers[ticket.buffer][: ticket.size].copy_(ticket.host[: ticket.size], non_blocking=True)
            ticket.arrived = self._recorded()

    def back(self, layer: int) -> tuple[Tensor | None, ...]:
        """The tensors, as they were, to be read until the next `back`. Starts the way back of the layers that left before."""
        if next(reversed(self._away), None) != layer:
            raise RuntimeError(f"layer {layer} is not the layer that was offloaded last")
        self._hand_in()
        self.prefetch(layer)  # nothing to do if all went well
        ticket = self._away.pop(layer)
        if ticket.held is not None:
            self._wait(ticket.copied)  # its memory is free when the caller lets go: the copy must not read it after that
            tensors = ticket.held
        else:
            assert ticket.buffer is not None
            self._wait(ticket.arrived)
            self._in_use = ticket.buffer
            slot = self._buffers[ticket.buffer]
            tensors = tuple(None if view is None else view.of(slot) for view in ticket.views)
        for below in list(reversed(self._away))[:BUFFERS]:
            self.prefetch(below)
        return tensors

    def _hand_in(self) -> None:
        if self._in_use is not None:
            self._tenants[self._in_use] = None
            self._in_use = None

    def finish(self) -> None:
        """After the step, also one that was broken off: nothing is away, and both streams are one again."""
        self._let_go()
        for ticket in self._away.values():
            if ticket.arrived is not None:
                self._wait(ticket.arrived)
        self._away.clear()
        self._tenants = [None] * BUFFERS
        self._in_use = None

    # ---- streams -------------------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        """The copy stream goes on after what the current one has queued."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def _on_copies(self) -> Any:
        return torch.cuda.stream(self._copies)  # does nothing for None

    def _recorded(self) -> Any:
        if self._copies is None:
            return None
        event = torch.cuda.Event()
        event.record(self._copies)
        return event

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)


def _layout(tensors: Sequence[Tensor | None]) -> tuple[tuple[_View | None, ...], list[_Part], int]:
    """Tensors that share a storage are copied once, from the first byte that one of them has to the last."""
    spans: dict[int, tuple[int, int, Tensor]] = {}  # storage -> first byte, end, one of its tensors
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            first, end = _span(tensor)
            key = tensor.untyped_storage().data_ptr()
            before = spans.get(key, (first, end, tensor))
            spans[key] = (min(first, before[0]), max(end, before[1]), tensor)
    parts, starts, used = [], {}, 0
    for key, (begin, end, tensor) in spans.items():
        first = begin - begin % 16  # so that every dtype stays aligned to itself
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload]
        parts.append(_Part(whole[first:end], used, end - first))
        starts[key] = used - first
        used += -(-(end - first) // ALIGNMENT) * ALIGNMENT
    views = tuple(
        None
        if t is None
        else _View(
            t.dtype, tuple(t.shape), tuple(t.stride()), starts[t.untyped_storage().data_ptr()] + _span(t)[0] if t.numel() else 0
        )
        for t in tensors
    )
    return views, parts, used


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and end in the storage. Strides of torch are never negative."""
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize
