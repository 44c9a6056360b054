"""The fields of OpenAI's requests that the server reads; any other field is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from saltus.engine.decoder import MAX_DRAFT_TOKENS
from saltus.server.errors import ApiError
from saltus.server.fields import Fields, Integer, Items, JsonObject, Number
from saltus.server.structured import MAX_TOOLS, GrammarFields, Tool, ToolFields

MAX_CHOICES = 128
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
RANDOM_SEED = -1  # of vLLM and llama.cpp
NO_LIMIT = -1  # of new tokens, in llama.cpp and others
MAX_TOP_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # stop strings, and characters of each
MAX_STOP_TOKENS = 1024
MAX_METHOD_LENGTH = 256  # characters of methods joined by +
MAX_BIASES = 1024  # tokens of logit_bias
MAX_ITEMS = 4096  # messages of a conversation with their parts, or prompts of a request
MAX_TOKENS = 2**20  # of a prompt that is given as token ids

TextKind = Literal["text", "input_text", "output_text", "refusal"]  # of the parts of messages
StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
TokenIds = Annotated[Items[Integer], Field(max_length=MAX_TOKENS)]
StopTokenIds = Annotated[Items[Integer], Field(max_length=MAX_STOP_TOKENS)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _without_no_limit(given: Any) -> Any:
    return None if given == NO_LIMIT else given


NewTokens = Annotated[int | None, BeforeValidator(_without_no_limit)]
"""The limit of new tokens; None: as many as the model's context holds."""


def of_few_biases(given: Any) -> Any:
    """Biases of few tokens."""
    if isinstance(given, dict) and len(given) > MAX_BIASES:  # each wrong one would be an error of its own
        raise ValueError(f"logit_bias has {len(given):,} tokens, but at most {MAX_BIASES:,} are read; leave some out")
    return given


def _num_items(given: Any, depth: int = 0) -> int:
    """How many items a list has, with the parts of messages, and with the parts of those."""
    if not isinstance(given, list):
        return 0
    inner = (item.get("content", item.get("output")) for item in given if isinstance(item, dict)) if depth < 2 else ()
    return len(given) + sum(_num_items(content, depth + 1) for content in inner)


def of_few_items(given: Any) -> Any:
    """A conversation with few messages and parts: a million of them would take seconds to be read."""
    if isinstance(given, list):
        count = _num_items(given)
        if count > MAX_ITEMS:
            raise ValueError(
                f"a conversation has {count:,} messages and parts, but at most {MAX_ITEMS:,} are read; shorten it"
            )
    return given


class StreamOptions(Fields):
    """When a stream reports token counts."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(Fields):
    """How a text is drafted; it cannot change the text."""

    method: str | None = Field(None, max_length=MAX_METHOD_LENGTH)
    # draft tokens of a call, at most; the server's is a limit, too
    max_draft_tokens: int | None = Field(None, ge=0, le=MAX_DRAFT_TOKENS)


class SamplingFields(Fields):
    """What all requests of texts have in common. A field that is null counts as not given: clients write it so."""

    model: str | None = None
    stream: bool = False
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    stop: StopString | Annotated[Items[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: StopTokenIds | None = None
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    repeat_penalty: float | None = Field(None, gt=0)  # llama.cpp's name for the same
    repeat_last_n: int | None = Field(None, ge=-1)  # llama.cpp's: the tokens that penalties look at; −1: all, 0: none
    penalty_last_n: int | None = Field(None, ge=-1)  # the same
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Number] | None, BeforeValidator(of_few_biases)] = None
    ignore_eos: bool = False
    speculative: bool | Speculative = True
    include_metrics: bool = False  # of drafting, in the answer
    cache_prompt: bool = True  # llama.cpp's; false: what was read for other texts is read again

    prompt_field: ClassVar[str] = "prompt"  # what errors of a prompt name

    @property
    def most_new_tokens(self) -> int | None:
        """The limit of new tokens; None: as many as the model's context holds."""
        raise NotImplementedError

    @property
    def requested_logprobs(self) -> tuple[bool, int]:
        """Whether log-probabilities are asked for, and of how many of the likeliest tokens beside. Errors: ApiError."""
        return False, 0

    @property
    def predicted_text(self) -> str | None:
        """What the text will probably repeat."""
        return None

    @property
    def max_draft_tokens(self) -> int | None:
        """The draft tokens of a call that the request asks for; None: as many as the server drafts."""
        return self.speculative.max_draft_tokens if isinstance(self.speculative, Speculative) else None


