"""The answers of llama.cpp's own routes: texts with their timings, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saltus.engine.infill import AnyRequest, HolesRequest
from saltus.engine.text_request import TextRequest
from saltus.methods.shared.answer_memory import AnswerMemory
from saltus.server.answers import Answer, Backend, Choice
from saltus.server.errors import ApiError
from saltus.server.events import event_text
from saltus.server.line_limits import LineLimits
from saltus.server.llama_request import LlamaCompletionRequest, LlamaFields
from saltus.server.served_request import Delta
from saltus.server.token_entries import token_entries
from saltus.server.usage import speculation_metrics


@dataclass
class TokenTimes:
    """When a text's first and last tokens came, by `time.perf_counter`."""

    first: float
    last: float


class LlamaAnswer(Answer):
    """Texts of one prompt or several; each is given `copies` times, where more of them would be the same."""

    body: LlamaFields

    def __init__(
        self, backend: Backend, requests: Sequence[AnyRequest], method: str, body: LlamaFields, context: int | None
    ) -> None:
        super().__init__(backend, requests, method, body)
        self.context, self.copies = context, body.n_cmpl // body.num_distinct
        self.limits = {choice.index: _limited(choice.asked, body) for choice in self.choices}
        self.submitted, self.times = 0.0, {}

    def draft_from(self, memory: AnswerMemory) -> None:
        if isinstance(self.choices[0].asked, TextRequest):  # tokens of holes do not follow on those given
            super().draft_from(memory)

    def submit(self) -> None:
        super().submit()
        self.submitted = time.perf_counter()

    async def whole(self) -> Any:
        """The answer as one object, or a list of several. Errors: ApiError."""
        async for _ in self._timed():
            pass
        made = [each for choice in self.choices for each in self._objects(choice, choice, True)]
        return made if len(made) > 1 else made[0]

    async def stream(self) -> AsyncIterator[str]:
        try:
            async for choice, delta in self._timed():
                if delta.text or delta.tokens:
                    yield self._events(choice, delta, False)
                if delta.finish_reason is not None:
                    yield self._events(choice, Delta("", ()), True)
        except ApiError as error:
            yield event_text(error.body())

    async def _timed(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """Each delta as it comes, after its time has been noted."""
        async for choice, delta in self.arriving():
            now = time.perf_counter()
            self.times.setdefault(choice.index, TokenTimes(now, now)).last = now
            yield choice, delta

    def _events(self, choice: Choice, new: Delta, stop: bool) -> str:
        return "".join(map(event_text, self._objects(choice, new, stop)))

    def _objects(self, choice: Choice, new: Choice | Delta, stop: bool) -> list[dict[str, Any]]:
        made = self._object(choice, new, stop)
        first = choice.index * self.copies
        return [self._selected({**made, "index": index}) for index in range(first, first + self.copies)]

    def _object(self, choice: Choice, new: Choice | Delta, stop: bool) -> dict[str, Any]:
        """llama.cpp's object, with what it says of a finished text at the end only."""
        body, request = self.body, choice.asked.request
        fields: dict[str, Any] = {
            "index": 0, "content": new.text, "tokens": [*new.tokens] if body.return_tokens or body.stream else [],
            "id_slot": -1, "stop": stop, "model": self.backend.name,
            "tokens_predicted": len(choice.tokens), "tokens_evaluated": len(request.prompt),
        }  # fmt: skip
        if body.n_probs:
            fields["completion_probabilities"] = self._probabilities(new)
        if stop or body.timings_per_token:
            fields["timings"] = self._timings(choice)
        if new.calls or not body.stream:  # the last event of a stream has none of its own
            fields |= self.metrics(new.calls)
        if not stop:
            return fields
        if isinstance(choice.asked, HolesRequest):
            fields["fillings"] = choice.asked.infilling().fillings
        kind, word = self._stop(choice)
        if isinstance(body, LlamaCompletionRequest):
            fields["prompt"] = str(getattr(choice.asked, "prompt", ""))
        return fields | {
            "generation_settings": generation_settings(body, choice.asked, self.context),
            "stop_type": kind, "stopping_word": word, "truncated": self._fills_context(choice),
            "has_new_line": "\n" in choice.text, "tokens_cached": _num_cached(choice),
        }  # fmt: skip

    def _stop(self, choice: Choice) -> tuple[str, str]:
        """What ended the text, and the stop string if it was one."""
        limits = self.limits[choice.index]
        if choice.finish_reason == "length" or limits is None or limits.ended:
            return "limit", ""
        word = limits.output.stop_string
        return ("eos", "") if word is None else ("word", word)

    def _fills_context(self, choice: Choice) -> bool:
        """Whether the context ended the text, before `n_predict` tokens."""
        read, written = len(choice.prompt), len(choice.tokens)
        most = self.body.most_new_tokens
        return self.context is not None and read + written >= self.context and (most is None or written < most)

    def _probabilities(self, of: Choice | Delta) -> list[dict[str, Any]]:
        """The tokens of a text, or of a part of it, with the likeliest ones beside."""
        entries = token_entries(self.backend.tokenizer, of)
        listed = of.top_logprobs or [[]] * len(of.scored)
        return [
            {
                "id": one.token, **entry,
                "top_logprobs": [
                    {"id": token, **other} for (token, _), other in zip(likely, entry["top_logprobs"], strict=True)
                ],
            }
            for one, likely, entry in zip(of.scored, listed, entries, strict=True)
        ]  # fmt: skip

    def _timings(self, choice: Choice) -> dict[str, Any]:
        """Numbers of tokens and milliseconds: until the first tokens came, and from then on."""
        times, cached = self.times[choice.index], _num_cached(choice)
        drafted = speculation_metrics(choice.calls)
        timings = {
            "cache_n": cached,
            **_timing("prompt", len(choice.prompt) - cached, times.first - self.submitted),
            **_timing("predicted", len(choice.tokens), times.last - times.first),
        }
        if drafted["num_draft_tokens"]:
            timings |= {
                "draft_n": drafted["num_draft_tokens"], "draft_n_accepted": drafted["num_accepted_draft_tokens"],
            }  # fmt: skip
        return timings

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


def generation_settings(body: LlamaFields, made: AnyRequest, context: int | None) -> dict[str, Any]:
    """The settings of a text as they are."""
    request = made.request
    sampling = asdict(request.sampling)
    names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    asked = ("n_indent", "t_max_predict_ms", "n_probs", "ignore_eos", "stream", "samplers")
    return {
        "n_ctx": context, "seed": request.seed, **{name: sampling[name] for name in names},
        "repeat_penalty": sampling["repetition_penalty"], "repeat_last_n": -1,
        "n_predict": body.n_predict, "max_tokens": body.n_predict,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        **{name: getattr(body, name) for name in asked},
    }  # fmt: skip


def _limited(made: AnyRequest, body: LlamaFields) -> LineLimits | None:
    """The limits on the lines of a text, as its end; None for one with holes, whose ends are its own."""
    if not isinstance(made, TextRequest):
        return None
    limits = LineLimits(made.output, body.n_indent, max(body.t_max_predict_ms, 0) / 1000)
    if limits.min_indent or limits.seconds:
        made.request.is_end = limits.add
    return limits


def _num_cached(choice: Choice) -> int:
    return choice.served.cached_tokens if choice.served is not None else 0


def _timing(kind: str, count: int, seconds: float) -> dict[str, Any]:
    milliseconds = 1000 * seconds
    return {
        f"{kind}_n": count, f"{kind}_ms": milliseconds, f"{kind}_per_token_ms": milliseconds / max(count, 1),
        f"{kind}_per_second": count / seconds if seconds else 0.0,
    }  # fmt: skip
