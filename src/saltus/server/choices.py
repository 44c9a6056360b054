"""The answers of chat completions and completions: choices, whole or as chunks."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

from saltus.engine.chat.channel_reader import ChannelReader
from saltus.engine.chat.reasoning import Reasoning, ReasoningCounter, ReasoningReader
from saltus.engine.chat.tool_calls import ToolCallReader
from saltus.engine.request import CallRecord
from saltus.engine.text_request import TextRequest
from saltus.engine.token_texts import token_name
from saltus.server.answers import Answer, Backend, Choice
from saltus.server.errors import ApiError
from saltus.server.events import event_text
from saltus.server.protocol import ChatCompletionRequest, CompletionRequest
from saltus.server.served_request import Delta
from saltus.server.structured import Tools, call_object
from saltus.server.token_entries import token_entries
from saltus.server.usage import usage

AnyText = TypeVar("AnyText", Choice, Delta)


class _Form:
    """What the objects of both have in common."""

    prefix = object = chunk_object = ""

    def __init__(self, tokenizer: Any, logprobs: bool) -> None:
        self.tokenizer, self.logprobs = tokenizer, logprobs

    def reasoning_tokens(self, choices: Sequence[Choice]) -> int | None:
        return None

    def _entry(self, index: int, body: dict[str, Any], of: Choice | Delta) -> dict[str, Any]:
        logprobs = self._logprobs(index, of) if self.logprobs else None
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": of.finish_reason}

    def _logprobs(self, index: int, of: Choice | Delta) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(_Form):
    """The objects of chat completions."""

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, tokenizer: Any, logprobs: bool, tools: Tools, reasoning: Reasoning | None, shows_reasoning: bool
    ) -> None:
        super().__init__(tokenizer, logprobs)
        self.tools, self.reasoning, self.shows_reasoning = tools, reasoning, shows_reasoning
        self.readers: dict[int, tuple[ReasoningReader | ChannelReader | None, ToolCallReader | None]] = {}  # by choice
        self.num_calls: Counter[int] = Counter()  # by choice
        self.counters: dict[int, ReasoningCounter] = {}  # by choice

    def choice(self, choice: Choice) -> dict[str, Any]:
        thought, text, calls = self._read(choice, choice.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thought is not None:
            message |= {"content": text or None, "reasoning_content": thought or None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return self._entry(choice.index, {"message": message}, self._shown(choice, choice))

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, choice: Choice, new: Delta) -> dict[str, Any]:
        thought, text, calls = self._read(choice, new.text, last=new.finish_reason is not None)
        first = self.num_calls[choice.index] - len(calls)
        delta: dict[str, Any] = {"reasoning_content": thought} if thought else {}
        if text:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": first + place, **call} for place, call in enumerate(calls)]
        return self._entry(choice.index, {"delta": delta}, self._shown(choice, new))

    def _shown(self, choice: Choice, of: AnyText) -> AnyText:
        """A text or a part of it without the log-probabilities of reasoning that is not shown."""
        num_before = len(choice.scored) - len(of.scored)
        hidden = self._num_hidden_tokens(choice) - num_before if self.logprobs else 0
        if hidden <= 0:
            return of
        return replace(
            of, scored=of.scored[hidden:], logprobs=of.logprobs[hidden:], top_logprobs=of.top_logprobs[hidden:]
        )

    def _entry(self, index: int, body: dict[str, Any], of: Choice | Delta) -> dict[str, Any]:
        entry = super()._entry(index, body, of)
        if entry["finish_reason"] == "stop" and self.num_calls[index]:
            entry["finish_reason"] = "tool_calls"
        return entry

    def reasoning_tokens(self, choices: Sequence[Choice]) -> int | None:
        """How many tokens of all choices are reasoning; None for a model without."""
        if self.reasoning is None:
            return None
        return sum(map(self._num_reasoning_tokens, choices))

    def _num_reasoning_tokens(self, choice: Choice) -> int:
        """How many tokens of a choice are reasoning by now."""
        if choice.index not in self.counters:
            self.counters[choice.index] = ReasoningCounter(self.reasoning, choice.prompt)
        return self.counters[choice.index].count(choice.tokens)

    def _num_hidden_tokens(self, choice: Choice) -> int:
        """How many tokens of a choice are reasoning that is not shown."""
        reads = self.readers[choice.index][0] is not None
        return self._num_reasoning_tokens(choice) if reads and not self.shows_reasoning else 0

    def _read(self, choice: Choice, text: str, last: bool) -> tuple[str | None, str, list[dict[str, Any]]]:
        """The reasoning of a choice (None if it is not shown), its text without its calls, and these."""
        if choice.index not in self.readers:
            prompt, reasoning = choice.prompt, self.reasoning
            self.readers[choice.index] = reasoning and reasoning.reader(prompt), self.tools.reader()
        of_reasoning, of_calls = self.readers[choice.index]
        thought = None
        if of_reasoning is not None:
            thought, text = of_reasoning.read(text, last)
            thought = thought if self.shows_reasoning else None
        if of_calls is None:
            return thought, text, []
        content, calls = of_calls.read(text, last)
        self.num_calls[choice.index] += len(calls)
        return thought, content, [call_object(call, f"call_{uuid.uuid4().hex[:24]}") for call in calls]

    def _logprobs(self, index: int, of: Choice | Delta) -> dict[str, Any]:
        return {"content": token_entries(self.tokenizer, of), "refusal": None}


class TextForm(_Form):
    """The objects of completions."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, tokenizer: Any, logprobs: bool, echoes: Sequence[str], echoed_tokens: Sequence[Sequence[str]]
    ) -> None:
        super().__init__(tokenizer, logprobs)
        self.echoes, self.echoed_tokens = echoes, echoed_tokens  # the prompts, and their tokens' texts if these count
        self.offsets = Counter({index: len(echo) for index, echo in enumerate(echoes)})  # of each choice's next token

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._entry(choice.index, {"text": self.echoes[choice.index] + choice.text}, choice)

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self.echoes[index]:
            return None
        return {"index": index, "text": self.echoes[index], "logprobs": None, "finish_reason": None}

    def delta(self, choice: Choice, new: Delta) -> dict[str, Any]:
        return self._entry(choice.index, {"text": new.text}, new)

    def _logprobs(self, index: int, of: Choice | Delta) -> dict[str, Any]:
        """Of an echoed prompt first, whose first token has none, and then of new tokens."""
        scored, values = [(one.token, one.text, one.drops_space) for one in of.scored], [*of.logprobs]
        listed = [*of.top_logprobs] or [[]] * len(scored)
        offset = self.offsets[index]
        if (prompt := of.prompt_scores) is not None:
            offset, texts = 0, self.echoed_tokens[index]
            scored = [*((token, text, False) for token, text in zip(prompt.tokens, texts, strict=True)), *scored]
            values = [None, *prompt.log_probabilities, *values]
            listed = [[], *(prompt.top_log_probabilities or [[]] * len(prompt.log_probabilities)), *listed]
        offsets = list(accumulate((len(text) for _, text, _ in scored), initial=offset))
        self.offsets[index] = offsets.pop()
        top = [
            self._by_text(token, text, drops_space, value, likely) if likely and value is not None else None
            for (token, text, drops_space), value, likely in zip(scored, values, listed, strict=True)
        ]
        return {
            "tokens": [text for _, text, _ in scored], "token_logprobs": values,
            "top_logprobs": top if any(top) else None, "text_offset": offsets,
        }  # fmt: skip

    def _by_text(
        self, own: int, text: str, drops_space: bool, value: float, likely: Sequence[tuple[int, float]]
    ) -> dict[str, float]:
        """The likeliest tokens and the text's own, by what is written of them, or by ids where that is the same."""
        named = {} if own in (token for token, _ in likely) else {text: value}
        for token, alternative in likely:
            name = text if token == own else token_name(self.tokenizer, token, drops_space, "bytes:")[0]
            named[f"token_id:{token}" if token != own and (name in named or name == text) else name] = alternative
        return named


