"""Parquet files, Arrow files and streams, and data sets of the hub into rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pronghorn.data.source_files import BadRow, RawRow, Source, content_of, neighbours
from pronghorn.errors import CommandError, DataError
from pronghorn.hub import quiet, require_data_set

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
BATCH_ROWS = 1024  # rows turned into Python values at a time; bounds memory, and larger is no faster


def read_parquet(source: Source) -> Iterator[RawRow | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with source.path.open("rb") as file:
        content = content_of(file.read(32))
        if content and content[0] != "a Parquet file":
            raise DataError(what=f"this is {content[0]}", where=source.name, fix=content[1])
        try:
            batches = pq.ParquetFile(file).iter_batches(BATCH_ROWS)
            yield from _arrow_rows(batches, lambda index: f"{source.name} row {index + 1}")
        except (pa.ArrowException, OSError) as error:
            reason = str(error).split("\n", 1)[0]
            raise DataError(what="this Parquet file is damaged, or is none", where=source.name, why=reason,
                            fix="copy or download it again, or write it again") from error


def read_arrow(source: Source) -> Iterator[RawRow | BadRow]:
    """An Arrow file (also Feather), or a stream, which is what `datasets` keeps in its cache and writes to disk."""
    import pyarrow as pa

    with source.path.open("rb") as file:
        head = file.read(32)
    content = content_of(head)
    is_stream = content is not None and content[0].startswith("an Arrow stream")
    if content and not is_stream and content[0] != "an Arrow file":
        raise DataError(what=f"this is {content[0]}", where=source.name, fix=content[1])
    try:
        with pa.OSFile(str(source.path)) as file:
            if is_stream:
                _require_end(source)
            batches = _checked(pa.ipc.open_stream(file) if is_stream else _batches(pa.ipc.open_file(file)))
            yield from _arrow_rows(batches, lambda index: f"{source.name} row {index + 1}")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise DataError(what="this Arrow file is damaged, or is none", where=source.name, why=reason,
                        fix="copy or download it again, or write it again") from error


def _batches(reader: Any) -> Iterator[Any]:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


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
        raise DataError(what="this Arrow stream is cut short: its end is missing", where=source.name,
                        fix="copy or download it again, or write it again")


def read_hub(source: Source) -> Iterator[RawRow | BadRow]:
    batches = hub_dataset(source).with_format("arrow").iter(BATCH_ROWS)
    yield from _arrow_rows(batches, lambda index: f"{source.name}[{index}]")


def _arrow_rows(batches: Iterable[Any], where: Callable[[int], str]) -> Iterator[RawRow | BadRow]:
    """Rows of Arrow tables or record batches."""
    index = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:  # Arrow does not check the texts it is given
            raise DataError(what="a text is not UTF-8", where=f"{where(index)} or one of the {batch.num_rows - 1} after it",
                            fix="write the data again as UTF-8") from error
        for row in rows:
            yield RawRow({key: _without_nulls(value) for key, value in row.items()}, where(index))
            index += 1


def _without_nulls(value: Any) -> Any:
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
        raise CommandError(what="no file of this name, and data sets from the hub need the `datasets` library",
                           where=source.name, fix="check the path, or pip install 'pronghorn[hub]'") from error
    try:
        require_data_set(name)
        with quiet():
            return datasets.load_dataset(name, config, split=split)
    except DataError as error:
        fix = f"if it is a file: {neighbours(name, Path(name))}; if it is a hub data set: {error.fix}"
        raise DataError(what=f"neither a file nor a hub data set: {error.what}", where=source.name, why=error.why,
                        fix=fix) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise DataError(what=f"neither a file nor a hub data set whose split `{split}` loads", where=source.name,
                        why=reason, fix=f"if it is a file: {neighbours(name, Path(name))}; if it is a hub data set, check"
                        " name:config:split, the network and your login") from error


def hub_fingerprint(source: Source) -> str:
    return str(hub_dataset(source)._fingerprint)
