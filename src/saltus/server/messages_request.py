"""The fields of Anthropic's Messages API that the server reads, and the chat completions that they stand for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from saltus.server.errors import ApiError
from saltus.server.fields import Items, JsonObject
from saltus.server.message_blocks import AnyMessage, MessagesFields, Texts, conversation_of
from saltus.server.protocol import (
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

THREAD_UNSUPPORTED = "thread_unsupported_request"  # the code at which clients send the whole conversation
REFUSED = {
    "thread": "nothing is stored here between requests; leave out thread, and send the whole conversation",
    "compaction": "conversations are not shortened here; leave out compaction",
    "mcp_servers": "no MCP servers are called from here; leave out mcp_servers, and give tools that the client runs",
}
"""Fields of later versions that an answer must not ignore."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, as chat completions name them


def _of_client(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"there is a tool of the type {kind!r}, which only Anthropic's servers have; leave it out")
    return kind


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

    @property
    def omits_thinking(self) -> bool:
        """Whether an answer has its reasoning in signatures alone."""
        return self.thinking is not None and self.thinking.display == "omitted"

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
        messages = [Message.model_validate(message) for message in conversation_of(self.system, self.messages)]
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
        thinking, variables, enabled = self.thinking, self.chat_template_kwargs, self.enable_thinking
        if thinking is not None and thinking.type == "disabled":
            effort = "none"
        elif thinking is not None:
            enabled, variables = True if enabled is None else enabled, {"thinking": True, **(variables or {})}
        return {"reasoning_effort": effort, "enable_thinking": enabled, "chat_template_kwargs": variables}


class MessagesRequest(CountTokensRequest, SamplingFields):
    """POST /v1/messages."""

    model_config = MessagesFields.model_config

    max_tokens: NewTokens = Field(ge=0)  # 0: the prompt is read into the prefix cache, and nothing is written
    stop_sequences: Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    prediction: Prediction | None = None
    thread: Any = None
    compaction: Any = None
    mcp_servers: Any = None

    @property
    def only_reads(self) -> bool:
        """Whether nothing is to be written after the prompt."""
        return self.max_tokens == 0

    @model_validator(mode="after")
    def _check_that_nothing_is_written(self) -> MessagesRequest:
        output = self.output_config or OutputSettings()
        wants = {
            "stream": self.stream,
            "thinking": self.thinking is not None and self.thinking.type == "enabled",
            "output_config.format": output.format or self.output_format,
            "tool_choice": self.tool_choice is not None and self.tool_choice.type in ("any", "tool"),
        }
        if self.only_reads and (asked := [name for name, is_asked in wants.items() if is_asked]):
            raise ValueError(f"max_tokens is 0, so that nothing is written, but {asked[0]} asks for more; leave it out")
        return self

    def as_chat(self) -> ChatCompletionRequest:
        """The chat completion with the same prompt and settings. Errors: ApiError 400."""
        for name, message in REFUSED.items():
            if getattr(self, name):
                raise ApiError(400, message, name, THREAD_UNSUPPORTED if name == "thread" else None)
        chat = super().as_chat()
        if self.only_reads:
            chat.max_tokens = 1  # the call that reads the prompt decides a token, whether it is wanted or not
        chat.stop = [*(self.stop_sequences or ()), *([self.stop] if isinstance(self.stop, str) else self.stop or ())]
        return chat
