"""Files of preference data with one thing wrong: refused, or groups whose answers begin alike and are compared as they say."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fuzz.data_files import Rows, spoilt
from fuzz.outcomes import Tally
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.pack.batches import build_batch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.data.stats import collect
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, pair_rows

CAPACITY = 2048


def _rows(chance: random.Random) -> Rows:
    """A few rows in one of the known layouts."""
    pairs = pair_rows(4, seed=chance.randrange(1000))
    texts = [{key: turns[0]["content"] for key, turns in row.items()} for row in pairs]
    said = [{"from": "human", "value": row["prompt"]} for row in texts]
    kinds: tuple[Rows, ...] = (
        pairs,
        texts,
        [{**row, "margin": 0.5 * i} for i, row in enumerate(texts)],
        [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in pairs],
        [{side: f"\n\nHuman: {row['prompt']}\n\nAssistant: {row[side]}" for side in ("chosen", "rejected")} for row in texts],
        [
            {"conversations": [one], "chosen": {"from": "gpt", "value": row["chosen"]}, "rejected": row["rejected"]}
            for one, row in zip(said, texts, strict=True)
        ],
        [{"instruction": row["prompt"], "input": "", "chosen": row["chosen"], "rejected": row["rejected"]} for row in texts],
        [{**row, "rejected": [row["rejected"], "no", ""]} for row in texts],
        [{"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0} for i, row in enumerate(texts)],
        [{"messages": row["prompt"] + row["chosen"], "kto_tag": "true"} for row in pairs],
        [
            {"system": "be kind", "question": row["prompt"], "chosen": row["chosen"], "rejected": row["rejected"]}
            for row in texts
        ],
        [
            {"input": {"messages": row["prompt"]}, "preferred_output": row["chosen"], "non_preferred_output": row["rejected"]}
            for row in pairs
        ],
        [{"messages": row["prompt"] + row["chosen"], "rejected_response": "no", "images": []} for row in pairs],
        [{"chosen": f"so {row['chosen']}", "rejected": f"so {row['rejected']}", "source": "web"} for row in texts],
    )
    return chance.choice(kinds)


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    tally = Tally("preference_files", count, seed)
    make_tokenizer().save_pretrained(folder / "model")
    tokenizer = load_tokenizer(str(folder / "model"))
    for number in range(count):
        chance = tally.random(number)
        ending, content, what = spoilt(chance, _rows(chance))
        wanted: Literal["pairs", "marked"] = chance.choice(("pairs", "marked"))
        options: dict[str, Any] = {"bad_rows": chance.choice(("stop", "skip")), "long": chance.choice(("drop", "truncate"))}

        def work(
            ending: str = ending,
            content: bytes = content,
            options: dict[str, Any] = options,
            wanted: Literal["pairs", "marked"] = wanted,
        ) -> str:
            place = folder / "one"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            os.environ["PRONGHORN_CACHE"] = str(place / "cache")
            file = place / f"rows.{ending}"
            file.write_bytes(content)
            spec = Data(train=(str(file),), max_length=512, **options)
            found = prepare(spec.train, spec, tokenizer, wanted=wanted, capacity=CAPACITY)
            wrong = _misread(found, tokenizer, wanted, cut=options["long"] == "truncate")
            collect(spec, 512, 0, tokenizer, wanted=wanted).as_dict()  # what `data stats` makes of it
            return f"silent\n{wrong}" if wrong else "same"

        tally.add(number, f".{ending} {wanted} {options}: {what}", work)
    return tally.outcomes


def _misread(found: Prepared, tokenizer: Any, wanted: str, *, cut: bool) -> str:
    table, pairs = found.tokens, found.tokens.pairs
    if pairs is None:
        return "no groups"
    for group in np.split(np.arange(len(table)), pairs.starts[1:-1]) if len(table) else []:
        roles, shared = pairs.roles[group].tolist(), pairs.prefixes[group].tolist()
        if wanted == "pairs" and (roles[0] != 0 or 0 in roles[1:] or len(roles) < 2):
            return f"{table.where(int(group[0]))}: roles {roles}"
        if len(set(shared)) > 1 or len({tuple(table.ids(int(i))[: shared[0]].tolist()) for i in group}) > 1:
            return f"{table.where(int(group[0]))}: answers do not begin alike"
        for i in map(int, group):
            if table.loss(i)[: shared[0]].any() or not table.loss(i).any():
                return f"{table.where(i)}: a prompt with loss, or an answer without"
            example = found.example(i)
            said = example.completion if example.kind == "completion" else str(example.messages[-1]["content"] or "")
            trained = tokenizer.decode(table.ids(i)[table.loss(i)]).replace("<|im_end|>", "")
            if said.replace("<|im_end|>", "") != trained and not cut and example.kind == "completion":
                return f"{table.where(i)}: trained on {trained!r}, said was {said!r}"
    for rows in pack_in_order(groups_of(table.sharing(True)), CAPACITY):  # it can be packed, with prompts shared
        build_batch(table.sharing(True), rows, CAPACITY)
    return ""
