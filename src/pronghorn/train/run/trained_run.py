"""A finished (or stopped) run, used: talked to. run_evaluation.py evaluates it, export/ exports it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pronghorn.data.encode.tokens import load_tokenizer, padding_id
from pronghorn.data.template.rendering import applied
from pronghorn.errors import CommandError
from pronghorn.generation.answering import answers
from pronghorn.generation.sampling import Sampling
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import base_of, install, without_adapters
from pronghorn.model.export import trained_model
from pronghorn.model.fingerprint import require_same_base
from pronghorn.model.head import Head
from pronghorn.model.heads import HEADS
from pronghorn.model.load import DTYPES, pick_device, resolve_precision
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Data
from pronghorn.train.checkpoint.checkpoint import list_checkpoints, step_of, verify_checkpoint
from pronghorn.train.checkpoint.resume import described

OnText = Callable[[str, str], None]


class Trained:
    """A checkpoint, and the recipe it was made with."""

    def __init__(self, path: Path, recipe: Recipe, step: int = 0, data: str = "") -> None:
        """`data`: the key of the tokens that it was trained on (run_identity.py)."""
        self.path, self.recipe, self.step, self.data = path, recipe, step, data

    def load(self) -> tuple[Any, Any, torch.device]:
        """Model, tokenizer, device."""
        device = pick_device()
        precision = resolve_precision(self.recipe.precision, device)
        model = trained_model(self.path, self.recipe, DTYPES[precision], device)
        model.eval()
        tokenizer = self.tokenizer()
        self.set_padding(model)
        return model, tokenizer, device

    def to_answer(self) -> tuple[Any, Any]:
        """Model, with the layers that generate its answers, and tokenizer."""
        model, tokenizer, _ = self.load()
        self.give_layers(model)
        return model, tokenizer

    def give_layers(self, model: HFModel) -> None:
        if self.recipe.layers == "fast":
            install(model, fp8=self.recipe.fp8)

    @property
    def head(self) -> type[Head]:
        return HEADS[self.recipe.objective.kind.head]

    def set_padding(self, model: HFModel) -> None:
        """For the model's own forward, where its head needs to know."""
        if not self.head.generates:
            self.head.set_padding(base_of(model), padding_id(self.tokenizer()))

    def require_answers(self) -> None:
        """Refuses a model that writes no text where some is to be written."""
        if not self.head.generates:
            raise CommandError(
                what=f"the run trained {self.head.title}, which gives {self.head.gives}, not answers",
                where=str(self.path),
                why=f"it has a {self.head.name} head in place of the LM head",
                fix=f"export it (--to merged) and load it with {self.head.auto_class(None).__name__}, or name another run",
            )

    def tokenizer(self) -> Any:
        """As it was trained with: its files have the template and the special tokens, but not which tokens end a turn."""
        ends = Data(train=self.recipe.data.train, eot_tokens=self.recipe.data.eot_tokens)
        return load_tokenizer(str(self.path), ends)


class TrainedRun(Trained):
    """One verified checkpoint of a run."""

    def __init__(self, run: Path, which: str) -> None:
        found = list_checkpoints(run)
        if not found:
            raise CommandError(
                what="no checkpoint found",
                where=str(run),
                why="this is not a run's folder, or the run has saved nothing yet",
                fix="pass a run's output folder; `pronghorn runs` lists them",
            )
        path = self._choose(found, which, run)
        manifest = verify_checkpoint(path)
        recipe = _found_again(described(path, manifest["recipe"], manifest["values"]).recipe, run)
        super().__init__(path, recipe, manifest["step"], manifest["values"]["data"])
        self.cursor = manifest["values"]["cursor"]
        if self.recipe.method != "full":
            require_same_base(self.recipe.model, manifest["values"], self.path.name)

    @staticmethod
    def _choose(found: list[Path], which: str, run: Path) -> Path:
        steps = {step_of(path): path for path in found}
        last = found[-1]
        if which == "last":
            return last
        if which == "best":
            manifest = verify_checkpoint(last)
            best = described(last, manifest["recipe"], manifest["values"]).progress.best_step
            return steps.get(best, last) if best is not None else last
        if which.isdigit() and int(which) in steps:
            return steps[int(which)]
        raise CommandError(
            what=f"checkpoint `{which}` not found",
            where=str(run),
            fix=f"choose best, last, or one of: {', '.join(str(step) for step in steps)}",
        )


