"""What a recipe changes about the model's tokenizer: a chat template by name, special tokens, tokens that end a turn.

Only tokens that the vocabulary has: a new one would need a row of its own in the model's embeddings.
"""

from __future__ import annotations

from typing import Any

from pronghorn.data.template.rendering import rendered
from pronghorn.data.template.template_by_name import with_template
from pronghorn.errors import CommandError, DataError, RecipeError
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe_parts import Data


def changes_tokens(spec: Data | None) -> bool:
    """Whether the tokenizer's files alone do not say what it will be."""
    return spec is not None and bool(spec.template or spec.eot_tokens or any(spec.special_tokens.model_dump().values()))


def changed(tokenizer: Tokenizer, spec: Data) -> Any:
    """The tokenizer as the recipe wants it: itself, or a copy where a template has a name."""
    if spec.template is not None:
        try:
            tokenizer = with_template(tokenizer, spec.template)
        except CommandError as error:
            what = error.what.replace(f"chat_template={spec.template!r}", "").strip(": ") or "unknown template name"
            raise RecipeError(f"{spec.template}: {what}", where="data.template", why=error.why, fix=error.fix) from error
    vocabulary = tokenizer.get_vocab()
    for key, token in spec.special_tokens.model_dump().items():
        if token is not None:
            _require_known(token, vocabulary, f"data.special_tokens.{key}")
            setattr(tokenizer, key, token)
    for token in spec.eot_tokens:
        _require_known(token, vocabulary, "data.eot_tokens")
        ids = tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids
        if ids != [vocabulary[token]]:
            raise RecipeError(
                f"{token} is encoded as {len(ids)} tokens",
                where="data.eot_tokens",
                why="the end of a turn must be one token",
                fix="use the token that the chat template writes there",
            )
    if spec.eot_tokens:
        tokenizer.pronghorn_eot_tokens = spec.eot_tokens
        tokenizer.pronghorn_stop_tokens = tuple(token for token in spec.eot_tokens if _ends_an_answer(tokenizer, token))
    return tokenizer


def _ends_an_answer(tokenizer: Tokenizer, token: str) -> bool:
    """Whether the template writes it after the last answer. Not after what only stands before it: Harmony's <|end|> closes the
    thoughts, and a generation that stops there never answers."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    if not tokenizer.chat_template:
        return False
    try:
        said = rendered(tokenizer, talk)
    except DataError:
        return False  # told where rows are read
    return said is not None and said.rstrip().endswith(token)


def _require_known(token: str, vocabulary: dict[str, int], where: str) -> None:
    if token not in vocabulary:
        raise RecipeError(
            f"the model's vocabulary has no token {token}",
            where=where,
            why="Pronghorn does not resize the model's embeddings",
            fix="use an existing token; tokenizer.json lists them under added_tokens",
        )
