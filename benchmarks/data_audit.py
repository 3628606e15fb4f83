"""What `pronghorn data audit` finds of what was planted, how long it takes, and whether held-out rows are ever trained on.

    python -m benchmarks.data_audit --tokenizer FOLDER [--data chats.jsonl ...] [--rows 100000] [--sets 500] [--write]

1. Conversations of random words (as frequent as in --data), with planted copies, near copies of several kinds, and held-out
   prompts inside training rows: recall of each kind, precision, and seconds of the whole command, nothing cached. What is
   planted is known from the line that it stands in, which the audit does not read.
2. Random data sets with planted copies and near copies, of random sizes: how often a held-out row has a copy among those that
   are trained on (`data.eval: FRACTION`, all other keys by default).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.data_rows import conversations
from benchmarks.data_speed import children_cpu, say, where
from benchmarks.record import RESULTS, record, write

SEED = 11
HELD_OUT = 1000  # rows
OF_A_HUNDRED = {"clean": 76, "copy": 8, "near copy": 12, "leak": 4}  # rows of each kind
CHANGED = 60  # of so many words one is another: alike at 0.9
SYSTEM = "You are helpful."

Words = list[str]


def sentences(words: Words) -> str:
    parts = [words[at : at + 12] for at in range(0, len(words), 12)]
    return " ".join(" ".join(part).capitalize() + "." for part in parts)


def row(ask: str, answer: str, system: str = "") -> dict[str, Any]:
    before = [{"role": "system", "content": system}] if system else []
    return {"messages": [*before, {"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


def some_words(text: str, chance: random.Random, other: Callable[[], str]) -> str:
    """One word in `CHANGED` is another."""
    words = text.split()
    for at in chance.sample(range(len(words)), max(1, len(words) // CHANGED)):
        words[at] = other()
    return " ".join(words)


def turned(text: str) -> str:
    """The last sentence first."""
    found = re.findall(r"[^.]+\.", text)
    return " ".join(part.strip() for part in [*found[-1:], *found[:-1]])


# Of the question and the answer of a row that stands further up, or of a held-out one.
NEAR: dict[str, Callable[[str, str, random.Random, Callable[[], str]], dict[str, Any]]] = {
    "words": lambda ask, answer, chance, other: row(ask, some_words(answer, chance, other)),
    "casing": lambda ask, answer, chance, other: row(ask.upper(), answer),
    "spacing": lambda ask, answer, chance, other: row(ask.replace(" ", "  "), answer.replace(". ", ".\n\n")),
    "system message": lambda ask, answer, chance, other: row(ask, answer, SYSTEM),
    "order of sentences": lambda ask, answer, chance, other: row(ask, turned(answer)),
}
LEAKED: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "whole row": lambda ask, answer, more: row(ask, answer),
    "other answer": lambda ask, answer, more: row(ask, more),
    "inside a longer prompt": lambda ask, answer, more: row(f"{more} {ask} Think first.", more),
    "inside an answer, in capitals": lambda ask, answer, more: row(more, f"{more} {ask.upper()}"),
}


def planted(files: Sequence[Path], rows: int, held_out: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what it is, which kind of it, the row); held-out rows first."""
    chance = random.Random(SEED)
    vocabulary = [word for texts in conversations(files)[1].values() for text in texts for word in re.findall(r"\w+", text)]

    def text(least: int, most: int) -> str:
        return sentences(chance.choices(vocabulary, k=chance.randint(least, most)))

    held = [(text(10, 60), text(40, 80)) for _ in range(held_out)]
    yield from (("held out", "", row(*one)) for one in held)
    kinds, weights = list(OF_A_HUNDRED), list(OF_A_HUNDRED.values())
    clean: list[tuple[str, str]] = []
    for number in range(rows):
        what = chance.choices(kinds, weights)[0] if number > held_out else "clean"
        if what == "clean":
            clean.append((text(20, 70), text(40, 80)))  # as long as GSM8K's
            yield what, "", row(*clean[-1])
        elif what == "copy":
            yield what, "", row(*chance.choice(clean))
        elif what == "near copy":
            kind = chance.choice(list(NEAR))
            yield what, kind, NEAR[kind](*chance.choice(clean), chance, lambda: chance.choice(vocabulary))
        else:
            kind = chance.choice(list(LEAKED))
            yield what, kind, LEAKED[kind](*chance.choice(held), text(20, 60))