def _found_again(recipe: Recipe, run: Path) -> Recipe:
    """Names in a recipe count from the folder it was trained in. From another one, that is where the run's folder, as the
    recipe names it, lies."""
    output, now = Path(recipe.output), run.resolve()
    depth = len(output.parts)
    if output.is_absolute() or not 0 < depth <= len(now.parents) or now.parents[depth - 1] / output != now:
        return recipe
    base = now.parents[depth - 1]

    def place(name: str) -> str:
        return str(base / name) if not Path(name).exists() and (base / name).exists() else name

    data = recipe.data.model_copy(
        update={
            "train": tuple(
                place(one) if isinstance(one, str) else one.model_copy(update={"path": place(one.path)})
                for one in recipe.data.train
            ),
            "eval": place(recipe.data.eval) if isinstance(recipe.data.eval, str) else recipe.data.eval,
        }
    )
    return recipe.model_copy(update={"model": place(recipe.model), "data": data})


class Chat:
    """A conversation, or two: with the base model, too. `temperature` 0: always the likeliest token."""

    def __init__(
        self, run: Path, which: str, *, max_tokens: int, system: str | None = None, temperature: float = 0.0, base: bool = False
    ) -> None:
        trained = TrainedRun(run, which)
        trained.require_answers()
        self._adapted = trained.recipe.method != "full"
        self.show_base(base)
        self.model, self.tokenizer = trained.to_answer()
        self.max_tokens, self.temperature = max_tokens, temperature
        self.seed = random.getrandbits(63)  # the next answer's
        self._opening = [{"role": "system", "content": system}] if system else []
        self.forget()
        if self.tokenizer.chat_template is None:
            raise CommandError(
                what="the tokenizer has no chat template",
                where=str(run),
                why="the model was trained on plain text",
                fix="use the exported model with your own prompts",
            )

    def show_base(self, asked: bool) -> bool:
        if asked and not self._adapted:
            raise CommandError(
                what="the base model cannot answer beside this run's model",
                why="method: full changes the weights themselves, so the base would be a second model in memory",
                fix="chat without --base; `pronghorn eval RUN --base` compares the two",
            )
        self.with_base = asked
        return asked

    def answer(self, message: str, on_text: OnText | None = None) -> str:
        return self._answer(self.messages, message, "model", on_text)

    def answers(self, message: str, on_text: OnText | None = None) -> dict[str, str]:
        """The base model's, if it is asked for, and the trained model's; each goes on from its own answers. `on_text` gets
        whose it is, and each piece of its text."""
        found = {}
        if self.with_base:
            with without_adapters(self.model):
                found["base"] = self._answer(self._of_base, message, "base", on_text)
        return found | {"model": self.answer(message, on_text)}

    def _answer(self, messages: list[dict[str, str]], message: str, name: str, on_text: OnText | None) -> str:
        messages.append({"role": "user", "content": message})
        (found,) = answers(
            self.model,
            self.tokenizer,
            [applied(self.tokenizer, messages)],
            max_new_tokens=self.max_tokens,
            rule=Sampling(self.temperature),
            seed=self.seed,
            on_text=None if on_text is None else lambda _, text: on_text(name, text),
        )
        messages.append({"role": "assistant", "content": found.text})
        self.seed += 1
        return found.text

    def forget(self) -> None:
        """All but the system message."""
        self.messages, self._of_base = list(self._opening), list(self._opening)
