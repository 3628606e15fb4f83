"""Names that are found and say on use what to do instead."""

from __future__ import annotations

import copy
import importlib

import pytest

import pronghorn
from pronghorn.compat.dropin.absent import ABSENT
from pronghorn.errors import CommandError
from tables import table


@table("name", ABSENT)
def test_importing_a_name_is_fine_and_using_it_tells(name: str) -> None:
    found = getattr(pronghorn, name)
    assert name in repr(found)
    assert copy.copy(found) is not None
    for use in (lambda: found("a model", 1), lambda: found.from_pretrained("a model")):
        with pytest.raises(CommandError, match=name) as caught:
            use()
        assert caught.value.why
        assert caught.value.fix


def test_modules_have_their_names() -> None:
    trainer = importlib.import_module("pronghorn.trainer")
    assert trainer.UnslothVisionDataCollator is ABSENT["UnslothVisionDataCollator"]
    with pytest.raises(AttributeError):
        importlib.import_module("pronghorn.compat.dropin.absent").nothing  # noqa: B018
    missing = [name for name in dir(pronghorn) if not name.startswith("_") and not hasattr(pronghorn, name)]
    assert not missing
