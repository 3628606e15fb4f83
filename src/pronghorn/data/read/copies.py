"""Which rows say the same: copies and near copies inside one table, and between two.

Rows are compared by what is said in them, in lower case, without system messages; preference rows by their prompt, because
another answer to a known prompt is not a new question. Two rows are near copies if the Jaccard similarity of their shingles of
three words is large, as MinHash estimates it. Passages that a quarter of all rows share, such as an instruction in front of
every question, do not count. Two rows whose messages have the same sentences, in whatever order, are near copies, too: in short
texts another order leaves a similarity under 0.8.

Held-out rows must not be trained on, so all that near copies link stays on one side, from an estimate of 0.7 on: that finds
99 % of those alike at 0.8, and 1 % of those alike at 0.6. What `data.duplicates: drop-near` drops is lost, so it must be like
an earlier row that stays, from an estimate of 0.8 on: that drops all alike at 0.9, 95 % at 0.85, half at 0.8, 13 % at 0.75 and
1 % at 0.7.

Plain numpy, the same on every machine: a resumed run holds out and drops the same rows. On one core, 7,473 rows of 150 words
take 1.2 to 2 s and 100,000 take 22 to 29 s, all but 2 s of it for the MinHashes. What is found is kept beside the cached table.
U = units: rows, or groups of preference rows. P = values of a MinHash.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.cached_rows import Progress, silent
from pronghorn.data.encode.token_cache import kept
from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_choices import held_out_by
from pronghorn.data.read.clean import BATCH, said
from pronghorn.data.read.formats import Example

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

COPIES_VERSION = 3  # raise it when other rows are copies
# A word, one sign of a script that writes no spaces, or one punctuation mark: `2+2` and `2*2` are different things.
WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
SENTENCES = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")  # between them: 3.5 is one
BETWEEN = "\x1e"  # messages; white space to WORD
SHINGLE = 3  # words in a row; with 3, one changed word among 50 leaves a similarity of 0.89
WIDEST = 13  # of all that are asked for
# 20 bands of 6 values: a pair that is alike at 0.8 becomes a candidate with 99.8 %, one at 0.5 with 27 %, at 0.3 with 1 %.
BANDS, BAND_ROWS = 20, 6
SEED = 20  # of MinHash; fixed, so that the same data loses the same rows
ALIKE, DROPPED = 0.7, 0.8  # kept on one side, dropped: estimates, with a standard error of 0.04
SAMPLED, SHARED_BY, FEWEST = 1000, 0.25, 20  # rows looked at for shared passages; by how many; below so many rows none is
BESIDE = 4  # rows of a bucket that a row is compared with, and its first: a cloud of near copies is linked all the same
MOST_PAIRS = 500_000  # compared in one band, between two tables
MOST_STAYING = 64  # rows of a bucket that later ones are compared with; near copies meet in other bands, too
PAIRS = 65_536  # compared in one call: 16 MB
_P = BANDS * BAND_ROWS
_chance = np.random.Generator(np.random.Philox(key=[SEED, 0]))
_FACTORS = _chance.integers(0, 2**63, _P, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_PLACES = _chance.integers(0, 2**63, WIDEST, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, slots=True)
class Side:
    """The units of a table: what stays together when rows are held out (`units`: for each row of the table)."""

    table: TokenTable
    units: Longs
    numbers: Longs  # of the units, ascending
    first: Longs  # row of the table, for each of them

    @classmethod
    def of(cls, table: TokenTable) -> Side:
        units = held_out_by(table)
        numbers, first = np.unique(units, return_index=True)
        return cls(table, units, numbers, first)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def content(self) -> bytes:
        return self.table.content_of_all.encode() + self.numbers.tobytes()

    def where(self, unit: int) -> str:
        return self.table.where(int(self.first[unit]))

    def rows(self, chosen: Flags) -> Flags:
        """The table's rows that belong to these units."""
        return chosen[np.searchsorted(self.numbers, self.units)]

    def examples(self) -> Iterator[list[Example]]:
        once = self.table.select(self.first)
        for start in range(0, len(self), BATCH):
            yield [Example.from_json(text, "") for text in once.examples_json(start, start + BATCH)]

    def texts(self) -> Iterator[list[str]]:
        for examples in self.examples():
            yield [compared_text(example, prompt=self.table.pairs is not None).lower() for example in examples]


