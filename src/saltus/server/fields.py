"""The base of all JSON objects that the server reads, and the types of their fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from saltus.engine.encoding import require_unicode
from saltus.server.neutral_fields import without_neutral_fields

MAX_FIELDS = 256  # of an object

NUMBERS = {int, float, int | None, float | None}  # types of fields

Integer = Annotated[int, Strict()]  # of a list or an object; fields are checked in `NumberFields`
Number = Annotated[float, Strict()]  # integers, too
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]  # a million wrong items are one error, not a million
"""A list."""


def _valid_json(value: Any) -> Any:
    """The value, if it can be written as JSON again. Errors: ValueError."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a text in it has a lone surrogate, which stands for no character; give valid UTF-8") from None
    except ValueError:
        raise ValueError("a number in it is not finite, which JSON has no form for; leave it out") from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_valid_json)]
"""A JSON object of any form, which an answer may repeat."""


class Fields(BaseModel):
    """A JSON object that rejects unknown fields but for neutral ones, and texts that are not Unicode."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _of_few_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:  # each unknown one would be an error of its own
            raise ValueError(f"an object has {len(given):,} fields, but at most {MAX_FIELDS} are read; leave some out")
        return without_neutral_fields(given, cls.model_fields)

    @model_validator(mode="after")
    def _is_unicode(self) -> Fields:
        for name, value in self:
            texts = value if isinstance(value, list) else [value]
            if texts and isinstance(texts[0], str):  # else it may be a million numbers
                for text in texts:
                    require_unicode(str(text), name)
        return self


class NumberFields(Fields):
    """A JSON object with numbers among its fields: they may not be texts, as OpenAI's server refuses them, too."""

    @field_validator("*", mode="before")
    @classmethod
    def _without_quotes(cls, given: Any, info: Any) -> Any:
        if isinstance(given, str) and cls.model_fields[info.field_name].annotation in NUMBERS:
            raise PydanticCustomError("number_in_quotes", "Input should be a number, not a text; leave out the quotes")
        return given
