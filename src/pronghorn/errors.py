"""What went wrong, where, why and how to fix it; and the exit code of each kind. Also how messages count things.

Every error a user can cause is one of these, so the command line prints it without a traceback.
Anything else that escapes is our bug (exit code 1) and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Self

# What a terminal would obey instead of showing it: escape sequences, carriage returns, other line ends, letters that turn the
# direction of reading, and halves of surrogate pairs, which nothing can print.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text of unknown origin (names of files and columns, rows, answers) for a terminal: ESC is shown as \\x1b, not obeyed."""
    return _OBEYED.sub(lambda found: f"\\x{ord(found[0]):02x}" if ord(found[0]) < 256 else f"\\u{ord(found[0]):04x}", text)


class PronghornError(Exception):
    """One problem, told in four parts; only `what` is required."""

    exit_code: int = 2

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.why, self.fix = what, where, why, fix

    @classmethod
    def of(cls, error: OSError, what: str, where: object = "", fix: str = "") -> Self:
        """The reason is what the system says."""
        return cls(what, where=str(where), why=error.strerror or str(error), fix=fix)

    def __str__(self) -> str:
        where = self.where.replace("\n", "\\n")  # a name is no place to write lines of one's own
        lines = [f"{where}: {self.what}" if where else self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return printable("\n".join(lines))

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        parts = {"what": self.what, "where": self.where, "why": self.why, "fix": self.fix}
        return {"error": type(self).__name__, "exit_code": self.exit_code, **{k: v for k, v in parts.items() if v}}


class CommandError(PronghornError):
    """The command itself is wrong; nothing started."""


class RecipeError(PronghornError):
    """The recipe is wrong; nothing started."""


class DataError(PronghornError):
    """The data is wrong; nothing started."""


class ModelError(PronghornError):
    """The model folder or name is wrong; nothing started."""


class CheckpointError(PronghornError):
    """A checkpoint is damaged or does not belong to this run; nothing was changed."""


class EnvironmentFault(PronghornError):
    """Disk, memory or driver; the same command resumes once it is repaired."""

    exit_code = 3


class EndedElsewhere(EnvironmentFault):
    """Another rank of the run failed, and this one ends with it. `told`: that one has shown its message."""

    def __init__(self, what: str, *, why: str = "", exit_code: int = EnvironmentFault.exit_code, told: bool = False) -> None:
        super().__init__(what, why=why or "a run needs all of its ranks", fix="fix the cause, then run the same command again")
        self.exit_code, self.told = exit_code, told


class HealthStop(PronghornError):
    """The run would have trained on broken numbers; the last good checkpoint is kept."""

    exit_code = 4


class CheckFailed(PronghornError):
    """What was written was loaded, and says something else than the trained model."""

    exit_code = 4


class Interrupted(PronghornError):
    """A signal asked for the end; the checkpoint is written."""

    def __init__(self, what: str, *, signal_number: int, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.exit_code = 128 + signal_number  # 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP


class Problems(PronghornError):
    """Several problems found in one pass, shown together."""

    def __init__(self, problems: Sequence[PronghornError]) -> None:
        super().__init__(f"{len(problems)} problems")
        self.problems = tuple(problems)
        self.exit_code = problems[0].exit_code

    def __str__(self) -> str:
        return "\n".join([f"{len(self.problems)} problems:", *(str(p) for p in self.problems)])

    def as_dict(self) -> dict[str, object]:
        return {"error": "Problems", "exit_code": self.exit_code, "problems": [p.as_dict() for p in self.problems]}


def counted(count: int, one: str, many: str = "") -> str:
    """1 step · 1,200 steps · 2 batches, where `many` is not just `one` and an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def raise_all(problems: Sequence[PronghornError]) -> None:
    """Raise one error as itself, several together, none not at all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(problems)
