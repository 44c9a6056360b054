"""The fields of Anthropic's Messages API that the server reads, and the chat completions that they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from saltus.server.errors import ApiError
from saltus.server.fields import Fields, Items, JsonObject
from saltus.server.protocol import (
    MAX_ITEMS,
    MAX_STOPS,
    ChatCompletionRequest,
    ChatFields,
    Message,
    NewTokens,
    Prediction,
    ReasoningEffort,
    SamplingFields,
    StopString,
    of_few_items,
)
from saltus.server.structured import (
    MAX_TOOLS,
    FunctionName,
    JsonSchema,
    JsonSchemaFormat,
    NamedTool,
    Tool,
    ToolFields,
    ToolName,
)

# What Claude Code puts before its system prompt: a line that differs in each request, so that no prefix is the same.
BILLING_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
THREAD_UNSUPPORTED = "thread_unsupported_request"  # the code at which clients send the whole conversation
REFUSED = {
    "thread": "nothing is stored here between requests; leave out thread, and send the whole conversation",
    "compaction": "conversations are not shortened here; leave out compaction",
    "mcp_servers": "no MCP servers are called from here; leave out mcp_servers, and give tools that the client runs",
}
"""Fields of later versions that an answer must not ignore."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, as chat completions name them


class MessagesFields(Fields):
    """A JSON object of Anthropic's API. Fields that are not known are ignored: agents send new ones in each version."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


def _blocks_of(*kinds: str) -> Callable[[Any], Any]:
    """Refuses blocks of other types with one line."""

    def read(given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(
                f"there is a block of the type {kind!r}, but only {', '.join(kinds)} can be read here; leave it out"
            )
        return given

    return read


def _of_client(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"there is a tool of the type {kind!r}, which only Anthropic's servers have; leave it out")
    return kind


class TextBlock(MessagesFields):
    """A piece of a text."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(MessagesFields):
    """The reasoning before an earlier answer; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(MessagesFields):
    """Reasoning of another server that nobody can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(MessagesFields):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject


OnlyText = Annotated[TextBlock, BeforeValidator(_blocks_of("text"))]
Texts = str | Annotated[Items[OnlyText], Field(max_length=MAX_ITEMS)]


class ToolResultBlock(MessagesFields):
    """What a call has returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = ""
    is_error: bool = False


AssistantBlock = Annotated[
    Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")],
    BeforeValidator(_blocks_of("text", "thinking", "redacted_thinking", "tool_use")),
]
UserBlock = Annotated[
    Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")],
    BeforeValidator(_blocks_of("text", "tool_result")),
]


class UserMessage(MessagesFields):
    """What the user writes, and what tools have returned."""

    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantMessage(MessagesFields):
    """An earlier answer, or the beginning of the one to write."""

    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemMessage(MessagesFields):
    """Instructions, in the midst of a conversation."""

    role: Literal["system"] = "system"
    content: Texts


AnyMessage = UserMessage | AssistantMessage | SystemMessage


class ClientTool(MessagesFields):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"], BeforeValidator(_of_client)] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None


class ToolChoice(MessagesFields):
    """Whether to call tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool that must be called
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _is_named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice has a name if its type is 'tool', and else none")
        return self


