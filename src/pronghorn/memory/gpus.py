"""Known GPUs: memory, bandwidths and rates from the vendors' data sheets, and what renting one costs, for orientation.

Rates are dense, with sums in fp32. What a training step makes of them is in costs.py, measured on an H200 and assumed to be the
same share elsewhere. Prices are on-demand list prices of small clouds and marketplaces; they vary by a factor of three between
providers, so give your own (`--price`) before you rely on a sum.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pronghorn.errors import CommandError

if TYPE_CHECKING:
    import torch

PRICES_AS_OF = "March 2026"


@dataclass(frozen=True)
class Gpu:
    name: str
    title: str
    capability: tuple[int, int]
    memory_gb: float  # 1e9 bytes
    bandwidth_gbs: float  # device memory
    bf16_tflops: float
    fp8_tflops: float  # 0: the chip has no FP8
    link_gbs: float  # to the host, each way
    price: float | None = None  # USD an hour; None: we have seen none that we would repeat
    drivers: tuple[str, ...] = ()  # what the driver calls it, where that is not the title

    @property
    def flash4(self) -> bool:
        """Attention at the rate of flash-attn-4, else of FlashAttention-2."""
        return self.capability[0] in (9, 10)

    @property
    def memory(self) -> int:
        return int(self.memory_gb * 1e9)


_PCIE4, _PCIE5 = 31.5, 63.0
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx3090", "GeForce RTX 3090", (8, 6), 25.3, 936, 71, 0, _PCIE4),
        Gpu("rtx4090", "GeForce RTX 4090", (8, 9), 25.3, 1008, 165, 330, _PCIE4, 0.34),
        Gpu("rtx5090", "GeForce RTX 5090", (12, 0), 33.7, 1792, 209, 419, _PCIE5, 0.76),
        Gpu(
            "rtx-pro-6000",
            "RTX PRO 6000 Blackwell",
            (12, 0),
            101.0,
            1792,
            504,
            1007,
            _PCIE5,
            drivers=("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ),
        Gpu("l4", "L4", (8, 9), 23.6, 300, 121, 242, _PCIE4),
        Gpu("a10", "A10", (8, 6), 23.6, 600, 125, 0, _PCIE4),
        Gpu("l40s", "L40S", (8, 9), 47.7, 864, 362, 733, _PCIE4),
        Gpu("a100-40", "A100 40 GB", (8, 0), 42.3, 1555, 312, 0, _PCIE4, drivers=("A100-SXM4-40GB", "A100-PCIE-40GB")),
        Gpu("a100-80", "A100 80 GB", (8, 0), 85.0, 2039, 312, 0, _PCIE4, 1.39, drivers=("A100-SXM4-80GB", "A100 80GB PCIe")),
        Gpu("h100-pcie", "H100 PCIe", (9, 0), 85.0, 2000, 756, 1513, _PCIE5, 1.99),
        Gpu("h100", "H100 SXM", (9, 0), 85.0, 3350, 989, 1979, _PCIE5, 2.69, drivers=("H100 80GB HBM3",)),
        Gpu("h200", "H200", (9, 0), 150.1, 4800, 989, 1979, _PCIE5, 3.59),
        Gpu("b200", "B200", (10, 0), 191.5, 8000, 2250, 4500, _PCIE5, 5.98),
    )
}


def find_gpu(name: str) -> Gpu:
    """By the table's name, or by what the driver calls it (`NVIDIA GeForce RTX 4090`)."""
    plain = _plain(name)
    for gpu in GPUS.values():
        if plain in map(_plain, (gpu.name, gpu.title, *gpu.drivers)):
            return gpu
    close = difflib.get_close_matches(name.lower(), GPUS, n=1)
    raise CommandError(
        what=f"unknown GPU {name!r}",
        why="its memory size and speed are not in the table",
        fix=(f"did you mean {close[0]}? " if close else "") + f"choose from {', '.join(GPUS)}",
    )


def local_gpu(device: torch.device) -> Gpu | None:
    """The table's row for this device, if it has one."""
    if device.type != "cuda":
        return None
    import torch  # commands that only name a GPU do without

    try:
        return find_gpu(torch.cuda.get_device_name(device))
    except CommandError:
        return None


def reckoned_with(gpu: Gpu | None, *, fp8: bool) -> Gpu:
    """A GPU whose rates stand in where it is not known, until they are measured: sizes do not depend on them. What a chip
    without FP8 does in FP8 is refused elsewhere."""
    return GPUS["h200"] if gpu is None or (fp8 and not gpu.fp8_tflops) else gpu


def _plain(name: str) -> str:
    kept = name.lower().replace("nvidia", "").replace("geforce", "").replace("gb", "")
    return "".join(letter for letter in kept if letter.isalnum())
