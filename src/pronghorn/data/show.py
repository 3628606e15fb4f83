"""`pronghorn data show`: one row as the model sees it, token by token, and which tokens it learns to produce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.text import Text

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_rows import CHOSEN
from pronghorn.errors import counted
from pronghorn.hf_types import Tokenizer

# Two shades of each, taken in turn, so that the borders of tokens show.
LOSS_STYLES = ("bold white on green4", "bold white on dark_green")
OTHER_STYLES = ("dim", "dim italic")
SPECIAL_STYLE = "cyan"
REJECTED_STYLES = ("bold white on dark_red", "bold white on red3")
LONGEST_CHARACTER = 8  # tokens that one character can be made of, generously: UTF-8 has 4 bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or the few that only together make a character."""

    text: str
    ids: tuple[int, ...]
    loss: bool
    special: bool


def pieces(tokenizer: Tokenizer, table: TokenTable, i: int) -> Iterator[Piece]:
    ids, loss = table.ids(i).tolist(), table.loss(i)
    loss[:1] = False  # nothing predicts the first token
    special = set(tokenizer.all_special_ids) | {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    before, at = 0, 0  # where the piece before this one begins
    while at < len(ids):
        stop = at + 1
        text = _spelt(tokenizer, ids, before, at, stop)
        while "\ufffd" in text and stop < len(ids) and stop - at < LONGEST_CHARACTER and ids[stop] not in special:
            stop += 1
            text = _spelt(tokenizer, ids, before, at, stop)
        yield Piece(text, tuple(ids[at:stop]), bool(loss[at:stop].any()), ids[at] in special)
        before, at = at, stop


def _spelt(tokenizer: Tokenizer, ids: list[int], before: int, at: int, stop: int) -> str:
    """What the tokens at:stop spell in their place: alone, a SentencePiece decoder takes the first one's space away."""
    decode = tokenizer.backend_tokenizer.decode
    alone = str(decode(ids[at:stop], skip_special_tokens=False))
    earlier = str(decode(ids[before:at], skip_special_tokens=False)) if before < at else ""
    together = str(decode(ids[before:stop], skip_special_tokens=False))
    placed = together[len(earlier) :] if together.startswith(earlier) else alone
    return placed if placed.endswith(alone) else alone


def rendered(shown: Iterable[Piece], coloured: bool, styles: tuple[str, str] = LOSS_STYLES) -> Text:
    """Tokens with loss on green, the others dim; without colour, what carries loss stands in « »."""
    text = Text()
    for loss, run in groupby(shown, key=lambda piece: piece.loss):
        if not coloured and loss:
            text.append("«")
        for number, piece in enumerate(run):
            style = (styles if loss else OTHER_STYLES)[number % 2] + (f" {SPECIAL_STYLE}" if piece.special else "")
            text.append(_visible(piece.text), style=style if coloured else None)
        if not coloured and loss:
            text.append("»")
    return text


def _visible(text: str) -> str:
    """Newlines, tabs and other control characters as signs, so that nothing in a row is invisible."""
    signs = {"\n": "↵\n", "\t": "→\t"}
    return "".join(signs.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def row_as_text(tokenizer: Tokenizer, table: TokenTable, i: int, *, coloured: bool) -> Text:
    """The row under a line that says where it came from and how much of it carries loss."""
    count, length = int(table.loss_counts[i]), int(table.lengths[i])
    carry = "carries" if count == 1 else "carry"
    head = Text(f"{table.where(i)}: {counted(length, 'token')}, {count:,} {carry} loss ({count / max(1, length):.0%})\n\n")
    head.append(rendered(pieces(tokenizer, table, i), coloured))
    return head


def row_as_dict(tokenizer: Tokenizer, table: TokenTable, i: int) -> dict[str, Any]:
    """For `--json`."""
    shown = list(pieces(tokenizer, table, i))
    spans = ["".join(piece.text for piece in run) for loss, run in groupby(shown, key=lambda piece: piece.loss) if loss]
    return {
        "where": table.where(i),
        "length": int(table.lengths[i]),
        "loss_tokens": int(table.loss_counts[i]),
        "trained_on": spans,
        "tokens": [{"ids": list(piece.ids), "text": piece.text, "loss": piece.loss} for piece in shown],
    }


# Groups of preference data ----------------------------------------------------------------------------------------------


def count_of(table: TokenTable) -> int:
    """How many rows, or groups of them, there are to show."""
    return len(table.starts) - 1


def as_text(tokenizer: Tokenizer, table: TokenTable, number: int, *, coloured: bool) -> Text:
    """A row; of preference data the prompt once, then each answer: the chosen one on green, others on red."""
    if table.pairs is None:
        return row_as_text(tokenizer, table, number, coloured=coloured)
    rows = _rows_of(table, number)
    shared = int(table.pairs.prefixes[rows[0]])
    alike = f", margin {table.pairs.margins[rows[0]]:g}" if table.pairs.margins[rows[0]] else ""
    text = Text(f"{table.where(rows[0])}: {counted(len(rows), 'answer')}, {counted(shared, 'token')} shared{alike}\n\n")
    text.append(rendered(_pieces_of(tokenizer, table, rows[0], 0, shared), coloured))
    for i in rows:
        role = int(table.pairs.roles[i])
        text.append(f"\n\n{_name(table, role)}: {counted(int(table.loss_counts[i]), 'token')} with loss\n", style="bold")
        styles = LOSS_STYLES if role == CHOSEN else REJECTED_STYLES
        text.append(rendered(_pieces_of(tokenizer, table, i, shared, int(table.lengths[i])), coloured, styles))
    return text


def as_dict(tokenizer: Tokenizer, table: TokenTable, number: int) -> dict[str, Any]:
    """For `--json`."""
    if table.pairs is None:
        return row_as_dict(tokenizer, table, number)
    rows = _rows_of(table, number)
    shared = int(table.pairs.prefixes[rows[0]])
    answers = [row_as_dict(tokenizer, table, i) | {"role": _name(table, int(table.pairs.roles[i]))} for i in rows]
    prompt = "".join(piece.text for piece in _pieces_of(tokenizer, table, rows[0], 0, shared))
    margin = float(table.pairs.margins[rows[0]])
    return {"where": table.where(rows[0]), "shared": shared, "prompt": prompt, "margin": margin, "answers": answers}


def _rows_of(table: TokenTable, group: int) -> range:
    return range(*(int(row) for row in table.starts[group : group + 2]))


def _name(table: TokenTable, role: int) -> str:
    assert table.pairs is not None
    marked = len(table) == len(table.pairs.sizes)
    return ("desirable", "undesirable")[role] if marked else "chosen" if role == CHOSEN else "rejected"


def _pieces_of(tokenizer: Tokenizer, table: TokenTable, i: int, start: int, stop: int) -> Iterator[Piece]:
    """Those that begin between two tokens."""
    at = 0
    for piece in pieces(tokenizer, table, i):
        if start <= at < stop:
            yield piece
        at += len(piece.ids)
