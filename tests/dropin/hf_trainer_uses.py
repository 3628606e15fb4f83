"""Kinds of use of transformers' `Trainer`: each takes a model and a folder, and gives back what the trainer logged and saw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from dropin.loop_uses import trained
from dropin.same_numbers import gradients
from samples import chat_rows, make_tokenizer

Use = Callable[[Any, Path], Any]
TRAINERS: dict[str, Use] = {}
TOKENIZER = make_tokenizer()


def use(function: Use) -> Use:
    TRAINERS[function.__name__.replace("_", " ")] = function
    return function


def rows(count: int = 8, seed: int = 0) -> list[dict[str, list[int]]]:
    """Questions without labels, answers with."""
    found = []
    for row in chat_rows(count, seed):
        asked, answered = (TOKENIZER(message["content"])["input_ids"] for message in row["messages"])
        found.append({"input_ids": asked + answered, "labels": [-100] * len(asked) + answered})
    return found


class Recorder(TrainerCallback):  # type: ignore[misc]
    """The gradients of every step, as they come to the optimizer."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(gradients(model))


ARGUMENTS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "learning_rate": 0.05,
    "optim": "sgd",
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}
TIMES = ("runtime", "per_second", "flos", "step_time")  # of log entries that are other in every run


def trainer_for(
    model: Any,
    folder: Path,
    *,
    kind: type[Trainer] = Trainer,
    collator: Any = None,
    data: Any = None,
    callbacks: tuple[Any, ...] = (),
    given: dict[str, Any] | None = None,
    **changes: Any,
) -> Trainer:
    trainer = kind(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **(ARGUMENTS | changes)),
        train_dataset=data or rows(),
        processing_class=TOKENIZER,
        callbacks=[Recorder(), *callbacks],
        data_collator=collator or DataCollatorForSeq2Seq(TOKENIZER),
        **(given or {}),
    )
    return trainer


def run(trainer: Trainer, **options: Any) -> list[Any]:
    trainer.train(**options)
    recorder = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Recorder))
    logged = [
        {name: float(value) for name, value in entry.items() if not any(part in name for part in TIMES)}
        for entry in trainer.state.log_history
    ]
    return [logged, recorder.gradients]


@use
def accumulation_and_clipping(model: Any, folder: Path) -> Any:
    return run(
        trainer_for(
            model,
            folder,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            lr_scheduler_type="cosine",
            warmup_steps=1,
            max_steps=3,
        )
    )


@use
def means_of_micro_batches(model: Any, folder: Path) -> Any:
    """A loss that takes no `num_items_in_batch`: the trainer divides."""

    class Means(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            out = model(**inputs)
            return (out.loss, out) if return_outputs else out.loss / 2

    return run(trainer_for(model, folder, kind=Means, gradient_accumulation_steps=2))


@use
def label_smoothing(model: Any, folder: Path) -> Any:
    return run(trainer_for(model, folder, label_smoothing_factor=0.1))


@use
def a_loss_function_of_ones_own(model: Any, folder: Path) -> Any:
    def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        found = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return found / num_items_in_batch + 1e-3 * outputs.logits[labels != -100].square().mean()  # of padding they are zeros

    return run(trainer_for(model, folder, given={"compute_loss_func": loss_of}, gradient_accumulation_steps=2))


@use
def metrics_of_logits_while_training(model: Any, folder: Path) -> Any:
    def right(found: Any) -> dict[str, float]:
        kept = found.label_ids[:, 1:] != -100
        return {"right": float((found.predictions[:, :-1][kept] == found.label_ids[:, 1:][kept]).mean())}

    given = {
        "eval_dataset": rows(3, seed=1),
        "compute_metrics": right,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    return run(trainer_for(model, folder, given=given, eval_strategy="steps", eval_steps=1, label_names=["labels"]))


@use
def callbacks_that_change_gradients_and_rates(model: Any, folder: Path) -> Any:
    class Act(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            for number, parameter in enumerate(trained(model).values()):
                parameter.grad.mul_(number % 3)

        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.01

    return run(trainer_for(model, folder, callbacks=(Act(),)))


@use
def generation_in_a_callback(model: Any, folder: Path) -> Any:
    texts: list[Tensor] = []

    class Ask(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            prompt = TOKENIZER("add 1", return_tensors="pt")
            model.eval()
            texts.append(model.generate(**prompt, max_new_tokens=3, do_sample=False))
            model.train()

    return [run(trainer_for(model, folder, callbacks=(Ask(),))), texts]


@use
def noise_on_the_embeddings(model: Any, folder: Path) -> Any:
    return run(trainer_for(model, folder, neftune_noise_alpha=5.0))


@use
def gradient_checkpointing(model: Any, folder: Path) -> Any:
    return run(trainer_for(model, folder, gradient_checkpointing=True))


@use
def rows_without_padding(model: Any, folder: Path) -> Any:
    return run(trainer_for(model, folder, collator=DataCollatorWithFlattening()))


@use
def padding_on_the_left(model: Any, folder: Path) -> Any:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.padding_side = "left"
    return run(trainer_for(model, folder, collator=DataCollatorForSeq2Seq(tokenizer)))


@use
def adam_with_two_groups(model: Any, folder: Path) -> Any:
    """A rate of its own for some weights, and an epsilon under which rounding does not decide about a sign."""
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW(
        [{"params": parameters[::2], "lr": 1e-3}, {"params": parameters[1::2], "lr": 5e-3}], eps=1e-2, weight_decay=0.1
    )
    return run(trainer_for(model, folder, given={"optimizers": (optimizer, None)}, max_steps=3))


@use
def the_best_checkpoint_at_the_end(model: Any, folder: Path) -> Any:
    trainer = trainer_for(
        model,
        folder / "best",
        given={"eval_dataset": rows(3, seed=1)},
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        learning_rate=0.3,
    )
    return [run(trainer), Path(trainer.state.best_model_checkpoint).name]


@use
def resumed_from_a_checkpoint(model: Any, folder: Path) -> Any:
    """Bit for bit what the run without a pause gives."""
    start = copy.deepcopy(model.state_dict())
    more = {
        "optim": "adamw_torch",
        "adam_epsilon": 1e-2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    whole = run(trainer_for(model, folder / "whole", **more))
    end = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    again = run(trainer_for(model, folder / "again", **more), resume_from_checkpoint=str(folder / "whole" / "checkpoint-1"))
    assert all(torch.equal(value, end[name]) for name, value in model.state_dict().items())
    assert [entry["loss"] for entry in again[0] if "loss" in entry] == [entry["loss"] for entry in whole[0] if "loss" in entry]
    return [whole, again]


@use
def prediction_after_training(model: Any, folder: Path) -> Any:
    trainer = trainer_for(model, folder, per_device_eval_batch_size=2, label_names=["labels"])
    seen = run(trainer)
    found = trainer.predict(rows(2, seed=1))
    kept = torch.from_numpy(found.label_ids != -100)  # what padding predicts is nobody's business
    return [seen, torch.from_numpy(found.predictions)[kept], float(found.metrics["test_loss"])]
