"""A process that calculates for the studio: a line of JSON in, a line of JSON out. It answers what `pronghorn plan`,
`data show`, `data stats` and `check` would print with --json, without their seconds of imports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pronghorn.data.encode.tokens import TokenizerFiles, load_tokenizer
from pronghorn.data.prepare import prepare
from pronghorn.data.show import as_dict, count_of
from pronghorn.data.stats import collect
from pronghorn.errors import PronghornError
from pronghorn.process import offline_without_hub, set_defaults
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.report.run_log import plain
from pronghorn.studio.recipes import problems
from pronghorn.train.run.run_forecast import forecast
from pronghorn.train.setup.check import check_run

MOST_ROWS, MOST_PIECES = 25, 4000  # rows of one page, tokens of one row
SEARCHED = 5_000  # rows that are looked through for a word


def plan(recipe: Recipe, asked: dict[str, Any]) -> dict[str, Any]:
    found = forecast(recipe, gpu=asked.get("gpu") or None, longest=bool(asked.get("longest")))
    return {"gpus": [{**one.as_dict(), "sold_as": one.gpu.sold_as, "step_tokens": one.step_tokens} for one in found]}


def rows(recipe: Recipe, asked: dict[str, Any]) -> dict[str, Any]:
    tokenizer, table = _table(recipe)
    count, word = count_of(table), str(asked.get("search") or "").lower()
    shown: list[dict[str, Any]] = []
    first = max(0, int(asked.get("first") or 0))
    at = first
    while at < min(count, first + SEARCHED) and len(shown) < MOST_ROWS:
        one = as_dict(tokenizer, table, at)
        if not word or word in _text(one).lower():
            shown.append({"number": at + 1, **_shortened(one)})
        at += 1
    return {"count": count, "rows": shown, "next": at if at < count else None}


def stats(recipe: Recipe, _: dict[str, Any]) -> dict[str, Any]:
    tokenizer = TokenizerFiles(recipe.model, recipe.data)
    wanted = recipe.objective.kind.reads
    return collect(
        recipe.data, recipe.train.capacity, recipe.train.seed, tokenizer, wanted=wanted, answer=recipe.answer_tokens
    ).as_dict()


def ready(recipe: Recipe, _: dict[str, Any]) -> dict[str, Any]:
    """What `pronghorn check` says: what a start would be refused for is a problem of the answer."""
    return check_run(recipe, report=lambda *_: None).as_dict()


def _table(recipe: Recipe) -> tuple[Any, Any]:
    tokenizer, spec = load_tokenizer(recipe.model, recipe.data), recipe.data
    wanted, size = recipe.objective.kind.reads, recipe.train.capacity
    return tokenizer, prepare(spec.train, spec, tokenizer, wanted=wanted, capacity=size, answer=recipe.answer_tokens).tokens


def _text(row: dict[str, Any]) -> str:
    answers = row.get("answers") or [row]
    return "".join(piece["text"] for one in answers for piece in one["tokens"])


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Token ids are not shown, and of a long row its beginning."""
    for one in row.get("answers") or [row]:
        one["cut"] = max(0, len(one["tokens"]) - MOST_PIECES)
        one["tokens"] = [[piece["text"], int(piece["loss"])] for piece in one["tokens"][:MOST_PIECES]]
        one.pop("trained_on", None)
    return row


QUESTIONS: dict[str, Callable[[Recipe, dict[str, Any]], dict[str, Any]]] = {
    "plan": plan,
    "rows": rows,
    "stats": stats,
    "ready": ready,
}


def answer(line: str) -> dict[str, Any]:
    try:
        asked = json.loads(line)
        recipe = parse_recipe(asked["recipe"], asked.get("set", ()), name=asked.get("name", "recipe"))
        offline_without_hub(recipe.model)
        found: dict[str, Any] = plain(QUESTIONS[asked["question"]](recipe, asked))
        return found
    except PronghornError as error:
        return {"problems": problems(error)}
    except Exception as error:  # noqa: BLE001 - the page tells it, and the process goes on
        return {"problems": [{"what": f"{type(error).__name__}: {error}", "why": "this is a bug of Pronghorn", "fix": ""}]}


def main() -> None:
    set_defaults()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(answer(line), allow_nan=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
