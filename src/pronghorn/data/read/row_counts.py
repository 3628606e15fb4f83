"""How many rows the sources will have, for a progress that can say how much is left. 0 where nobody knows without reading them:
packed files, JSON that is no line a row, data sets that are streamed."""

from __future__ import annotations

from collections.abc import Sequence

from pronghorn.data.read.source_files import Source

BLOCK = 1 << 20


def expected_rows(sources: Sequence[Source], at_most: int | None = None) -> int:
    """Rows of all sources together; at most `at_most` of each count."""
    counts = [_rows(source) for source in sources]
    if not all(counts):
        return 0
    return sum(min(count, at_most) if at_most else count for count in counts)


def _rows(source: Source) -> int:
    try:
        if source.kind in ("jsonl", "csv", "tsv") and not source.packing:
            return _lines(source) - (source.kind != "jsonl")
        if source.kind == "txt" and not source.by_line:
            return 1
        if source.kind == "parquet":
            return _parquet_rows(source)
    except OSError:
        pass  # whoever reads it says so
    return 0


def _lines(source: Source) -> int:
    """Lines of a file. For CSV an upper bound of its rows, since a row may have several lines."""
    count, last = 0, b"\n"
    with source.path.open("rb") as file:
        while block := file.read(BLOCK):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


def _parquet_rows(source: Source) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with source.path.open("rb") as file:
            return int(pq.ParquetFile(file).metadata.num_rows)
    except pa.ArrowException:
        return 0
