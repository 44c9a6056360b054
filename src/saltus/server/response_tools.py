"""The tools of the responses route: functions, also in namespaces, tools that take a text, and the calls of each.

The model sees all of them as functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from saltus.server.fields import Fields, Items, JsonObject
from saltus.server.structured import MAX_TOOLS, Function, FunctionName, NamedTool, Tool, ToolName

TEXT_FIELD = "input"  # of the function that stands for a tool which takes a text
TEXT_PARAMETERS = {
    "type": "object", "properties": {TEXT_FIELD: {"type": "string"}}, "required": [TEXT_FIELD],
    "additionalProperties": False,
}  # fmt: skip


class ResponseTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    defer_loading: bool = False  # until it is searched for: here the prompt has all tools
    output_schema: Any = None  # what it returns, for clients


class CustomTool(Fields):
    """A tool that takes a text. Its grammar, if it has one, stands in its description and is not followed."""

    type: Literal["custom"]
    name: ToolName
    description: str = ""
    format: JsonObject | None = None
    defer_loading: bool = False

    def as_function(self, name: str, before: str = "") -> Function:
        """The function that stands for it."""
        given = self.format or {}
        grammar = f"The input follows this {given.get('syntax')} grammar:\n{given.get('definition')}"
        parts = (before, self.description, grammar if given.get("type") == "grammar" else "")
        return Function.model_validate({
            "name": name, "description": "\n".join(part for part in parts if part), "parameters": TEXT_PARAMETERS,
        })  # fmt: skip


class Namespace(Fields):
    """Tools that belong together, such as those of an MCP server that the client calls."""

    type: Literal["namespace"]
    name: ToolName
    description: str = ""
    tools: Items[Annotated[ResponseTool | CustomTool, Field(discriminator="type")]] = Field(max_length=MAX_TOOLS)


class HostedTool(Fields):
    """A tool that OpenAI's servers run, and that agents offer without being asked: left out, since nobody calls it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    type: Literal[
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
        "image_generation", "tool_search",
    ]  # fmt: skip


AnyTool = Annotated[ResponseTool | CustomTool | Namespace | HostedTool, Field(discriminator="type")]


class ResponseNamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function", "custom"]
    name: str

    def as_in_chat(self) -> NamedTool:
        """The same in the form of chat completions."""
        return NamedTool(function=FunctionName(name=self.name))


class ResponseAllowedTools(Fields):
    """Those of the tools that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ResponseNamedTool] = Field(max_length=MAX_TOOLS)


@dataclass(frozen=True)
class ToolOrigin:
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    takes_text: bool = False

    def call_item(self, arguments: str) -> dict[str, Any]:
        """A call as an item of the output, without its ids."""
        kind = "custom_tool_call" if self.takes_text else "function_call"
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"type": kind, "name": self.name, **namespace, self.field: self.given(arguments)}

    @property
    def field(self) -> str:
        """Where an item has what the tool is called with."""
        return TEXT_FIELD if self.takes_text else "arguments"

    @property
    def events(self) -> str:
        """The name of the events that bring it."""
        return "custom_tool_call_input" if self.takes_text else "function_call_arguments"

    def given(self, arguments: str) -> str:
        """What the tool is called with."""
        return str(json.loads(arguments).get(TEXT_FIELD, "")) if self.takes_text else arguments


def functions_of(tools: Sequence[Any]) -> Iterator[tuple[Tool, ToolOrigin]]:
    """The functions that the model sees, and the tools that they stand for."""
    for tool in tools:
        if isinstance(tool, Namespace):
            for place, one in enumerate(tool.tools):
                # one of them says what the namespace is for
                yield _function(one, tool.name, "" if place else tool.description)
        elif not isinstance(tool, HostedTool):
            yield _function(tool)


def tool_origins(tools: Sequence[Any]) -> Mapping[str, ToolOrigin]:
    """The tools by the names that the model knows."""
    return {tool.function.name: origin for tool, origin in functions_of(tools)}


def shown_name(name: str, namespace: str | None) -> str:
    """The name that the model knows: some clients have the separator in the namespace."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _function(
    tool: ResponseTool | CustomTool, namespace: str | None = None, before: str = ""
) -> tuple[Tool, ToolOrigin]:
    name, origin = shown_name(tool.name, namespace), ToolOrigin(tool.name, namespace, isinstance(tool, CustomTool))
    if isinstance(tool, CustomTool):
        return Tool(function=tool.as_function(name, before)), origin
    given = tool.model_dump(by_alias=True, exclude={"type", "defer_loading", "output_schema"}, exclude_none=True)
    if before:
        given["description"] = "\n".join(text for text in (before, tool.description) if text)
    return Tool(function=Function.model_validate({**given, "name": name})), origin
