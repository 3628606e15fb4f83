"""Chat templates × kinds of conversations: is what carries loss exactly what the assistant says?

    python -m benchmarks.chat_templates FOLDER_OF_JINJA_FILES --tokenizer FOLDER [--only NAME] [--odd 72] [--random 9] [--write]

Each template is judged by `template_oracle.py` on every kind of conversation, with its own special strings added to the
tokenizer: exact, refused (with the reason: the template raises, or leaves out part of the row), refused without need, or wrong.
The exit code is 1 when anything is wrong or refused without need. `--odd N` sets how many rows a template gets whose texts are
white space, tags, empty or odd (`odd_rows.py`). `--random N` adds N conversations a template with random
texts for questions, answers and system messages. `--write` puts the table into results/chat-templates.md and
every verdict into results/chat-templates.json.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.odd_rows import SEED, judge_odd, odd_chats
from benchmarks.record import RESULTS, record, write
from benchmarks.template_facts import FACTS
from benchmarks.template_oracle import Answer, Chat, Facts, Message, Refusal, Verdict, chats, judge
from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.read.formats import Example
from pronghorn.data.template.templates import chat_template
from pronghorn.errors import DataError

SPECIAL = re.compile(r"<\|[^|<>\s\"'{}]{1,40}\|>|<｜[^｜<>{}]{1,40}｜>|\[/?[A-Z][A-Z_]+\]|<(?:start|end)_of_turn>")
COMMAND = "python -m benchmarks.chat_templates FOLDER_OF_JINJA_FILES --tokenizer FOLDER --write"
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def fitted(tokenizer: Any, template: str, facts: Facts) -> Any:
    """The tokenizer as a model with this template would have it: its special strings are tokens."""
    tokenizer.chat_template = template
    tokenizer.bos_token, tokenizer.eos_token = facts.bos, facts.eos or facts.end.split("\n")[-1] or "</s>"
    texts = [template]
    for prompt in (False, True):
        try:
            texts.append(tokenizer.apply_chat_template(PROBE, tokenize=False, add_generation_prompt=prompt))
        except Exception:  # noqa: BLE001 - a template that refuses a probe shows nothing
            continue
    found = {token for text in texts for token in SPECIAL.findall(text) if token != "[BEGIN FINAL RESPONSE]"}
    tokenizer.add_tokens(sorted({*found, *facts.specials}), special_tokens=True)
    return tokenizer


class Under:
    """Pronghorn, as the oracle asks it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer)
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self._special = np.array([*special, *tokenizer.all_special_ids])

    def __call__(self, messages: list[Message], tools: Any) -> Answer | Refusal:
        example = Example("chat", "row", messages=tuple(messages), tools=tuple(tools) if tools else None)
        try:
            rendered = self._rendered(messages, tools)
            row = self._encoder.encode(example)
        except DataError as error:
            return Refusal(f"{error.what}: {error.why}" if error.why else error.what)
        decoded = tuple(self._tokenizer.decode(row.ids[a:b], clean_up_tokenization_spaces=False) for a, b in row.runs)
        spans = tuple((turn.message, turn.start, turn.stop) for turn in rendered.turns)
        return Answer(rendered.text, spans, decoded, int(np.isin(row.ids, self._special).sum()))

    def _rendered(self, messages: list[Message], tools: Any) -> Any:
        return chat_template(self._tokenizer).render(messages, tools)


ODD = 72  # rows a template: 3,168 for 44
NUMBERED = ("random ", "odd ")