def audited(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tags, counts = {}, Counter[str]()
    with (folder / "train.jsonl").open("w") as train, (folder / "held_out.jsonl").open("w") as held:
        for what, kind, one in planted(options.data, options.rows, HELD_OUT):
            file = held if what == "held out" else train
            file.write(json.dumps(one) + "\n")
            counts[file.name] += 1
            if file is train and what != "clean":
                tags[counts[file.name]] = (what, kind)
    recipe = folder / "audit.yaml"
    recipe.write_text(
        f"model: {options.tokenizer}\n"
        f"data: {{train: {folder / 'train.jsonl'}, eval: {folder / 'held_out.jsonl'}, max_length: 100000}}\n"
        "train: {capacity: 131072, batch_tokens: 131072}\n"
    )
    found: dict[str, Any] = {"part": "audit", "rows": options.rows, "held_out": HELD_OUT}
    words = [sys.executable, "-m", "pronghorn.cli", "data", "audit", str(recipe), "--json", "-o", str(folder / "audit")]
    for name in ("first", "again"):
        before, began = children_cpu(), time.perf_counter()
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"PRONGHORN_CACHE": str(folder / "cache")}
        )
        if done.returncode:
            raise SystemExit(f"data audit failed:\n{done.stdout}")
        found[name] = {"cpu_seconds": round(children_cpu() - before, 1), "wall_seconds": round(time.perf_counter() - began, 1)}
        say(f"data audit, {name}: {found[name]}")
    return found | judged(tags, json.loads((folder / "audit" / "select.json").read_text())["left_out"])


def judged(tags: dict[int, tuple[str, str]], left_out: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Copies and near copies are one thing here: what only differs in casing is a copy to some."""
    reasons = {int(one["row"].rsplit(":", 1)[1]): one["reason"] for one in left_out}
    of = {"copy": "copies", "near copy": "copies", "leak": "leaks"}
    recall: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for line, (what, kind) in tags.items():
        recall[of[what]][kind or "exact"].append(of.get(reasons.get(line, "")) == of[what])
    right = {
        name: [line in tags and of[tags[line][0]] == name for line, why in reasons.items() if of.get(why) == name]
        for name in recall
    }
    return {
        name: {
            "planted": sum(map(len, kinds.values())),
            "recall": round(sum(map(sum, kinds.values())) / sum(map(len, kinds.values())), 5),
            "precision": round(sum(right[name]) / max(1, len(right[name])), 5),
            "recall_by_kind": {kind: round(sum(hits) / len(hits), 5) for kind, hits in sorted(kinds.items())},
        }
        for name, kinds in sorted(recall.items())
    }


def random_sets(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from pronghorn.data.encode.tokens import TokenizerFiles
    from pronghorn.data.prepare import prepare
    from pronghorn.data.read.splitting import apart
    from pronghorn.recipe_parts import Data

    os.environ["PRONGHORN_CACHE"] = str(folder / "sets-cache")
    tokenizer, chance, leaks, copies = TokenizerFiles(options.tokenizer), random.Random(SEED), 0, 0
    vocabulary = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "nrstx"]
    for number in range(options.sets):
        texts = [(sentences(chance.choices(vocabulary, k=chance.randint(20, 60))), sentences(chance.choices(vocabulary, k=60)))
                 for _ in range(chance.randint(20, 120))]  # fmt: skip
        rows = [(family, row(*one)) for family, one in enumerate(texts)]
        for _ in range(chance.randint(1, len(texts))):
            family = chance.randrange(len(texts))
            kind = chance.choice(list(NEAR))
            same = NEAR[kind](*texts[family], chance, lambda: chance.choice(vocabulary)) if chance.random() < 0.5 else None
            rows.append((family, same or row(*texts[family])))
        chance.shuffle(rows)
        copies += len(rows) - len(texts)
        path = folder / "set.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for _, one in rows))
        spec = Data(train=(str(path),), eval=chance.choice((0.05, 0.1, 0.2)), max_length=100000)
        sides = apart(prepare(spec.train, spec, tokenizer), None, spec, number)
        assert sides.held is not None
        own, other = (
            {rows[int(table.where(i).rsplit(":", 1)[1]) - 1][0] for i in range(len(table))}
            for table in (sides.train, sides.held)
        )
        leaks += bool(own & other)
    return {"part": "held-out rows", "sets": options.sets, "planted": copies, "sets_with_a_leak": leaks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer, its chat template and a config.json")
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="chats as JSON Lines with `messages`")
    parser.add_argument("--rows", type=int, default=100_000, help="0: no audit")
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/data-audit.json")
    options = parser.parse_args()
    words = [Path(word).name if Path(word).exists() else word for word in sys.argv[1:]]
    results = []
    with tempfile.TemporaryDirectory(prefix="data-audit-", dir=options.folder) as folder:
        if options.rows:
            results.append(audited(options, Path(folder)))
        if options.sets:
            results.append(random_sets(options, Path(folder)))
    load = [round(one, 2) for one in os.getloadavg()]
    what = "`pronghorn data audit` on planted data, and held-out rows of random data sets"
    result = record(what, "python -m benchmarks.data_audit " + " ".join(words), results, where(), load_average=load)
    print(json.dumps(result, indent=1))
    if options.write:
        write(RESULTS / "data-audit.json", result)


if __name__ == "__main__":
    main()
