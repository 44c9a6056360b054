"""The base of all JSON objects that the server reads, and the types of their fields."""

from __future__ import annotations

import json
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, LiteralString, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from saltus.engine.encoding import require_unicode
from saltus.server.neutral_fields import without_neutral_fields

MAX_FIELDS = 256  # of an object

NUMBERS = {int, float}  # types of fields
SCALARS = {*NUMBERS, bool, str}

Integer = Annotated[int, Strict()]  # of a list or an object; fields are checked in `Fields`
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
    """A JSON object that rejects unknown fields but for neutral ones, and texts that are not Unicode.

    Numbers, texts and truth values are not taken for each other, as OpenAI's server does not; 2.0 is an integer.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > MAX_FIELDS:  # each unknown one would be an error of its own
            raise ValueError(f"an object has {len(given):,} fields, but at most {MAX_FIELDS} are read; leave some out")
        matters = without_neutral_fields(given, cls.model_fields)
        errors = [
            InitErrorDetails(type=PydanticCustomError("type_of_value", fault), loc=(name,), input=value)
            for name, value in matters.items()
            if name in cls.model_fields and (fault := _scalar_fault(value, _scalars_of(cls, name)))
        ]
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return matters

    @model_validator(mode="after")
    def _is_unicode(self) -> Fields:
        for name, value in self:
            texts = value if isinstance(value, list) else [value]
            if texts and isinstance(texts[0], str):  # else it may be a million numbers
                for text in texts:
                    require_unicode(str(text), name)
        return self


@cache
def _scalars_of(kind: type[Fields], name: str) -> frozenset[type]:
    """The types of single values that a field takes."""

    def types_in(annotation: Any) -> set[type]:
        origin = get_origin(annotation)
        if origin is Literal:
            return set(map(type, get_args(annotation)))
        if origin is Annotated:
            return types_in(get_args(annotation)[0])
        if origin in (Union, UnionType):
            return set().union(*map(types_in, get_args(annotation)))
        return {annotation} & SCALARS if isinstance(annotation, type) else set()

    return frozenset(types_in(kind.model_fields[name].annotation))


def _scalar_fault(given: Any, taken: frozenset[type]) -> LiteralString:
    """What is wrong with a value that Pydantic would convert; empty if nothing is."""
    if type(given) not in SCALARS or not taken or (isinstance(given, str) and str in taken):
        return ""
    takes_numbers, takes_truth = bool(taken & NUMBERS), bool in taken
    if isinstance(given, str):
        what = "a number" if takes_numbers else "true or false"
        return f"Input should be {what}, not a text; leave out the quotes"
    if isinstance(given, bool):
        return "Input should be a number, not true or false" if takes_numbers and not takes_truth else ""
    return "Input should be true or false, not a number" if takes_truth and not takes_numbers else ""