def compared_text(example: Example, *, prompt: bool = False) -> str:
    """All that is said, but for system messages: a long one shared by all rows would make them all alike. `prompt`: only what
    comes before the answer, if something does."""
    if example.kind != "chat":
        alone = prompt and example.prompt.strip()
        return example.prompt if alone else BETWEEN.join((example.prompt, example.completion, example.text))
    before = _spoken(example.messages[: example.prompt_messages]) if prompt else []
    return BETWEEN.join(before or _spoken(example.messages))


def _spoken(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [said(message) for message in messages if message["role"] not in ("system", "developer")]


@dataclass(frozen=True, slots=True)
class Families:
    """For each unit the first one with the same text; itself where there is none."""

    exact: Longs
    near: Longs  # linked, one by one, by near copies; the exact ones are near, too
    dropped: Longs  # of those that `drop-near` drops, the first like it of those that stay


@dataclass(frozen=True, slots=True)
class Leaks:
    """Units of the held-out side that are on the other side, too, and the first copy there; units of that side."""

    held: Longs
    copy: Longs  # of each of `held`
    exact: Flags  # of each of `held`: word for word
    train: Longs


def families(side: Side, cache: Path, progress: Progress = silent) -> Families:
    own, found = np.arange(len(side)), []

    def look() -> list[Any]:
        every = [(np.flatnonzero(firsts != own), firsts) for firsts in _families(_marks(side, progress))]
        return [[copies.tolist(), firsts[copies].tolist()] for copies, firsts in every]

    for copies, first in _kept(cache, side.content, look):
        found.append(firsts := own.copy())
        firsts[copies] = first
    return Families(*found)


def leaks(train: Side, held: Side, cache: Path, progress: Progress = silent) -> Leaks:
    """What of the held-out side stands on the other one, too."""

    def look() -> list[Any]:
        common = _shared_passages(train)
        ours, theirs = _marks(train, progress, common), _marks(held, progress, common)
        found = _across(ours, theirs)
        return [found.held.tolist(), found.copy.tolist(), found.exact.tolist(), found.train.tolist()]

    at, copy, exact, ours = _kept(cache, train.content + held.content, look)
    return Leaks(np.array(at, np.int64), np.array(copy, np.int64), np.array(exact, np.bool_), np.array(ours, np.int64))


def _kept(cache: Path, content: bytes, look: Callable[[], list[Any]]) -> list[Any]:
    """What is written beside the cached table, or what a look finds. A damaged note is made again: it says nothing new."""
    digest = hashlib.sha256(f"{COPIES_VERSION}\0".encode() + content).hexdigest()[:16]
    return kept(cache.with_suffix(f".copies-{digest}.json"), list[Any], look)[0]


# Marks: what rows are compared by -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Marks:
    keys: npt.NDArray[np.uint64]  # [U], of the words
    sentences: npt.NDArray[np.uint64]  # [U], of each message's sentences in alphabetical order
    signs: npt.NDArray[np.uint16]  # [U, P]
    some: Flags  # whether there is a shingle to compare


def _marks(side: Side, progress: Progress, common: npt.NDArray[np.uint64] | None = None) -> _Marks:
    common = _shared_passages(side) if common is None else common
    known = WordHashes()
    keys, sentences, signs, some = bytearray(), bytearray(), [np.zeros((0, _P), np.uint16)], [np.zeros(0, np.bool_)]
    for number, texts in enumerate(side.texts()):
        progress("comparing rows", number * BATCH, len(side))
        words = [WORD.findall(text) for text in texts]
        for text, one in zip(texts, words, strict=True):
            keys += _digest(" ".join(one))
            sentences += _digest(_in_one_order(text))
        shingles = [shingles_of(one, known) for one in words]
        owners, hashes = np.repeat(np.arange(len(words)), [len(one) for one in shingles]), np.concatenate(shingles)
        counts = ~np.isin(hashes, common)
        some.append(np.bincount(owners[counts], minlength=len(words)) > 0)
        signs.append(_signs(hashes[counts], owners[counts], len(words)))
    progress("comparing rows", len(side), len(side))
    of_words, of_sentences = (np.frombuffer(bytes(each), np.uint64) for each in (keys, sentences))
    return _Marks(of_words, of_sentences, np.concatenate(signs), np.concatenate(some))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _in_one_order(text: str) -> str:
    """Sentences are ordered within a message: with question and answer exchanged, a row asks for something else."""
    parts = ([" ".join(one.split()) for one in SENTENCES.split(part)] for part in text.split(BETWEEN))
    return BETWEEN.join("\n".join(sorted(part)) for part in parts)


def _shared_passages(side: Side) -> npt.NDArray[np.uint64]:
    """Shingles that a quarter of different rows have."""
    numbers = np.unique(np.linspace(0, max(0, len(side) - 1), SAMPLED).astype(np.int64))
    sample = Side.of(side.table.select(side.first[numbers]))
    texts = {" ".join(WORD.findall(text)) for batch in sample.texts() for text in batch}
    known = WordHashes()
    found = [np.unique(shingles_of(text.split(), known)) for text in texts]
    if len(found) < FEWEST:
        return np.zeros(0, np.uint64)
    hashes, counts = np.unique(np.concatenate(found), return_counts=True)
    return np.asarray(hashes[counts >= SHARED_BY * len(found)])


class WordHashes(dict[str, int]):
    """Each word's hash, made once."""

    def __missing__(self, word: str) -> int:
        self[word] = found = int.from_bytes(_digest(word), "little")
        return found


def shingles_of(words: list[str], known: WordHashes, width: int = SHINGLE) -> npt.NDArray[np.uint64]:
    """A hash of each so many words in a row; of fewer words, of all."""
    hashes = np.fromiter(map(known.__getitem__, words), np.uint64, len(words))
    width = min(width, len(words))
    total = np.zeros(max(0, len(words) - width + 1) if width else 0, np.uint64)
    for place in range(width):
        total += hashes[place : place + len(total)] * _PLACES[place]
    return total ^ (total >> np.uint64(29))


def _signs(hashes: npt.NDArray[np.uint64], owners: Longs, rows: int) -> npt.NDArray[np.uint16]:
    """MinHashes, 16 bits of each value: two rows agree in as large a share of them as their shingles are alike. `owners`: the
    row of each hash, ascending; a row without any has zeros."""
    signs = np.zeros((rows, _P), np.uint16)
    there, starts = np.unique(owners, return_index=True)
    for place, factor in enumerate(_FACTORS if len(there) else ()):
        signs[there, place] = np.minimum.reduceat((hashes * factor) >> np.uint64(32), starts).astype(np.uint16)
    return signs


def _buckets(signs: npt.NDArray[np.uint16]) -> Iterator[npt.NDArray[np.uint64]]:
    """For each band a number per row: rows that agree in the band have the same number."""
    for start in range(0, _P, BAND_ROWS):
        number = np.zeros(len(signs), np.uint64)
        for place in range(BAND_ROWS):
            number = (number ^ signs[:, start + place]) * _PLACES[place]
            number ^= number >> np.uint64(31)
        yield number


def _alike(a: npt.NDArray[np.uint16], i: Longs, b: npt.NDArray[np.uint16], j: Longs, least: float = ALIKE) -> Flags:
    """Which of the pairs (a[i], b[j]) are near copies."""
    same = [np.zeros(0, np.bool_)]
    for at in range(0, len(i), PAIRS):
        part = slice(at, at + PAIRS)
        same.append((a[i[part]] == b[j[part]]).sum(1) >= least * _P)
    return np.concatenate(same)


# Comparing ----------------------------------------------------------------------------------------------------------------


def _families(marks: _Marks) -> tuple[Longs, Longs, Longs]:
    exact = _first_of(marks.keys)
    same = _first_of(marks.sentences[exact])[exact]
    members = np.unique(same[marks.some[same]])
    signs = marks.signs[members]
    goes = np.arange(len(same))
    goes[members] = members[_dropped(signs)]
    i, j = _linked(signs)
    return exact, _joined(same, members[i], members[j]), goes[same]


def _first_of(keys: npt.NDArray[np.uint64]) -> Longs:
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])


