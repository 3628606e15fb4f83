"""Labels on answers only, for the data of a Hugging Face trainer: found by the texts that stand around an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pronghorn.data.template.turn_parts import IGNORED, Marker, turn_parts
from pronghorn.errors import CommandError, DataError, counted
from pronghorn.kernels.runtime.dispatch import say_once

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

    from pronghorn.hf_types import Tokenizer


def train_on_responses_only(
    trainer: Trainer | None = None,
    instruction_part: str | None = None,
    response_part: str | None = None,
    force_match: bool = True,
    tokenizer: Tokenizer | None = None,
    return_function: bool = False,
    num_proc: int | None = None,
    last_response_only: bool = False,
) -> Any:
    """Sets every label of the trainer's data to -100 but those between `response_part` and the next `instruction_part`. Rows
    without an answer are left out, and that is said: a batch of them has no loss.

    Without the two they are derived from the tokenizer's chat template. `return_function` gives back what labels a row, or a
    batch of rows, instead of a trainer. A marker is always found as a whole (`force_match`).
    """
    if not force_match:
        raise CommandError(what="force_match=False", why="partial markers would match as well", fix="remove it")
    if trainer is None and not return_function:
        raise CommandError(
            what="no trainer", fix="call train_on_responses_only(trainer), or use return_function=True with a tokenizer"
        )
    tokenizer = tokenizer if tokenizer is not None else getattr(trainer, "processing_class", None)
    if tokenizer is None:
        raise CommandError(what="this trainer has no tokenizer", fix="pass processing_class=tokenizer to the trainer")
    marker = _marker(getattr(tokenizer, "tokenizer", tokenizer), instruction_part, response_part, last_response_only)
    if trainer is None or return_function:
        return marker
    collator = type(trainer.data_collator)
    if collator.__name__ == "DataCollatorForLanguageModeling" and collator.__module__.startswith("transformers."):
        raise CommandError(
            what="the trainer's collator creates its own labels",
            why="they would replace the masked labels",
            fix="pass data_collator=DataCollatorForSeq2Seq(tokenizer), or use SFTTrainer",
        )

    def labelled(data: Dataset, name: str) -> Any:
        return _labelled(data, marker, name, num_proc)

    if trainer.train_dataset is not None:
        trainer.train_dataset = labelled(trainer.train_dataset, "train_dataset")
    held_out = getattr(trainer, "eval_dataset", None)
    if isinstance(held_out, dict):
        trainer.eval_dataset = {name: labelled(data, f"eval_dataset[{name!r}]") for name, data in held_out.items()}
    elif held_out is not None:
        trainer.eval_dataset = labelled(held_out, "eval_dataset")
    return trainer


def _marker(tokenizer: Tokenizer, instruction: str | None, response: str | None, last_only: bool) -> Marker:
    if (instruction is None) != (response is None):
        raise CommandError(what="only one of instruction_part and response_part is set", fix="set both, or neither")
    if instruction is None or response is None:
        instruction, response = turn_parts(tokenizer)
    return Marker(tokenizer, instruction, response, last_only=last_only)


def _labelled(data: Dataset, marker: Marker, name: str, processes: int | None) -> Any:
    if "input_ids" not in (data.column_names or ()):
        raise DataError(
            what="the dataset is not tokenized",
            where=name,
            why="it has no column input_ids",
            fix="let SFTTrainer tokenize it first",
        )
    several = {"num_proc": processes} if processes and processes > 1 and hasattr(data, "__len__") else {}
    labelled = data.map(marker.label_row, **several)
    if hasattr(labelled, "__len__"):
        kept = [i for i, row in enumerate(labelled) if any(label != IGNORED for label in row["labels"])]
        if not kept:
            raise DataError(
                what=f"no answer in any of {counted(len(labelled), 'row')}",
                where=name,
                why=f"{marker.response!r} does not occur, or nothing follows it",
                fix="pass the exact text that the chat template writes before an answer",
            )
        if len(kept) < len(labelled):
            say_once(
                f"{name}: {len(labelled) - len(kept):,} of {counted(len(labelled), 'row')} have no answer or a truncated one, "
                "and are removed"
            )
            return labelled.select(kept)
    return labelled
