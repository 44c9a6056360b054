"""llama.cpp's own routes: texts after a prompt or in a hole, and what the server is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import saltus
from saltus.engine.encoding import PromptSettings, begin_tokens, conversation_text, tokens_inside_text
from saltus.engine.engine import Engine
from saltus.engine.grammar import Grammar
from saltus.engine.infill import AnyRequest
from saltus.engine.text_bounds import PromptTooLongError, require_fits
from saltus.engine.text_request import TextRequest
from saltus.server.answers import Answer
from saltus.server.errors import CONTEXT_EXCEEDED, ApiError
from saltus.server.llama_answers import LlamaAnswer
from saltus.server.llama_request import DEFAULTS, InfillRequest, LlamaCompletionRequest, LlamaFields
from saltus.server.preparation import Prepare
from saltus.server.protocol import MAX_CHOICES, MAX_ITEMS, ChatCompletionRequest
from saltus.server.service import Service
from saltus.server.structured import Tools
from saltus.server.translation import chosen_seeds, conversation, infill_request, text_requests

Respond = Callable[[Request, Callable[..., Any], Any], Awaitable[Response]]
"""Answers a request by what makes the answer to its body."""


def add_llama_routes(app: FastAPI, service: Service, respond: Respond, respond_at_once: Respond) -> None:
    """Add the routes; `respond` answers with texts, `respond_at_once` with what needs no decoding."""

    async def complete(body: LlamaCompletionRequest, prepare: Prepare) -> Answer:
        return await _answer(service, body, prepare, [partial(_completion_requests, each) for each in body.prompts])

    async def fill(body: InfillRequest, prepare: Prepare) -> Answer:
        return await _answer(service, body, prepare, [_infill_requests])

    @app.post("/completion")
    async def completion(request: Request, body: LlamaCompletionRequest) -> Response:
        return await respond(request, complete, body)

    @app.post("/infill")
    async def infill(request: Request, body: InfillRequest) -> Response:
        return await respond(request, fill, body)

    @app.post("/apply-template")
    async def apply_template(request: Request, body: ChatCompletionRequest) -> Response:
        return await respond_at_once(request, lambda given: _prompt_of_conversation(service, given), body)

    @app.get("/props")
    async def props() -> dict[str, Any]:
        return _properties(service)

    @app.get("/slots")
    async def slots(fail_on_no_slot: bool = False) -> Response:
        listed = _slots(service)
        busy = all(slot["is_processing"] for slot in listed)
        if busy and fail_on_no_slot:
            raise ApiError(503, "all slots are busy; try again later", headers={"Retry-After": "1"})
        return JSONResponse(listed)


async def _answer(
    service: Service, body: LlamaFields, prepare: Prepare, makers: Sequence[Callable[..., Sequence[AnyRequest]]]
) -> Answer:
    """The answer to a request; `makers` make the texts of each prompt."""
    service.check_model(body.model)
    most, asked = max(service.engine_thread.limits.max_texts, MAX_CHOICES), len(makers) * body.n_cmpl
    if asked > most:  # also of texts that are the same, and so are decoded once
        message = f"the answer would have {asked:,} texts, but may have {most:,}; split the request"
        raise ApiError(400, message, "prompt" if body.n_cmpl == 1 else "n_cmpl")
    service.check_capacity(len(makers) * body.num_distinct)
    method = await service.loaded_method(body.speculative)
    grammar = await prepare(body.text_grammar, service.engine)
    seeds = chosen_seeds(body, body.num_distinct)
    requests: list[AnyRequest] = []
    for make in makers:  # one by one: others have their turn between them, and a client that leaves ends it
        requests += await prepare(make, service, body, grammar, seeds)
    return LlamaAnswer(service.backend, requests, method, body, service.engine.target.context_length)


def _completion_requests(
    prompt: str | Sequence[int | str],
    service: Service,
    body: LlamaCompletionRequest,
    grammar: Grammar | None,
    seeds: Sequence[int],
) -> Sequence[TextRequest]:
    return text_requests(service.engine, _tokens(service.engine, prompt), body, seeds, grammar=grammar, raw=True)


def _tokens(engine: Engine, prompt: str | Sequence[int | str]) -> str | list[int]:
    """A prompt for the engine; the texts among token ids become tokens, a begin token before the first of all parts.

    Errors: ApiError 400.
    """
    if isinstance(prompt, str):
        return prompt
    tokenizer, texts = engine.tokenizer, [part for part in prompt if isinstance(part, str)]
    if len(texts) > MAX_ITEMS:
        message = (
            f"a prompt has {len(texts):,} texts among its token ids, but at most {MAX_ITEMS:,} are read; join some"
        )
        raise ApiError(400, message, "prompt")
    try:
        require_fits(texts, tokenizer, engine.target.context_length, engine.target.name, "the prompt")
        tokens = begin_tokens(tokenizer) if isinstance(prompt[0], str) else []
        for part in prompt:
            tokens += tokens_inside_text(tokenizer, part) if isinstance(part, str) else [part]
    except ValueError as error:
        code = CONTEXT_EXCEEDED if isinstance(error, PromptTooLongError) else None
        raise ApiError(400, str(error), "prompt", code) from error
    return tokens


def _infill_requests(
    service: Service, body: InfillRequest, grammar: Grammar | None, seeds: Sequence[int]
) -> Sequence[AnyRequest]:
    try:
        template = body.template()
    except ValueError as error:
        raise ApiError(400, str(error), "parts") from error
    engine = service.engine
    if engine.network.any_subset:
        if grammar is not None:
            raise ApiError(400, "the holes of this model follow no grammar; leave it out", "grammar")
        for field in ("stop", "stop_token_ids", "min_tokens", "n_probs"):
            if getattr(body, field):
                raise ApiError(
                    400, f"the holes of this model have lengths or ends of their own; leave out {field}", field
                )
        given = "n_predict" in body.model_fields_set and body.n_predict > 0
        open_tokens = body.n_predict if given else None
        return [infill_request(engine, template, body, open_tokens, seed) for seed in seeds]
    if template.hole_lengths != (None,):
        raise ApiError(400, "this model fills one hole and ends it itself; give two parts", "parts")
    before, after = template.pieces
    files = [(file.filename, file.text) for file in body.input_extra]
    return text_requests(engine, before, body, seeds, grammar=grammar, raw=True, suffix=after, files=files)


def _prompt_of_conversation(service: Service, body: ChatCompletionRequest) -> dict[str, Any]:
    """A conversation as the chat template writes it. Errors: ApiError."""
    service.check_model(body.model)
    engine = service.engine
    settings = PromptSettings(
        tools=Tools(engine, body).offered, chat_template_kwargs=body.template_variables(body.reasoning_effort),
        add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message,
    )  # fmt: skip
    messages = conversation(body.messages, str(engine.tokenizer.chat_template))
    try:
        return {"prompt": conversation_text(engine.tokenizer, messages, settings, engine.target.name)}
    except ValueError as error:
        raise ApiError(400, str(error), "messages") from error


def _properties(service: Service) -> dict[str, Any]:
    """What the server is, and the settings of a text that a request does not change."""
    engine = service.engine
    tokenizer = engine.tokenizer
    return {
        "default_generation_settings": {
            "n_ctx": engine.target.context_length,
            "params": {**DEFAULTS, "seed": -1, "n_predict": -1, "max_tokens": -1, "repeat_penalty": 1.0, "stop": []},
        },
        "total_slots": service.engine_thread.limits.max_batch, "model_alias": service.name,
        "model_path": service.name, "modalities": {"vision": False, "audio": False},
        "chat_template": str(tokenizer.chat_template or ""), "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "", "build_info": f"saltus-{saltus.__version__}",
    }  # fmt: skip


def _slots(service: Service) -> list[dict[str, Any]]:
    """The places of the batch; which text has which is not kept, so the first ones count as busy."""
    engine, running = service.engine, service.engine_thread.num_running
    return [
        {
            "id": place, "n_ctx": engine.target.context_length, "speculative": engine.method != "plain",
            "is_processing": place < running,
        }
        for place in range(service.engine_thread.limits.max_batch)
    ]  # fmt: skip
