"""Files of the base model that are written again as they are: generation_config.json, and an image processor's.

transformers reads contradicting settings for generation with a warning (`temperature` without `do_sample: true`, as many
published models have them), but refuses to write them. So it never writes this file: the base's bytes are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import GenerationConfig

from pronghorn.hf_types import HFModel
from pronghorn.hub import model_folder
from pronghorn.model.config import generation_config
from pronghorn.model_files import GENERATION

FOLDER = "_base_folder"  # a loaded model's attribute: a relative name means another folder after a chdir


def remember_folder(model: HFModel, folder: Path) -> None:
    """Notes the folder that a model was loaded from."""
    setattr(model, FOLDER, folder.resolve())


def base_folder(model: HFModel) -> Path:
    """Where the files lie that the model was loaded from; of a model that was not loaded by us, what its name leads to."""
    found: Path | None = getattr(model, FOLDER, None)
    return found if found is not None and found.is_dir() else model_folder(str(model.name_or_path))


def write_generation(model: HFModel, folder: Path) -> None:
    """The base's own bytes, unless the settings were changed since: then these, as they are."""
    settings, base = getattr(model, "generation_config", None), getattr(model, FOLDER, None)
    if settings is None or not model.can_generate():
        return
    if base is not None and (base / GENERATION).is_file() and generation_config(str(base), base) == settings:
        (folder / GENERATION).write_bytes((base / GENERATION).read_bytes())
    else:
        settings.to_json_file(str(folder / GENERATION))


@contextmanager
def generation_apart(model: HFModel, folder: Path) -> Iterator[None]:
    """Around `model.save_pretrained(folder)`."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        yield
        return
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
    write_generation(model, folder)
