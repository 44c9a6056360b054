"""The fields of OpenAI's requests that the server reads; any other field is refused by name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from saltus.engine.decoder import MAX_BUDGET
from saltus.serving.fields import Fields
from saltus.serving.structured import (
    MAX_TOOLS,
    FlatJsonSchemaFormat,
    Function,
    FunctionName,
    GrammarFields,
    JsonObjectFormat,
    NamedTool,
    TextFormat,
    Tool,
    ToolFields,
)

MAX_CHOICES = 128
MAX_SEED = 2**63 - 1
MAX_TOP_LOGPROBS = 20


class StreamOptions(Fields):
    """When a stream reports token counts."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # accepted and ignored


class Speculative(Fields):
    """How a text is drafted; it cannot change the text."""

    method: str | None = None
    budget: int | None = Field(
        None, ge=0, le=MAX_BUDGET
    )  # draft tokens of a call, at most; the server's is a limit, too


class SamplingFields(Fields):
    """What all requests of texts have in common. A field that is null counts as not given: clients write it so."""

    model: str | None = None
    stream: bool = False
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[int, float] | None = Field(None, max_length=1024)
    ignore_eos: bool = False
    speculative: bool | Speculative = True
    include_metrics: bool = False  # of drafting, in the answer
    # accepted and ignored
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @property
    def draft_budget(self) -> int | None:
        """The draft tokens of a call that the request asks for; None: as many as the server drafts."""
        return self.speculative.budget if isinstance(self.speculative, Speculative) else None


class SharedFields(SamplingFields, GrammarFields):
    """What chat completions and completions have in common."""

    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)


class ContentPart(Fields):
    """A piece of a message: text only."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation; fields that the chat template may read are kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[ContentPart] | None = None


class Prediction(Fields):
    """OpenAI's Predicted Outputs: what the answer will probably repeat."""

    type: Literal["content"] = "content"
    content: str | list[ContentPart]


class ChatCompletionRequest(SharedFields, ToolFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = None


class CompletionRequest(SharedFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    suffix: str | None = None  # what follows the answer, for models with fill-in-the-middle tokens
    best_of: Literal[1] | None = None


class TokenizeRequest(Fields):
    """POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class ResponseContentPart(Fields):
    """A piece of a message in a response's input, or of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponseMessage(Fields):
    """A message in a response's input, or an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ResponseContentPart]
    id: str | None = None
    status: str | None = None


class ResponseCall(Fields):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResponseCallOutput(Fields):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponseContentPart]
    id: str | None = None
    status: str | None = None


class ResponseText(Fields):
    """The form of a response's text."""

    format: TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None = Field(None, discriminator="type")
    verbosity: str | None = None


class ResponseTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ResponseNamedTool(Fields):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class ResponsesRequest(SamplingFields):
    """POST /v1/responses. Nothing is stored: the whole conversation is in `input`."""

    input: str | list[ResponseCall | ResponseCallOutput | ResponseMessage] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    text: ResponseText | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseNamedTool | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    # accepted and ignored
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesRequest:
        self.tool_fields()
        return self

    def tool_fields(self) -> ToolFields:
        """The tools as chat completions describe them. Errors: ValueError."""
        tools = [
            Tool(function=Function(**tool.model_dump(exclude={"type"}, exclude_none=True))) for tool in self.tools or ()
        ]
        named = self.tool_choice
        choice = NamedTool(function=FunctionName(name=named.name)) if isinstance(named, ResponseNamedTool) else named
        return ToolFields.checked(tools, choice, self.parallel_tool_calls)
