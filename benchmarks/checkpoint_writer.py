"""What a checkpoint beside the run costs: how long the step is blocked, how long until it is on disk, and how much slower the
steps in between are.

    python -m benchmarks.checkpoint_writer [--gb 1.0] [--folder DIR] [--repeats 3]

Run it in two checkouts, in turns, to compare two writers. On the GPU if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from pronghorn.model.export import AdapterFiles
from pronghorn.train.checkpoint.checkpoint import TrainState, capture_rng
from pronghorn.train.checkpoint.checkpoint_writer import CheckpointWriter

SIDE = 1024
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def step(x: torch.Tensor) -> float:
    """Seconds that some products take, until the host knows their end."""
    began = time.perf_counter()
    for _ in range(200 if DEVICE.type == "cuda" else 4):
        x @ x
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    count = max(3, round(options.gb * 1e9 / (4 * SIDE * SIDE)))
    tensors = {f"t{i}": torch.nn.Parameter(torch.randn(SIDE, SIDE, device=DEVICE)) for i in range(count)}
    weights = dict(list(tensors.items())[: count // 3])
    moments = {name: tensor.detach() for name, tensor in tensors.items() if name not in weights}
    files = AdapterFiles("adapter_model.safetensors", weights, {"format": "pt"}, {"adapter_config.json": b"{}"})
    x = torch.randn(SIDE, SIDE, device=DEVICE)
    alone = statistics.median(step(x) for _ in range(20))
    print(f"{options.gb} GB on {DEVICE}; a step alone takes {1000 * alone:.1f} ms")
    with tempfile.TemporaryDirectory(dir=options.folder) as name, CheckpointWriter(Path(name), DEVICE, say=print) as writer:
        for number in range(1, options.repeats + 1):
            began = time.perf_counter()
            snapshot = writer.snapshot(files, TrainState(number, moments, {}, {}, capture_rng()))
            snapshot.hold()
            writer.write(snapshot, keep=1, best_step=None)
            blocked, steps = time.perf_counter() - began, list[float]()
            while not writer.finished():
                steps.append(step(x))
            print(
                f"blocked {1000 * blocked:.0f} ms, on disk after {time.perf_counter() - began:.2f} s and {len(steps)} steps of "
                f"{1000 * statistics.median(steps):.1f} ms, the longest {1000 * max(steps):.1f} ms"
            )


if __name__ == "__main__":
    main()
