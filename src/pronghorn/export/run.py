"""`pronghorn export`: every target that was asked for, one after the other, each written, checked and put in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.export.checking import Reference, Verdict, reference_of
from pronghorn.export.job import Job, Options, Report, Scratch, refuse_existing, resolved, workplace, writing
from pronghorn.export.record import write_card, write_record
from pronghorn.export.targets import Asked, asked_for
from pronghorn.export.usage import Usage
from pronghorn.report.run_log import FILE_NAME, history, read_log
from pronghorn.train.trained_run import Trained, TrainedRun


@dataclass(frozen=True)
class Written:
    name: str
    folder: Path
    verdict: Verdict
    usages: list[Usage]
    record: dict[str, Any]


def export_run(
    run: Path,
    which: str,
    target: Path | None,
    to: str,
    *,
    options: Options | None = None,
    report: Report = lambda *_: None,
    done: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """`target`: the folder of one export, or what holds several; None: RUN/export-NAME."""
    asked = asked_for(to)
    trained = TrainedRun(run, which)
    places = [_place(run, target, one, len(asked)) for one in asked]
    return export_trained(trained, list(zip(asked, places, strict=True)), figures_of(run, trained), options, report, done)


def _place(run: Path, target: Path | None, asked: Asked, count: int) -> Path:
    if target is None:
        return run / f"export-{asked.name}"
    return target if count == 1 else target / asked.name


def figures_of(run: Path, trained: Trained) -> dict[str, Any]:
    """Of the run's log, at the checkpoint's step."""
    events = read_log(run) if (run / FILE_NAME).exists() else []  # a checkpoint is whole without it
    here = {event["event"]: event for event in history(events) if event.get("step") == trained.step}
    step, held_out = here.get("step", {}), here.get("eval", {})
    return {
        "checkpoint": trained.path.name,
        "training loss at this step": step.get("loss", "unknown"),
        "held-out loss": held_out.get("loss", "not measured at this step"),
        "trained tokens": step.get("seen_tokens", "unknown"),
    }


def export_trained(
    trained: Trained,
    places: list[tuple[Asked, Path]],
    figures: dict[str, Any],
    options: Options | None = None,
    report: Report = lambda *_: None,
    done: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """What is refused is refused before anything is written."""
    options = options or Options()
    places = [(asked, resolved(place)) for asked, place in places]
    scratch = Scratch(places[0][1])
    for asked, place in places:
        refuse_existing(place)
        asked.target.refuse(Job(trained, place, place, options, asked.variant))
    found = []
    reference: Reference | None = None
    try:
        for asked, place in places:
            with workplace(place) as folder:
                refuse_existing(place)  # another export may just have ended
                job = Job(trained, place, folder, options, asked.variant, report, scratch)
                with writing(place):
                    asked.target.write(job)
                verdict = Verdict.skipped("--no-check")
                if options.check:
                    reference = reference or reference_of(trained, report)
                    verdict = asked.target.check(job, reference)
                usages = asked.target.usage(job)
                with writing(place):
                    write_card(job, asked.target.name, figures, usages, verdict if options.check else None)
                    record = write_record(job, asked.name, figures, verdict)
                    folder.replace(place)
            found.append(Written(asked.name, place, verdict, usages, record))
            done(found[-1])
    finally:
        scratch.close()
    return found
