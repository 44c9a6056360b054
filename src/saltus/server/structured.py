"""Constraints of an answer that a request may set: formats, grammars and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from saltus.engine.chat.tool_calls import ToolCall, ToolCallReader, tool_format, tool_grammar
from saltus.engine.engine import Engine
from saltus.engine.grammar import Grammar
from saltus.server.errors import ApiError
from saltus.server.fields import Fields, Items, JsonObject

MAX_TOOLS = 128

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_./:-]{1,128}$")]  # OpenAI's, and those of MCP servers


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"] = "text"


class JsonObjectFormat(Fields):
    """Any JSON object, or as llama.cpp's server and others have it, JSON of a schema."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    type: Literal["json_object"]
    definition: JsonObject | None = Field(None, alias="schema")


class JsonSchema(Fields):
    """A JSON schema and its name. It is always followed; with `strict` keywords that cannot be are an error."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = "answer"
    description: str | None = None
    definition: JsonObject = Field(default_factory=lambda: {"type": "object"}, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Fields):
    """JSON that follows a schema, as chat completions ask for it; llama.cpp's server has the schema beside the type."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, given: Any) -> Any:
        if isinstance(given, dict) and "schema" in given and "json_schema" not in given:
            return {"type": given.get("type"), "json_schema": {k: v for k, v in given.items() if k != "type"}}
        return given


class FlatJsonSchemaFormat(JsonSchema):
    """JSON that follows a schema, as responses ask for it."""

    type: Literal["json_schema"]


class StructuredOutputs(Fields):
    """vLLM's field: one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GrammarFields(Fields):
    """Formats of answers, in OpenAI's fields, in vLLM's, and in llama.cpp's: `json_schema` and `grammar`."""

    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(None, discriminator="type")
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonObject | None = None
    grammar: str | None = None  # GBNF; an empty one is none

    def text_grammar(self, engine: Engine) -> Grammar | None:
        """What the text must be; None: anything. Errors: ApiError 400 that names the field."""
        outputs = self.structured_outputs or StructuredOutputs()  # pyright: ignore[reportCallIssue]
        known: Sequence[tuple[str, Callable[[Any], Grammar | None], Any]] = (  # field, what makes its grammar, value
            ("guided_json", Grammar.json_schema, self.guided_json),
            ("guided_regex", Grammar.regex, self.guided_regex),
            ("guided_choice", Grammar.choice, self.guided_choice),
            ("guided_grammar", Grammar.lark, self.guided_grammar),
            ("structured_outputs", Grammar.json_schema, outputs.json_),
            ("structured_outputs", Grammar.regex, outputs.regex),
            ("structured_outputs", Grammar.choice, outputs.choice),
            ("structured_outputs", Grammar.lark, outputs.grammar),
            ("structured_outputs", lambda _: Grammar.json_object(), outputs.json_object or None),
            ("response_format", format_grammar, self.response_format),
            ("json_schema", partial(Grammar.json_schema, strict=False), self.json_schema),
            ("grammar", Grammar.gbnf, self.grammar or None),
        )
        given = [entry for entry in known if entry[2] is not None and not isinstance(entry[2], TextFormat)]
        if len(given) > 1:
            first, second = given[0][0], given[1][0]
            twice = f"{first} has several forms; give one"
            raise ApiError(400, f"give {first} or {second}, not both" if first != second else twice, second)
        return checked_grammar(engine, *given[0]) if given else None


def format_grammar(given: TextFormat | JsonObjectFormat | JsonSchemaFormat | FlatJsonSchemaFormat) -> Grammar | None:
    """The grammar of a format. Errors: ValueError."""
    if isinstance(given, JsonSchemaFormat):
        return Grammar.json_schema(given.json_schema.definition, bool(given.json_schema.strict))
    if isinstance(given, FlatJsonSchemaFormat):
        return Grammar.json_schema(given.definition, bool(given.strict))
    if isinstance(given, JsonObjectFormat) and given.definition is not None:
        return Grammar.json_schema(given.definition, False)
    return Grammar.json_object() if isinstance(given, JsonObjectFormat) else None


