"""Known GPUs: memory, bandwidths and rates from the vendors' data sheets, and what renting one costs, for orientation.

Rates are dense, with sums in fp32, which is half of GeForce's rates with sums in fp16. What a training step makes of them is in
costs.py, measured on an H200 and assumed to be the same share elsewhere. Prices are on-demand list prices of small clouds and
marketplaces; they vary by a factor of three between providers, so give your own (`--price`) before you rely on a sum.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pronghorn.errors import CommandError

if TYPE_CHECKING:
    import torch

PRICES_AS_OF = "2026"
OLDEST = (8, 0)  # compute capability that the kernels are compiled for, and that has bf16


@dataclass(frozen=True)
class Gpu:
    name: str
    title: str
    capability: tuple[int, int]
    card_gb: int  # GiB, as it is sold
    memory_gb: float  # 1e9 bytes, as the driver reports it
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
    def sold_as(self) -> str:
        return self.title if "GB" in self.title else f"{self.title} ({self.card_gb} GB)"

    @property
    def memory(self) -> int:
        return int(self.memory_gb * 1e9)


_PCIE4, _PCIE5 = 31.5, 63.0
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx3060", "GeForce RTX 3060", (8, 6), 12, 12.6, 360, 25.5, 0, _PCIE4, 0.14),
        Gpu("rtx4070", "GeForce RTX 4070", (8, 9), 12, 12.6, 504, 58.3, 117, _PCIE4),
        Gpu("rtx5070", "GeForce RTX 5070", (12, 0), 12, 12.6, 672, 61.7, 123, _PCIE5),
        Gpu("rtx4060ti-16", "GeForce RTX 4060 Ti", (8, 9), 16, 16.7, 288, 44.1, 88, _PCIE4 / 2),
        Gpu("rtx4080", "GeForce RTX 4080", (8, 9), 16, 16.7, 717, 97.5, 195, _PCIE4, 0.15),
        Gpu("rtx5070ti", "GeForce RTX 5070 Ti", (12, 0), 16, 16.7, 896, 87.9, 176, _PCIE5),
        Gpu("rtx5080", "GeForce RTX 5080", (12, 0), 16, 16.7, 960, 113, 225, _PCIE5),
        Gpu("rtx3090", "GeForce RTX 3090", (8, 6), 24, 25.3, 936, 71, 0, _PCIE4, 0.18),
        Gpu("rtx4090", "GeForce RTX 4090", (8, 9), 24, 25.3, 1008, 165, 330, _PCIE4, 0.34),
        Gpu("rtx5090", "GeForce RTX 5090", (12, 0), 32, 33.7, 1792, 209, 419, _PCIE5, 0.76),
        Gpu("rtx-a6000", "RTX A6000", (8, 6), 48, 51.0, 768, 155, 0, _PCIE4, 0.82),
        Gpu(
            "rtx-pro-6000",
            "RTX PRO 6000 Blackwell",
            (12, 0),
            96,
            101.0,
            1792,
            504,
            1007,
            _PCIE5,
            1.45,
            drivers=("RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ),
        Gpu("l4", "L4", (8, 9), 24, 23.6, 300, 121, 242, _PCIE4, 0.44),
        Gpu("a10", "A10", (8, 6), 24, 23.6, 600, 125, 0, _PCIE4, drivers=("A10G",)),
        Gpu("l40s", "L40S", (8, 9), 48, 47.7, 864, 362, 733, _PCIE4, 1.38),
        Gpu("a100-40", "A100 40 GB", (8, 0), 40, 42.3, 1555, 312, 0, _PCIE4, 0.80, ("A100-SXM4-40GB", "A100-PCIE-40GB")),
        Gpu("a100-80", "A100 80 GB", (8, 0), 80, 85.0, 2039, 312, 0, _PCIE4, 1.39, ("A100-SXM4-80GB", "A100 80GB PCIe")),
        Gpu("h100-pcie", "H100 PCIe", (9, 0), 80, 85.0, 2000, 756, 1513, _PCIE5, 1.99),
        Gpu("h100", "H100 SXM", (9, 0), 80, 85.0, 3350, 989, 1979, _PCIE5, 2.69, ("H100 80GB HBM3",)),
        Gpu("h200", "H200", (9, 0), 141, 150.1, 4800, 989, 1979, _PCIE5, 3.59),
        Gpu("b200", "B200", (10, 0), 180, 191.5, 8000, 2250, 4500, _PCIE5, 5.98),
    )
}
# Known, and too old: plain names, and their compute capability.
TOO_OLD = {"t4": (7, 5), "rtx2080ti": (7, 5), "v100": (7, 0), "p100": (6, 0), "gtx1080ti": (6, 1)}


def find_gpu(name: str) -> Gpu:
    """By the table's name, or by what the driver calls it (`NVIDIA GeForce RTX 4090`)."""
    plain = _plain(name)
    for gpu in GPUS.values():
        if plain in map(_plain, (gpu.name, gpu.title, *gpu.drivers)):
            return gpu
    old = next((old for old in TOO_OLD if plain.startswith(old)), None)
    if old:
        raise CommandError(
            what=f"{name} has compute capability {'.'.join(map(str, TOO_OLD[old]))}",
            why=f"the kernels are compiled for {'.'.join(map(str, OLDEST))} (Ampere) and newer, which have bf16",
            fix=f"choose from {', '.join(GPUS)}",
        )
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
    kept = name.lower()
    for word in ("nvidia", "geforce", "tesla", "gb"):
        kept = kept.replace(word, "")
    return "".join(letter for letter in kept if letter.isalnum())
