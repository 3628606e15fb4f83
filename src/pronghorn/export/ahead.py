"""Which exports a run will not have, as far as the base model's files and the tokenizer tell: `check` says so before step 1."""

from __future__ import annotations

from pronghorn.errors import EnvironmentFault, PronghornError
from pronghorn.export.gguf_convert import require_convertible
from pronghorn.export.gguf_target import begins_with_bos
from pronghorn.export.ollama_template import turns_of
from pronghorn.hf_types import Tokenizer
from pronghorn.hub import model_folder
from pronghorn.recipe import Recipe


def not_possible(recipe: Recipe, tokenizer: Tokenizer) -> list[str]:
    """A notice for each such target. A package that is missing can still be installed."""
    if not recipe.objective.kind.answers:
        return []  # it has none that generates text
    for targets, attempt in (
        ("gguf or ollama", lambda: require_convertible(model_folder(recipe.model))),
        ("ollama", lambda: turns_of(tokenizer, begins_with_bos(tokenizer))),
    ):
        try:
            attempt()
        except EnvironmentFault:
            continue
        except PronghornError as error:
            return [f"export --to {targets} will be refused: {error.what} ({error.why})"]
    return []
