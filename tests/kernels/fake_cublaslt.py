"""A cuBLASLt of Python functions behind C pointers, which multiplies on the CPU: arguments go to it as to the real one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pronghorn.kernels.gemm.cublaslt import _SIGNATURES, _TYPES, Algorithm

BF16, FP32, COMPUTE_FP32 = 14, 0, 68


class Layout(NamedTuple):
    rows: int
    columns: int
    stride: int  # from one column to the next

    def at(self, address: int) -> torch.Tensor:
        """[rows, columns] of memory in which columns lie one after the other."""
        count = (self.columns - 1) * self.stride + self.rows
        numbers = torch.frombuffer((ctypes.c_uint16 * count).from_address(address), dtype=torch.bfloat16)
        return numbers.as_strided((self.rows, self.columns), (1, self.stride))


class FakeCublasLt:
    def __init__(self, offers: Sequence[Algorithm], refuses: bool = False) -> None:
        self.offers, self.refuses = offers, refuses
        self.alive: dict[int, Any] = {}  # what was created and not destroyed
        self.ran: list[Algorithm] = []
        self.errors: list[Exception] = []  # ctypes would only print what is raised here
        for name, letters in _SIGNATURES.items():
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *(_TYPES[letter] for letter in letters))
            method = re.sub("([A-Z])", lambda capital: "_" + capital[1].lower(), name.removeprefix("cublasLt"))
            setattr(self, name, kind(self._answer(getattr(self, method))))

    def _answer(self, function: Callable[..., int | None]) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            try:
                return function(*arguments) or 0
            except (AssertionError, KeyError, RuntimeError, TypeError, ValueError) as error:
                self.errors.append(error)
                return 99

        return answer

    def _new(self, place: int, what: Any) -> None:
        number = 1 + max(self.alive, default=0)
        self.alive[number] = what
        ctypes.c_void_p.from_address(place).value = number

    def _create(self, place: int) -> None:
        self._new(place, "handle")

    def _matmul_desc_create(self, place: int, compute: int, scale: int) -> None:
        assert (compute, scale) == (COMPUTE_FP32, FP32)
        self._new(place, {})

    def _matmul_desc_set_attribute(self, description: int, attribute: int, value: int, size: int) -> None:
        assert size == 4
        self.alive[description][attribute] = ctypes.c_int.from_address(value).value

    def _matmul_desc_destroy(self, description: int) -> None:
        del self.alive[description]

    def _matrix_layout_create(self, place: int, kind: int, rows: int, columns: int, stride: int) -> int | None:
        assert kind == BF16
        if self.refuses:
            return 7
        self._new(place, Layout(rows, columns, stride))
        return None

    def _matrix_layout_destroy(self, layout: int) -> None:
        del self.alive[layout]

    def _matmul_preference_create(self, place: int) -> None:
        self._new(place, {})

    def _matmul_preference_set_attribute(self, preference: int, attribute: int, value: int, size: int) -> None:
        assert size == 8
        self.alive[preference][attribute] = ctypes.c_uint64.from_address(value).value

    def _matmul_preference_destroy(self, preference: int) -> None:
        del self.alive[preference]

    def _matmul_algo_get_heuristic(
        self,
        handle: int,
        description: int,
        a: int,
        b: int,
        c: int,
        d: int,
        preference: int,
        most: int,
        results: int,
        count: int,
    ) -> None:
        assert self.alive[handle] == "handle"
        assert self.alive[preference] == {1: 0}  # no workspace
        self._shapes(description, a, b, c, d)
        for i, offer in enumerate(self.offers[:most]):
            words = (ctypes.c_uint64 * 12).from_address(results + 96 * i)
            words[:3] = offer
        ctypes.c_int.from_address(count).value = min(most, len(self.offers))

    def _matmul_algo_config_get_attribute(self, algorithm: int, attribute: int, value: int, size: int, written: int) -> None:
        word, expected = {1: (0, 4), 8: (1, 2), 5: (2, 4)}[attribute]
        assert size == expected
        found = (ctypes.c_uint64 * 3).from_address(algorithm)[word]
        (ctypes.c_uint16 if size == 2 else ctypes.c_uint32).from_address(value).value = found
        ctypes.c_size_t.from_address(written).value = size

    def _shapes(self, description: int, a: int, b: int, c: int, d: int) -> tuple[Layout, Layout, Layout, Layout, bool]:
        transposed = bool(self.alive[description].get(3))
        left, right, added, result = (self.alive[layout] for layout in (a, b, c, d))
        rows, inner = (left.columns, left.rows) if transposed else (left.rows, left.columns)
        assert (right.rows, right.columns) == (inner, result.columns)
        assert (added.rows, added.columns) == (result.rows, result.columns) == (rows, right.columns)
        return left, right, added, result, transposed

    def _matmul(
        self,
        handle: int,
        description: int,
        alpha: int,
        a: int,
        a_layout: int,
        b: int,
        b_layout: int,
        beta: int,
        c: int,
        c_layout: int,
        d: int,
        d_layout: int,
        algorithm: int,
        workspace: int,
        size: int,
        stream: int,
    ) -> None:
        assert (workspace, size, stream) == (None, 0, 77)
        left, right, added, result, transposed = self._shapes(description, a_layout, b_layout, c_layout, d_layout)
        factor = left.at(a).T if transposed else left.at(a)
        total = ctypes.c_float.from_address(alpha).value * (factor.double() @ right.at(b).double())
        if ctypes.c_float.from_address(beta).value:
            total += ctypes.c_float.from_address(beta).value * added.at(c).double()
        result.at(d).copy_(total)
        self.ran.append(Algorithm(*(ctypes.c_uint64 * 3).from_address(algorithm)))
