"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

import saltus
from saltus.engine.encoding import require_unicode
from saltus.engine.fim import find_fim_format
from saltus.serving.answers import Answer
from saltus.serving.errors import ApiError
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

log = logging.getLogger("saltus.serving")

MAX_BODY_BYTES = 16 * 2**20
TOO_LONG = f"the body has more than {MAX_BODY_BYTES:,} bytes; shorten it"
PAGE, PAGE_FILES = Path(__file__).with_name("page"), ("style.css", "script.js")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
OPEN_ROUTES = (  # that need no key
    "/", *(f"/page/{name}" for name in PAGE_FILES),
    "/health", "/version", "/metrics", "/load", "/docs", "/openapi.json",
)  # fmt: skip

KEY_IN_SCOPE = "saltus.api_key"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def make_app(service: Service, api_keys: Sequence[str] = (), log_requests: bool = False) -> FastAPI:
    """The app of a service. With `api_keys` requests need one of them; with `log_requests` bodies are in the log."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await asyncio.to_thread(service.batcher.close, 10.0)

    app = FastAPI(title="Saltus", version=saltus.__version__, lifespan=lifespan)
    app.add_middleware(_Guard, api_keys=tuple(api_keys), log_bodies=log_requests)  # pyright: ignore[reportArgumentType]
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(RequestValidationError)(_invalid_request)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RecursionError)(_too_deep)
    app.exception_handler(Exception)(_fault)

    async def respond(request: Request, answer: Answer) -> Response:
        if service.memories is not None:
            answer.draft_from(service.memories.of(request.scope.get(KEY_IN_SCOPE, "")))
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
        size = len(service.engine.tokenizer)
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


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _invalid_request(_: Request, error: Exception) -> Response:
    """The first field at fault, in one line."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    of_field = [one for one in errors if one["loc"][:2] == errors[0]["loc"][:2]]
    first = max(
        of_field, key=lambda one: len(one["loc"])
    )  # where a value may have several forms, the one that fits most
    names = _names_in(error.body, first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"the field {names[-1]!r} is not supported; leave it out"
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"])
    elif first["type"] == "json_invalid" or not names:
        message, names = "the body is not a JSON object (of content type application/json)", []
    else:
        message = f"{'.'.join(names) or 'the body'}: {first['msg']}"
    refused = ApiError(400, message, ".".join(names) or None, "unsupported" if "not supported" in message else None)
    return JSONResponse(refused.body(), 400)


def _names_in(body: Any, place: Sequence[str | int]) -> list[str]:
    """The names on the way to a value that is wrong, without those of the types that were tried on it."""
    names: list[str] = []
    value = body
    for number, part in enumerate(place[1:], start=2):
        try:
            value = value[part]
        except (LookupError, TypeError):
            if number < len(place) or not isinstance(value, dict):  # a field that is missing is the last part
                continue
        names.append(str(part))
    return names


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code == 400 and isinstance(error.__cause__, RecursionError | ValueError):  # FastAPI read the body
        message = "the body is not JSON in UTF-8, or it is nested too deeply"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, error.headers)


async def _fault(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"a fault of the server: {type(error).__name__}; please report it").body(), 500)


async def _too_deep(_: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(400, "the JSON is nested too deeply").body(), 400)


class _Guard:
    """Checks keys and sizes, gives each request an id, and logs it as a line of JSON."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api_keys: Sequence[str], log_bodies: bool
    ) -> None:
        self.app, self.api_keys, self.log_bodies = app, [key.encode() for key in api_keys], log_bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")[:128]
        request_id = given if given and given.isascii() and given.decode().isprintable() else uuid.uuid4().hex.encode()
        started, status, body = time.monotonic(), 499, bytearray()

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if (refusal := self._refusal(scope, headers)) is not None:
                return await JSONResponse(refusal.body(), refusal.status)(scope, receive, send_with_id)
            await self.app(scope, _limited(receive, body if self.log_bodies else None), send_with_id)
        finally:
            seconds = round(time.monotonic() - started, 4)
            line = {"request_id": request_id.decode(), "method": scope["method"], "path": scope["path"]}
            asked = {"body": body.decode(errors="replace")} if self.log_bodies else {}
            log.info(json.dumps({**line, "status": status, "seconds": seconds, **asked}))

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Why a request is not answered; one with a valid key is noted to come from it."""
        if self.api_keys and scope["path"] not in OPEN_ROUTES:
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            known = [hmac.compare_digest(key, each) for each in self.api_keys]  # all of them, in constant time
            if scheme.lower() != b"bearer" or not any(known):
                return ApiError(401, "give a valid API key as a bearer token", code="invalid_api_key")
            scope[KEY_IN_SCOPE] = key.decode()
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return ApiError(413, TOO_LONG)
        return None


def _limited(receive: Receive, copy: bytearray | None) -> Receive:
    """Receive a body, into `copy` too, and refuse one that grows beyond the limit."""
    size = 0

    async def limited() -> MutableMapping[str, Any]:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, TOO_LONG)  # the only error that FastAPI lets through here
        if copy is not None:
            copy.extend(message.get("body", b""))
        return message

    return limited
