"""The fields of OpenAI's responses route that the server reads."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from saltus.server.fields import Fields, Items, JsonObject
from saltus.server.protocol import (
    MAX_TOP_LOGPROBS,
    ChatFields,
    ContentPart,
    NewTokens,
    ReasoningEffort,
    SamplingFields,
    checked_logprobs,
    of_few_items,
)
from saltus.server.response_tools import (
    TEXT_FIELD,
    AnyTool,
    ResponseAllowedTools,
    ResponseNamedTool,
    functions_of,
    shown_name,
)
from saltus.server.structured import (
    MAX_TOOLS,
    AllowedTools,
    FlatJsonSchemaFormat,
    JsonObjectFormat,
    TextFormat,
    ToolFields,
    ToolSubset,
)

LOGPROBS = "message.output_text.logprobs"  # what a response includes


class ResponseContentPart(ContentPart):
    """A piece of a message in a response's input, or of an earlier answer."""

    logprobs: list[Any] | None = None


class ResponseMessage(Fields):
    """A message in a response's input, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[ResponseContentPart]
    id: str | None = None
    status: str | None = None


class ResponseCall(Fields):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    id: str | None = None
    status: str | None = None

    @property
    def function(self) -> dict[str, str]:
        """The call as chat completions have it."""
        return {"name": shown_name(self.name, self.namespace), "arguments": self.arguments}


class ResponseCustomCall(Fields):
    """An earlier call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    id: str | None = None
    status: str | None = None

    @property
    def function(self) -> dict[str, str]:
        """The call as chat completions have it."""
        arguments = json.dumps({TEXT_FIELD: self.input}, ensure_ascii=False)
        return {"name": shown_name(self.name, self.namespace), "arguments": arguments}


class ResponseCallOutput(Fields):
    """What a call has returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Items[ResponseContentPart]
    id: str | None = None
    status: str | None = None


class ResponseReasoningText(Fields):
    """A piece of earlier reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ResponseReasoning(Fields):
    """The reasoning before an earlier answer."""

    type: Literal["reasoning"]
    summary: Items[ResponseReasoningText] = Field(default_factory=list)
    content: Items[ResponseReasoningText] | None = None
    encrypted_content: str | None = None  # of another server, which alone can read it
    id: str | None = None
    status: str | None = None


class ResponseHostedCall(Fields):
    """A search of another server, which its answer already has; it is left out."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    type: Literal["web_search_call"]


NOT_STORED = ("previous_response_id", "conversation", "prompt")  # what only a server that stores things has


class ReasoningSettings(Fields):
    """How much a model thinks before it answers."""

    effort: ReasoningEffort | None = None


class ResponseText(Fields):
    """The form of a response's text."""

    format: TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None = Field(None, discriminator="type")


class ResponsesRequest(SamplingFields, ChatFields):
    """POST /v1/responses. Nothing is stored: the whole conversation is in `input`."""

    input: Annotated[
        str
        | Items[
            ResponseCall
            | ResponseCustomCall
            | ResponseCallOutput
            | ResponseReasoning
            | ResponseHostedCall
            | ResponseMessage
        ],
        BeforeValidator(of_few_items),
    ] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: NewTokens = Field(None, ge=1)
    text: ResponseText | None = None
    tools: Items[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: as disabled, and an input that is too long an error
    include: Items[str] | None = None  # log-probabilities; others are ignored
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    metadata: JsonObject | None = None  # repeated in the answer

    prompt_field = "input"

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, given: Any) -> Any:
        """Refuse what refers to something stored."""
        if isinstance(given, dict):
            items = given.get("input")
            refers = isinstance(items, list) and any(
                isinstance(item, dict) and item.get("type") == "item_reference" for item in items
            )
            names = [*(name for name in NOT_STORED if given.get(name) is not None), *(["input"] if refers else [])]
            if names:
                what = "references to items" if names[0] == "input" else names[0]
                raise ValueError(
                    f"{names[0]}: nothing is stored here between requests; leave out {what}, and send the whole"
                    " conversation"
                )
        return given

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return LOGPROBS in (self.include or ())

    @property
    def most_new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def requested_logprobs(self) -> tuple[bool, int]:
        return checked_logprobs(self.logprobs, self.top_logprobs, f"include: [{LOGPROBS!r}]")

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        self.tool_fields()
        return self

    def tool_fields(self) -> ToolFields:
        """The tools as chat completions describe them. Errors: ValueError."""
        tools = [tool for tool, _ in functions_of(self.tools or ())]
        choice: Any = self.tool_choice
        if isinstance(choice, ResponseNamedTool):
            choice = choice.as_in_chat()
        elif isinstance(choice, ResponseAllowedTools):
            allowed = ToolSubset(mode=choice.mode, tools=[tool.as_in_chat() for tool in choice.tools])
            choice = AllowedTools(type="allowed_tools", allowed_tools=allowed)
        return ToolFields.checked(tools, choice, self.parallel_tool_calls)
