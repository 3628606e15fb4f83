"""Which training rows have the prompt of a held-out row in them, whole or in large part.

By containment: of the word 8-grams of the prompt (13-grams of a long one), the share that one training row has, wherever it
stands in it. MinHash (copies.py) compares whole rows, and misses a short prompt in a long row. Shorter prompts, and those whose
words many rows share, are compared as a whole. Grams that more than SHARED of the different training rows have are templates,
and do not count. R = training rows, in the order in which they were added. H = held-out prompts.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pronghorn.data.read.copies import FEWEST, SHARED_BY, WORD, Longs, WordHashes, shingles_of

GRAM, LONG_GRAM = 8, 13
LONG = 200  # words of a long prompt
CONTAINED = 0.5  # of a prompt's grams; one changed word in 20 leaves 0.62 of the 13 grams, two that are far apart none
SHARED = 0.01  # of the training rows
AT_ONCE = 2_000_000  # pairs of a training row and a prompt that are counted together


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


class HeldPrompts:
    def __init__(self, prompts: Sequence[str]) -> None:
        self._known = WordHashes()
        words = [words_of(prompt) for prompt in prompts]
        self._whole = {_digest(prompt): held for held, prompt in reversed(list(enumerate(prompts))) if prompt.strip()}
        widths = [LONG_GRAM if len(one) >= LONG else GRAM if len(one) >= GRAM else 0 for one in words]
        none = np.zeros(0, np.uint64)
        grams = [np.unique(self._grams(one, width)) if width else none for one, width in zip(words, widths, strict=True)]
        self._widths = tuple(sorted({width for width in widths if width}))
        self._vocabulary, place = np.unique(np.concatenate([none, *grams]), return_inverse=True)
        owner = np.repeat(np.arange(len(words)), [len(one) for one in grams])
        order = np.argsort(place, kind="stable")
        self._owners = owner[order]  # H, by gram
        self._begins = np.searchsorted(place[order], np.arange(len(self._vocabulary) + 1))
        self._prompts, self._rows = len(words), 0
        self._equal: dict[int, bytes] = {}  # R -> digest of its prompt, where a held-out row has the same
        self._asked = Counter[bytes]()
        self._texts: set[bytes] = set()
        self._codes: list[Longs] = [np.zeros(0, np.int64)]  # R * grams + gram
        self._counts = np.zeros(len(self._vocabulary), np.int64)  # of different rows that have the gram

    def _grams(self, words: list[str], width: int) -> npt.NDArray[np.uint64]:
        """Hashes of so many words in a row, which differ from those of another width."""
        return shingles_of(words, self._known, width) + np.uint64(width)

    def add(self, texts: Sequence[tuple[str, str]]) -> None:
        """Training rows: all that each says, and its prompt."""
        for row, (_, prompt) in enumerate(texts, start=self._rows):
            if (digest := _digest(prompt)) in self._whole:
                self._equal[row] = digest
                self._asked[digest] += 1
        words, found, grams = [words_of(text) for text, _ in texts], [np.zeros(0, np.int64)], max(1, len(self._vocabulary))
        sizes = np.array([len(one) for one in words], np.int64)
        owners, together = np.repeat(np.arange(len(words)), sizes), list(itertools.chain.from_iterable(words))
        left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(together))  # words from here to the end of the row
        for width in self._widths:  # all rows at once: 100,000 one by one take 40 s more
            hashes = self._grams(together, width)
            at = np.minimum(np.searchsorted(self._vocabulary, hashes), grams - 1)
            hits = np.flatnonzero((self._vocabulary[at] == hashes) & (left[: len(hashes)] >= width))
            found.append(owners[hits] * grams + at[hits])
        rows, at = np.divmod(np.unique(np.concatenate(found)), grams)
        for row, of_row in zip(*_split(rows, at), strict=True):
            if (whole := _digest(texts[row][0])) not in self._texts:
                self._texts.add(whole)
                self._counts[of_row] += 1
        self._codes.append((self._rows + rows) * grams + at)
        self._rows += len(texts)

    def found(self) -> dict[int, tuple[int, float]]:
        """R -> H and the share of its grams, the largest; 1.0 where the prompts are equal."""
        often = max(FEWEST, SHARED_BY * self._rows)
        found = {row: (self._whole[one], 1.0) for row, one in self._equal.items() if self._asked[one] <= often}
        rows, grams = np.divmod(np.concatenate(self._codes), max(1, len(self._vocabulary)))
        rare = self._counts <= max(FEWEST, SHARED * self._rows)
        sizes = np.bincount(self._owners[np.repeat(rare, np.diff(self._begins))], minlength=self._prompts)
        rows, grams = rows[rare[grams]], grams[rare[grams]]
        pairs = np.cumsum(np.diff(self._begins)[grams])
        start = 0
        while start < len(rows):  # whole rows
            last = int(np.searchsorted(pairs, (pairs[start - 1] if start else 0) + AT_ONCE))
            stop = int(np.searchsorted(rows, rows[min(last, len(rows) - 1)], side="right"))
            for row, held, share in self._contained(rows[start:stop], grams[start:stop], sizes):
                if row not in found:
                    found[row] = (held, share)
            start = stop
        return dict(sorted(found.items()))

    def _contained(self, rows: Longs, grams: Longs, sizes: Longs) -> list[tuple[int, int, float]]:
        """The prompt that each of these rows has the most of, if it is enough."""
        begin, count = self._begins[grams], np.diff(self._begins)[grams]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        codes, counts = np.unique(
            np.repeat(rows, count) * self._prompts + self._owners[np.repeat(begin, count) + within], return_counts=True
        )
        row, held = np.divmod(codes, self._prompts)
        share = counts / sizes[held]
        order = np.lexsort((held, -share, row))
        row, held, share = row[order], held[order], share[order]
        first = np.concatenate([[True], row[1:] != row[:-1]]) & (share >= CONTAINED)
        return list(zip(row[first].tolist(), held[first].tolist(), share[first].tolist(), strict=True))


def _split(rows: Longs, values: Longs) -> tuple[list[int], list[Longs]]:
    """The different rows, which ascend, and the values of each."""
    different, first = np.unique(rows, return_index=True)
    return different.tolist(), np.split(values, first[1:]) if len(different) else []


def _digest(text: str) -> bytes:
    """Equal whatever the casing and the spaces."""
    return hashlib.blake2b("".join(text.lower().split()).encode("utf-8", "surrogatepass"), digest_size=16).digest()
