"""Check keys, sizes and times of requests before anything reads them, and log each as a line of JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from saltus.serving.errors import ApiError

log = logging.getLogger("saltus.serving")

MAX_BODY_BYTES = 16 * 2**20
MAX_BODY_SECONDS = 60.0  # until all of a body is here
TOO_LONG = f"the body has more than {MAX_BODY_BYTES:,} bytes; shorten it"
PAGE_FILES = ("style.css", "script.js")
OPEN_ROUTES = (  # that need no key
    "/", *(f"/page/{name}" for name in PAGE_FILES),
    "/health", "/version", "/metrics", "/load", "/docs", "/openapi.json",
)  # fmt: skip

KEY_IN_SCOPE = "saltus.api_key"
CLOSE = {"Connection": "close"}  # the rest of a body that is refused is not read

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
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
    """Receive a body, into `copy` too, and refuse one that grows beyond the limit or takes too long.

    The errors are HTTPExceptions, since FastAPI lets no others through while it reads a body.
    """
    size, complete, deadline = 0, False, time.monotonic() + MAX_BODY_SECONDS

    async def limited() -> MutableMapping[str, Any]:
        nonlocal size, complete
        try:
            message = await asyncio.wait_for(receive(), None if complete else deadline - time.monotonic())
        except TimeoutError as error:
            late = f"the body was not complete after {MAX_BODY_SECONDS:g} seconds; send it faster"
            raise HTTPException(408, late, CLOSE) from error
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > MAX_BODY_BYTES:
            raise HTTPException(413, TOO_LONG, CLOSE)
        if copy is not None:
            copy.extend(message.get("body", b""))
        return message

    return limited
