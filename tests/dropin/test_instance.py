"""Modes as methods of the model, beside those of the class."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_parts import adapted, load
from pronghorn import FastLanguageModel, FastModel, FastQwen2Model, is_bf16_supported, is_bfloat16_supported
from pronghorn.errors import CommandError
from pronghorn.model.causal_lm import base_of


def test_modes_are_methods_too(tiny_model: Path) -> None:
    model, _ = adapted(tiny_model)
    assert model.for_inference() is model
    assert not model.training
    assert base_of(model).config.use_cache
    assert model.for_training() is model
    assert model.training
    assert not base_of(model).config.use_cache
    with pytest.raises(CommandError, match="use_gradient_checkpointing"):
        model.for_training(use_gradient_checkpointing="often")
    plain, _ = load(tiny_model)
    assert not plain.for_inference().training


def test_other_names_of_the_same() -> None:
    assert issubclass(FastModel, FastLanguageModel)
    assert FastQwen2Model is FastLanguageModel
    assert is_bf16_supported() == is_bfloat16_supported()
