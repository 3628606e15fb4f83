"""What every section of a recipe is: frozen, and closed to unknown keys."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

NO_CODE = "Pronghorn runs code only if it is named on the command line"


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a valid regular expression: {error}; fix the pattern") from None
    return pattern


Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Name = Annotated[str, Field(min_length=1)]
Pattern = Annotated[Name, AfterValidator(_compiles)]


def _takes_a_number(annotation: object) -> bool:
    parts = {annotation, *get_args(annotation), *(inner for part in get_args(annotation) for inner in get_args(part)[:1])}
    return bool(parts & {int, float}) and str not in parts


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: object, info: ValidationInfo) -> Any:
        """pydantic would take `epochs: true` for 1."""
        if isinstance(value, bool) and _takes_a_number(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError(f"{str(value).lower()} is not a number; write one")
        return value


def no_file(option: str) -> BeforeValidator:
    """Refuses the name of a file: code is named on the command line alone."""

    def check(name: object) -> Any:
        if isinstance(name, str) and (name.endswith(".py") or "/" in name or ".py:" in name):
            file = re.sub(r"\.py:.*", ".py", name)  # mine.py:check
            raise ValueError(f"{name} is a file, and {NO_CODE}; remove it here and add: {option} {file}")
        return name

    return BeforeValidator(check)


def one_or_many(value: object) -> Any:
    return (value,) if isinstance(value, (str, dict, Section)) else value
