"""A sweep: its trials, rung by rung, in one process; killed at any instant, the same command goes on to the same table.

    sweep/
      trial-01/           an ordinary run, by the ordinary loop, with its checkpoints; paused at its last rung, or finished
        rung-1.json       what it was worth there: its loss after a decay, and that of each held-out row
      sweep.json          the command, the plan, who ended at which rung and why, and the table
      sweep.html

What is not in rung-N.json or sweep.json is done again: a trial trains on from its last checkpoint, and a decay leaves nothing
behind. Both are replaced as whole files. So the table follows from the command, but for the seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError, EnvironmentFault, HealthStop
from pronghorn.recipe import MAY_CHANGE_ON_RESUME, flat
from pronghorn.report.html import write_text
from pronghorn.report.run_log import FILE_NAME, as_number, plain, read_log
from pronghorn.report.run_stats import ending, run_stats
from pronghorn.report.stages import Stages
from pronghorn.report.sweep_page import render_sweep
from pronghorn.small_files import read_small
from pronghorn.sweep.grid import Trial
from pronghorn.sweep.halving import TINY, Judgement, Rungs, ends
from pronghorn.sweep.judging import Watch, judged, seconds_of_a_step
from pronghorn.sweep.plan import Budget, Work, planned, require_possible, told
from pronghorn.train.dist.world import World
from pronghorn.train.loop import ready, train
from pronghorn.train.run.paired import Counts
from pronghorn.train.run.run_folder import RunFolder
from pronghorn.train.run.steps import Display, Pause
from pronghorn.train.setup.kept import KeptSession, shared
from pronghorn.train.setup.setup import Session, look_ahead

STATE, PAGE = "sweep.json", "sweep.html"
LABEL = "sweep"


class Sweep:
    def __init__(
        self,
        folder: Path,
        trials: Sequence[Trial],
        *,
        display: Display,
        budget: Budget | None = None,
        price: float | None = None,
        say: Callable[[str], None] = lambda _: None,
        name: str = "sweep",
    ) -> None:
        """`price`: USD an hour. `say`: tells a person. `name`: the recipe's."""
        require_possible(len(trials), budget)
        self.folder, self.trials, self.budget, self.price = folder, trials, budget, price
        self.display, self.say, self.name = display, say, name
        self.kept = KeptSession()
        self._began, self._before = time.perf_counter(), 0.0
        self._counts_R: Counts | None = None

    def run(self) -> dict[str, Any]:
        """The table, as sweep.json has it. Without a winner, every trial diverged."""
        with RunFolder(self.folder, "-o FOLDER"):
            self.state = self._restored()
            self._before = self.state["seconds"]
            if not self.state["rungs"]:
                self._plan()
            self.rungs = Rungs.of(self.state["rungs"])
            self.say(self.state["told"])
            for rung in range(len(self.rungs.shares)):
                self._through(rung)
            return self._finished()

    def _plan(self) -> None:
        for group in _sharing(self.trials)[1:]:
            look_ahead(group[0].recipe)  # what this machine or model cannot do is refused now, and not after other trials
        session = self._session(self.trials[0])
        work = Work.of(session, seconds_of_a_step(session, Stages()))
        plan, runs = planned(len(self.trials), work, self.budget, self._spent())
        told_first = told(len(self.trials), plan, work, self.budget, self.price)
        self.state |= {"rungs": asdict(plan), "runs": runs, "run": asdict(work), "told": told_first}
        self.rungs = plan
        self._write()

    def _through(self, rung: int) -> None:
        """Every trial that is left until this rung, and who goes on from there."""
        alive, last = self._alive(), rung == len(self.rungs.shares) - 1
        if rung < self.state["decided"] or not alive or (len(alive) == 1 and not last):  # the only one goes to its end at once
            return
        for trial in self._in_order(alive, rung):
            if self._judgement(trial, rung) is None:
                self._judge(trial, rung, last=last)
                self._write()
        judgements = {trial.number: one for trial in alive if (one := self._judgement(trial, rung))}
        keep, left = 1 if last else self.rungs.trials[rung + 1], self._left()
        reasons = ends(
            judgements,
            self._held_out_counts(),
            keep,
            lambda number: self.trials[number - 1].name,
            None if last else lambda count: self.rungs.cost(count, rung + 1) <= left + TINY,
        )
        self.state["ended"] |= {str(number): f"rung {rung + 1}: {why}" for number, why in sorted(reasons.items())}
        self.state["decided"] = rung + 1
        self._write()
        if not last and self._alive():
            self.say(f"rung {rung + 1} of {len(self.rungs.shares)}: {', '.join(trial.told for trial in self._alive())} go on")

    def _judge(self, trial: Trial, rung: int, *, last: bool) -> None:
        # Until the last stretch, only a rule that may end the run before its rung needs evaluations.
        pause = Pause(self.rungs.shares[rung], evaluates=last or trial.recipe.eval.stop is not None)
        stages = Stages(time.monotonic())  # a trial's account has its own time, and what trials share is in none
        watch = Watch(self.display, trial.folder, pause, LABEL, self._trained(), self._all_tokens())
        try:
            reason = train(trial.recipe, display=watch, stages=stages, kept=self.kept, pause=pause).reason
            why = pause.why
        except HealthStop as stopped:
            self.kept.drop()
            reason, why = "health", f"diverged: {stopped.what}"
        session = self.kept.session
        if why or session is None:
            step, tokens = _reached(trial.folder)
            found = Judgement(rung, step, tokens, 0.0, why=why)
        else:
            found = judged(session, rung, decays=reason == "paused", stages=stages, progress=self.display.progress)
            if found.why:
                self.kept.drop()
        _write_json(self._file(trial, rung), asdict(found))
        worth = found.why or f"loss {found.loss:.4f} ± {found.error:.4f}"
        self.say(f"rung {rung + 1} of {len(self.rungs.shares)}: {trial.told}: {worth}")

    def _in_order(self, alive: Sequence[Trial], rung: int) -> list[Trial]:
        """Trials that share a session follow each other; every second rung begins where the one before ended."""
        groups = _sharing(alive)
        return [trial for group in (groups[::-1] if rung % 2 else groups) for trial in group]

    def _session(self, trial: Trial) -> Session:
        return ready(trial.recipe, trial.folder, self.display, Stages(), (), World(), {}, self.kept)

    def _held_out_counts(self) -> Counts:
        """Tokens with loss in each held-out row: a session has them, and one is there unless the sweep has just begun again."""
        if self._counts_R is None:
            session = self.kept.session or self._session(self.trials[0])
            assert session.source.held_out is not None
            self._counts_R = session.source.held_out.loss_counts
        return self._counts_R

    # ---- where the sweep stands ----------------------------------------------------------------------------------

    def _alive(self) -> list[Trial]:
        return [trial for trial in self.trials if str(trial.number) not in self.state["ended"]]

    def _file(self, trial: Trial, rung: int) -> Path:
        return trial.folder / f"rung-{rung + 1}.json"

    def _judgement(self, trial: Trial, rung: int) -> Judgement | None:
        file = self._file(trial, rung)
        return Judgement(**_read_json(file)) if file.exists() else None

    def _judgements(self, trial: Trial) -> list[Judgement]:
        found = (self._judgement(trial, rung) for rung in range(len(self.rungs.shares)))
        return [one for one in found if one is not None]

    def _done(self) -> float:
        """Runs, by now."""
        return sum(self.rungs.stretch(one.rung) for trial in self.trials for one in self._judgements(trial))

    def _left(self) -> float:
        """Runs that may still be spent; where time counts, at the speed of those done."""
        done, left = self._done(), float(self.state["runs"])
        if self.budget is None or self.budget.unit == "runs":
            return left - done
        seconds = sum(_seconds(trial.folder, self._judgements(trial)) for trial in self.trials)
        return min(left - done, (self.budget.seconds - self._spent()) * done / seconds)

    def _spent(self) -> float:
        """Seconds of wall-clock; of processes that were killed, until they last wrote."""
        return self._before + time.perf_counter() - self._began

    def _trained(self) -> int:
        """Tokens; decays and evaluations count as those that would take as long."""
        return int(self._done() * self.state["run"]["tokens"])

    def _all_tokens(self) -> int:
        """The same throughout a rung: what was done before it, and all that is planned from its beginning on."""
        alive, rung = self._alive(), self.state["decided"]
        judged_now = sum(self._judgement(trial, rung) is not None for trial in alive)
        runs = self._done() - judged_now * self.rungs.stretch(rung) + self.rungs.cost(len(alive), rung)
        return max(1, round(runs * float(self.state["run"]["tokens"])))

    # ---- files ---------------------------------------------------------------------------------------------------

    def _restored(self) -> dict[str, Any]:
        command = {
            "keys": [trial.keys for trial in self.trials],
            "budget": self.budget.text if self.budget else None,
            "recipe": _digest(self.trials),
        }
        file = self.folder / STATE
        if not file.exists():
            fresh: dict[str, Any] = {"rungs": None, "decided": 0, "ended": {}, "winner": None, "seconds": 0.0}
            return {"recipe": self.name, "command": command, **fresh}
        state = _read_json(file)
        if changed := [key for key in command if command[key] != state["command"].get(key)]:
            raise CommandError(
                what=f"this folder has another sweep: {' and '.join(changed)} changed",
                where=str(self.folder),
                why="trials of two sweeps cannot be compared",
                fix="choose another folder with -o, or run the same command as before, which goes on",
            )
        return state

    def table(self) -> dict[str, Any]:
        """The sweep as it stands, for sweep.json. A loss that is not known is None."""
        rows = []
        for trial in self.trials:
            judgements = self._judgements(trial)
            known = [one for one in judgements if not one.why]
            reached, last = judgements[-1:], known[-1:]
            ended = self.state["ended"].get(str(trial.number), "")
            if self.state["winner"] == trial.name:
                run = run_stats(_events(trial.folder))
                ended = "the winner; " + ending(run.state, run.step, run.planned, run.why)
            rows.append(
                {
                    "trial": trial.name,
                    "folder": str(trial.folder),
                    "keys": trial.keys,
                    "step": reached[0].step if reached else 0,
                    "tokens": reached[0].tokens if reached else 0,
                    "loss": last[0].loss if last and last == reached else None,
                    "error": last[0].error if last and last == reached else None,
                    "seconds": _seconds(trial.folder, judgements),
                    "ended": ended,
                    "rungs": [{"step": one.step, "tokens": one.tokens, "loss": one.loss, "error": one.error} for one in known],
                }
            )
        return {**self.state, "seconds": self._spent(), "tokens": sum(row["tokens"] for row in rows), "trials": rows}

    def _write(self) -> None:
        _write_json(self.folder / STATE, self.table())

    def _finished(self) -> dict[str, Any]:
        self.state["winner"] = next((trial.name for trial in self._alive()), None)
        found: dict[str, Any] = plain(self.table())
        _write_json(self.folder / STATE, found)
        write_text(self.folder / PAGE, render_sweep(found))
        self.kept.drop()
        return found


