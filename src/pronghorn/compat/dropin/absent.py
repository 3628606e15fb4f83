"""Names that scripts import and that are not here: each is found, and says on use what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from pronghorn.errors import CommandError

NO_SERVER = "Pronghorn starts no servers of other libraries"
NO_IMAGES = "Pronghorn trains on text only; the vision tower stays frozen"


class Absent:
    """Importing it is fine; calling it, or asking it for anything, raises."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.__dict__.update(_name=name, _why=why, _fix=fix)

    def _raise(self, used: str) -> NoReturn:
        raise CommandError(what=f"{used} is not supported", why=self._why, fix=self._fix)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        self._raise(self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)  # copy, inspect and notebooks ask for these
        self._raise(f"{self._name}.{attribute}")

    def __repr__(self) -> str:
        return f"<{self._name}: not supported>"


ABSENT = {
    name: Absent(name, why, fix)
    for name, why, fix in (
        ("UnslothVisionDataCollator", NO_IMAGES, "train on text with FastModel; SFTTrainer supplies the data collator"),
        ("FastSentenceTransformer", "Pronghorn does not train embedding models",
         "use SentenceTransformer and its trainer from sentence_transformers"),
        ("add_new_tokens", "Pronghorn does not resize the embeddings",
         "use tokens of the existing vocabulary, such as its reserved tokens"),
        ("is_port_open", NO_SERVER, "start the environment's server yourself and pass its address to the reward function"),
        ("launch_openenv", NO_SERVER, "start the environment's server yourself and pass its address to the reward function"),
    )
}  # fmt: skip


def __getattr__(name: str) -> Absent:
    if name not in ABSENT:
        raise AttributeError(f"module 'pronghorn.compat.dropin.absent' has no attribute {name!r}")
    return ABSENT[name]
