"""The tokenizer, and the table of tokenized rows that it makes: Arrow columns (token_cache.py), viewed without copying.

One row of the table is one example: its token ids, which of them carry loss, where it came from, and the example itself
as JSON (to show it and to answer its prompt later). Loss is stored as run borders (start, stop, start, stop, ...)
because a chat row has one run per assistant turn: two numbers for an answer of 300 tokens instead of 300 flags.

This is the only file of `data` that imports transformers, and only when a tokenizer is really needed: a cached table is
found from the tokenizer's files alone (importing transformers with torch behind it takes 3 s, the files 0.03 s).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pronghorn.data.encode.tokenizer_changes import changed, changes_tokens
from pronghorn.data.preference.pair_rows import PairRows
from pronghorn.errors import ModelError, RecipeError
from pronghorn.folders import folder_of
from pronghorn.hf_types import Tokenizer
from pronghorn.hub import cached_folder, model_folder
from pronghorn.model_files import MALFORMED, require_safe_files, require_template_names
from pronghorn.recipe_parts import Data
from pronghorn.small_files import read_small_text

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Span = tuple[int, int]

# Everything in a model folder that can change what a text is tokenized into (config.json names the tokenizer's class).
TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates/*", "config.json",
)  # fmt: skip
LARGEST_TEMPLATE = 1_000_000  # bytes; the largest chat template seen has 20,000


class TokenizerFiles:
    """A tokenizer by name: its fingerprint comes from its files, and it is loaded the first time it is needed."""

    def __init__(self, name: str, spec: Data | None = None) -> None:
        self.name, self.spec = name, spec
        self._loaded: Any = None

    def load(self) -> Any:
        if self._loaded is None:
            self._loaded = load_tokenizer(self.name, self.spec)
        return self._loaded

    def fingerprint(self) -> str:
        """Content of the files and of the template that replaces theirs; loads the tokenizer when it has no files yet."""
        if changes_tokens(self.spec):
            return _content_fingerprint(self.load())
        files = _files_of(self.name)
        if not files:
            self.load()  # says what is wrong with the name, or downloads it
            files = _files_of(self.name)
        if not files:
            return _content_fingerprint(self.load())
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + file.read_bytes())
        digest.update(_template_text(self.spec.chat_template if self.spec else None).encode())
        return digest.hexdigest()


def _files_of(name: str) -> list[Path]:
    """None for a name that nothing has; loading it says so."""
    if not (folder := folder_of(name) or cached_folder(name)):
        return []
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})


def _template_text(chat_template: str | None) -> str:
    if chat_template is None:
        return ""
    try:
        return read_small_text(Path(chat_template).expanduser(), LARGEST_TEMPLATE)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"cannot read the chat template {chat_template}", where="data.chat_template", why=str(error),
            fix="use the path of a Jinja file, relative to the working directory",
        ) from error  # fmt: skip


def padding_id(tokenizer: Tokenizer) -> int:
    """The token that fills a pack, and that a classifier takes for no part of a row."""
    return int(next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None))


def load_tokenizer(name: str, spec: Data | None = None) -> Any:
    """The tokenizer of a local folder or a hub name, with what the recipe changes about it: template, special tokens."""
    chat_template = spec.chat_template if spec else None
    template = _template_text(chat_template)
    folder = model_folder(name)
    content = require_safe_files(folder, name)
    tokenizer = _constructed(folder, name, from_hub=bool(content) and folder_of(name) is None)
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            "the tokenizer has no tokenizer.json, so the loss mask cannot be checked", where=name,
            why=f"{type(tokenizer).__name__} does not map tokens to characters",
            fix="use a model folder with a tokenizer.json",
        )  # fmt: skip
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    if len(set(vocabulary.values())) < len(vocabulary):  # transformers 5.17 then cuts the same text differently at each start
        raise ModelError(
            "the tokenizer's vocabulary gives two tokens the same id", where=name,
            why="its tokenizer.json is damaged, and which of the two is meant is not said",
            fix="download tokenizer.json again",
        )  # fmt: skip
    if chat_template is not None:
        tokenizer.chat_template = template
        tokenizer.pronghorn_own_template = True  # which must fit this tokenizer (templates.py)
    elif isinstance(tokenizer.chat_template, dict):
        require_template_names(list(tokenizer.chat_template), name)
    # A tokenizer.json may carry a truncation of its own; rows are cut by the recipe, and never silently.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if spec is not None and changes_tokens(spec):
        tokenizer = changed(tokenizer, spec)
    tokenizer.pronghorn_files = TokenizerFiles(name, spec)
    tokenizer.pronghorn_as_loaded = (tokenizer.chat_template, len(tokenizer))
    return tokenizer


def _constructed(folder: Path, name: str, *, from_hub: bool) -> Any:
    """What transformers makes out of the folder's files; if it cannot, that is their fault."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoTokenizer

    options: dict[str, Any] = {}
    try:
        if from_hub:  # transformers knows some tokenizers by the hub's names
            options["config"] = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            options["config"]._name_or_path = name
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
        tokenizer.decode(tokenizer("Is it whole? 1, 2, 3 \u00e9\u6c34")["input_ids"])
    except Exception as error:
        # tokenizers (Rust) raises Exception itself
        malformed = (*MALFORMED, StrictDataclassError)
        if not isinstance(error, malformed) and type(error) is not Exception:
            raise
        why, fix = (str(error).strip() or type(error).__name__).split("\n")[0][:300], "download the tokenizer files again"
        if "custom code" in why:
            why, fix = "it needs code from its repository", ("use a model whose tokenizer needs no remote code")
        elif not (folder / "tokenizer.json").is_file():
            why = "the folder has no tokenizer.json"
            fix = "put tokenizer.json and tokenizer_config.json into the folder"
        raise ModelError("cannot load the tokenizer", where=name, why=why, fix=fix) from error
    if from_hub:
        tokenizer.name_or_path = name
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """Digest of a tokenizer or of `TokenizerFiles`: equal when the same text gives the same tokens."""
    if isinstance(tokenizer, TokenizerFiles):
        return tokenizer.fingerprint()
    files: TokenizerFiles | None = getattr(tokenizer, "pronghorn_files", None)
    if files is not None and tokenizer.pronghorn_as_loaded == (tokenizer.chat_template, len(tokenizer)):
        return files.fingerprint()
    return _content_fingerprint(tokenizer)  # made or changed in Python


