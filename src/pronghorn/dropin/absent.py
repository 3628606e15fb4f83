"""Names that scripts import and that are not here: each is found, and says on use what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from pronghorn.errors import CommandError

NO_CODE = "code that a model wrote would run here, and Pronghorn runs none"
OWN_SANDBOX = "run it in a sandbox of your own (a container without a network), and call that from the reward function"
NO_IMAGES = "text is what trains here: a vision tower stays frozen, as it was loaded"


class Absent:
    """Importing it is fine; calling it, or asking it for anything, raises."""

    def __init__(self, name: str, why: str, fix: str) -> None:
        self.__dict__.update(_name=name, _why=why, _fix=fix)

    def _raise(self, used: str) -> NoReturn:
        raise CommandError(what=f"{used} is not in this version", why=self._why, fix=self._fix)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._raise(self._name)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute.endswith("__"):
            raise AttributeError(attribute)  # copy, inspect and notebooks ask for these
        self._raise(f"{self._name}.{attribute}")

    def __repr__(self) -> str:
        return f"<{self._name}: not in this version>"


ABSENT = {
    name: Absent(name, why, fix)
    for name, why, fix in (
        ("FastVisionModel", NO_IMAGES, "FastModel, which trains the text model of one that reads images"),
        ("UnslothVisionDataCollator", NO_IMAGES, "train on text with FastModel; SFTTrainer brings the collator for it"),
        ("FastSentenceTransformer", "embeddings have another loss than text",
         "sentence_transformers' own SentenceTransformer and its trainer"),
        ("add_new_tokens", "a new token would need new rows in the embeddings", "tokens that the vocabulary has, such as its "
         "reserved ones"),
        ("execute_with_time_limit", NO_CODE, OWN_SANDBOX),
        ("check_python_modules", NO_CODE, OWN_SANDBOX),
        ("create_locked_down_function", NO_CODE, OWN_SANDBOX),
        ("is_port_open", NO_CODE, "start the environment's server yourself, and give the reward function its address"),
        ("launch_openenv", NO_CODE, "start the environment's server yourself, and give the reward function its address"),
    )
}  # fmt: skip


def __getattr__(name: str) -> Absent:
    if name not in ABSENT:
        raise AttributeError(f"module 'pronghorn.dropin.absent' has no attribute {name!r}")
    return ABSENT[name]
