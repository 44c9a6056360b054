"""Answer requests with one model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from saltus.engine.engine import AnyRequest, Engine, TextRequest
from saltus.engine.infill_template import DEFAULT_OPEN_TOKENS
from saltus.engine.text_bounds import require_fits
from saltus.methods.shared.answer_memory import AnswerMemories
from saltus.server.answers import Answer, Backend
from saltus.server.choices import ChatForm, ChoicesAnswer, TextForm
from saltus.server.engine_thread import EngineThread
from saltus.server.errors import ApiError
from saltus.server.infill import InfillAnswer, InfillRequest
from saltus.server.metrics import ServerMetrics
from saltus.server.preparation import Prepare, Workers
from saltus.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from saltus.server.responses import ResponseAnswer, response_messages
from saltus.server.served_request import Limits
from saltus.server.structured import Tools, checked_grammar, format_grammar
from saltus.server.translation import (
    chosen_seeds,
    completion_prompts,
    conversation,
    infill_request,
    max_tokens_of,
    requested_method,
    text_requests,
)

MAX_TOKENIZED = 2**20  # characters that /tokenize takes, or what fits into the context


@runtime_checkable
class OnlineLearner(Protocol):
    """What trains the drafter while the server runs (`server.learning`)."""

    def start(self, engine_thread: EngineThread, metrics: ServerMetrics) -> None: ...

    def close(self) -> None: ...


class Service:
    """One model, its batch, and its metrics."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: Limits,
        ngram_cache_bytes: int = 0,
        learner: OnlineLearner | None = None,
    ) -> None:
        self.engine, self.name = engine, name
        self.memories = AnswerMemories(ngram_cache_bytes) if ngram_cache_bytes else None  # by API key
        self.engine_thread = EngineThread(engine, limits)
        self.metrics = ServerMetrics(name, self.engine_thread)
        self.started = int(time.time())
        self.backend = Backend(name, engine.tokenizer, self.engine_thread, self.metrics)
        self.workers = Workers()
        self.learner = learner

    def start(self) -> None:
        """Start the threads."""
        self.engine_thread.start()
        if self.learner is not None:
            self.learner.start(self.engine_thread, self.metrics)

    def close(self, timeout: float) -> None:
        """Drop what still runs and end the threads."""
        self.workers.close()
        self.engine_thread.close(timeout)
        if self.learner is not None:
            self.learner.close()

    async def chat(self, asked: ChatCompletionRequest, prepare: Prepare) -> Answer:
        """The answer to a conversation."""
        self.check_model(asked.model)
        self._check_capacity(asked.n)
        method, limit = requested_method(asked.speculative, self.engine.method), max_tokens_of(asked)

        def make() -> tuple[Tools, list[TextRequest]]:
            tools = Tools(self.engine, asked)
            settings = {"grammar": tools.grammar(asked.grammar(self.engine)), "tools": tools.offered}
            seeds, messages = chosen_seeds(asked, asked.n), conversation(asked.messages)
            return tools, text_requests(self.engine, messages, asked, limit, seeds, raw=False, **settings)

        tools, requests = await prepare(make)
        return ChoicesAnswer(
            self.backend, ChatForm(self.engine.tokenizer, asked.logprobs, tools), requests, method, asked
        )

    async def respond(self, asked: ResponsesRequest, prepare: Prepare) -> Answer:
        """The answer in the form of OpenAI's responses."""
        self.check_model(asked.model)
        self._check_capacity(1)
        method, form = (
            requested_method(asked.speculative, self.engine.method),
            asked.text.format if asked.text else None,
        )

        def make() -> tuple[Tools, list[TextRequest]]:
            tools = Tools(self.engine, asked.tool_fields())
            of_text = None if form is None else checked_grammar(self.engine, "text.format", format_grammar, form)
            settings = {"grammar": tools.grammar(of_text), "tools": tools.offered}
            limit, seeds, messages = asked.max_output_tokens, chosen_seeds(asked), response_messages(asked)
            return tools, text_requests(self.engine, messages, asked, limit, seeds, raw=False, **settings)

        tools, requests = await prepare(make)
        return ResponseAnswer(self.backend, requests, method, asked, tools)

    async def complete(self, asked: CompletionRequest, prepare: Prepare) -> Answer:
        """Continuations of texts."""
        self.check_model(asked.model)
        prompts = completion_prompts(asked.prompt)
        self._check_capacity(len(prompts) * asked.n)
        method, seeds = requested_method(asked.speculative, self.engine.method), chosen_seeds(asked, asked.n)
        if asked.echo and asked.logprobs is not None:
            self._check_scores_prompts(asked)
        settings = {"raw": True, "suffix": asked.suffix, "grammar": await prepare(asked.grammar, self.engine)}
        requests: list[TextRequest] = []
        for prompt in prompts:  # one by one: others have their turn between them, and a client that leaves ends it
            make = partial(text_requests, self.engine, prompt, asked, asked.max_tokens, seeds, **settings)
            requests += await prepare(make)
        echoes = [str(request.prompt) if asked.echo else "" for request in requests]
        return ChoicesAnswer(
            self.backend, TextForm(self.engine.tokenizer, asked.logprobs is not None, echoes), requests, method, asked
        )

    async def infill(self, asked: InfillRequest, prepare: Prepare) -> Answer:
        """What stands between two texts, in llama.cpp's form, or in the holes between several."""
        self.check_model(asked.model)
        self._check_capacity(1)
        method = requested_method(asked.speculative, self.engine.method)
        return InfillAnswer(self.backend, await prepare(self._infill_requests, asked), method, asked)

    def _infill_requests(self, asked: InfillRequest) -> Sequence[AnyRequest]:
        seeds = chosen_seeds(asked)
        try:
            template = asked.template()
        except ValueError as error:
            raise ApiError(400, str(error), "parts") from error
        if self.engine.network.any_subset:
            if asked.stop:
                raise ApiError(400, "the holes of this model have no stop strings; leave out stop", "stop")
            given = "n_predict" in asked.model_fields_set and asked.n_predict > 0
            open_tokens = asked.n_predict if given else DEFAULT_OPEN_TOKENS
            return [infill_request(self.engine, template, asked, open_tokens, seeds[0])]
        if template.hole_lengths != (None,):
            raise ApiError(400, "this model fills one hole and ends it itself; give two parts", "parts")
        before, after = template.pieces
        files = [(one.filename, one.text) for one in asked.input_extra]
        limit = asked.n_predict if asked.n_predict >= 0 else None
        return text_requests(self.engine, before, asked, limit, seeds, raw=True, suffix=after, files=files)

    def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text or of a conversation. Errors: ApiError."""
        self.check_model(asked.model)
        engine, context = self.engine, self.engine.target.context_length
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        messages = None if asked.messages is None else conversation(asked.messages)
        texts = [asked.prompt or ""] if messages is None else [message["content"] for message in messages]
        try:
            if sum(map(len, texts)) > MAX_TOKENIZED:  # shorter ones may be longer than the context: clients cut them
                require_fits(texts, engine.tokenizer, context, engine.target.name, "the text")
            if messages is not None:
                tokens = engine.encode(messages)
            elif asked.add_special_tokens:
                tokens = engine.encode(texts[0], raw=True)
            else:
                tokens = engine.tokenizer(texts[0], add_special_tokens=False).input_ids
        except ValueError as error:
            raise ApiError(400, str(error), "prompt" if messages is None else "messages") from error
        strings = engine.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        return {"tokens": tokens, "token_strs": strings, "count": len(tokens), "max_model_len": context}

    def detokenize(self, asked: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens. Errors: ApiError."""
        self.check_model(asked.model)
        size = max(len(self.engine.tokenizer), self.engine.target.num_token_ids)
        if wrong := [token for token in asked.tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {wrong[0]} does not exist; the vocabulary has {size:,}", "tokens")
        return {"prompt": self.engine.tokenizer.decode(asked.tokens)}

    def _check_capacity(self, num_texts: int) -> None:
        """Refuse more texts than can be queued, before they are prepared. Errors: ApiError 400 or 429."""
        limits = self.engine_thread.limits
        capacity = limits.max_batch + limits.max_queue
        if num_texts > capacity:
            message = f"the request is for {num_texts:,} texts, but the server takes {capacity:,}; split it"
            raise ApiError(400, message, "n")
        if self.engine_thread.num_open + num_texts > capacity:
            raise ApiError(429, "the queue is full; try again later", headers={"Retry-After": "1"})

    def _check_scores_prompts(self, asked: CompletionRequest) -> None:
        """Refuse log-probabilities of an echoed prompt where there are none. Errors: ApiError 400."""
        if self.engine.network.any_subset:
            raise ApiError(400, "this model gives no log-probabilities of a prompt; leave out echo or logprobs", "echo")
        if asked.suffix is not None:
            raise ApiError(400, "a suffix and log-probabilities of an echoed prompt exclude each other", "suffix")

    def check_model(self, asked: str | None) -> None:
        """Raise ApiError 404 for another model."""
        if asked is not None and asked not in (self.name, "default"):
            raise ApiError(
                404, f"the model {asked!r} is not served here, but {self.name!r} is", "model", "model_not_found"
            )
