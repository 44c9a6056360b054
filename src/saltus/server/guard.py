"""Check hosts, keys and sizes of requests before anything reads them, and log each as a line of JSON."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, MutableMapping, Sequence
from typing import Any

from saltus.server.bodies import CLOSE, MAX_BODY_BYTES, TOO_LONG, Body, BodyBudget, Receive
from saltus.server.error_answers import error_response, speaks_anthropic
from saltus.server.errors import ApiError
from saltus.server.hosts import is_allowed

log = logging.getLogger("saltus.server")

PAGE_FILES = ("style.css", "script.js")
OPEN_ROUTES = (  # that need no key
    "/", *(f"/page/{name}" for name in PAGE_FILES),
    "/health", "/v1/health", "/version", "/metrics", "/load", "/docs", "/openapi.json",
)  # fmt: skip

GONE = 499  # in the log: the client left before there was an answer
KEY_IN_SCOPE, BODY_IN_SCOPE = "saltus.api_key", "saltus.body"

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def checked_keys(api_keys: Sequence[str]) -> tuple[str, ...]:
    """The keys. Errors: ValueError for one that is empty or has spaces around it, which no request could give."""
    for key in api_keys:
        if not key or key != key.strip():
            raise ValueError("an API key is empty or has spaces around it; give another one, or leave it out")
    return tuple(api_keys)


class Guard:
    """Checks hosts, keys and sizes, gives each request an id, and logs it as a line of JSON."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        api_keys: Sequence[str],
        log_bodies: bool,
        hosts: Collection[str],
    ) -> None:
        self.app, self.api_keys, self.hosts = app, [key.encode() for key in api_keys], hosts
        self.log_bodies, self.budget = log_bodies, BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")[:128]
        request_id = given if given and given.isascii() and given.decode().isprintable() else uuid.uuid4().hex.encode()
        started, status = time.monotonic(), None
        scope[BODY_IN_SCOPE] = body = Body(
            self.budget, bytearray() if self.log_bodies else None, has_length=b"transfer-encoding" not in headers
        )

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = [b"x-request-id", *([b"request-id"] if speaks_anthropic(scope["path"]) else ())]
                message["headers"] = [*message.get("headers", ()), *((name, request_id) for name in names)]
            await send(message)

        try:
            if (refusal := self._refusal(scope, headers)) is not None:
                return await error_response(refusal, scope["path"])(scope, receive, send_with_id)
            await self.app(scope, body.receiver(receive), send_with_id)
        except Exception as error:
            if status is not None:  # an answer that has begun can only be cut off
                raise
            log.exception("a fault of the server")
            message = f"a fault of the server: {type(error).__name__}; please report it"
            fault = ApiError(500, message, headers=CLOSE)
            await error_response(fault, scope["path"])(scope, receive, send_with_id)
        finally:
            body.release()
            seconds = round(time.monotonic() - started, 4)
            line = {"request_id": request_id.decode(), "method": scope["method"], "path": scope["path"]}
            logged = {} if body.copy is None else {"body": body.copy.decode(errors="replace")}
            log.info(json.dumps({**line, "status": status or GONE, "seconds": seconds, **logged}))

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        """Why a request is not answered; one with a valid key is noted to come from it."""
        host = headers.get(b"host", b"").decode("latin-1")
        if host and not self.api_keys and not is_allowed(host, self.hosts):  # a page of another site has no key
            return ApiError(403, f"this server is not called {host[:100]!r}; start it with --allowed-host, or a key")
        if self.api_keys and scope["path"] not in OPEN_ROUTES:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            given = [token if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
            known = [
                [hmac.compare_digest(key, each) for each in self.api_keys] for key in given
            ]  # all of them, in constant time
            if (key := next((key for key, same in zip(given, known, strict=True) if any(same)), None)) is None:
                message = "give a valid API key as a bearer token, or in the header x-api-key"
                return ApiError(401, message, code="invalid_api_key")
            scope[KEY_IN_SCOPE] = key.decode()
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return ApiError(413, TOO_LONG)
        return None