def _content_fingerprint(tokenizer: Tokenizer) -> str:
    parts = (
        tokenizer.backend_tokenizer.to_str(),
        str(tokenizer.chat_template),
        str(tokenizer.special_tokens_map),
        *getattr(tokenizer, "pronghorn_eot_tokens", ()),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def loaded(tokenizer: Tokenizer) -> Any:
    return tokenizer.load() if isinstance(tokenizer, TokenizerFiles) else tokenizer


def render_tracked(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: object, **options: object
) -> tuple[str, list[Span]]:
    """Text, and the character ranges inside `{% generation %}` blocks as transformers tracks them.

    `apply_chat_template` gives this only as a token mask, which is too wide where a token straddles the border.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(messages)], tools=tools, chat_template=tokenizer.get_chat_template(None, tools),
        return_assistant_tokens_mask=True, **(tokenizer.special_tokens_map | options),
    )  # fmt: skip
    return texts[0], [(start, stop) for start, stop in spans[0]]


# The table ----------------------------------------------------------------------------------------------------------

SCHEMA = pa.schema(
    [
        ("ids", pa.list_(pa.int32())),
        ("loss", pa.list_(pa.int32())),  # run borders: start, stop, start, stop, ...
        ("where", pa.string()),
        ("example", pa.string()),  # JSON
    ]
)
# Preference data has as many rows as answers, side by side (pair_rows.py).
PAIR_FIELDS = (("begins", pa.bool_()), ("role", pa.int32()), ("prefix", pa.int32()), ("margin", pa.float32()))
PAIR_SCHEMA = pa.schema([*SCHEMA, *(pa.field(name, kind) for name, kind in PAIR_FIELDS)])


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One tokenized example; `runs` are the token ranges that carry loss, in order, not touching."""

    ids: Ints
    runs: tuple[Span, ...]
    where: str
    example: str = ""
    lost: str = ""  # what of the row is not in its text, told where data.lost allows it
    controls: int = 0  # control tokens inside its texts
    pair: tuple[bool, int, int, float] | None = None  # whether it begins a group, its role, shared tokens, margin


def _list_column(pieces: Sequence[Ints]) -> Any:
    offsets = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
    values = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, pa.int32()))


