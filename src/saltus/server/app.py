"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import saltus
from saltus.engine.fim_formats import find_fim_format
from saltus.server.answers import Answer
from saltus.server.error_answers import MESSAGES_ROUTE, add_error_answers
from saltus.server.errors import ApiError
from saltus.server.guard import BODY_IN_SCOPE, GONE, KEY_IN_SCOPE, PAGE_FILES, Guard, checked_keys
from saltus.server.hosts import ANY_HOST
from saltus.server.llama_routes import add_llama_routes
from saltus.server.messages_request import CountTokensRequest, MessagesRequest
from saltus.server.preparation import Prepare
from saltus.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from saltus.server.responses_request import ResponsesRequest
from saltus.server.service import Service

Result = TypeVar("Result")

DOCS_BEGIN = '<div id="swagger-ui">'  # of what Swagger UI, which browsers load from a CDN, replaces
DOCS_WITHOUT_NETWORK = (
    "<p>If nothing else appears here, this browser does not reach cdn.jsdelivr.net, from where it loads this page."
    ' <a href="openapi.json">openapi.json</a> describes all routes.</p>'
)
PAGE = Path(__file__).with_name("page")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def make_app(
    service: Service,
    api_keys: Sequence[str] = (),
    log_requests: bool = False,
    hosts: Collection[str] = (ANY_HOST,),
    origins: Sequence[str] = (),
) -> FastAPI:
    """The app of a service. With `api_keys` requests need one of them; with `log_requests` bodies are in the log.

    `hosts` are names of the server, besides localhost and addresses; the command `saltus serve` gives them. `origins`
    are other sites whose pages may use the server. Errors: ValueError for an empty key.
    """
    keys = checked_keys(api_keys)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.close, 10.0)

    app = FastAPI(title="Saltus", version=saltus.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, api_keys=keys, log_bodies=log_requests, hosts=hosts)  # pyright: ignore[reportArgumentType]
    if origins:  # around the guard: a browser asks without a key whether a page may send one
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["x-request-id"],
        )  # pyright: ignore[reportArgumentType]  # fmt: skip
    add_error_answers(app)

    _add_page(app)
    _add_texts(app, service)
    add_llama_routes(app, service, partial(_respond, service), partial(_respond_at_once, service))
    _add_information(app, service)
    return app


def _add_page(app: FastAPI) -> None:
    """The server's page, and the description of its routes."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers=PAGE_HEADERS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        html = bytes(get_swagger_ui_html(openapi_url="openapi.json", title="Saltus").body).decode()
        return HTMLResponse(html.replace(DOCS_BEGIN, DOCS_BEGIN + DOCS_WITHOUT_NETWORK))

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404, f"there is no file {name!r}")
        return FileResponse(PAGE / name, headers=PAGE_HEADERS)


def _add_texts(app: FastAPI, service: Service) -> None:
    """The routes of OpenAI and Anthropic that answer with texts."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatCompletionRequest) -> Response:
        return await _respond(service, request, service.chat, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await _respond(service, request, service.complete, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        return await _respond(service, request, service.respond, body)

    @app.post(MESSAGES_ROUTE)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        return await _respond(service, request, service.message, body)

    @app.post(f"{MESSAGES_ROUTE}/count_tokens")
    async def count_tokens(request: Request, body: CountTokensRequest) -> Response:
        return await _respond_at_once(service, request, service.count_tokens, body)


def _add_information(app: FastAPI, service: Service) -> None:
    """What the model is, its tokens, and how the server is doing."""

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = model_card()
        return {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card()

    def model_card() -> dict[str, Any]:
        context = service.engine.target.context_length
        return {
            "id": service.name, "object": "model", "created": service.started, "owned_by": "saltus",
            "type": "model", "display_name": service.name, "lifecycle": "active",  # Anthropic's
            "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
            "max_model_len": context, "max_input_tokens": context, "max_tokens": context,
            "fill_in_the_middle": find_fim_format(service.engine.tokenizer) is not None,
            "several_holes": service.engine.network.any_subset,
            "meta": {"n_ctx": context, "n_ctx_train": context, "n_vocab": service.engine.target.num_token_ids},
        }  # fmt: skip

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        return await _respond_at_once(service, request, service.tokenize, body)

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        return await _respond_at_once(service, request, service.detokenize, body)

    @app.get("/health")
    @app.head("/health", include_in_schema=False)
    @app.api_route("/v1/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> Response:
        if not service.engine_thread.thread.is_alive():
            raise ApiError(503, "the server has failed or is shutting down; try another one")
        return JSONResponse({"status": "ok"})  # llama.cpp's body; others look at the status alone

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": saltus.__version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": service.engine_thread.num_open}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _respond(
    service: Service, request: Request, make: Callable[..., Coroutine[Any, Any, Answer]], body: Any
) -> Response:
    """Decode the answer that `make` makes of a body, and send it, whole or as a stream."""
    answer = await _unless_gone(request, make(body, _prepare_for(service, request)))
    if answer is None:
        return Response(status_code=GONE)  # nobody reads it
    key = request.scope.get(KEY_IN_SCOPE, "")
    answer.group = key
    answer.client = key or (request.client.host if request.client else "")
    if service.memories is not None:
        answer.draft_from(service.memories.of(key))
    answer.submit()
    request.scope[BODY_IN_SCOPE].release()
    return await _send(request, answer)


async def _respond_at_once(
    service: Service, request: Request, make: Callable[[Any], dict[str, Any]], body: Any
) -> Response:
    """Send what `make` makes of a body without decoding."""
    made = _prepare_for(service, request)(lambda: JSONResponse(make(body)))
    return await _unless_gone(request, made) or Response(status_code=GONE)


def _prepare_for(service: Service, request: Request) -> Prepare:
    return service.workers.of_body(request.scope[BODY_IN_SCOPE].num_bytes)


async def _send(request: Request, answer: Answer) -> Response:
    """The answer as JSON or as a stream; a client that vanishes ends the decoding."""
    if answer.body.stream:
        return StreamingResponse(
            _until_read(answer), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    whole = await _unless_gone(request, answer.whole())
    return Response(status_code=GONE) if whole is None else JSONResponse(whole)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of the work; None if the client leaves before, which cancels it."""
    done, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        done.cancel()
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
