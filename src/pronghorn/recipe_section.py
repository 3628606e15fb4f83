"""What every section of a recipe is: frozen, and closed to unknown keys."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]


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
