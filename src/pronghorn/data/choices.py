"""The column `choices` (or the one that `data.fields.choices` names): the answers that a question offers.

They are not trained on; the metric `multiple_choice` asks which of them the model finds most likely. A list of texts, or, as in
ARC and OpenBookQA, an object with such a list in `text`; in CSV, JSON of either.
"""

from __future__ import annotations

from typing import Any

from pronghorn.data.chat_messages import from_json

COLUMN = "choices"


def choices_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """Nothing where the column is missing or holds something else: then it is none of ours."""
    value = fields.get(COLUMN)
    if isinstance(value, str):
        value = from_json(value)
    if isinstance(value, dict):
        value = value.get("text")
    if not isinstance(value, (list, tuple)) or len(value) < 2 or not all(isinstance(one, str) and one for one in value):
        return ()
    return tuple(value)