def judged(tokenizer: Any, facts: Facts, random: int = 0, odd: int = 0, name: str = "") -> dict[str, Verdict]:
    def render(messages: list[Message], tools: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    under = Under(tokenizer)
    controls = [
        token
        for token in dict.fromkeys((facts.end.split("\n")[-1], facts.opens[0], facts.bos))
        if token in tokenizer.get_vocab()
    ]
    found = {chat.kind: judge(chat, facts, render, under) for chat in [*chats(controls), *random_chats(random, controls)]}
    rows = odd_chats(name, odd, controls, lambda chat: found[chat.kind].result == "exact")
    return found | {chat.kind: judge_odd(chat, facts, render, under) for chat in rows}


def random_chats(count: int, controls: list[str], seed: int = 0) -> list[Chat]:
    """Conversations of every kind with random texts, which hold control tokens, spaces and other scripts."""
    random = np.random.default_rng(seed)
    kinds = [chat for chat in chats() if not chat.contents and chat.kind != "think in content"]
    letters = [*"ab 0.,'\"{}<>|\\\n", "é", "水", "🦦", *controls]
    found = []
    for number in range(count):
        chat = kinds[int(random.integers(len(kinds)))]
        spoken = [message["content"] for message in chat.messages if message["role"] != "tool" and message["content"]]
        texts = ["".join(random.choice(letters, int(random.integers(1, 12)))) for _ in spoken]
        found.append(
            Chat(
                f"random {number}: {chat.kind}",
                chat.messages,
                chat.tools,
                {word: f"q{text}q" for word, text in zip(spoken, texts, strict=True)},
            )
        )
    return found


def markdown(table: dict[str, dict[str, Verdict]]) -> str:
    """A row a template, a column a kind of conversation; reasons of refusals below."""
    odd = {name: _counted({kind: one for kind, one in row.items() if kind.startswith("odd ")}) for name, row in table.items()}
    table = {name: {kind: one for kind, one in row.items() if not kind.startswith(NUMBERED)} for name, row in table.items()}
    kinds = list(dict.fromkeys(_kind(kind) for row in table.values() for kind in row))
    lines = [
        "# Chat templates",
        "",
        "Which tokens carry loss, by template and kind of conversation, judged by "
        "`benchmarks/template_oracle.py` (`python -m benchmarks.chat_templates`). "
        "✓ exact; a number: refused, for the reason below; ✗ wrong. Last column: generated rows whose texts are "
        f"white space, tags, empty or odd (`benchmarks/odd_rows.py`, seed {SEED}).",
        "",
        "| template | " + " | ".join([*kinds, "odd texts"]) + " |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    reasons: dict[str, int] = {}
    for name, row in table.items():
        cells: dict[str, str] = {}
        for kind, verdict in row.items():
            number = reasons.setdefault(_reason(verdict.why), len(reasons) + 1) if verdict.result == "refused" else 0
            sign = {"exact": "✓", "refused": str(number)}.get(verdict.result, "✗")
            cells[_kind(kind)] = sign if cells.get(_kind(kind), sign) == sign else "✗"
        said = ", ".join(f"{count} {result}" for result, count in sorted(odd[name].items()))
        lines.append(f"| {name} | " + " | ".join([*(cells.get(kind, "") for kind in kinds), said]) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items()), ""])


def _counted(verdicts: dict[str, Verdict]) -> Counter[str]:
    return Counter(verdict.result for verdict in verdicts.values())


def _counted_all(table: dict[str, dict[str, Verdict]], chosen: Callable[[str], bool]) -> Counter[str]:
    return Counter(one.result for row in table.values() for kind, one in row.items() if chosen(kind))


def _kind(kind: str) -> str:
    return "control tokens" if kind.startswith("control ") else kind


def _reason(why: str) -> str:
    said = re.sub(r"w\d{3}x(, w\d{3}x)*", "a text", why.split(". Said: ", maxsplit=1)[0])
    return re.sub(r"\s+", " ", said).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--only", default="", help="templates whose name holds this")
    parser.add_argument("--odd", type=int, default=ODD, metavar="N", help="so many rows with odd texts a template")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="so many random conversations a template")
    parser.add_argument("--verbose", action="store_true", help="also the reasons of refusals")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table: dict[str, dict[str, Verdict]] = {}
    began = time.perf_counter()
    base = load_tokenizer(arguments.tokenizer, None)
    for path in sorted(arguments.folder.glob("*.jinja")):
        if arguments.only not in path.stem:
            continue
        if path.stem not in FACTS:
            print(f"{path.stem}: not in template_facts.py, so nobody can judge it")
            continue
        facts = FACTS[path.stem]
        tokenizer = fitted(copy.deepcopy(base), path.read_text(encoding="utf-8"), facts)
        table[path.stem] = judged(tokenizer, facts, arguments.random, arguments.odd, path.stem)
        counts = _counted(table[path.stem])
        print(f"{path.stem:50}", ", ".join(f"{count} {result}" for result, count in sorted(counts.items())), flush=True)
        for kind, verdict in table[path.stem].items():
            if verdict.result not in ("exact", "refused") or (arguments.verbose and verdict.result == "refused"):
                print(f"    {kind}: {verdict.result}: {verdict.why[:300]}")
    total = _counted_all(table, lambda _: True)
    print(", ".join(f"{count} {result}" for result, count in sorted(total.items())), f"in {time.perf_counter() - began:.0f} s")
    if arguments.write:
        (RESULTS / "chat-templates.md").write_text(markdown(table), encoding="utf-8")
        verdicts = [
            {"template": name, "not exact": {kind: [one.result, one.why] for kind, one in row.items() if one.result != "exact"}}
            for name, row in table.items()
        ]
        write(
            RESULTS / "chat-templates.json",
            record(
                "Which tokens carry loss, by chat template and kind of conversation",
                COMMAND,
                verdicts,
                templates=len(table),
                total=dict(_counted_all(table, lambda kind: not kind.startswith(NUMBERED))),
                odd={"rows": arguments.odd * len(table), "a template": arguments.odd, "seed": SEED}
                | _counted_all(table, lambda kind: kind.startswith("odd ")),
            ),
        )
    return 1 if total["wrong"] or total["refused without need"] else 0


if __name__ == "__main__":
    sys.exit(main())