def _dropped(signs: npt.NDArray[np.uint16]) -> Longs:
    """For each row the first kept row that it resembles. Rows are compared with kept ones alone, so that of a chain a ~ b ~ c
    whose ends differ only b goes."""
    first = np.arange(len(signs))
    shared: list[list[int]] = [[] for _ in signs]  # of each row, the buckets that it is not alone in
    for band, numbers in enumerate(_buckets(signs)):
        _, number, size = np.unique(numbers, return_inverse=True, return_counts=True)
        for i in np.flatnonzero(size[number] > 1).tolist():
            shared[i].append(int(number[i]) * BANDS + band)
    staying = defaultdict[int, list[int]](list)
    for i, buckets in enumerate(shared):
        near = np.array(sorted({j for bucket in buckets for j in staying[bucket]}), np.int64)
        near = near[_alike(signs, near, signs, np.full(len(near), i), DROPPED)]
        if len(near):
            first[i] = near[0]
            continue
        for bucket in buckets:
            if len(staying[bucket]) < MOST_STAYING:
                staying[bucket].append(i)
    return first


def _linked(signs: npt.NDArray[np.uint16]) -> tuple[Longs, Longs]:
    """Pairs of near copies, through which all of a cloud of them are linked."""
    codes = np.zeros(0, np.int64)
    for numbers in _buckets(signs):
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        begins = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.zeros(0, np.bool_)
        earlier = [order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]]
        later = [order]
        for apart in range(1, min(BESIDE + 1, len(order))):
            same = ordered[apart:] == ordered[:-apart]
            earlier.append(order[:-apart][same])
            later.append(order[apart:][same])
        a, b = np.concatenate(earlier), np.concatenate(later)
        codes = np.union1d(codes, (np.minimum(a, b) * len(signs) + np.maximum(a, b))[a != b])
    i, j = codes // max(1, len(signs)), codes % max(1, len(signs))
    near = _alike(signs, i, signs, j)
    return i[near], j[near]


