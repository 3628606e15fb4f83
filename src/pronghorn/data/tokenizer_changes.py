"""What a recipe changes about the model's tokenizer: a chat template by name, special tokens, tokens that end a turn.

Only tokens that the vocabulary has: a new one would need a row of its own in the model's embeddings.
"""

from __future__ import annotations

from typing import Any

from pronghorn.data.template_by_name import with_template
from pronghorn.errors import CommandError, RecipeError
from pronghorn.recipe import Data


def changes_tokens(spec: Data | None) -> bool:
    """Whether the tokenizer's files alone do not say what it will be."""
    return spec is not None and bool(spec.template or spec.eot_tokens or any(spec.special_tokens.model_dump().values()))


def changed(tokenizer: Any, spec: Data) -> Any:
    """The tokenizer as the recipe wants it: itself, or a copy where a template has a name."""
    if spec.template is not None:
        try:
            tokenizer = with_template(tokenizer, spec.template)
        except CommandError as error:
            what = error.what.replace(f"chat_template={spec.template!r}", "").strip(": ") or "no template has this name"
            raise RecipeError(f"data.template: {spec.template}: {what}", where="data.template", why=error.why,
                              fix=error.fix) from error
    vocabulary = tokenizer.get_vocab()
    for key, token in spec.special_tokens.model_dump().items():
        if token is not None:
            _require_known(token, vocabulary, f"data.special_tokens.{key}")
            setattr(tokenizer, key, token)
    for token in spec.eot_tokens:
        _require_known(token, vocabulary, "data.eot_tokens")
        ids = tokenizer.backend_tokenizer.encode(token, add_special_tokens=False).ids
        if ids != [vocabulary[token]]:
            raise RecipeError(f"data.eot_tokens: {token} is written with {len(ids)} tokens", where="data.eot_tokens",
                              why="the end of a turn is one token", fix="name the token that the chat template writes there")
    if spec.eot_tokens:
        tokenizer.pronghorn_eot_tokens = spec.eot_tokens
    return tokenizer


def _require_known(token: str, vocabulary: dict[str, int], where: str) -> None:
    if token not in vocabulary:
        raise RecipeError(f"{where}: the model's vocabulary has no token {token}", where=where,
                          why="a new token would need new rows in the model's embeddings, which are not added here",
                          fix="name a token that it has; its tokenizer.json lists them under added_tokens")
