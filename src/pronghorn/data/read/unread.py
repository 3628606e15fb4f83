"""Columns that nothing reads and that a row cannot do without: refused, where others are only named.

Images, sound and video: the text speaks of what the model would not see. A text that belongs to the question, such as `context`
beside `prompt` and `completion`: without it the answer is taught as an answer to something else. A text that the prompt already
contains is no loss.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any

from pronghorn.data.read.source_files import UnfitError
from pronghorn.data.template.chat_messages import MEDIA, TEXT_ONLY, holds_media, texts_in

MEDIA_COLUMN = re.compile(rf"(?:{'|'.join(MEDIA)})s?(?:_(?:path|url|file|bytes|data|content)s?)?", re.IGNORECASE)
# How files of images, sound and video begin (WebP and WAV: RIFF; FLAC, Ogg, MP3, TIFF, Matroska).
MEDIA_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"II*\x00", b"\x1aE\xdf")
QUESTION_COLUMNS = (
    *("context", "question", "query", "input", "instruction", "passage", "document", "article", "paragraph", "background"),
    *("schema", "problem"),
)
ABOUT_ROWS = re.compile(  # columns that describe a row
    r"(?:.*[_-])?(?:u?u?id|idx|index|hash|source|dataset|origin|split|subset|config|lang|language|model|category|type|topic|domain|"
    r"tags?|url|link|date|time|timestamp|version|license|author|annotator|difficulty|level|quality|scores?|ratings?|ranks?|labels?|"
    r"margin|metadata|meta)(?:[_-](?:chosen|rejected|name|id))?|unnamed: \d+|__index_level_\d+__",
    re.IGNORECASE,
)


def refuse_media(fields: dict[str, Any]) -> None:
    for column, value in fields.items():
        if (_names_media(column) and holds_media(value)) or (not isinstance(value, str) and _is_media(value)):
            raise UnfitError(
                f"`{column}` holds images, sound or video; {TEXT_ONLY}",
                f"remove the column `{column}` from the file if the texts make sense without it, or remove the rows",
            )


@functools.lru_cache(maxsize=1024)  # a file has the same columns in every row
def _names_media(column: str) -> bool:
    return MEDIA_COLUMN.fullmatch(column) is not None


def _is_media(value: object) -> bool:
    """As `datasets` stores it: {"bytes": ..., "path": ...}, or bytes as a file has them."""
    if isinstance(value, list):
        return bool(value) and _is_media(value[0])
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) or _is_media(value.get("bytes"))
    return isinstance(value, bytes) and (value.startswith(MEDIA_BYTES) or value[4:8] == b"ftyp")


def refuse_unread_texts(fields: dict[str, Any], read: Collection[str], fix: str, *, guessed: bool = False) -> None:
    """`read`: the columns that are. `fix` says how another one is read, with %s for it. `guessed`: no column is the prompt."""
    for column, value in fields.items():
        if not _asks(column, guessed) or column in read or not isinstance(value, str) or not value.strip():
            continue
        if not any(value.strip() in text for name in read for text in texts_in(fields.get(name))):
            raise UnfitError(
                f"`{column}` is a text that nothing reads, and it may belong to the prompt",
                f"{fix % column}; if it does not belong to the prompt, remove the column from the file",
            )


@functools.lru_cache(maxsize=1024)
def _asks(column: str, guessed: bool) -> bool:
    return column.lower() in QUESTION_COLUMNS or (guessed and not ABOUT_ROWS.fullmatch(column))
