"""Keywords of JSON schemas that no grammar can follow: named where they must be followed, else ignored."""

import json
import re

import pytest

from saltus.engine.grammar import Grammar
from saltus.engine.json_schemas import JSON_FORM, OPTIONS, followed_schema, schema_problem

UNKNOWN = {
    "uniqueItems": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    "'path'": {"type": "string", "format": "path"},
    "'byte'": {"type": "string", "format": "byte"},
    "pattern": {"type": "string", "pattern": "^(?!-)a"},
    "(a)": {"type": "object", "patternProperties": {"^(a)\\1": {"type": "string"}}},
    "https://example.com": {"$ref": "https://example.com/schema"},
}


@pytest.mark.parametrize("named", UNKNOWN)
@pytest.mark.parametrize("nest", [
    lambda one: {"properties": {"x": one}}, lambda one: {"items": {"anyOf": [one]}},
    lambda one: {"$defs": {"x": one}, "properties": {"y": {"$ref": "#/$defs/x"}}},
], ids=["property", "items", "definition"])  # fmt: skip
def test_unknown_keywords_are_ignored_or_named(named, nest):
    schema = nest(UNKNOWN[named])
    with pytest.raises(ValueError, match=rf"^[^\n]*({re.escape(named.strip(chr(39)))}|pattern)[^\n]*$"):
        followed_schema(schema, strict=True)
    assert not schema_problem(followed_schema(schema, strict=False))


def test_what_restricts_nothing_is_left_out():
    given = {
        "$schema": "http://example.com/dialect", "type": "object", "required": None,
        "properties": {"x": {"type": "array", "uniqueItems": False, "items": None, "default": None}},
    }  # fmt: skip
    kept = {"type": "object", "properties": {"x": {"type": "array", "default": None}}}
    assert followed_schema(given, strict=True) == {**kept, OPTIONS: JSON_FORM}


def test_names_and_values_that_look_like_keywords_stay():
    names = {"uniqueItems": {"type": "boolean"}, "pattern": {"type": "string"}, "$ref": {"const": {"pattern": "(?=a)"}}}
    schema = {"type": "object", "properties": names, "enum": [{"uniqueItems": False, "x": None}]}
    unfollowed = {**schema, "patternProperties": {"(?=a)": {}}}
    found = followed_schema(unfollowed, strict=False)
    assert {name: found[name] for name in schema} == schema
    assert found["patternProperties"] == {}


@pytest.mark.parametrize("schema", [{"enum": []}, {"properties": {"x": {"$ref": "#/$defs/none"}}}])
def test_what_is_no_schema_is_an_error_also_where_it_need_not_be_strict(schema):
    with pytest.raises(ValueError, match=r"Unsatisfiable|none"):
        followed_schema(schema, strict=False)


@pytest.mark.parametrize("unknown", [{"type": "any"}, {"type": ["str", "null"]}, {"properties": []}])
def test_types_that_json_does_not_have_and_empty_lists_of_properties_are_ignored_if_it_need_not_be_strict(unknown):
    known = {"description": "what some clients write"}
    found = followed_schema({"type": "object", "properties": {"x": {**unknown, **known}}}, strict=False)
    assert found["properties"] == {"x": known}
    with pytest.raises(ValueError, match=r"type|properties|map"):
        followed_schema({"type": "object", "properties": {"x": unknown}}, strict=True)


def test_a_grammar_ignores_keywords_if_it_need_not_be_strict():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(ValueError, match="uniqueItems"):
        Grammar.json_schema(schema)
    assert json.loads(Grammar.json_schema(schema, strict=False).definition)
