"""What a table of preference data knows of its rows: which of them are answers to one question, and which answer is better.

The rows of a group stand side by side in the table, the chosen answer first. Each is a whole document (prompt and answer) with
loss marks on the answer alone, so a row by itself is what it would be in supervised data. All rows of a group begin with the
same `prefixes` tokens, which carry no loss: the prompt, up to a border that the chat template sets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

CHOSEN, REJECTED = 0, 1  # roles; 2 and above: further rejected answers. Of single answers (KTO): desirable, undesirable


@dataclass(frozen=True, slots=True)
class PairRows:
    """One entry for each row of the table."""

    groups: npt.NDArray[np.int64]  # number of the pair; its rows stand side by side
    roles: npt.NDArray[np.int32]
    prefixes: npt.NDArray[np.int32]  # tokens at the beginning that all rows of the group share
    margins: npt.NDArray[np.float32]  # by how much the chosen answer is better; 0 where the data does not say
    shared: bool = False  # whether a pack has the prefix of a group once (pair_packing.py)

    def select(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> PairRows:
        columns = {name: getattr(self, name)[chosen] for name in ("groups", "roles", "prefixes", "margins")}
        return replace(self, **columns)

    def cut(self, lengths: npt.NDArray[np.int32]) -> PairRows:
        """The same groups, with rows cut to these lengths."""
        return replace(self, prefixes=np.minimum(self.prefixes, lengths))

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Rows of each group."""
        return np.diff(self.starts)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first row of each group, and the number of rows at the end."""
        changes = np.flatnonzero(np.diff(self.groups)) + 1
        return np.concatenate([[0], changes, [len(self.groups)]]) if len(self.groups) else np.zeros(1, np.int64)


def pairs_of(table: object) -> PairRows | None:
    """The groups of a table of preference data; None where rows stand for themselves."""
    found: PairRows | None = getattr(table, "pairs", None)
    return found
