"""The requests of llama.cpp's own routes: /completion and /infill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from saltus.core.sampling import MAX_BIAS, MIN_TEMPERATURE
from saltus.engine.infill_template import InfillTemplate
from saltus.server.fields import Fields, Integer, Items, Number
from saltus.server.protocol import (
    MAX_CHOICES,
    MAX_ITEMS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    RANDOM_SEED,
    SamplingFields,
    of_few_biases,
)
from saltus.server.structured import GrammarFields

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama.cpp's
OFF = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": None, "repeat_penalty": None,
    "presence_penalty": None, "frequency_penalty": None,
}  # fmt: skip
"""Values with which a field does nothing."""
SAMPLERS = {
    "temperature": ("temperature",), "top_k": ("top_k",), "top_p": ("top_p",), "min_p": ("min_p",),
    "penalties": ("repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty"),
}  # fmt: skip
"""The fields of a sampler."""
LETTERS = {"t": "temperature", "k": "top_k", "p": "top_p", "m": "min_p", "e": "penalties", "i": "infill"}
UNSIGNED_RANDOM_SEED = 2**32 - 1  # −1 in llama.cpp's type of seeds
DEFAULT_MIDDLE_TOKENS = 128
MAX_NAME = 256  # characters of a sampler or of a field of the answer

Name = Annotated[str, Field(max_length=MAX_NAME)]


def _biases_by_token(given: Any) -> Any:
    """Biases as OpenAI gives them, also from a list of pairs; false bans a token."""
    if isinstance(given, list):
        if any(not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int for pair in given):
            raise ValueError("logit_bias: give pairs of a token id and a number, or false; /tokenize has the ids")
        given = {token: -MAX_BIAS if bias is False else bias for token, bias in given}
    return of_few_biases(given)


class LlamaFields(SamplingFields, GrammarFields):
    """What both routes have in common."""

    n_predict: int = Field(-1, ge=-2)  # new tokens, at most; below 0: as many as the context holds
    n_cmpl: int = Field(1, ge=1, le=MAX_CHOICES)  # texts of a prompt
    n_indent: int = Field(0, ge=0)  # white space that lines after the first begin with; another line ends the text
    # since the first token; after it the next line break ends the text; 0: off
    t_max_predict_ms: float = Field(0, allow_inf_nan=False)
    samplers: Name | Annotated[Items[Name], Field(max_length=64)] | None = None  # those in use
    n_probs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)  # likeliest tokens at each place, with log-probabilities
    post_sampling_probs: bool = False
    return_tokens: bool = False
    timings_per_token: bool = False
    # which fields the answer has; "timings/prompt_n" is a field in a field
    response_fields: Items[Name] | None = Field(None, max_length=1024)
    logit_bias: Annotated[dict[int, Number] | None, BeforeValidator(_biases_by_token)] = None

    @model_validator(mode="before")
    @classmethod
    def _by_llamas_names(cls, given: Any) -> Any:
        """OpenAI's names of some fields are taken, too."""
        if isinstance(given, dict):
            given = dict(given)
            for name, others in (("n_predict", ("max_completion_tokens", "max_tokens")), ("n_cmpl", ("n",))):
                for other in others:
                    value = given.pop(other, None)
                    if given.get(name) is None:
                        given[name] = value
        return given

    @model_validator(mode="after")
    def _with_defaults(self) -> LlamaFields:
        for name, value in DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.samplers is not None:
            given = self.samplers
            used = {LETTERS.get(letter) for letter in given} if isinstance(given, str) else set(given)
            for sampler, fields in SAMPLERS.items():
                for field in fields if sampler not in used else ():
                    setattr(self, field, OFF[field])
            if "infill" in used:  # it leaves the likeliest tokens alone
                self.temperature = 0.0
        if self.seed == UNSIGNED_RANDOM_SEED:
            self.seed = RANDOM_SEED
        if self.post_sampling_probs and self.n_probs:
            raise ValueError("post_sampling_probs: probabilities are those of the model here; leave it out")
        return self

    @property
    def most_new_tokens(self) -> int | None:
        return None if self.n_predict < 0 else self.n_predict

    @property
    def requested_logprobs(self) -> tuple[bool, int]:
        return self.n_probs > 0, self.n_probs

    @property
    def num_distinct(self) -> int:
        """Texts of a prompt that are decoded: one where all are the same."""
        return 1 if (self.temperature or 0) < MIN_TEMPERATURE or not self.n_predict else self.n_cmpl


class TextPrompt(Fields):
    """A prompt as an object, which elsewhere may have images beside its text."""

    prompt_string: str


PromptParts = Annotated[Items[Integer | str], Field(min_length=1, max_length=MAX_TOKENS)]
Prompts = Annotated[Items[str | TextPrompt | PromptParts], Field(min_length=1, max_length=MAX_ITEMS)]


class LlamaCompletionRequest(LlamaFields):
    """POST /completion."""

    # a text, token ids, both by turns, or a list of such prompts
    prompt: str | TextPrompt | PromptParts | Prompts

    @property
    def prompts(self) -> list[str | Sequence[int | str]]:
        """Each prompt: a text, or its parts, which are texts and token ids."""
        given: Any = self.prompt
        if not isinstance(given, list) or (any(type(part) is int for part in given)):
            given = [given]
        return [one.prompt_string if isinstance(one, TextPrompt) else one for one in given]


class ExtraFile(Fields):
    """Another file, or a piece of one."""

    text: str
    filename: str = "file"


class InfillRequest(LlamaFields):
    """POST /infill."""

    prompt_field = "input_prefix"

    n_predict: int = Field(DEFAULT_MIDDLE_TOKENS, ge=-2)
    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""  # what follows the prefix
    parts: Items[str] | None = Field(None, min_length=2, max_length=257)  # the texts around holes, in place of the two
    # of the holes between parts, in tokens; null: the model ends it
    hole_lengths: Items[Integer | None] | None = Field(None, max_length=256)
    input_extra: Items[ExtraFile] = Field(default_factory=list, max_length=1024)

    @model_validator(mode="after")
    def _of_one_form(self) -> InfillRequest:
        if self.parts is None:
            if self.hole_lengths is not None:
                raise ValueError("hole_lengths are of the holes between parts; give parts, too")
            return self
        if self.input_prefix or self.input_suffix or self.prompt:
            raise ValueError("give either parts, or input_prefix and input_suffix")
        if self.hole_lengths is not None and len(self.hole_lengths) != len(self.parts) - 1:
            raise ValueError(f"{len(self.parts)} parts have {len(self.parts) - 1} holes between them")
        return self

    def template(self) -> InfillTemplate:
        """The text with its holes. Errors: ValueError."""
        if self.parts is None:
            return InfillTemplate((self.input_prefix + self.prompt, self.input_suffix), (None,))
        return InfillTemplate(tuple(self.parts), tuple(self.hole_lengths or [None] * (len(self.parts) - 1)))
