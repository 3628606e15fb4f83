"""What a run writes into its log about itself: where it starts, how busy its experts are, how it ended."""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pronghorn import __version__
from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import EnvironmentFault, PronghornError, counted
from pronghorn.memory.gpus import PRICES_AS_OF, local_gpu
from pronghorn.memory.scaling import foretold_sum
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.formats.store import count_parameters
from pronghorn.report.html import write_html
from pronghorn.report.run_log import RunLog
from pronghorn.report.stages import Stages
from pronghorn.train.setup.setup import Session
from pronghorn.train.step.health import require_trainable
from pronghorn.train.step.optim import trainable
from pronghorn.train.step.step import StepResult

FP32 = 4  # bytes of a gradient
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage counts


def log_start(session: Session, folder: Path, log: RunLog) -> None:
    model = session.model
    log.write(
        "start",
        run=folder.resolve().name,
        recipe=session.recipe.model_dump(mode="json"),
        versions=versions(),
        device=_device_name(session.device, session.world.size),
        threads=torch.get_num_threads(),
        ranks=session.world.size,
        precision=session.precision,
        resumed_from=session.resumed_from,
        steps=session.total,
        planned=session.source.total,
        parameters={"total": count_parameters(model), "trainable": require_trainable(model)},
        data=session.source.summary(),
        eval_documents=len(session.source.held_out or ()),
        **_price(session.device),
    )


def log_experts(session: Session, log: RunLog) -> None:
    """Tokens of each expert since the last look, where the model has experts. Only where no step is under way may the host
    ask for them."""
    engine = engine_of(session.model)
    if engine is not None and engine.expert_counts is not None:
        session.world.add_up([engine.expert_counts.counts_LE])
        log.write("experts", step=session.step, counts=engine.expert_counts.read())


def log_step(session: Session, log: RunLog, step_batch: StepBatch, result: StepResult, lr: float, seconds: float) -> None:
    """A step that is done, and what there is to tell of it."""
    figures = {**result.figures, **step_batch.figures}
    log.write(
        "step",
        step=session.step,
        epoch=round(step_batch.epoch, 6),
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=lr,
        tokens=step_batch.tokens,
        loss_tokens=step_batch.loss_tokens,
        seconds=seconds,
        seen_tokens=session.seen_tokens,
        **figures,
    )
    if step_batch.samples:
        log.write("samples", step=session.step, shown=list(step_batch.samples))
    for text in (*step_batch.told, *session.objective.remarks(session.step, figures)):
        log.write("notice", text=text)


def log_end(session: Session, folder: Path, log: RunLog, stages: Stages, end: dict[str, str], code: int) -> None:
    """The log's last lines, and the report that shows them."""
    progress = session.progress
    best = {"step": progress.best_step, progress.metric: progress.best} if progress.best_step is not None else None
    log.write("stages", **stages.event())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    log.write("end", **end, step=session.step, exit_code=code, best=best, host_peak_bytes=peak)
    if session.world.writes:
        _write_report(folder, must=code == 0)


def _write_report(folder: Path, *, must: bool) -> None:
    """Where the run ends with an error, that is what to tell, and not that the same disk took no report either."""
    try:
        write_html(folder)
    except (OSError, PronghornError) as error:
        if must:
            raise EnvironmentFault(
                what="cannot write the run's report",
                where=str(folder),
                why=str(error),
                fix="check that the run's folder exists and is writable, then run the same command again",
            ) from error


@functools.cache
def versions() -> dict[str, str]:
    """Read once a process: a package's version is found by parsing all its metadata, 8 ms each."""
    return {
        "python": platform.python_version(),
        "pronghorn": __version__,
        **{name: version(name) for name in ("torch", "transformers", "peft", "safetensors")},
    }


def _price(device: torch.device) -> dict[str, Any]:
    """What an hour of this GPU costs, for the report; nothing where we know no price."""
    gpu = local_gpu(device)
    if gpu is None or gpu.price is None:
        return {}
    return {"price": {"usd_an_hour": gpu.price, "note": f"a list price of {PRICES_AS_OF}"}}


def _device_name(device: torch.device, ranks: int) -> str:
    several = f"{ranks} x " if ranks > 1 else ""
    if device.type == "cuda":
        return several + torch.cuda.get_device_name(device)
    return f"{several}CPU ({platform.machine()}, {counted(os.cpu_count() or 1, 'core')})"


def foretold(session: Session) -> dict[str, float]:
    """Seconds that a step's sum over ranks should take, for the report; nothing where the GPU is not in the table, is shared by
    ranks, or weights are spread."""
    gpu, size = local_gpu(session.device), session.world.size
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if gpu is None or session.shards is not None or here > torch.cuda.device_count():
        return {}
    gradients = FP32 * sum(parameter.numel() for parameter in trainable(session.model).values())
    return {"foretold": foretold_sum(gpu, size, max(1, size // here), gradients)}
