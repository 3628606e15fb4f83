"""Does the arithmetic cost quality? One model, the same batches in the same order, trained in several forms; held-out losses.

    python -m benchmarks.quality --model FOLDER --data train.jsonl [--held-out eval.jsonl] [--out X.json] [--picture X.svg]

Rows of the data are {"messages": [...]}, {"question", "answer"} or {"prompt", "completion"}; they go through the tokenizer's
chat template, and the last answer is what is trained on. Every form starts from the same checkpoint and the same adapter, and
is evaluated on the same held-out rows at the same steps. Writes the curves, what they were held against, hardware, versions,
date and command as JSON, and a picture beside it. Needs torch, transformers, peft and pydantic; Triton on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.quality_picture import draw
from benchmarks.record import record, write
from pronghorn.data.pack.batches import Shapes
from pronghorn.data.pack.loader import BatchLoader, StepBatch, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.errors import CommandError
from pronghorn.model.causal_lm import install
from pronghorn.model.formats.store import dequantize_
from pronghorn.model.load import DTYPES, Precision, load_model, pick_device, require_fp8_precision
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.train.run.evaluate import evaluate
from pronghorn.train.step.graphed_step import make_step
from pronghorn.train.step.optim import lr_scale, make_optimizer, set_lr

SEED = 3407
WHAT = (
    "Held-out loss (mean over the tokens that carry loss) of one model trained in several forms on the same batches in the "
    "same order, from the same checkpoint and the same adapter; AdamW, cosine schedule after warm-up"
)


@dataclass(frozen=True)
class Form:
    """How the linears are stored and multiplied."""

    title: str
    method: str
    precision: Precision = "bf16"
    compute: str = "auto"
    unpacked: bool = False  # stored in 4 bits once, and trained on in 16: what NF4 itself costs, and nothing else


FORMS = {
    "fp32": Form("float32", "lora", "fp32"),
    "bf16": Form("bf16", "lora"),
    "fp8": Form("FP8", "fp8"),
    "nf4-base": Form("NF4 weights, in 16 bits", "qlora", unpacked=True),
    "nf4": Form("NF4, products in bf16", "qlora"),
    "nf4-fp8": Form("NF4, products in FP8", "qlora", compute="fp8"),
    "full": Form("all weights, bf16", "full"),
    "full-fp8": Form("all weights, products in FP8", "full", compute="fp8"),
}
ADAPTED = ("fp32", "bf16", "fp8", "nf4-base", "nf4", "nf4-fp8")
# (form, held against, how much higher its last held-out loss may be; None: what 4 bits themselves cost, whoever multiplies)
DEMANDS = (
    ("bf16", "fp32", 0.002),
    ("fp8", "bf16", 0.01),
    ("nf4", "nf4-base", 0.01),
    ("nf4-fp8", "nf4-base", 0.01),
    ("nf4-base", "bf16", None),
    ("full-fp8", "full", 0.01),
)


class Rows:
    """Tokenized rows, as the loader reads them."""

    def __init__(self, rows: Sequence[tuple[list[int], int]]) -> None:
        """(token ids, how many of them come before the answer)"""
        self.rows = [(np.array(ids, dtype=np.int32), before) for ids, before in rows]
        self.lengths = np.array([len(ids) for ids, _ in self.rows], dtype=np.int32)
        self.loss_counts = np.array([len(ids) - max(1, before) for ids, before in self.rows], dtype=np.int32)

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, i: int) -> npt.NDArray[np.int32]:
        return self.rows[i][0]

    def loss(self, i: int) -> npt.NDArray[np.bool_]:
        ids, before = self.rows[i]
        return np.arange(len(ids)) >= before


def messages_of(row: dict[str, Any]) -> list[dict[str, str]]:
    if "messages" in row:
        return list(row["messages"])
    for asked, answered in (("question", "answer"), ("prompt", "completion")):
        if asked in row and answered in row:
            return [{"role": "user", "content": row[asked]}, {"role": "assistant", "content": row[answered]}]
    raise CommandError(
        what=f"a row has the keys {', '.join(row)}", fix="give messages, question and answer, or prompt and completion"
    )


def tokenized(path: Path, tokenizer: Any, longest: int) -> Rows:
    """Rows that are longer than a batch are left out."""
    found = []
    for line in path.read_text(encoding="utf-8").split("\n"):  # and at no other character that ends a line
        if not line.strip():
            continue
        messages = messages_of(json.loads(line))
        whole = _template(tokenizer, messages)
        before = _template(tokenizer, messages[:-1], add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise CommandError(
                what="the chat template writes a question otherwise when an answer follows",
                where=str(path),
                fix="use another model's tokenizer",
            )
        if len(before) < len(whole) <= longest:
            found.append((whole, len(before)))
    if not found:
        raise CommandError(what="no row fits", where=str(path), fix=f"rows have up to {longest} tokens and an answer")
    return Rows(found)


def _template(tokenizer: Any, messages: Sequence[dict[str, str]], **options: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **options))


def split(rows: Rows, held_out: int) -> tuple[Rows, Rows]:
    order = np.random.default_rng(SEED).permutation(len(rows))
    pairs = [(rows.ids(int(i)).tolist(), rows.rows[int(i)][1]) for i in order]
    return Rows(pairs[held_out:]), Rows(pairs[:held_out])


# ---- one form ----------------------------------------------------------------------------------------------------------------


def recipe_of(form: Form, options: argparse.Namespace) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(options.model),
            "method": form.method,
            "compute": form.compute,
            "precision": form.precision,
            "lora": {"r": options.rank, "alpha": options.rank},
            "data": {"train": [str(options.data)], "max_length": options.tokens},
            "train": {
                "capacity": options.tokens,
                "batch_tokens": options.tokens,
                "lr": options.lr,
                "steps": options.steps,
                "seed": SEED,
            },
        }
    )


def model_of(form: Form, recipe: Recipe, device: torch.device) -> Any:
    dtype = torch.float32 if recipe.method == "full" else DTYPES[form.precision]
    if recipe.fp8:
        require_fp8_precision(device, form.precision)
    model: Any = load_model(recipe.model, dtype, device, storage=recipe.stored_as)
    if form.unpacked:
        dequantize_(model, dtype)
    if recipe.method != "full":
        model = add_adapter(model, recipe.lora, seed=SEED)
    if why := install(model, fp8=recipe.fp8):
        raise CommandError(what="this model has no fast layers", why=why, fix="choose another model")
    return model.train()


def train(name: str, batches: Sequence[StepBatch], held_out: Rows, options: argparse.Namespace, pad: int) -> dict[str, Any]:
    form, device = FORMS[name], pick_device()
    recipe = recipe_of(form, options)
    began = time.perf_counter()
    model = model_of(form, recipe, device)
    optimizer = make_optimizer(model, recipe)
    said: list[str] = []
    step = make_step(
        model, optimizer, device=device, precision=form.precision, clip=recipe.train.clip, graph="auto", say=said.append
    )

    def look() -> float:
        return evaluate(model, held_out, capacity=options.tokens, device=device, pad_id=pad, autocast=step.autocast).loss

    seen, losses, under_way = [(0, look())], [], 0
    for number, batch in enumerate(batches, start=1):
        set_lr(optimizer, lr_scale(number, len(batches), recipe.train))
        step.begin(batch)
        under_way += 1
        if under_way > step.depth or number % options.every == 0 or number == len(batches):
            losses += [step.finish().loss for _ in range(under_way)]
            under_way = 0
        if number % options.every == 0 or number == len(batches):
            seen.append((number, look()))
            print(f"{form.title}: step {number}, held-out loss {seen[-1][1]:.4f}", flush=True)
    step.release()
    return {
        "form": name,
        "title": form.title,
        "method": form.method,
        "compute": form.compute,
        "precision": form.precision,
        "held_out": seen,
        "train": [round(loss, 6) for loss in losses],
        "notices": said,
        "step": type(step).__name__,
        "seconds": round(time.perf_counter() - began, 1),
    }


# ---- all of them -------------------------------------------------------------------------------------------------------------


def verdicts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Which demands hold, of those whose forms were trained."""
    last = {run["form"]: run["held_out"][-1][1] for run in runs}
    found = []
    for form, against, allowed in DEMANDS:
        if form in last and against in last:
            difference = last[form] / last[against] - 1
            found.append(
                {
                    "form": form,
                    "against": against,
                    "difference": difference,
                    "allowed": allowed,
                    "holds": allowed is None or difference <= allowed,
                }
            )
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model folder with a chat template")
    parser.add_argument("--data", type=Path, required=True, help="JSONL")
    parser.add_argument("--held-out", help="another JSONL, or how many rows of the data (default: 256)", default="256")
    parser.add_argument("--forms", default=",".join(ADAPTED), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=8192, help="in a step")
    parser.add_argument("--every", type=int, default=25, help="steps between two looks at the held-out rows")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("quality.json"))
    parser.add_argument("--picture", type=Path, help="an SVG; by default beside the JSON")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    from transformers import AutoTokenizer

    options = parse(words)
    names = [name.strip() for name in options.forms.split(",")]
    if unknown := [name for name in names if name not in FORMS]:
        raise CommandError(what=f"no form is called {', '.join(unknown)}", fix=f"choose from {', '.join(FORMS)}")
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    rows = tokenized(options.data, tokenizer, options.tokens)
    if options.held_out.isdigit():
        rows, held_out = split(rows, int(options.held_out))
    else:
        held_out = tokenized(Path(options.held_out), tokenizer, options.tokens)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    shapes = Shapes.planned(rows, pack(rows.lengths, options.tokens, seed=SEED, epoch=0), options.tokens)
    loader = BatchLoader(
        rows, StepPacking(options.tokens, pad_id=pad, shapes=shapes, pin=torch.cuda.is_available()), seed=SEED, workers=0
    )
    batches = list(itertools.islice(loader, options.steps))
    data = {
        "rows": len(rows),
        "held_out_rows": len(held_out),
        "tokens_a_step": options.tokens,
        "tokens": sum(batch.tokens for batch in batches),
        "loss_tokens": sum(b.loss_tokens for b in batches),
        "held_out_loss_tokens": int(held_out.loss_counts.sum()),
    }
    command = "python -m benchmarks.quality " + " ".join(_public(sys.argv[1:] if words is None else words))
    result = record(
        WHAT, command, [], model=options.model.name, rank=options.rank, lr=options.lr, steps=options.steps, data=data
    )
    for name in names:
        result["results"].append(train(name, batches, held_out, options, pad))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        result["verdicts"] = verdicts(result["results"])
        write(options.out, result)
        (options.picture or options.out.with_suffix(".svg")).write_text(draw(result), encoding="utf-8")
    for one in result["verdicts"]:
        said = f" ({'within' if one['holds'] else 'BEYOND'} {100 * one['allowed']:.1f} %)" if one["allowed"] else ""
        print(f"{one['form']} against {one['against']}: {100 * one['difference']:+.3f} %{said}")
    return result


def _public(words: Sequence[str]) -> list[str]:
    """Folders are this machine's own business."""
    return [Path(word).name if "/" in word else word for word in words]


if __name__ == "__main__":
    main()
