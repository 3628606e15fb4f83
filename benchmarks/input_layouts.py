"""`python -m benchmarks.input_layouts [--write]`: every input layout of layout_cases.py, read or refused, as expected or not.

A layout is right when its rows are exactly the expected ones, token for token with what carries loss, and its unused columns
are named; or when it is refused with the expected words and a fix. `--write` makes benchmarks/results/input-layouts.json and
docs/input-layouts.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.layout_cases import CALLS, CHAT, COMPARED, FILES, LAYOUTS, PAIRS, PREFERENCES, PUBLIC, Layout
from benchmarks.record import RESULTS as FOLDER
from benchmarks.record import ROOT, record, write
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.errors import PronghornError
from pronghorn.recipe_parts import Data

RESULTS, TABLE = FOLDER / "input-layouts.json", ROOT / "docs" / "input-layouts.md"
GROUPS = {
    "Conversations": CHAT,
    "Calls and tools": CALLS,
    "Prompts and answers": PAIRS,
    "Preference data, in a supervised run": PREFERENCES,
    "Preference data, compared": COMPARED,
    "Public data sets and other tools": PUBLIC,
    "Files and sources": FILES,
}
SPECIAL = ["<pad>", "<end>", "<system>", "<developer>", "<user>", "<assistant>", "<tool>", "<tools>"]
# Writes all that a message may hold, so that whatever is lost on the way shows.
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}<end>{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@contextlib.contextmanager
def _placed(layout: Layout, folder: Path) -> Iterator[None]:
    for name, content in layout.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    before, cache = Path.cwd(), os.environ.get("PRONGHORN_CACHE")
    os.environ["PRONGHORN_CACHE"] = str(folder / "cache")
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("PRONGHORN_CACHE")
        if cache is not None:
            os.environ["PRONGHORN_CACHE"] = cache


def outcome(layout: Layout, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """What became of it: `rows` and `remarks`, or `refused`, `why` and `fix`; and what of it is `wrong`."""
    with _placed(layout, folder):
        spec = Data(train=layout.train or next(iter(layout.files)), **layout.keys)
        try:
            found = prepare(spec.train, spec, tokenizer, wanted=layout.wanted)
        except PronghornError as error:
            told = {"refused": error.what, "where": error.where, "why": error.why, "fix": error.fix}
            return {"layout": layout.name, **told, "wrong": _wrong_refusal(layout, error)}
        rows = [_shown(tokenizer, found, i) for i in range(len(found.tokens))]
        return {
            "layout": layout.name,
            "rows": rows,
            "remarks": list(found.remarks),
            "wrong": _wrong_rows(layout, rows, list(found.remarks)),
        }


def _shown(tokenizer: Any, found: Prepared, i: int) -> str:
    ids, loss = found.tokens.ids(i).tolist(), found.tokens.loss(i).tolist()
    pairs = found.tokens.pairs
    text = "" if pairs is None else "- " if pairs.roles[i] else "+ "
    for trained, run in groupby(zip(ids, loss, strict=True), key=lambda pair: pair[1]):
        said = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        text += f"«{said}»" if trained else said
    return text


def _wrong_refusal(layout: Layout, error: PronghornError) -> str:
    if layout.trained:
        return f"refused: {error}"
    missing = [part for part, text in ((layout.what, error.what), (layout.fix, error.fix)) if not part or part not in text]
    return f"not in the refusal: {missing}: {error}" if missing or not error.where else ""


def _wrong_rows(layout: Layout, rows: list[str], remarks: list[str]) -> str:
    if rows != list(layout.trained):
        return f"trained {rows}, expected {list(layout.trained)}"
    unused = [remark for remark in remarks if remark.startswith("unused columns: ")]
    if len(unused) != bool(layout.unused) or not all(f"columns: {layout.unused} (" in remark for remark in unused):
        return f"unused columns {unused}, expected {layout.unused!r}"
    return (
        ""
        if any(layout.told in remark for remark in [*remarks, ""] if layout.told or not remark)
        else (f"told {remarks}, expected {layout.told!r}")
    )


def table(found: dict[str, dict[str, Any]]) -> str:
    right = sum(not one["wrong"] for one in found.values())
    read = sum("rows" in one for one in found.values())
    refused = len(found) - read
    text = f"""# Input layouts

{len(found)} layouts: {read} are read, {refused} are refused with a fix, {len(found) - right} differ from what is expected.

Rows are shown as the model sees them, with a template that writes every part of a message. « » marks what is trained on. The
expected results are written by hand in benchmarks/layout_cases.py; `+` is a chosen or good answer, `-` another.
`python -m benchmarks.input_layouts --write` checks them and writes this page.
"""
    for title, layouts in GROUPS.items():
        text += f"\n## {title}\n\n| layout | |\n|---|---|\n"
        text += "".join(f"| {layout.name} | {_cell(found[layout.name])} |\n" for layout in layouts)
    return text


def _cell(one: dict[str, Any]) -> str:
    if "rows" in one:
        cell = "<br>".join(_code(row) for row in one["rows"]) + "".join(f"<br>notice: {remark}" for remark in one["remarks"])
    else:
        cell = f"refused: {one['refused']}<br>fix: {one['fix']}"
    return cell.replace("|", "\\|").replace("\n", "↵")


def _code(text: str) -> str:
    return f"`{text}`".replace("\n", "↵")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="the results and the table, into the repository")
    arguments = parser.parse_args()
    tokenizer, found = make_tokenizer(), dict[str, dict[str, Any]]()
    for layout in LAYOUTS:
        assert layout.name not in found, layout.name
        with tempfile.TemporaryDirectory() as folder:
            found[layout.name] = outcome(layout, tokenizer, Path(folder))
    wrong = [one for one in found.values() if one["wrong"]]
    for one in wrong:
        print(f"{one['layout']}: {one['wrong']}", file=sys.stderr)
    print(
        f"{len(found)} layouts: {sum('rows' in one for one in found.values())} read, "
        f"{sum('refused' in one for one in found.values())} refused with a fix, {len(wrong)} other than expected"
    )
    if arguments.write:
        write(
            RESULTS,
            record(
                "Every input layout: what is trained on, or why it is refused",
                "python -m benchmarks.input_layouts --write",
                list(found.values()),
            ),
        )
        TABLE.write_text(table(found), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    for variable, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(variable, value)
    sys.exit(main())
