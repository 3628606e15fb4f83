"""UnslothTrainer and UnslothTrainingArguments: TRL's SFTTrainer and SFTConfig, and a learning rate for embeddings."""

from __future__ import annotations

from typing import Any


def PatchDPOTrainer() -> None:  # noqa: N802 - the name scripts call it by
    """Nothing to do: our models go through TRL's DPOTrainer as it is."""


def trainer_class() -> Any:
    raise NotImplementedError


def arguments_class() -> Any:
    raise NotImplementedError
