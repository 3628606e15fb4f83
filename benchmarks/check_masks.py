"""Do the tokens that carry loss spell exactly what the assistant says? For every row of real conversations.

    python benchmarks/check_masks.py --tokenizer FOLDER [FOLDER ...] --data chat.jsonl [chat.jsonl ...] [--json result.json]

Judged without the code under test: a supervised run must decode to the turn's content, followed by an end token and
preceded by nothing but what the template makes the model produce first (LEADS); there are as many runs as assistant
turns; and the tokens before the last run are exactly the prompt that transformers gives the model at inference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.tokens import TokenRow, load_tokenizer
from pronghorn.data.read.formats import Example

LEADS = ("", "<think>\n\n</think>\n\n", "<|channel|>final<|message|>")
ENDS = ("<|im_end|>", "<|end|>", "<|return|>", "<|eot_id|>", "<end_of_turn>", "</s>")


def complaints(tokenizer: Any, row: TokenRow, messages: list[dict[str, Any]]) -> list[str]:
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if len(row.runs) != len(answers):
        return [f"{len(row.runs)} runs for {len(answers)} assistant turns"]
    found = []
    for (start, stop), answer in zip(row.runs, answers, strict=True):
        said = tokenizer.decode(row.ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        expected = {lead + text + end for lead in LEADS for end in ENDS
                    for text in (answer, answer.strip(), unicodedata.normalize("NFC", answer))}  # fmt: skip
        if said not in expected:
            found.append(f"{said!r} is not {answer!r} and an end token")
    if messages[-1]["role"] == "assistant":
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
        if row.ids[: row.runs[-1][0]].tolist() != list(prompt):
            found.append("the tokens before the last answer are not the prompt at inference")
    return found


def check(tokenizer: Any, path: Path) -> dict[str, Any]:
    chats = [json.loads(line)["messages"] for line in path.read_bytes().splitlines()]
    encoder = Encoder(tokenizer)
    began = time.perf_counter()
    rows = [encoder.encode(Example("chat", f"{path.name}:{n}", messages=tuple(chat))) for n, chat in enumerate(chats, 1)]
    seconds = time.perf_counter() - began
    wrong = [f"{row.where}: {what}" for row, chat in zip(rows, chats, strict=True) for what in complaints(tokenizer, row, chat)]
    return {
        "data": path.name, "rows": len(rows), "turns": sum(len(row.runs) for row in rows),
        "tokens": sum(len(row.ids) for row in rows), "rows_per_second": round(len(rows) / seconds), "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", nargs="+", required=True)
    parser.add_argument("--data", nargs="+", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    for name in arguments.tokenizer:
        tokenizer = load_tokenizer(name, None)
        for path in arguments.data:
            result = {"tokenizer": Path(name).name, **check(tokenizer, path)}
            results.append(result)
            print("{tokenizer:>12} {data:24} {rows:6,} rows {turns:7,} turns {tokens:10,} tokens {rows_per_second:6,} rows/s"
                  .format(**result), f"{len(result['wrong']):4} wrong")  # fmt: skip
            for what in result["wrong"][:3]:
                print("   ", what[:300])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if any(result["wrong"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
