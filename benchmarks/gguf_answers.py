"""The demo's model in llama.cpp: as many right answers as where it was trained?

    pronghorn demo && python -m benchmarks.gguf_answers runs/demo [--held-out 70] [--to q8_0,q4_k_m] [--write]

The demo's kind of requests, none of them a training row, are answered by the trained model, and by llama.cpp (xllamacpp) with
each GGUF file of it. An answer is right if it is exactly the expected JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, record, write
from pronghorn.demo import hotel
from pronghorn.demo.machine_speed import ANSWER_TOKENS
from pronghorn.evaluation.metrics import json_match
from pronghorn.export.gguf_target import rendered
from pronghorn.export.job import Options
from pronghorn.export.llama_cpp import Questions, ask
from pronghorn.export.run import export_run
from pronghorn.generation.answering import answers as answers_of
from pronghorn.recipe_parts import named
from pronghorn.train.run.trained_run import TrainedRun


def right(answers: list[str], expected: list[str]) -> int:
    return sum(json_match(good, answer) == 1.0 for good, answer in zip(expected, answers, strict=True))


def measured(run: Path, held_out: int, variants: list[str]) -> list[dict[str, Any]]:
    trained = TrainedRun(run, "last")
    lines = len(Path(named(trained.recipe.data.train[0])).read_text(encoding="utf-8").splitlines())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hotel.write(folder, train=lines, held_out=held_out)
        rows = [json.loads(line)["messages"] for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
        expected = [row[-1]["content"] for row in rows]
        model, tokenizer = trained.to_answer()
        prompts = [rendered(tokenizer, row[:-1]) or [] for row in rows]
        answers = [one.text for one in answers_of(model, tokenizer, prompts, max_new_tokens=ANSWER_TOKENS)]
        found = [{"in": "trained model", "right": right(answers, expected), "of": held_out}]
        del model
        asked = Questions(prompts=[{"ids": ids, "longest": ANSWER_TOKENS} for ids in prompts])
        for variant in variants:
            export_run(run, "last", folder / variant, f"gguf:{variant}", options=Options(check=False))
            file = next((folder / variant).glob("*.gguf"))
            told = [one["text"] for one in ask(file, asked).answers]
            same = sum(a.strip() == b.strip() for a, b in zip(told, answers, strict=True))
            row = {"in": f"llama.cpp, {variant}", "right": right(told, expected), "of": held_out, "same_text": same}
            found.append(row | {"bytes": file.stat().st_size})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--held-out", type=int, default=70)
    parser.add_argument("--to", default="q8_0,q4_k_m")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = measured(arguments.run, arguments.held_out, arguments.to.split(","))
    for row in found:
        print(json.dumps(row))
    if arguments.write:
        command = "python -m benchmarks.gguf_answers runs/demo --write"
        write(RESULTS / "gguf-answers.json", record("the demo's answers in llama.cpp", command, found))


if __name__ == "__main__":
    main()
