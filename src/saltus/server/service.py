"""Answer requests with one model."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Protocol, runtime_checkable

from saltus.engine.encoding import tokens_of_text
from saltus.engine.engine import Engine
from saltus.engine.prompt_texts import prompt_texts
from saltus.engine.text_bounds import PromptTooLongError
from saltus.engine.text_request import TextRequest
from saltus.methods.shared.answer_memory import AnswerMemories
from saltus.server.answers import Answer, Backend
from saltus.server.choices import ChatForm, ChoicesAnswer, TextForm
from saltus.server.engine_thread import EngineThread
from saltus.server.errors import CONTEXT_EXCEEDED, ApiError
from saltus.server.messages import MessageAnswer
from saltus.server.messages_request import CountTokensRequest, MessagesRequest
from saltus.server.metrics import ServerMetrics
from saltus.server.preparation import Prepare, Workers
from saltus.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Speculative,
    TokenizeRequest,
    template_variables,
)
from saltus.server.responses import ResponseAnswer, response_messages
from saltus.server.responses_request import ResponsesRequest
from saltus.server.served_request import Limits
from saltus.server.structured import Tools, checked_grammar, format_grammar
from saltus.server.token_entries import token_pieces
from saltus.server.translation import (
    ChatTexts,
    chosen_seeds,
    completion_prompts,
    conversation,
    reasoning_of,
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

    async def chat(self, body: ChatCompletionRequest, prepare: Prepare) -> Answer:
        """The answer to a conversation."""
        texts = await self._chat_texts(body, prepare)
        form = ChatForm(self.engine.tokenizer, body.logprobs, texts.tools, texts.reasoning, body.include_reasoning)
        return ChoicesAnswer(self.backend, form, texts.requests, texts.method, body)

    async def message(self, body: MessagesRequest, prepare: Prepare) -> Answer:
        """The answer to a conversation in the form of Anthropic's messages."""
        chat = body.as_chat()
        texts = await self._chat_texts(chat, prepare)
        return MessageAnswer(self.backend, texts, chat, body.omits_thinking, body.only_reads)

    async def _chat_texts(self, body: ChatCompletionRequest, prepare: Prepare) -> ChatTexts:
        """What a chat completion asks for, ready for the queue. Errors: ApiError."""
        self.check_model(body.model)
        self.check_capacity(body.n)
        method = await self.loaded_method(body.speculative)

        def make() -> ChatTexts:
            template = str(self.engine.tokenizer.chat_template)
            tools, messages = Tools(self.engine, body), conversation(body.messages, template)
            reasoning = reasoning_of(self.engine, messages, body)
            requests = text_requests(
                self.engine, messages, body, chosen_seeds(body, body.n), reasoning=reasoning,
                grammar=tools.grammar(body.text_grammar(self.engine)), tools=tools.offered,
                chat_template_kwargs=body.template_variables(body.reasoning_effort),
                add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message,
                add_special_tokens=body.add_special_tokens, parse_special=body.parse_special,
            )  # fmt: skip
            return ChatTexts(requests, method, tools, reasoning)

        return await prepare(make)

    async def respond(self, body: ResponsesRequest, prepare: Prepare) -> Answer:
        """The answer in the form of OpenAI's responses."""
        self.check_model(body.model)
        self.check_capacity(1)
        method, form = await self.loaded_method(body.speculative), body.text.format if body.text else None

        def make() -> ChatTexts:
            tools, messages = Tools(self.engine, body.tool_fields()), response_messages(body)
            of_text = None if form is None else checked_grammar(self.engine, "text.format", format_grammar, form)
            reasoning, effort = reasoning_of(self.engine, messages, body), body.reasoning and body.reasoning.effort
            requests = text_requests(
                self.engine, messages, body, chosen_seeds(body), grammar=tools.grammar(of_text), reasoning=reasoning,
                tools=tools.offered, chat_template_kwargs=body.template_variables(effort),
                parse_special=body.parse_special,
            )  # fmt: skip
            return ChatTexts(requests, method, tools, reasoning)

        return ResponseAnswer(self.backend, await prepare(make), body)

    async def complete(self, body: CompletionRequest, prepare: Prepare) -> Answer:
        """Continuations of texts."""
        self.check_model(body.model)
        prompts = completion_prompts(body.prompt)
        self.check_capacity(len(prompts) * body.n)
        method, seeds = await self.loaded_method(body.speculative), chosen_seeds(body, body.n)
        if body.echo and body.logprobs is not None:
            self._check_scores_prompts(body)
        settings = {
            "raw": True, "suffix": body.suffix or None, "add_special_tokens": body.add_special_tokens,
            "grammar": await prepare(body.text_grammar, self.engine),
        }  # fmt: skip
        requests: list[TextRequest] = []
        echoed: list[list[str]] = []
        for prompt in prompts:  # one by one: others have their turn between them, and a client that leaves ends it
            made = await prepare(partial(text_requests, self.engine, prompt, body, seeds, **settings))
            if body.echo and body.logprobs is not None:
                text, tokens = str(made[0].prompt), made[0].request.prompt
                echoed += [await prepare(prompt_texts, self.engine.tokenizer, text, tokens)] * len(made)
            requests += made
        echoes = [str(request.prompt) if body.echo else "" for request in requests]
        form = TextForm(self.engine.tokenizer, body.logprobs is not None, echoes, echoed)
        return ChoicesAnswer(self.backend, form, requests, method, body)

    def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """The tokens of a text or of a conversation. Errors: ApiError."""
        self.check_model(body.model)
        tokenizer, context = self.engine.tokenizer, self.engine.target.context_length
        if sum(given is not None for given in (body.prompt, body.messages, body.content)) != 1:
            raise ApiError(400, "give one of prompt, messages and content", "prompt")
        try:  # texts may be longer than the context, since clients cut them
            tokens = self._tokens_of_text(body) if body.messages is None else self._tokens_of_messages(body)
        except ValueError as error:
            code = CONTEXT_EXCEEDED if isinstance(error, PromptTooLongError) else None
            raise ApiError(400, str(error), "prompt" if body.messages is None else "messages", code) from error
        if body.content is not None:
            return {"tokens": token_pieces(tokenizer, tokens) if body.with_pieces else tokens}
        strings = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {"tokens": tokens, "token_strs": strings, "count": len(tokens), "max_model_len": context}

    def _tokens_of_text(self, body: TokenizeRequest) -> list[int]:
        text = body.prompt or body.content or ""
        if len(text) > MAX_TOKENIZED:
            self.engine.target.require_fits("the text", text)
        begins = body.add_special_tokens is not False if body.content is None else bool(body.add_special)
        return tokens_of_text(self.engine.tokenizer, text, begins, body.parse_special is not False)

    def _tokens_of_messages(self, body: TokenizeRequest) -> list[int]:
        tools = [tool.model_dump(by_alias=True, exclude_none=True) for tool in body.tools or ()]
        variables = template_variables(body.reasoning_effort, body.enable_thinking, body.chat_template_kwargs)
        return self.engine.encode(
            conversation(body.messages or (), str(self.engine.tokenizer.chat_template)),
            unchecked_length=MAX_TOKENIZED, tools=tools, chat_template_kwargs=variables,
            parse_special=bool(body.parse_special), add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message, add_special_tokens=body.add_special_tokens,
        )  # fmt: skip

    def count_tokens(self, body: CountTokensRequest) -> dict[str, Any]:
        """How many tokens the prompt of a request in Anthropic's form has. Errors: ApiError."""
        chat = body.as_chat()
        asked = {name: value for name, value in chat if name in TokenizeRequest.model_fields}
        if chat.tool_choice == "none":  # then the prompt has no tools
            asked["tools"] = None
        return {"input_tokens": self.tokenize(TokenizeRequest.model_construct(**asked))["count"]}

    def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """The text of tokens. Errors: ApiError."""
        self.check_model(body.model)
        size = max(len(self.engine.tokenizer), self.engine.target.num_token_ids)
        if wrong := [token for token in body.tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {wrong[0]} does not exist; the vocabulary has {size:,}", "tokens")
        text = self.engine.tokenizer.decode(body.tokens)
        return {"prompt": text, "content": text}  # vLLM's name and llama.cpp's

    async def loaded_method(self, speculative: bool | Speculative) -> str:
        """The method of a request; its networks are loaded beside the calls of other texts. Errors: ApiError."""
        method, decoder = requested_method(speculative, self.engine), self.engine.decoder
        if self.engine.network.model.device.type != "cpu":  # calls may be captured in graphs meanwhile
            return method
        try:
            if decoder.lacks_networks(method):
                await self.workers.load(decoder.load_networks, method)
        except ValueError as error:
            raise ApiError(400, str(error), "speculative.method") from error
        return method

    def check_capacity(self, num_texts: int) -> None:
        """Refuse more texts than can be queued, before they are prepared. Errors: ApiError 400 or 429."""
        capacity = self.engine_thread.limits.max_texts
        if num_texts > capacity:
            message = f"the request is for {num_texts:,} texts, but the server takes {capacity:,}; split it"
            raise ApiError(400, message, "n")
        self.engine_thread.check_queue(num_texts)

    def _check_scores_prompts(self, body: CompletionRequest) -> None:
        """Refuse log-probabilities of an echoed prompt where there are none. Errors: ApiError 400."""
        if self.engine.network.any_subset:
            raise ApiError(400, "this model gives no log-probabilities of a prompt; leave out echo or logprobs", "echo")
        if body.suffix:
            raise ApiError(400, "a suffix and log-probabilities of an echoed prompt exclude each other", "suffix")

    def check_model(self, model: str | None) -> None:
        """Raise ApiError 404 for another model."""
        if model and model not in (self.name, "default"):  # llama.vim sends an empty one
            raise ApiError(
                404, f"the model {model!r} is not served here, but {self.name!r} is", "model", "model_not_found"
            )