def _joined(labels: Longs, i: Longs, j: Longs) -> Longs:
    """The smallest label of all that are linked, one by one, by the pairs (i, j)."""
    labels = labels.copy()
    while True:
        least = np.minimum(labels[i], labels[j])
        before = labels.copy()
        np.minimum.at(labels, before[i], least)
        np.minimum.at(labels, before[j], least)
        labels = labels[labels]
        if (labels == before).all():
            return labels


def _across(train: _Marks, held: _Marks) -> Leaks:
    exact = np.isin(held.keys, train.keys)
    copy, leaked = np.full(len(exact), -1, np.int64), np.zeros(len(train.keys), np.bool_)
    for ours, theirs in ((train.keys, held.keys), (train.sentences, held.sentences)):
        new = np.isin(theirs, ours) & (copy < 0)
        order = np.argsort(ours, kind="stable")
        copy[new] = order[np.searchsorted(ours[order], theirs[new])]
        leaked |= np.isin(ours, theirs)
    members, asked = np.flatnonzero(train.some), np.flatnonzero(held.some)
    most = max(16, MOST_PAIRS // max(1, len(asked)))
    for numbers, wanted in zip(_buckets(train.signs[members]), _buckets(held.signs[asked]), strict=True):
        order = np.argsort(numbers, kind="stable")
        begin, end = (np.searchsorted(numbers[order], wanted, side=side) for side in ("left", "right"))
        counts = np.minimum(end - begin, most)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        i, j = members[order[np.repeat(begin, counts) + within]], np.repeat(asked, counts)
        near = _alike(train.signs, i, held.signs, j)
        leaked[i[near]] = True
        new = near & (copy[j] < 0)
        copy[j[new][::-1]] = i[new][::-1]
    at = np.flatnonzero(copy >= 0)
    return Leaks(at, copy[at], exact[at], np.flatnonzero(leaked))
