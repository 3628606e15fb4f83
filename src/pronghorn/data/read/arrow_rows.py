"""Parquet files, Arrow files and streams, and data sets of the hub into rows."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronghorn.data.read.source_files import BadRow, RawRow, Source, content_of, neighbours
from pronghorn.errors import CommandError, DataError, EnvironmentFault
from pronghorn.hub import data_set_revision, hub_errors, quiet, require_data_set

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
AGAIN = "copy, download or write it again"
BATCH_ROWS = 1024  # rows turned into Python values at a time; bounds memory, and larger is no faster


def read_parquet(source: Source) -> Iterator[RawRow | BadRow]:
    import pyarrow.parquet as pq

    _content(source, "a Parquet file")
    with source.path.open("rb") as file, _damage_told(source, "this Parquet file is damaged or not a Parquet file"):
        batches = pq.ParquetFile(file).iter_batches(BATCH_ROWS)
        yield from _arrow_rows(batches, lambda index: f"{source.name} row {index + 1}")


def read_arrow(source: Source) -> Iterator[RawRow | BadRow]:
    """An Arrow file (also Feather), or a stream, which is what `datasets` keeps in its cache and writes to disk."""
    import pyarrow as pa

    is_stream = _content(source, "an Arrow file", "an Arrow stream (`datasets` cache)").startswith("an Arrow stream")
    with _damage_told(source, "this Arrow file is damaged or not an Arrow file"), pa.OSFile(str(source.path)) as file:
        if is_stream:
            _require_end(source)
        reader = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        batches = _checked(reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)))
        yield from _arrow_rows(batches, lambda index: f"{source.name} row {index + 1}")


def _content(source: Source, *allowed: str) -> str:
    """What the file's first bytes say it is, or ""; refuses what is plainly something else."""
    with source.path.open("rb") as file:
        name, fix = content_of(file.read(32)) or ("", "")
    if name and name not in allowed:
        raise source.error(f"this is {name}", fix=fix)
    return name


@contextmanager
def _damage_told(source: Source, what: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        why = str(error).split("\n", 1)[0]
        raise source.error(what, why=why, fix=AGAIN) from error


def _checked(batches: Iterable[Any]) -> Iterator[Any]:
    """Arrow's reader trusts lengths and offsets: without the look at all of them, a flipped bit ends the process."""
    for batch in batches:
        batch.validate(full=True)
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _require_end(source: Source) -> None:
    """A stream that was cut between two batches reads like one that ends there."""
    with source.path.open("rb") as file:
        file.seek(-min(8, source.path.stat().st_size), 2)
        end = file.read(8)
    if end != END_OF_STREAM:
        raise source.error("this Arrow stream is truncated: its end is missing", fix=AGAIN)


def read_hub(source: Source) -> Iterator[RawRow | BadRow]:
    """A stream as it comes over the network, some rows at a time: nothing of it is put on the disk. Always the revision that
    the fingerprint names. A network that fails leaves what is tokenized; the same command goes on behind it."""
    data = hub_dataset(source)
    try:
        yield from _arrow_rows(data.with_format("arrow").iter(BATCH_ROWS), lambda index: f"{source.name}[{index}]")
    except hub_errors() as error:
        if not source.stream:
            raise
        raise EnvironmentFault(
            what="the download stalled",
            where=source.name,
            why=_first_line(error),
            fix="run the same command again: it continues after the tokenized rows",
        ) from error


def hub_fingerprint(source: Source) -> str:
    return _revision(source) if source.stream else str(hub_dataset(source)._fingerprint)


@functools.lru_cache(maxsize=8)  # one for a run: what is read is what the cache's key says
def _revision(source: Source) -> str:
    assert source.hub is not None
    if "[" in source.hub[2]:
        raise source.error(
            "a slice of a split cannot be streamed", fix="name the whole split, and set max_rows to use its first rows"
        )
    return data_set_revision(source.hub[0])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]


def _arrow_rows(batches: Iterable[Any], where: Callable[[int], str]) -> Iterator[RawRow | BadRow]:
    """Rows of Arrow tables or record batches."""
    index = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:  # Arrow does not check the texts it is given
            raise DataError(
                what="a text is not UTF-8",
                where=f"{where(index)} or one of the {batch.num_rows - 1} after it",
                fix="write the data again as UTF-8",
            ) from error
        for row in rows:
            yield RawRow({key: _without_nulls(value) for key, value in row.items()}, where(index))
            index += 1


def _without_nulls(value: object) -> Any:
    """Arrow gives every object of a list all keys that any of them has, null where it had none: take those out again."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


@functools.lru_cache(maxsize=8)  # fingerprint and rows ask for the same one; it is memory-mapped, so keeping it is cheap
def hub_dataset(source: Source) -> Any:
    assert source.hub is not None  # resolve() gives every hub source one
    name, config, split = source.hub
    try:
        import datasets
    except ImportError as error:
        raise CommandError(
            what="file not found, and Hub datasets need the `datasets` library",
            where=source.name,
            fix="check the path, or pip install 'pronghorn[hub]'",
        ) from error
    try:
        how = {"streaming": True, "revision": _revision(source)} if source.stream else {}
        if not source.stream:
            require_data_set(name)
        with quiet():
            return datasets.load_dataset(name, config, split=split, **how)
    except DataError as error:
        fix = f"if it is a file: {neighbours(name, Path(name))}; if it is a Hub dataset: {error.fix}"
        raise source.error(f"neither a file nor a Hub dataset: {error.what}", why=error.why, fix=fix) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = _first_line(error)
        if isinstance(error, OSError) and (error.errno == errno.ENOSPC or "disk space" in reason):
            raise source.error(
                "the dataset does not fit on the disk",
                why=reason,
                fix=f"stream it without a local copy: data.train: [{{path: {name}, stream: true}}]; or set "
                "HF_HOME to a larger disk",
            ) from error
        raise source.error(
            f"neither a file nor a Hub dataset with a split `{split}`",
            why=reason,
            fix=f"if it is a file: {neighbours(name, Path(name))}; if it is a Hub dataset, check "
            "name:config:split, the network and your login",
        ) from error
