"""Compiles attention's kernels ahead for a Hopper that is not here, and says which. For test_compile_ahead.py."""

from __future__ import annotations

import threading
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmarks.compile_for import Builds
from pronghorn.kernels.attention import attention_short as op
from pronghorn.kernels.attention import attention_torch as plain
from pronghorn.kernels.runtime.dispatch import HOPPER, compile_kernels


class NoGpu:
    """What Triton's compiler asks a driver for, of a Hopper."""

    def __init__(self) -> None:
        self.launchers: list[str] = []

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers.append(metadata.name)


def main() -> None:
    gpu = NoGpu()
    driver.set_active(gpu)
    T, width = 256, 128
    cu = torch.tensor([0, 100, T], dtype=torch.int32)
    packed = plain.Packed(cu, T, 0.125, None, None, None, None, plain.spans(cu, T))

    def layer() -> None:
        q, k, v = (torch.zeros(T, heads, width, dtype=torch.bfloat16) for heads in (8, 2, 2))
        angles = torch.zeros(T, width // 2)
        out, lse = op.Short.forward(q, k, v, packed, None)
        done = plain.Computed(q, k, v, out, lse)
        backward = threading.Thread(target=op.Short.backward, args=(q, done, packed, None, (angles, angles)))
        backward.start()
        backward.join()

    compile_kernels(lambda: [layer() for _ in range(2)])
    for kernel in (op._forward_kernel, op._dq_kernel, op._dkdv_kernel):
        (found,) = kernel.device_caches[gpu.get_current_device()][0].values()
        build = Builds(HOPPER)._build(kernel.__name__, found, "")
        assert (build.registers > 0, build.spilled) == (True, 0), kernel.__name__
        assert gpu.launchers.count(kernel.__name__) == 1, gpu.launchers
        print(kernel.__name__)


if __name__ == "__main__":
    main()
