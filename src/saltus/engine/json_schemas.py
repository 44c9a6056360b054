"""Prepare JSON schemas for grammars: leave out, or refuse by name, the keywords that llguidance cannot follow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from saltus.loading.fetching import first_line

# JSON has one fixed spacing, Python's: then keys and punctuation follow from the schema, and are drafted.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_LENGTH = 1 << 18  # characters of a schema or a grammar
# What llguidance may spend on the regular expressions of a grammar before a text: a quarter of its default. So the
# first look at `(a{1000}){1000}` takes 0.2 seconds and 30 MB, not 1 and 170. Schemas of MAX_LENGTH need less; a literal
# of more than half of it is refused.
LEXER_FUEL = 250_000
OPTIONS = "x-guidance"  # the key of llguidance's options in a schema
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
SCHEMAS = {
    "items", "additionalItems", "prefixItems", "additionalProperties", "allOf", "anyOf", "oneOf", "not", "if", "then",
    "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
TYPES = {"null", "boolean", "object", "array", "number", "integer", "string"}
VALUES = {"const", "default", "enum", "example", "examples"}  # keywords whose null is a value


def followed_schema(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """The schema as a grammar follows it, with llguidance's options.

    What restricts nothing is left out: fields that are null, `uniqueItems: false`, references to unknown dialects. With
    `strict` any other keyword that llguidance cannot follow is an error. Without, it is ignored: keywords and formats
    and types that it does not know, patterns that are no regular expression, references to other documents.
    Errors: ValueError of one line that names the keyword.
    """
    try:
        text = json.dumps(schema)
        if len(text) > MAX_LENGTH:
            raise ValueError(f"it has {len(text):,} characters; at most {MAX_LENGTH:,} are read")
        return json.loads(_followed(text, strict))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@lru_cache(maxsize=128)
def _followed(schema: str, strict: bool) -> str:
    made = _rewritten(json.loads(schema), _without_effect)
    if not isinstance(options := made.get(OPTIONS, {}), dict):
        raise ValueError(f"its {OPTIONS} must be an object")
    options = {**options, **JSON_FORM} if strict else {**options, **JSON_FORM, "lenient": True}
    problem = schema_problem({**made, OPTIONS: options})
    if problem and not strict:
        made = _rewritten(made, _cannot_be_followed)
        problem = schema_problem({**made, OPTIONS: options})
    if problem:
        raise ValueError(problem)
    return json.dumps({**made, OPTIONS: options})


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Why llguidance cannot follow a schema, in one line that names the keyword; empty if it can."""
    matcher = matcher_class()
    return describe_problem(
        matcher.validate_grammar(matcher.grammar_from_json_schema(json.dumps(schema)), limits=grammar_limits())
    )


def describe_problem(message: str) -> str:
    """What llguidance says of a schema, in one line."""
    if keys := re.search(r"Unimplemented keys: \[(.*?)\]", message):
        return f"it has {keys[1].replace(chr(34), '')}, which a grammar cannot follow; leave it out"
    if unknown := re.search(r"Unknown format: (.*)", message):
        return f"its format {unknown[1]!r} is unknown; leave it out"
    if "regex parse error" in message:
        return f"its pattern is no regular expression that a grammar can follow ({message.splitlines()[-1].strip()})"
    if "oneOf constraints" in message:
        return "the choices of its oneOf are not exclusive, which a grammar cannot follow; write anyOf"
    return first_line(message) if message else ""


def matcher_class() -> Any:
    """llguidance's matcher. Errors: ValueError if the package is missing."""
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise ValueError('grammars need the package llguidance: pip install ".[serve]" in the clone') from None
    return LLMatcher


def grammar_limits() -> Any:
    """What llguidance may spend on a grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=LEXER_FUEL)


def _rewritten(schema: Any, is_ignored: Callable[[str, Any], bool]) -> Any:
    """A schema without the keywords to ignore, also in the schemas in it. Values such as those of enum stay."""
    if isinstance(schema, list):
        return [_rewritten(one, is_ignored) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for keyword, value in schema.items():
        if is_ignored(keyword, value):
            continue
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            patterns = keyword == "patternProperties"
            named = {name: one for name, one in value.items() if not (patterns and is_ignored("pattern", name))}
            value = {name: _rewritten(one, is_ignored) for name, one in named.items()}
        made[keyword] = _rewritten(value, is_ignored) if keyword in SCHEMAS else value
    return made


def _without_effect(keyword: str, value: Any) -> bool:
    dialect = keyword == "$schema" and "json-schema.org" not in str(value)
    return dialect or (value is None and keyword not in VALUES) or (keyword == "uniqueItems" and value is False)


def _cannot_be_followed(keyword: str, value: Any) -> bool:
    if keyword == "pattern" and isinstance(value, str):
        return bool(schema_problem({"type": "string", "pattern": value}))
    if keyword == "type":  # such as "any" and "float", which some clients write
        return not TYPES.issuperset(value if isinstance(value, list) else [str(value)])
    if keyword in NAMED_SCHEMAS:  # PHP writes an empty object as a list
        return value == []
    return keyword == "$ref" and not str(value).startswith("#")