def _sharing(trials: Sequence[Trial]) -> list[list[Trial]]:
    groups: list[list[Trial]] = []
    for trial in trials:
        group = next((one for one in groups if shared(one[0].recipe, trial.recipe)), None)
        if group is None:
            groups.append(group := [])
        group.append(trial)
    return groups


def _digest(trials: Sequence[Trial]) -> str:
    """Values that the numbers depend on."""
    every = [flat(trial.recipe.model_dump(mode="json")) for trial in trials]
    kept = [{key: value for key, value in one.items() if not key.startswith(MAY_CHANGE_ON_RESUME)} for one in every]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def _seconds(folder: Path, judgements: Sequence[Judgement]) -> float:
    """GPU seconds of a trial: steps, repeated ones included, evaluations and decays. Loading is the sweep's."""
    trained = sum(as_number(event["seconds"]) for event in _events(folder) if event["event"] in ("step", "eval"))
    return trained + sum(one.seconds for one in judgements)


def _reached(folder: Path) -> tuple[int, int]:
    """The last step of a run, and tokens until there."""
    steps = [event for event in _events(folder) if event["event"] == "step"]
    return (steps[-1]["step"], steps[-1]["seen_tokens"]) if steps else (0, 0)


def _events(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder) if (folder / FILE_NAME).exists() else []


def _write_json(file: Path, value: dict[str, Any]) -> None:
    """What is not finite is null."""
    finite = {key: None if isinstance(one, float) and not math.isfinite(one) else one for key, one in value.items()}
    try:
        write_text(file, json.dumps(plain(finite), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        fix = "free some space, then run the same command again"
        raise EnvironmentFault.of(error, "cannot write the sweep's state", file, fix) from error


def _read_json(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(read_small(file))
    return value