def checked_logprobs(logprobs: bool, top_logprobs: int | None, needed: str) -> tuple[bool, int]:
    """Both, as `requested_logprobs`. Errors: ApiError 400 where the second lacks the field that is `needed`."""
    if top_logprobs and not logprobs:
        raise ApiError(400, f"top_logprobs needs {needed}", "top_logprobs")
    return logprobs, top_logprobs or 0


class SharedFields(SamplingFields, GrammarFields):
    """What chat completions and completions have in common."""

    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)

    @model_validator(mode="before")
    @classmethod
    def _by_openais_names(cls, given: Any) -> Any:
        """llama.cpp's name for the limit of new tokens is taken, too."""
        if isinstance(given, dict) and "n_predict" in given:
            given = dict(given)
            limit = given.pop("n_predict")
            if limit is not None:
                given["max_tokens"] = limit
        return given


def _of_text(kind: Any) -> Any:
    if isinstance(kind, str) and kind not in get_args(TextKind):
        raise ValueError(f"a message has a part of the type {kind!r}, but this model reads text alone; leave it out")
    return kind


class ContentPart(Fields):
    """A piece of a message: text only. A part may be a bare text, or an earlier refusal."""

    type: Annotated[TextKind, BeforeValidator(_of_text)]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _as_object(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"type": "text", "text": given}
        if isinstance(given, dict) and given.get("type") == "refusal":
            return {"text": given.get("refusal"), **{name: value for name, value in given.items() if name != "refusal"}}
        return given


class ChatFields(Fields):
    """How a conversation becomes a prompt, and what of an answer is reasoning."""

    chat_template_kwargs: JsonObject | None = None  # variables of the chat template, such as enable_thinking
    enable_thinking: bool | None = None  # the same, as Qwen's clients send it
    parse_special: bool = False  # control tokens that messages spell are tokens
    include_reasoning: bool = True
    reasoning_format: Literal["auto", "none", "deepseek"] | None = None  # llama.cpp's; none: it stays in the content

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        """Variables of the chat template."""
        return template_variables(effort, self.enable_thinking, self.chat_template_kwargs)


def template_variables(
    effort: str | None, enable_thinking: bool | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Variables of the chat template, with the reasoning effort in the words of several families of models."""
    variables: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        variables |= {"enable_thinking": False, "thinking": False}
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    return variables | dict(given or {})


class Message(BaseModel):
    """A message of a conversation; fields that the chat template may read are kept."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Items[ContentPart] | None = None
    refusal: str | None = None  # of an earlier answer, in place of a content

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role in ("system", "developer", "user"):
            raise ValueError(f"a message of the role {self.role!r} has no content; add one, if only an empty text")
        return self


class Prediction(Fields):
    """OpenAI's Predicted Outputs: what the answer will probably repeat."""

    type: Literal["content"] = "content"
    content: str | Items[ContentPart]

    @property
    def text(self) -> str:
        """The content; its parts follow on each other."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(SharedFields, ToolFields, ChatFields):
    """POST /v1/chat/completions."""

    messages: Annotated[Items[Message], BeforeValidator(of_few_items)] = Field(min_length=1)
    max_tokens: NewTokens = Field(None, ge=0)  # 0: the prompt is read for answers to come
    max_completion_tokens: NewTokens = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = None
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool = False

    prompt_field = "messages"

    @property
    def most_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def requested_logprobs(self) -> tuple[bool, int]:
        return checked_logprobs(self.logprobs, self.top_logprobs, "logprobs: true")

    @property
    def predicted_text(self) -> str | None:
        return None if self.prediction is None else self.prediction.text


class CompletionRequest(SharedFields):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[Items[str], Field(max_length=MAX_ITEMS)]
        | TokenIds
        | Annotated[Items[TokenIds], Field(max_length=MAX_ITEMS)]
    )
    max_tokens: NewTokens = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    suffix: str | None = None  # what follows the answer, for models with fill-in-the-middle tokens
    add_special_tokens: bool = True

    @property
    def most_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def requested_logprobs(self) -> tuple[bool, int]:
        return self.logprobs is not None, self.logprobs or 0


class TokenizeRequest(Fields):
    """POST /tokenize, in vLLM's form, or in llama.cpp's, with a `content`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None  # with a content: the begin token, too
    with_pieces: bool | None = None  # with a content: the text of each token, too
    messages: Annotated[Items[Message] | None, BeforeValidator(of_few_items)] = None
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # null: to a prompt, not to messages
    parse_special: bool | None = None  # null: in a prompt, not in messages
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