def checked_grammar(engine: Engine, field: str, make: Callable[[Any], Grammar | None], given: Any) -> Grammar | None:
    """`make(given)`, ready for use. Errors: ApiError 400 that names the field of the request."""
    try:
        if (grammar := make(given)) is not None:
            grammar.constraint(engine.tokenizer, engine.target.end_tokens)  # compiles it
        return grammar
    except ValueError as error:
        raise ApiError(400, str(error), field) from error


class Function(Fields):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None  # a JSON schema
    strict: bool | None = None
    return_: JsonObject | None = Field(None, alias="return")  # for the chat template, as Transformers describes tools
    response: JsonObject | None = None  # for the chat template, as Gemini's tools describe it


class Tool(Fields):
    """A tool: always a function."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class ToolSubset(Fields):
    """Those of the tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(max_length=MAX_TOOLS)


class AllowedTools(Fields):
    """OpenAI's choice among the tools: the prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


class ToolFields(Fields):
    """Tools and whether to call them."""

    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None  # false: one call at most

    @classmethod
    def checked(cls, tools: list[Tool], choice: Any, parallel: bool | None) -> ToolFields:
        """The fields given one by one. Errors: ValueError, and no ValidationError."""
        made = cls.model_construct(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
        made.check()
        return made

    @model_validator(mode="after")
    def _valid(self) -> ToolFields:
        self.check()
        return self

    def check(self) -> None:
        """Refuse what contradicts itself. Errors: ValueError."""
        names = [tool.function.name for tool in self.tools or ()]
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise ValueError(f"tools has {twice[0]!r} twice; rename one")
        if unknown := [name for name in chosen_names(self.tool_choice) or () if name not in names]:
            raise ValueError(f"tool_choice names {unknown[0]!r}, which is not among the tools")
        if isinstance(self.tool_choice, AllowedTools) and not self.tool_choice.allowed_tools.tools:
            raise ValueError("tool_choice allows no tools; give none in place of allowed_tools")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")


def chosen_names(choice: Any) -> list[str] | None:
    """The names of the functions that a choice leaves; None: all."""
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    return [tool.function.name for tool in choice.allowed_tools.tools] if isinstance(choice, AllowedTools) else None


class Tools:
    """The tools of a request: what the prompt says of them, and the calls in an answer."""

    def __init__(self, engine: Engine, body: ToolFields) -> None:
        tools, choice = body.tools or [], body.tool_choice
        if choice == "none":
            tools = []
        self.offered = [tool.model_dump(by_alias=True, exclude_none=True) for tool in tools]
        if (names := chosen_names(choice)) is not None:
            tools = [tool for tool in tools if tool.function.name in names]
        self._callable = [tool.model_dump(by_alias=True, exclude_none=True) for tool in tools]
        self.engine, self.form = engine, tool_format(engine.tokenizer)
        must = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
        self.required = choice == "required" or isinstance(choice, NamedTool) or must
        self.several = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)

    def grammar(self, of_text: Grammar | None) -> Grammar | None:
        """The grammar of an answer: of its calls, or of its text, or of both. Errors: ApiError 400."""
        if not self._callable:
            return of_text
        schema = None if of_text is None else of_text.schema
        if of_text is not None and not self.required and (schema is None or not self.form.begin):
            kind = "JSON, as this model writes its calls" if schema is not None else "not JSON"
            raise ApiError(
                400, f"tools and a format of the text that is {kind} cannot be combined; leave one out", "tools"
            )
        choice, tokenizer = "required" if self.required else "auto", self.engine.tokenizer
        return checked_grammar(
            self.engine, "tools", lambda tools: tool_grammar(tools, choice, self.several, tokenizer, schema),
            self._callable,
        )  # fmt: skip

    def reader(self) -> ToolCallReader | None:
        """What separates the calls from an answer's text; None if nothing can be called."""
        return ToolCallReader(self.form, self.required, self._callable) if self._callable else None


def call_object(call: ToolCall, call_id: str) -> dict[str, Any]:
    """A call as chat completions write it."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
