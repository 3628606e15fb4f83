"""What preference objectives need of data and model before a run: whether prompts are shared, and where a reference is kept."""

from __future__ import annotations

import json
from collections.abc import Callable

from pronghorn.data.preference.reference_store import ReferenceStore
from pronghorn.errors import RecipeError
from pronghorn.model.config import read_config
from pronghorn.model.fingerprint import fingerprint, settings
from pronghorn.model.load import DTYPES, pick_device, resolve_precision
from pronghorn.model.shared_prefix import why_not_shared
from pronghorn.recipe import Recipe


def shares_prompts(recipe: Recipe) -> tuple[bool, list[str]]:
    """Whether a pack has the prompt of a pair once, and what should be told. Decided before weights are loaded: the number of
    steps depends on it."""
    asked = recipe.objective.share_prompt
    if recipe.objective.kind.reads not in ("pairs", "prompts") or asked in (None, "off"):
        return False, []
    device = pick_device()
    precision = resolve_precision(recipe.precision, device)
    why = "the recipe sets layers: own"
    if recipe.layers == "fast":
        why = why_not_shared(read_config(recipe.model), device, DTYPES[precision])
    if why and asked == "on":
        raise RecipeError(
            what="objective.share_prompt: this model cannot compute a prompt once for all its answers", why=why,
            fix="set objective.share_prompt: auto",
        )  # fmt: skip
    return not why, [f"each answer has its own copy of the prompt (slower): {why}"] if why else []


def reference_store(recipe: Recipe, say: Callable[[str], None], *, writes: bool = True) -> ReferenceStore | None:
    """None: the objective has no reference, or its files are not where they could be compared. `writes`: on one rank."""
    weights = fingerprint(recipe.model) if recipe.objective.kind.reference else ""
    if not weights:
        return None
    device = pick_device()
    how = (device.type, resolve_precision(recipe.precision, device), recipe.stored_as, str(recipe.fp8), recipe.layers)
    facts = {
        "weights": weights,
        "config": json.dumps(settings(recipe.model, "config.json"), sort_keys=True),
        "computed": " ".join(how),
    }
    return ReferenceStore(facts, say, writes=writes)
