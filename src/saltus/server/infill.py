"""llama.cpp's route /infill: generate the text between a prefix and a suffix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field, model_validator

from saltus.engine.engine import TextRequest
from saltus.engine.infill import HolesRequest
from saltus.engine.infill_template import InfillTemplate
from saltus.engine.request import CallRecord
from saltus.methods.shared.answer_memory import AnswerMemory
from saltus.server.answers import Answer
from saltus.server.errors import ApiError
from saltus.server.events import event_text
from saltus.server.fields import Fields, Integer, Items
from saltus.server.protocol import SamplingFields

DEFAULT_TEMPERATURE = 0.8  # llama.cpp's, as are the next two
DEFAULT_TOP_K, DEFAULT_TOP_P, DEFAULT_MIN_P = 40, 0.95, 0.05


class ExtraFile(Fields):
    """Another file, or a piece of one."""

    text: str
    filename: str = "file"


class InfillRequest(SamplingFields):
    """POST /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""  # what follows the prefix
    parts: Items[str] | None = Field(None, min_length=2, max_length=257)  # the texts around holes, in place of the two
    # of the holes between parts, in tokens; null: the model ends it
    hole_lengths: Items[Integer | None] | None = Field(None, max_length=256)
    input_extra: Items[ExtraFile] = Field(default_factory=list, max_length=1024)
    n_predict: int = Field(128, ge=-1)  # −1: as many tokens as the context holds
    # which fields the answer has; "timings/prompt_n" is a field in a field
    response_fields: Items[str] | None = Field(None, max_length=1024)

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

    @model_validator(mode="after")
    def _with_defaults(self) -> InfillRequest:
        defaults = {
            "temperature": DEFAULT_TEMPERATURE, "top_k": DEFAULT_TOP_K, "top_p": DEFAULT_TOP_P, "min_p": DEFAULT_MIN_P,
        }  # fmt: skip
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self


class InfillAnswer(Answer):
    """The text in one hole, or from the first hole to the last."""

    body: InfillRequest

    def draft_from(self, memory: AnswerMemory) -> None:
        if isinstance(self.choices[0].request, TextRequest):  # tokens of holes do not follow on those given
            super().draft_from(memory)

    async def whole(self) -> dict[str, Any]:
        async for _ in self.arriving():
            pass
        return self._selected(self._object(self.choices[0].text, True, self.calls))

    async def stream(self) -> AsyncIterator[str]:
        try:
            async for _, delta in self.arriving():
                chunk = self._selected(self._object(delta.text, delta.finish_reason is not None, delta.calls))
                yield event_text(chunk)
        except ApiError as error:
            yield event_text(error.body())

    def _object(self, content: str, stop: bool, new_calls: Sequence[CallRecord]) -> dict[str, Any]:
        """llama.cpp's object, with what it says of a finished text at the end only."""
        choice = self.choices[0]
        request, calls = choice.request.request, choice.calls
        fields: dict[str, Any] = {
            "index": 0, "content": content, "tokens": [], "id_slot": -1, "stop": stop,
            "tokens_predicted": len(choice.tokens), "tokens_evaluated": len(request.prompt),
        }  # fmt: skip
        fields |= self.metrics(new_calls)
        if not stop:
            return fields
        read = calls[0].context_tokens_read if calls else 0
        timings = {
            **_timing("prompt", read, calls[0].seconds if calls else 0.0),
            **_timing("predicted", len(choice.tokens), sum((call.seconds for call in calls[1:]), 0.0)),
        }
        if isinstance(choice.request, HolesRequest):
            fields["fillings"] = choice.request.infilling().fillings
        kind = "limit" if choice.finish_reason == "length" else "word" if self._ended_by_word() else "eos"
        fields |= {
            "model": self.backend.name, "stop_type": kind, "stopping_word": "", "truncated": False,
            "has_new_line": "\n" in choice.text, "timings": timings,
            "tokens_cached": choice.served.cached_tokens if choice.served is not None else 0,
        }  # fmt: skip
        return fields

    def _ended_by_word(self) -> bool:
        choice = self.choices[0]
        ends = choice.request.output.end_tokens if isinstance(choice.request, TextRequest) else ()
        return not choice.tokens or choice.tokens[-1] not in ends

    def _selected(self, content: dict[str, Any]) -> dict[str, Any]:
        """The fields that the client wants, under the names that it gave."""
        if not self.body.response_fields:
            return content
        chosen = {}
        for name in self.body.response_fields:
            value: Any = content
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                chosen[name] = value
        return chosen


def _timing(kind: str, count: int, seconds: float) -> dict[str, Any]:
    milliseconds = 1000 * seconds
    return {
        f"{kind}_n": count, f"{kind}_ms": milliseconds, f"{kind}_per_token_ms": milliseconds / max(count, 1),
        f"{kind}_per_second": count / seconds if seconds else 0.0,
    }  # fmt: skip