class ChoicesAnswer(Answer):
    """An answer in either form."""

    body: ChatCompletionRequest | CompletionRequest

    def __init__(
        self,
        backend: Backend,
        form: ChatForm | TextForm,
        requests: Sequence[TextRequest],
        method: str,
        body: ChatCompletionRequest | CompletionRequest,
    ) -> None:
        self.form, self.prefix = form, form.prefix
        self.score_prompts = isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None
        super().__init__(backend, requests, method, body)

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        async for _ in self.arriving():
            pass
        made = [self._with_stop_reason(self.form.choice(choice), choice) for choice in self.choices]
        answer = self._object(self.form.object, made)
        return answer | {"usage": self._usage()} | self.metrics(self.calls)

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        options = self.body.stream_options
        continuous = options is not None and options.continuous_usage_stats

        silent: list[list[CallRecord]] = [[] for _ in self.choices]  # calls whose text is still held back

        def event(
            choices: list[dict[str, Any]], counts: dict[str, Any] | None, calls: Sequence[CallRecord] | None = None
        ) -> str:
            chunk = self._object(self.form.chunk_object, choices)
            if calls is not None:
                chunk |= self.metrics(calls)
            if counts is not None:
                chunk["usage"] = counts
            return event_text(chunk)

        opened: set[int] = set()
        try:
            async for choice, delta in self.arriving():
                silent[choice.index] += delta.calls
                if choice.index not in opened:  # not before, so that clients can time the first token by it
                    opened.add(choice.index)
                    if (opening := self.form.opening(choice.index)) is not None:
                        yield event([opening], self._usage(len(delta.tokens)) if continuous else None)
                if delta.text or delta.scored or delta.prompt_scores is not None or delta.finish_reason is not None:
                    counts = self._usage() if continuous else None
                    entry = self._with_stop_reason(self.form.delta(choice, delta), choice)
                    yield event([entry], counts, silent[choice.index])
                    silent[choice.index] = []
            if options is not None and options.include_usage:
                yield event([], self._usage(), self.calls)
        except ApiError as error:
            yield event_text(error.body())
        yield "data: [DONE]\n\n"

    def _with_stop_reason(self, entry: dict[str, Any], choice: Choice) -> dict[str, Any]:
        """At the end of a text also vLLM's field: the stop string or the token of `stop_token_ids` that ended it."""
        if choice.finish_reason is None:
            return entry
        reason = getattr(choice.asked.output, "stop_string", None)
        if reason is None and choice.finish_reason == "stop":
            reason = next((token for token in choice.tokens[-1:] if token in (self.body.stop_token_ids or ())), None)
        return {**entry, "stop_reason": reason}

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.backend.name, "choices": choices,
        }  # fmt: skip

    def _usage(self, num_unsent: int = 0) -> dict[str, Any]:
        """Token counts up to now, without the last tokens if they are not sent yet; of drafts when all are there."""
        each_prompt = self.choices[:: self.body.n]
        complete = all(choice.finish_reason is not None for choice in self.choices)
        return usage(
            sum(len(choice.prompt) for choice in each_prompt),
            sum(len(choice.tokens) for choice in self.choices) - num_unsent,
            sum(choice.served.cached_tokens for choice in each_prompt if choice.served is not None),
            self.calls if complete and getattr(self.body, "prediction", None) is not None else None,
            self.form.reasoning_tokens(self.choices),
        )
