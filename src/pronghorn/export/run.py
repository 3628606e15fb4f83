"""`pronghorn export`: every target that was asked for, one after the other, each written, checked and put in place."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, Interrupted
from pronghorn.export.checking import Reference, Verdict, reference_of
from pronghorn.export.job import (
    Job,
    Options,
    Report,
    Scratch,
    put_in_place,
    refuse_existing,
    require_space,
    resolved,
    unfinished,
    workplace,
    writing,
)
from pronghorn.export.record import write_card, write_record
from pronghorn.export.targets import AskedTarget, asked_for
from pronghorn.export.usage import Usage
from pronghorn.model.load import require_tokenizer_fits
from pronghorn.report.run_log import FILE_NAME, history, read_log
from pronghorn.train.run.trained_run import Trained, TrainedRun


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
    places = [place_of(run, target, one, len(asked)) for one in asked]
    try:
        return export_trained(trained, list(zip(asked, places, strict=True)), figures_of(run, trained), options, report, done)
    except KeyboardInterrupt as error:
        kept = [beside for place in places if (beside := unfinished(resolved(place))).is_dir()]
        raise Interrupted(
            what="the export was stopped",
            signal_number=signal.SIGINT,
            where=str(places[0]),
            why=f"complete weight files remain in {kept[0]}" if kept else "no files remain",
            fix="run the same command to continue from there, or remove that folder" if kept else "run the same command again",
        ) from error


def place_of(run: Path, target: Path | None, asked: AskedTarget, count: int) -> Path:
    if target is None:
        return run / f"export-{asked.name}"
    return target if count == 1 else target / asked.name


def figures_of(run: Path, trained: Trained) -> dict[str, Any]:
    """Figures of the run's log, at the checkpoint's step."""
    events = read_log(run) if (run / FILE_NAME).exists() else []  # a checkpoint is whole without it
    here = {event["event"]: event for event in history(events) if event.get("step") == trained.step}
    step, held_out = here.get("step", {}), here.get("eval", {})
    return {
        "checkpoint": trained.path.name,
        "training loss at this step": step.get("loss", "unknown"),
        "held-out loss": held_out.get("loss", "not measured at this step"),
        "trained tokens": step.get("seen_tokens", "unknown"),
        **{f"held-out {name}": value for name, value in (held_out.get("metrics") or {}).items()},
        "data fingerprint": trained.data or "unknown",
    }


def export_trained(
    trained: Trained,
    places: list[tuple[AskedTarget, Path]],
    figures: dict[str, Any],
    options: Options | None = None,
    report: Report = lambda *_: None,
    done: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """What is refused is refused before anything is written."""
    options = options or Options()
    places = [(asked, resolved(place)) for asked, place in places]
    jobs = [Job(trained, place, place, options, asked.variant, report) for asked, place in places]
    require_tokenizer_fits(trained.tokenizer(), jobs[0].model_facts.vocabulary, str(trained.path))
    needed = 0
    for (asked, place), job in zip(places, jobs, strict=True):
        refuse_existing(place)
        if not trained.head.generates and not asked.target.any_head:
            raise CommandError(
                what=f"--to {asked.name} does not support {trained.head.title}",
                why=f"it is for programs that generate text; the model has a {trained.head.name} head in place of the LM head",
                fix=f"use --to merged, or adapter: transformers loads them with {jobs[0].loaded_with}",
            )
        asked.target.refuse(job)
        needed += asked.target.size(job)
    require_space(places[0][1], needed)
    found = []
    with ExitStack() as stack:
        scratch = Scratch(places[0][1], stack)
        reference: Reference | None = None
        for (asked, place), job in zip(places, jobs, strict=True):
            with workplace(place, job.key(asked.name)) as folder:
                refuse_existing(place)  # another export may just have ended
                job.folder, job.scratch = folder, scratch
                with writing(place):
                    asked.target.write(job)
                verdict = Verdict.skipped("--no-check")
                if options.check:
                    reference = reference or reference_of(trained, report)
                    verdict = asked.target.check(job, reference)
                found.append(_finished(asked, job, figures, verdict))
            if asked.target.name == "merged" and scratch.folder is None:
                scratch.folder = found[-1].folder  # for the targets that start from it
            done(found[-1])
    return found


def _finished(asked: AskedTarget, job: Job, figures: dict[str, Any], verdict: Verdict) -> Written:
    """Put in place, with its card and record: under its name, or, where it says something else than the trained model, beside
    it, so that nobody takes it for the export."""
    usages, place = asked.target.usage(job), job.target
    if verdict.passed is False:
        place = place.with_name(f"{place.name}.failed")
        refuse_existing(place)
    with writing(place):
        write_card(job, asked.target.name, figures, usages, verdict if job.options.check else None)
        record = write_record(job, asked.name, figures, verdict)
        put_in_place(job.folder, place)
    return Written(asked.name, place, verdict, usages, record)
