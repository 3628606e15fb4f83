"""What is served: one run, or several adapters of one base, each under the name of its folder; and the base itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import CommandError
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.model.load import DTYPES, pick_device, resolve_precision
from pronghorn.model.several_adapters import with_adapters
from pronghorn.train.run.trained_run import TrainedRun

FIRST = "default"  # PEFT's name of the first adapter


@dataclass(frozen=True)
class Served:
    name: str
    adapter: str | None  # PEFT's name of it; None: the base, or a model without adapters
    tokenizer: Tokenizer


class Models:
    def __init__(self, model: HFModel, served: Sequence[Served], *, adapters: bool) -> None:
        self.model, self._adapters = model, adapters
        self._served = {one.name: one for one in served}

    @property
    def all(self) -> list[Served]:
        return list(self._served.values())

    @property
    def names(self) -> list[str]:
        return list(self._served)

    def get(self, name: str) -> Served | None:
        return self._served.get(name)

    @contextmanager
    def using(self, one: Served) -> Iterator[Any]:
        """The model as this one."""
        if not self._adapters:
            yield self.model
        elif one.adapter is None:
            with self.model.disable_adapter():
                yield self.model
        else:
            self.model.set_adapter(one.adapter, inference_mode=True)
            yield self.model

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        config = self.model.config
        found = getattr(config.get_text_config(), "max_position_embeddings", None)
        return int(found) if isinstance(found, int) else 1 << 20


def load(folders: Sequence[Path], which: str) -> Models:
    runs = [TrainedRun(folder, which) for folder in folders]
    for run in runs:
        run.require_answers()
    names = _names(folders)
    first = runs[0]
    for run, folder in zip(runs[1:], folders[1:], strict=True):
        if why := _differs(first, run):
            raise CommandError(
                what=f"{folders[0]} and {folder} cannot be served together",
                why=why,
                fix="serve each with its own command and --port",
            )
    if len(runs) == 1:
        model, tokenizer = first.to_answer()
        if first.recipe.method == "full":
            return Models(model, [Served(names[0], None, tokenizer)], adapters=False)
        served = [Served(names[0], FIRST, tokenizer)]
    else:
        adapters = [FIRST, *(f"run{number}" for number in range(2, len(runs) + 1))]
        device = pick_device()
        dtype = DTYPES[resolve_precision(first.recipe.precision, device)]
        found = {name: (run.path, run.recipe.lora) for name, run in zip(adapters, runs, strict=True)}
        model = with_adapters(first.recipe, dtype, device, found)
        first.give_layers(model)
        served = [Served(name, adapter, run.tokenizer()) for name, adapter, run in zip(names, adapters, runs, strict=True)]
    base = Path(first.recipe.model).name
    if base not in names:
        served.append(Served(base, None, served[0].tokenizer))
    return Models(model, served, adapters=True)


def _names(folders: Sequence[Path]) -> list[str]:
    """Model names: the folders', with their parents where two are the same."""
    places = [folder.resolve() for folder in folders]
    if len(set(places)) < len(places):
        raise CommandError(what="the same run is named twice", fix="name each run once")
    short = [place.name for place in places]
    return [place.name if short.count(place.name) == 1 else f"{place.parent.name}/{place.name}" for place in places]


def _differs(first: TrainedRun, other: TrainedRun) -> str:
    one, two = first.recipe, other.recipe
    if "full" in (one.method, two.method):
        return "method: full trains a whole model, and only adapters can share a base model"
    if (one.model, one.stored_as) != (two.model, two.stored_as):
        return f"their base models differ: {one.model} ({one.stored_as}) and {two.model} ({two.stored_as})"
    if one.precision != two.precision:
        return f"their precisions differ: {one.precision} and {two.precision}"
    return ""
