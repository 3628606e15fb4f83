"""How much work the demo does: as much as fits into a few minutes at the speed that this machine has now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pronghorn.hf_types import HFModel
from pronghorn.model.load import DTYPES, load_model, pick_device, resolve_precision
from pronghorn.report.display import Display
from pronghorn.report.stages import Stages

STEP_TOKENS = 512
PROBE_TOKENS = 128  # timed, in the place of a whole step
ROW_TOKENS = 67  # of a training row, on average
ANSWER_TOKENS = 48  # the longest command has 41
BATCH = 32  # answers at a time on a CPU (model/generate.py)
# Rows to train on and held-out rows, most first. 420 rows: 54 of 56, 101 of 105 and 102 of 105 held-out requests exact with
# three seeds; with 350 one of two seeds stayed at 92 of 105.
SIZES = ((420, 70), (420, 35), (350, 35), (350, 21))
AROUND = 1.7  # what a token of an answer takes over one bare pass: adapters and the cache (1.5 to 2.1 on two busy cores)
LIMIT = 360.0  # seconds: the first that takes no longer is taken, or the last
ELSE = 25.0  # seconds for loading, tokenizing, the held-out loss and saving, on two cores


@dataclass(frozen=True, slots=True)
class Speed:
    step: float  # seconds of a training step of STEP_TOKENS
    token: float  # seconds for one more token of BATCH answers


@dataclass(frozen=True, slots=True)
class Work:
    train_rows: int
    held_out_rows: int
    seconds: float | None  # expected; None: not measured

    @property
    def told(self) -> str:
        sizes = f"{self.train_rows} training requests, {self.held_out_rows} held out"
        if self.seconds is None:
            return f"demo: {sizes}; under a minute on most GPUs"
        minutes = max(1, round(self.seconds / 60))
        return f"demo: {sizes}; about {minutes} {'minute' if minutes == 1 else 'minutes'} on this machine"


def choose(speed: Speed | None) -> Work:
    """`speed` None: a GPU, which does all of it in seconds."""
    if speed is None:
        return Work(*SIZES[0], None)
    found = [Work(train, held_out, expected(speed, train, held_out)) for train, held_out in SIZES]
    return next((work for work in found if work.seconds is not None and work.seconds <= LIMIT), found[-1])


def expected(speed: Speed, train_rows: int, held_out_rows: int) -> float:
    """Seconds. Both the base model and the trained one answer all held-out rows."""
    steps = -(-train_rows * ROW_TOKENS // STEP_TOKENS)
    batches = -(-held_out_rows // BATCH)
    return ELSE + steps * speed.step + 2 * batches * ANSWER_TOKENS * AROUND * speed.token


def speed_here(model: Path, display: Display, stages: Stages) -> Speed | None:
    """None on a GPU."""
    device, label = pick_device(), "measuring this machine's speed"
    if device.type != "cpu":
        return None
    with stages("load"):
        display.progress(label, 0, 0)
        speed = measure(load_model(str(model), DTYPES[resolve_precision("auto", device)], device))
        display.progress(label, 1, 1)
    return speed


def measure(model: HFModel) -> Speed:
    """Two passes of each kind, of which the second counts. A LoRA step costs what a pass forward and back through frozen
    weights does, with the head on the third of the tokens that carry loss."""
    ids = torch.arange(BATCH)[:, None] % model.config.vocab_size
    width = model.get_input_embeddings().embedding_dim

    def step() -> None:
        inputs = torch.zeros(1, PROBE_TOKENS, width, dtype=model.dtype, requires_grad=True)
        hidden = model.base_model(inputs_embeds=inputs, use_cache=False)[0]
        logits = model.get_output_embeddings()(hidden[:, : PROBE_TOKENS // 3])
        logits.float().logsumexp(-1).mean().backward()

    def token() -> None:
        with torch.no_grad():
            model(ids)

    training = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in training:
        weight.requires_grad_(False)
    try:
        return Speed(STEP_TOKENS / PROBE_TOKENS * _second_time(step), _second_time(token))
    finally:
        for weight in training:
            weight.requires_grad_(True)


def _second_time(work: Callable[[], None]) -> float:
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
