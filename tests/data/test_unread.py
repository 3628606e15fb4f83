"""Columns that nothing reads: those that a row cannot do without are refused, others are left to be named."""

from __future__ import annotations

from typing import Any

import pytest

from pronghorn.data.read.source_files import UnfitError
from pronghorn.data.read.unread import refuse_media, refuse_unread_texts
from tables import table

PNG, MP4 = b"\x89PNG\r\n\x1a\n", b"\x00\x00\x00\x20ftypisom"


@table(
    "column",
    [{"Image_URL": "x"}, {"audio": {"bytes": b"x", "path": None}}, {"video_paths": ["a.mp4"]}, {"photo": PNG}, {"clip": MP4}],
)
def test_images_sound_and_video_are_refused(column: dict[str, Any]) -> None:
    with pytest.raises(UnfitError) as caught:
        refuse_media({"text": "t", **column})
    assert "trains on text only" in str(caught.value)
    assert f"remove the column `{next(iter(column))}`" in caught.value.fix


@table(
    "column",
    [{"images": [None]}, {"video": 3}, {"imagination": "x"}, {"digest": b"\x01\x02"}, {"path": "a.png"}, {"x": {"bytes": 3}}],
)
def test_other_columns_are_not(column: dict[str, Any]) -> None:
    refuse_media({"text": "t", **column})


@table(
    ("fields", "guessed", "refused"),
    [
        ({"prompt": "q", "Question": "c"}, False, "Question"),
        ({"prompt": [{"role": "user", "content": "c q"}], "context": "c"}, False, None),
        ({"prompt": "q", "context": ""}, False, None),
        ({"prompt": "q", "context": ["c"]}, False, None),
        ({"prompt": "q", "note": "c"}, False, None),
        ({"title": "c"}, True, "title"),
        ({"id": "c", "source": "c", "chosen_model": "c", "lang": "c", "Unnamed: 0": "c", "prompt_id": "c"}, True, None),
    ],
)
def test_texts_that_belong_to_the_prompt_are_refused(fields: dict[str, Any], guessed: bool, refused: str | None) -> None:
    if refused is None:
        refuse_unread_texts(fields, ("prompt",), "set %s", guessed=guessed)
        return
    with pytest.raises(UnfitError) as caught:
        refuse_unread_texts(fields, ("prompt",), "set %s", guessed=guessed)
    assert f"`{refused}` is a text that nothing reads" in str(caught.value)
    assert caught.value.fix.startswith(f"set {refused}; ")
