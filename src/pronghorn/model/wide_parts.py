"""Parameters that a family keeps in float32 whatever the model's dtype: the bias of a router's choice, for one, whose steps of
0.001 bf16 would lose beside a value near 1. transformers honours them when it loads; so do our loader and merging."""

from __future__ import annotations

import re
from typing import Any


def stays_wide(model: Any, name: str) -> bool:
    """Whether this parameter or buffer stays in float32."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){part}($|\.)", name) for part in kept)