def record_batch(rows: Sequence[TokenRow]) -> Any:
    borders = [np.array(list(itertools.chain.from_iterable(row.runs)), np.int32) for row in rows]
    columns = [
        _list_column([row.ids for row in rows]),
        _list_column(borders),
        pa.array([row.where for row in rows], pa.string()),
        pa.array([row.example for row in rows], pa.string()),
    ]
    if not rows or rows[0].pair is None:
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    marks = zip(*(cast(Any, row.pair) for row in rows), strict=True)
    columns += [pa.array(values, kind) for values, (_, kind) in zip(marks, PAIR_FIELDS, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=PAIR_SCHEMA)


class TokenTable:
    """Tokenized rows. A view holds (row, start, stop) for each of its rows; the tokens stay in the mapped file."""

    def __init__(
        self,
        base: _Columns,
        rows: npt.NDArray[np.int64],
        starts: Ints,
        stops: Ints,
        counts: Ints,
        pairs: PairRows | None = None,
    ) -> None:
        self._base, self._rows, self._starts, self._stops = base, rows, starts, stops
        self.pairs = pairs  # of preference data
        self.lengths: Ints = stops - starts
        self.loss_counts: Ints = counts

    @classmethod
    def of(cls, rows: Sequence[TokenRow]) -> TokenTable:
        """A table in memory."""
        return cls.of_arrow(pa.Table.from_batches([record_batch(rows)]))

    @classmethod
    def of_arrow(cls, table: pa.Table, guard: Callable[[], None] | None = None, content: str = "") -> TokenTable:
        """`guard` is called before rows are read, and may raise; `content`: where it is known."""
        base = _Columns(table, guard, content)
        rows = np.arange(base.count, dtype=np.int64)
        return cls(base, rows, np.zeros(base.count, np.int32), base.lengths, base.label_counts(), base.pairs())

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self, i: int) -> Ints:
        return self._base.ids(self._rows[i])[self._starts[i] : self._stops[i]]

    def loss(self, i: int) -> Bools:
        """True: this token is trained on, as a target (the token at position 0 never is: nothing predicts it)."""
        mask = np.zeros(self._stops[i], np.bool_)
        for start, stop in self._base.runs(self._rows[i]).reshape(-1, 2):
            mask[start:stop] = True
        return mask[self._starts[i] :]

    def where(self, i: int) -> str:
        return self._base.text("where", self._rows[i])

    def example_json(self, i: int) -> str:
        return self._base.text("example", self._rows[i])

    def examples_json(self, start: int, stop: int) -> list[str]:
        """The examples of many rows at once, ten times as fast as one by one."""
        return self._base.texts("example", self._rows[start:stop])

    @property
    def content_of_all(self) -> str:
        """Digest of the whole table that this is a view of."""
        return self._base.content()

    @property
    def content(self) -> str:
        """SHA-256 of every token and every loss mark, in order, and of which parts of which rows this view has. Not of where
        they came from: a file that was moved or renamed is the same data."""
        digest = hashlib.sha256(self.content_of_all.encode())
        for array in (self._rows, self._starts, self._stops):
            digest.update(array.tobytes())
        if self.pairs is not None:  # how packs are made of it: a resumed run must make the same
            digest.update(self.pairs.groups.tobytes() + bytes([self.pairs.shared]))
        return digest.hexdigest()

    def row(self, i: int) -> int:
        """The number of the underlying row: pieces of one split row share it."""
        return int(self._rows[i])

    def select(self, indices: npt.ArrayLike) -> TokenTable:
        chosen = np.asarray(indices)
        if chosen.dtype != np.bool_:
            chosen = chosen.astype(np.int64)
        arrays = (self._rows, self._starts, self._stops, self.loss_counts)
        pairs = None if self.pairs is None else self.pairs.select(chosen)
        rows, starts, stops, counts = (array[chosen] for array in arrays)
        return TokenTable(self._base, rows, starts, stops, counts, pairs)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first row of each unit (a row; of preference data, a group of rows), and the number of rows at the end."""
        return np.arange(len(self) + 1) if self.pairs is None else self.pairs.starts

    def select_units(self, units: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> TokenTable:
        """These units; a number that is given twice repeats its unit."""
        chosen = np.flatnonzero(units) if units.dtype == np.bool_ else units
        first, sizes = self.starts[:-1][chosen], np.diff(self.starts)[chosen]
        ends = np.concatenate([[0], np.cumsum(sizes)])
        table = self.select(np.repeat(first - ends[:-1], sizes) + np.arange(ends[-1]))
        if table.pairs is None:
            return table
        # numbers of their own, so that a group that is named twice is two
        return table.with_pairs(replace(table.pairs, groups=np.repeat(np.arange(len(sizes)), sizes)))

    def with_pairs(self, pairs: PairRows) -> TokenTable:
        return TokenTable(self._base, self._rows, self._starts, self._stops, self.loss_counts, pairs)

    def sharing(self, shared: bool) -> TokenTable:
        """The same table, whose packs have the prompt of a group once, or not."""
        return self if self.pairs is None else self.with_pairs(replace(self.pairs, shared=shared))

    def cut(self, pieces: Sequence[tuple[int, int, int]]) -> TokenTable:
        """Views of parts of rows: (index in this table, start, stop) for each, in tokens."""
        parts = np.array(pieces, np.int64).reshape(-1, 3)
        index = parts[:, 0]
        starts = (self._starts[index] + parts[:, 1]).astype(np.int32)
        stops = np.minimum(self._starts[index] + parts[:, 2], self._stops[index]).astype(np.int32)
        whole = (starts == self._starts[index]) & (stops == self._stops[index])
        counts = self.loss_counts[index].copy()
        for i in np.flatnonzero(~whole):
            borders = self._base.runs(self._rows[index[i]]).reshape(-1, 2)
            inside = np.minimum(borders[:, 1], stops[i]) - np.maximum(borders[:, 0], starts[i] + 1)
            counts[i] = np.maximum(inside, 0).sum()
        pairs = None if self.pairs is None else self.pairs.select(index).cut(stops - starts)
        return TokenTable(self._base, self._rows[index], starts, stops, counts, pairs)


class _Columns:
    """The mapped columns as numpy views, one set per record batch."""

    def __init__(self, table: pa.Table, guard: Callable[[], None] | None, content: str) -> None:
        self.count: int = table.num_rows
        self._guard, self._content, self._table = guard or (lambda: None), content, table
        self._ids, self._loss = ([_flat(chunk) for chunk in table.column(name).chunks] for name in ("ids", "loss"))
        sizes = [len(offsets) - 1 for offsets, _ in self._ids]
        self._first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        lengths = [np.diff(offsets) for offsets, _ in self._ids]
        self.lengths: Ints = np.concatenate([np.zeros(0, np.int32), *lengths]).astype(np.int32)

    def pairs(self) -> PairRows | None:
        if len(self._table.schema) == len(SCHEMA):
            return None
        begins, roles, prefixes, margins = _pair_columns(self._table)
        return PairRows(np.cumsum(begins, dtype=np.int64) - 1, roles, prefixes, margins)

    def content(self) -> str:
        """Digest of all tokens and loss marks, independent of record batches; the cache knows it without reading them."""
        if not self._content:
            lists = (self._ids, self._loss)
            columns = [arrays for chunks in lists for arrays in ([np.diff(at) for at, _ in chunks], [one for _, one in chunks])]
            columns += [[column] for column in _pair_columns(self._table)]
            self._content = " ".join(_digest(arrays) for arrays in columns)
        return self._content

    def ids(self, row: int) -> Ints:
        return self._values(self._ids, row)

    def runs(self, row: int) -> Ints:
        return self._values(self._loss, row)

    def _values(self, chunks: Sequence[tuple[Ints, Ints]], row: int) -> Ints:
        self._guard()
        chunk = int(np.searchsorted(self._first, row, side="right")) - 1
        at, (offsets, values) = int(row - self._first[chunk]), chunks[chunk]
        return values[offsets[at] : offsets[at + 1]]

    def text(self, name: str, row: int) -> str:
        self._guard()
        return str(self._table.column(name)[int(row)].as_py())

    def texts(self, name: str, rows: npt.NDArray[np.int64]) -> list[str]:
        if not len(rows) or (np.diff(rows) != 1).any():
            return [self.text(name, int(row)) for row in rows]
        self._guard()
        return list(self._table.column(name).slice(int(rows[0]), len(rows)).to_pylist())

    def label_counts(self) -> Ints:
        counts = [np.zeros(0, np.int64)]
        for offsets, values in self._loss:
            signed = values.astype(np.int64)
            signed[0::2] *= -1  # every list has an even length, so starts stand at even places: stop - start adds up
            total = np.concatenate([[0], np.cumsum(signed)])
            count = total[offsets[1:]] - total[offsets[:-1]]
            some = np.flatnonzero(offsets[1:] > offsets[:-1])
            count[some] -= values[offsets[some]] == 0  # a loss token at position 0 has no label
            counts.append(count)
        return np.concatenate(counts).astype(np.int32)


def _digest(arrays: Sequence[npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _pair_columns(table: pa.Table) -> list[npt.NDArray[Any]]:
    """Those of PAIR_FIELDS; none where rows stand for themselves."""
    types = (np.bool_, np.int32, np.int32, np.float32) if len(table.schema) > len(SCHEMA) else ()
    return [np.array(table.column(name).to_pylist(), of) for (name, _), of in zip(PAIR_FIELDS, types, strict=False)]


def _flat(chunk: pa.ListArray) -> tuple[Ints, Ints]:
    """Views of its buffers. `to_numpy` would import pandas first, where it is installed: 0.5 s of every start."""
    return cast(Ints, np.from_dlpack(chunk.offsets)), cast(Ints, np.from_dlpack(chunk.values))
