"""Forty tools as agents get them from servers of the Model Context Protocol, with what their schemas have in them."""

from typing import Any

PATH = {"type": "string", "format": "path", "description": "A path below an allowed directory."}
PATHS = {"type": "array", "items": PATH, "minItems": 1, "uniqueItems": True}
NUMBER = {"type": "integer", "format": "int64", "minimum": 1, "default": 1}
MAYBE = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Maybe"}
URL = {"type": "string", "format": "uri"}
NAME = {"type": "string", "pattern": "^(?!-)[a-z0-9-]+$", "maxLength": 12}
LABELS = {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2, "contains": {"type": "string"}}
STATE = {"type": "string", "enum": ["open", "closed", "all"]}
EDIT = {"type": "object", "properties": {"old": {"type": "string"}, "new": {"type": "string"}}, "required": ["old"]}
EDITS = {"type": "array", "items": EDIT, "maxItems": 2}
REPOSITORY = {"owner": NAME, "repo": NAME}
TARGET = {"oneOf": [{"type": "string", "maxLength": 8}, {"type": "string", "pattern": "^#"}]}
FIELDS = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-z]+$"},
    "additionalProperties": {"type": ["string", "null"]},
}

SERVERS: dict[str, dict[str, dict[str, Any]]] = {
    "filesystem": {
        "read_file": {"path": PATH, "head": NUMBER}, "read_files": {"paths": PATHS},
        "write_file": {"path": PATH, "content": {"type": "string"}}, "edit_file": {"path": PATH, "edits": EDITS},
        "create_directory": {"path": PATH}, "list_directory": {"path": PATH}, "move_file": {"source": PATH, "to": PATH},
        "search_files": {"path": PATH, "pattern": {"type": "string"}, "excluded": PATHS}, "file_info": {"path": PATH},
        "allowed_directories": {},
    },
    "github": {
        "create_issue": {**REPOSITORY, "title": {"type": "string"}, "labels": LABELS},
        "list_issues": {**REPOSITORY, "state": STATE, "page": NUMBER}, "get_issue": {**REPOSITORY, "number": NUMBER},
        "update_issue": {**REPOSITORY, "number": NUMBER, "state": STATE}, "search_code": {"q": {"type": "string"}},
        "create_branch": {**REPOSITORY, "branch": NAME, "from": MAYBE}, "list_commits": {**REPOSITORY, "sha": MAYBE},
        "fork": {**REPOSITORY, "organization": MAYBE}, "merge": {**REPOSITORY, "method": {"enum": ["merge", "squash"]}},
        "push_files": {**REPOSITORY, "files": EDITS},
    },
    "browser": {
        "navigate": {"url": URL}, "click": {"target": TARGET, "button": {"const": "left"}}, "close": {},
        "type": {"target": TARGET, "text": {"type": "string"}, "submit": {"type": "boolean"}}, "snapshot": {},
        "wait": {"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": 30, "multipleOf": 0.5}},
        "select": {"target": TARGET, "values": LABELS}, "evaluate": {"function": {"type": "string"}, "target": TARGET},
        "screenshot": {"filename": PATH, "full": {"type": "boolean", "default": False}},
        "upload": {"paths": PATHS, "content": {"type": "string", "format": "byte", "contentEncoding": "base64"}},
    },
    "database": {
        "query": {"sql": {"type": "string"}, "limit": NUMBER}, "tables": {"schema": MAYBE}, "describe": {"table": NAME},
        "insert": {"table": NAME, "row": FIELDS}, "delete": {"table": NAME, "where": {"not": {"type": "null"}}},
        "login": {"user": NAME, "password": {"type": "string", "format": "password"}}, "commit": {}, "rollback": {},
        "export": {"table": NAME, "to": {"$ref": "#/$defs/target"}}, "explain": {"sql": {"type": "string"}},
    },
}  # fmt: skip


def agent_tools() -> list[dict[str, Any]]:
    """The tools as chat completions take them."""
    made = []
    for server, functions in SERVERS.items():
        for name, properties in functions.items():
            parameters = {
                "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties,
                "required": [*properties][:1], "additionalProperties": False, "$defs": {"target": TARGET},
            }  # fmt: skip
            about = {"name": f"mcp__{server}__{name}", "description": f"{name} of {server}", "parameters": parameters}
            made.append({"type": "function", "function": about})
    return made
