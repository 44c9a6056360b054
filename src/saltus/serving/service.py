"""Answer requests with one model."""

from __future__ import annotations

import time

from starlette.concurrency import run_in_threadpool

from saltus.drafting.answer_memory import AnswerMemories
from saltus.engine.engine import Engine, TextRequest
from saltus.engine.infill_template import DEFAULT_OPEN_TOKENS
from saltus.serving.answers import Answer, Backend
from saltus.serving.batching import Batcher
from saltus.serving.choices import ChatForm, ChoicesAnswer, TextForm
from saltus.serving.errors import ApiError
from saltus.serving.infill import InfillAnswer, InfillRequest
from saltus.serving.jobs import Limits
from saltus.serving.learning import Learner
from saltus.serving.metrics import ServerMetrics
from saltus.serving.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from saltus.serving.responses import ResponseAnswer, response_messages
from saltus.serving.structured import Tools, checked_grammar, format_grammar
from saltus.serving.translation import (
    chosen_seed,
    completion_prompts,
    conversation,
    infill_request,
    max_tokens_of,
    requested_method,
    text_request,
)


class Service:
    """One model, its batch, and its metrics."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: Limits,
        remember_bytes: int = 0,
        learner: Learner | None = None,
    ) -> None:
        self.engine, self.name = engine, name
        self.memories = AnswerMemories(remember_bytes) if remember_bytes else None  # of earlier answers, by API key
        self.batcher = Batcher(engine, limits)
        self.metrics = ServerMetrics(name, self.batcher)
        self.started = int(time.time())
        self.backend = Backend(name, engine.tokenizer, self.batcher, self.metrics)
        self.learner = learner
        if learner is not None:
            learner.on_progress = self.metrics.learning_counter()

    def start(self) -> None:
        """Start the threads."""
        self.batcher.start()
        if self.learner is not None:
            self.learner.start(self.batcher)

    def close(self, timeout: float) -> None:
        """Drop what still runs and end the threads."""
        self.batcher.close(timeout)
        if self.learner is not None:
            self.learner.close()

    async def chat(self, asked: ChatCompletionRequest) -> Answer:
        """The answer to a conversation."""
        self.check_model(asked.model)
        method, seed = requested_method(asked.speculative, self.engine.method), chosen_seed(asked)
        messages, limit, tools = conversation(asked.messages), max_tokens_of(asked), Tools(self.engine, asked)
        settings = {
            "raw": False,
            "grammar": await run_in_threadpool(lambda: tools.grammar(asked.grammar(self.engine))),
            "tools": tools.offered,
        }
        requests = [
            await run_in_threadpool(text_request, self.engine, messages, asked, limit, seed + i, **settings)
            for i in range(asked.n)
        ]
        form = ChatForm(self.engine.tokenizer, asked.logprobs, tools)
        return ChoicesAnswer(self.backend, form, requests, method, asked)

    async def respond(self, asked: ResponsesRequest) -> Answer:
        """The answer in the form of OpenAI's responses."""
        self.check_model(asked.model)
        method, messages = requested_method(asked.speculative, self.engine.method), response_messages(asked)
        tools, form = Tools(self.engine, asked.tool_fields()), asked.text.format if asked.text else None

        def make() -> TextRequest:
            of_text = None if form is None else checked_grammar(self.engine, "text.format", format_grammar, form)
            settings = {"raw": False, "grammar": tools.grammar(of_text), "tools": tools.offered}
            return text_request(
                self.engine, messages, asked, asked.max_output_tokens, chosen_seed(asked), **settings
            )  # fmt: skip

        return ResponseAnswer(self.backend, [await run_in_threadpool(make)], method, asked, tools)

    async def complete(self, asked: CompletionRequest) -> Answer:
        """Continuations of texts."""
        self.check_model(asked.model)
        method, seed = requested_method(asked.speculative, self.engine.method), chosen_seed(asked)
        prompts, limit = completion_prompts(asked.prompt), asked.max_tokens
        if asked.echo and asked.logprobs is not None:
            self._check_scores_prompts(asked)
        settings = {"raw": True, "suffix": asked.suffix, "grammar": await run_in_threadpool(asked.grammar, self.engine)}
        requests = [
            await run_in_threadpool(text_request, self.engine, prompt, asked, limit, seed + i, **settings)
            for prompt in prompts
            for i in range(asked.n)
        ]
        echoes = [
            self._echo(prompt) if asked.echo else "" for prompt in prompts for _ in range(asked.n)
        ]  # fmt: skip
        return ChoicesAnswer(
            self.backend, TextForm(self.engine.tokenizer, asked.logprobs is not None, echoes), requests, method, asked
        )

    async def infill(self, asked: InfillRequest) -> Answer:
        """What stands between two texts, in llama.cpp's form, or in the holes between several."""
        self.check_model(asked.model)
        method, seed = requested_method(asked.speculative, self.engine.method), chosen_seed(asked)
        try:
            template = asked.template()
        except ValueError as error:
            raise ApiError(400, str(error), "parts") from error
        if self.engine.network.any_subset:
            if asked.stop:
                raise ApiError(400, "the holes of this model have no stop strings; leave out stop", "stop")
            given = "n_predict" in asked.model_fields_set and asked.n_predict > 0
            open_tokens = asked.n_predict if given else DEFAULT_OPEN_TOKENS
            request = await run_in_threadpool(infill_request, self.engine, template, asked, open_tokens, seed)
        else:
            if template.hole_lengths != (None,):
                raise ApiError(400, "this model fills one hole and ends it itself; give two parts", "parts")
            before, after = template.pieces
            files = [(one.filename, one.text) for one in asked.input_extra]
            limit = asked.n_predict if asked.n_predict >= 0 else None
            request = await run_in_threadpool(
                text_request, self.engine, before, asked, limit, seed, raw=True, suffix=after, files=files
            )
        return InfillAnswer(self.backend, [request], method, asked)

    def _check_scores_prompts(self, asked: CompletionRequest) -> None:
        """Refuse log-probabilities of an echoed prompt where there are none. Errors: ApiError 400."""
        if self.engine.network.any_subset:
            raise ApiError(400, "this model gives no log-probabilities of a prompt; leave out echo or logprobs", "echo")
        if asked.suffix is not None:
            raise ApiError(400, "a suffix and log-probabilities of an echoed prompt exclude each other", "suffix")

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.engine.tokenizer.decode(prompt)

    def check_model(self, asked: str | None) -> None:
        """Raise ApiError 404 for another model."""
        if asked is not None and asked not in (self.name, "default"):
            raise ApiError(
                404, f"the model {asked!r} is not served here, but {self.name!r} is", "model", "model_not_found"
            )
