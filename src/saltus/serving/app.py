"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import saltus
from saltus.engine.encoding import require_unicode
from saltus.engine.fim import find_fim_format
from saltus.serving.answers import Answer
from saltus.serving.error_answers import add_error_answers
from saltus.serving.errors import ApiError
from saltus.serving.guard import KEY_IN_SCOPE, PAGE_FILES, Guard
from saltus.serving.infill import InfillRequest
from saltus.serving.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from saltus.serving.service import Service
from saltus.serving.translation import conversation

PAGE = Path(__file__).with_name("page")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def make_app(service: Service, api_keys: Sequence[str] = (), log_requests: bool = False) -> FastAPI:
    """The app of a service. With `api_keys` requests need one of them; with `log_requests` bodies are in the log."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.close, 10.0)

    app = FastAPI(title="Saltus", version=saltus.__version__, lifespan=lifespan)
    app.add_middleware(Guard, api_keys=tuple(api_keys), log_bodies=log_requests)  # pyright: ignore[reportArgumentType]
    add_error_answers(app)

    async def respond(request: Request, answer: Answer) -> Response:
        key = request.scope.get(KEY_IN_SCOPE, "")
        answer.client = key or (request.client.host if request.client else "")
        if service.memories is not None:
            answer.draft_from(service.memories.of(key))
        return await _respond(request, answer)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404, f"there is no file {name!r}")
        return FileResponse(PAGE / name, headers=PAGE_HEADERS)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, asked: ChatCompletionRequest) -> Response:
        return await respond(request, await service.chat(asked))

    @app.post("/v1/completions")
    async def completions(request: Request, asked: CompletionRequest) -> Response:
        return await respond(request, await service.complete(asked))

    @app.post("/v1/responses")
    async def responses(request: Request, asked: ResponsesRequest) -> Response:
        return await respond(request, await service.respond(asked))

    @app.post("/infill")
    async def infill(request: Request, asked: InfillRequest) -> Response:
        return await respond(request, await service.infill(asked))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card()

    def model_card() -> dict[str, Any]:
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "saltus",
            "max_model_len": service.engine.target.context_length,
            "fill_in_the_middle": find_fim_format(service.engine.tokenizer) is not None,
            "several_holes": service.engine.network.any_subset,
        }  # fmt: skip

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt")
        try:
            if asked.messages is not None:
                tokens = service.engine.encode(conversation(asked.messages))
            elif asked.add_special_tokens:
                tokens = service.engine.encode(asked.prompt or "", raw=True)
            else:
                text = require_unicode(asked.prompt or "", "the prompt")
                tokens = service.engine.tokenizer(text, add_special_tokens=False).input_ids
        except ValueError as error:
            raise ApiError(400, str(error), "prompt" if asked.messages is None else "messages") from error
        strings = service.engine.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else None
        length = service.engine.target.context_length
        return {"tokens": tokens, "token_strs": strings, "count": len(tokens), "max_model_len": length}

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(asked.model)
        size = max(len(service.engine.tokenizer), service.engine.target.num_token_ids)
        if wrong := [token for token in asked.tokens if not 0 <= token < size]:
            raise ApiError(400, f"token {wrong[0]} does not exist; the vocabulary has {size:,}", "tokens")
        return {"prompt": service.engine.tokenizer.decode(asked.tokens)}

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if service.batcher.thread.is_alive() else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": saltus.__version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.batcher.num_open}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


async def _respond(request: Request, answer: Answer) -> Response:
    """The answer as JSON or as a stream; a client that vanishes ends the decoding."""
    answer.submit()
    if answer.asked.stream:
        return StreamingResponse(
            _until_read(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    whole, gone = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(whole.result())
    finally:
        whole.cancel()
        gone.cancel()


async def _until_read(answer: Answer) -> AsyncIterator[str]:
    """The answer's events; a reader that leaves, even before the first text, ends the decoding."""
    try:
        async for event in answer.stream():
            yield event
    finally:
        answer.drop()


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