class ThinkingSettings(MessagesFields):
    """Whether the model thinks before it answers, where its chat template has a choice."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: str | None = None


class OutputFormat(MessagesFields):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    definition: JsonObject = Field(alias="schema")


class OutputSettings(MessagesFields):
    """How much a model thinks, and the form of its answer."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(MessagesFields, ChatFields):
    """POST /v1/messages/count_tokens: what a prompt is made of."""

    model_config = MessagesFields.model_config

    model: str | None = None
    system: Texts = ""
    messages: Annotated[
        Items[Annotated[AnyMessage, Field(discriminator="role")]], BeforeValidator(of_few_items)
    ] = Field(min_length=1)  # fmt: skip
    tools: Items[ClientTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None
    output_format: OutputFormat | None = None  # the older place of the form

    @model_validator(mode="after")
    def _check(self) -> CountTokensRequest:
        self.tool_fields()
        return self

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same prompt and settings."""
        output = self.output_config or OutputSettings()
        form = output.format or self.output_format
        schema = form and JsonSchemaFormat(type="json_schema", json_schema=JsonSchema(schema=form.definition))
        shared = {name: value for name, value in self if name in ChatCompletionRequest.model_fields}
        messages = [Message.model_validate(message) for message in self._conversation()]
        made = {**shared, **dict(self.tool_fields()), **self._reasoning_fields(output.effort)}
        return ChatCompletionRequest.model_construct(**made | {"messages": messages, "response_format": schema})

    def tool_fields(self) -> ToolFields:
        """The tools as chat completions describe them. Errors: ValueError."""
        functions = [
            {"name": one.name, "description": one.description, "parameters": one.input_schema, "strict": one.strict}
            for one in self.tools or ()
        ]
        tools = [Tool.model_validate({"function": function}) for function in functions]
        choice = self.tool_choice
        if choice is None:
            return ToolFields.checked(tools, None, None)
        if choice.type == "any" and not tools:
            raise ValueError("tool_choice is 'any', but there are no tools; give some")
        chosen = CHOICES.get(choice.type) or NamedTool(function=FunctionName(name=choice.name or ""))
        return ToolFields.checked(tools, chosen, not choice.disable_parallel_tool_use)

    def _reasoning_fields(self, effort: ReasoningEffort | None) -> dict[str, Any]:
        """The fields that are about reasoning; those of chat completions that a request has itself come first."""
        thinking, variables, enabled, shown = (
            self.thinking, self.chat_template_kwargs, self.enable_thinking, self.include_reasoning
        )  # fmt: skip
        if thinking is not None and thinking.type == "disabled":
            effort = "none"
        elif thinking is not None:
            enabled, variables = True if enabled is None else enabled, {"thinking": True, **(variables or {})}
            shown = shown and thinking.display != "omitted"
        return {
            "reasoning_effort": effort, "enable_thinking": enabled, "chat_template_kwargs": variables,
            "include_reasoning": shown,
        }  # fmt: skip

    def _conversation(self) -> list[dict[str, Any]]:
        """The messages as chat completions have them; those of one role that follow on each other are one."""
        system = self.system if isinstance(self.system, str) else [block.text for block in self.system]
        texts = [BILLING_LINE.sub("", text, 1) if BILLING_LINE.match(text) else text for text in _listed(system)]
        first = [SystemMessage(content=text) for text in texts if text]
        made: list[dict[str, Any]] = []
        for role, group in groupby([*first, *self.messages], key=lambda message: message.role):
            blocks = [block for message in group for block in _blocks(message.content)]
            made += [_answer(blocks)] if role == "assistant" else _texts_and_results(role, blocks)
        return made


class MessagesRequest(CountTokensRequest, SamplingFields):
    """POST /v1/messages."""

    model_config = MessagesFields.model_config

    max_tokens: NewTokens = Field(ge=1)
    stop_sequences: Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    prediction: Prediction | None = None
    thread: Any = None
    compaction: Any = None
    mcp_servers: Any = None

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same prompt and settings. Errors: ApiError 400."""
        for name, message in REFUSED.items():
            if getattr(self, name):
                raise ApiError(400, message, name, THREAD_UNSUPPORTED if name == "thread" else None)
        chat = super().as_chat()
        chat.stop = [*(self.stop_sequences or ()), *_listed(self.stop or [])]
        return chat


def _listed(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _text_of(blocks: Sequence[Any]) -> str:
    """The text of blocks, which are lines of their own, as the parts of messages in chat completions."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    """An answer as one message."""
    made: dict[str, Any] = {"role": "assistant", "content": _text_of(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        made["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return made


def _texts_and_results(role: str, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """The texts and the results of tools in their order: texts that follow on each other are one message."""
    made: list[dict[str, Any]] = []
    for is_text, group in groupby(blocks, key=lambda block: isinstance(block, TextBlock)):
        if is_text:
            made.append({"role": role, "content": _text_of([*group])})
            continue
        made += ({"role": "tool", "tool_call_id": one.tool_use_id, "content": _result(one)} for one in group)
    return made or [{"role": role, "content": ""}]


def _result(block: ToolResultBlock) -> str:
    """What a call has returned, and whether that is an error, which chat templates have no place for."""
    return ("Error: " if block.is_error else "") + _text_of(_blocks(block.content))
