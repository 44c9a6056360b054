"""Turn errors that end a request into error objects of the route's protocol, of one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from saltus.server.errors import ApiError

MESSAGES_ROUTE = "/v1/messages"  # of Anthropic's protocol, as what is below it


def speaks_anthropic(path: str) -> bool:
    """True for the routes of Anthropic's protocol."""
    return path == MESSAGES_ROUTE or path.startswith(f"{MESSAGES_ROUTE}/")


def error_response(error: ApiError, path: str) -> JSONResponse:
    """An error as the clients of this route read it."""
    if speaks_anthropic(path):
        return JSONResponse(error.anthropic_body(), error.anthropic_status, error.headers)
    return JSONResponse(error.body(), error.status, error.headers)


def add_error_answers(app: FastAPI) -> None:
    """Answer errors of all kinds with an error object; Guard does so for faults of the server."""
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(RequestValidationError)(_invalid_request)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RecursionError)(_too_deep)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _invalid_request(request: Request, error: Exception) -> Response:
    """The first field at fault, in one line."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    of_field = [detail for detail in errors if detail["loc"][:2] == errors[0]["loc"][:2]]
    # where a value may have several forms, the one that fits most: but for its length, or in its outer parts; an
    # unknown type says more than the fields that others have
    first = max(
        of_field,
        key=lambda detail: (
            detail["type"].endswith("too_long"), len(detail["loc"]), detail["type"] != "missing" and
            detail["loc"][-1] == "type",
        ),
    )  # fmt: skip
    names = _names_in(error.body, first["loc"], first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        message = f"the field {names[-1]!r} is not supported; leave it out"
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"])
    elif first["type"] == "json_invalid":
        message, names = f"the body is not JSON: {first['ctx']['error']} at character {first['loc'][-1]}", []
    elif first["type"] == "missing" and names:
        message = f"{'.'.join(names)} is missing; add it"
    elif first["type"] == "too_short":
        least = first["ctx"]["min_length"]
        message = f"{'.'.join(names)} has {first['ctx']['actual_length']} items, but needs {least} or more; add some"
    elif not names:
        message, names = "the body must be a JSON object of content type application/json", []
    else:
        message = f"{'.'.join(names) or 'the body'}: {_in_words_of_json(first['msg'])}"
    refused = ApiError(400, message, ".".join(names) or None, "unsupported" if "not supported" in message else None)
    return error_response(refused, request.url.path)


def _in_words_of_json(message: str) -> str:
    """A message of Pydantic without Python's names of types."""
    message = message.replace("valid dictionary or object to extract fields from", "valid object")
    message = message.replace("valid dictionary", "valid object")
    return re.sub(r"Unable to extract tag using discriminator ('\w+')", r"the field \1 is missing", message)


def _names_in(body: Any, place: Sequence[str | int], missing: bool) -> list[str]:
    """The names on the way to a value that is wrong or missing, without those of the types that were tried on it."""
    names: list[str] = []
    value = body
    for number, part in enumerate(place[1:], start=2):
        try:
            value = value[part]
        except (LookupError, TypeError):
            if number < len(place) or not missing:  # a field that is missing is the last part
                continue
        names.append(str(part))
    return names


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if message == "Not Found":
        message = f"there is no {request.url.path}; /openapi.json lists what there is"
    elif message == "Method Not Allowed":
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} is not for {request.method}; use {allowed}"
    if error.status_code == 400 and isinstance(error.__cause__, RecursionError | ValueError):  # FastAPI read the body
        message = "the body is not JSON in UTF-8, or it is nested too deeply"
        if "digits" in str(error.__cause__):  # Python reads no longer ones
            message = f"a number in the body has more than {sys.get_int_max_str_digits():,} digits; shorten it"
    return error_response(ApiError(error.status_code, message, headers=error.headers), request.url.path)


async def _too_deep(request: Request, error: Exception) -> Response:
    return error_response(ApiError(400, "the JSON is nested too deeply"), request.url.path)
