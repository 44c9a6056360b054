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
    first = _error_that_fits(error.errors())
    names = _names_in(error.body, first["loc"], first["type"] == "missing")
    if not names and len(first["loc"]) > 1 and (first["loc"][0] == "query" or isinstance(error.body, dict)):
        names = [str(first["loc"][1])]  # of the query, or of a field that was given by another name
    if first["type"] == "extra_forbidden":
        message = f"the field {names[-1]!r} is not supported; leave it out"
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        if not names and (field := message.split()[0].rstrip(":")) in (
            error.body or ()
        ):  # of several fields, named first
            names = [field]
    elif first["type"] == "union_tag_invalid":
        names.append(first["ctx"]["discriminator"].strip("'"))
        message = f"{'.'.join(names)}: {first['ctx']['tag']!r} is unknown; choose from {first['ctx']['expected_tags']}"
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


def _error_that_fits(errors: Sequence[Any]) -> Any:
    """The error to answer with. Where a value may have several forms, it is one of the form that was meant."""
    errors = [detail for detail in errors if detail["loc"][:2] == errors[0]["loc"][:2]]
    of_types = [one for one in errors if one["loc"][-1] == "type" and one["type"] in ("literal_error", "missing")]
    not_meant = [detail["loc"][:-1] for detail in of_types]
    meant = [detail for detail in errors if not any(detail["loc"][: len(form)] == form for form in not_meant)]
    if of_types and max((len(detail["loc"]) for detail in meant), default=0) < len(of_types[0]["loc"]):
        known = [detail["ctx"]["expected"] for detail in of_types if detail["type"] == "literal_error"]
        return {**of_types[0], "msg": f"Input should be {' or '.join(known)}"} if len(known) > 1 else of_types[0]
    # the error in the innermost part, but for a length, since what is too long has errors in its parts as well
    return max(meant, key=lambda detail: (detail["type"].endswith("too_long"), len(detail["loc"])))


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
        message = f"there is no {request.url.path}; {_what_there_is(request)}"
    elif message == "Method Not Allowed":
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} is not for {request.method}; use {allowed}"
    if error.status_code == 400 and isinstance(error.__cause__, RecursionError | ValueError):  # FastAPI read the body
        message = "the body is not JSON in UTF-8, or it is nested too deeply"
        if "digits" in str(error.__cause__):  # Python reads no longer ones
            message = f"a number in the body has more than {sys.get_int_max_str_digits():,} digits; shorten it"
    return error_response(ApiError(error.status_code, message, headers=error.headers), request.url.path)


def _what_there_is(request: Request) -> str:
    """A route that was probably meant: clients differ in whether their base URL ends with /v1."""
    path = request.url.path
    routes = {getattr(route, "path", "") for route in request.app.routes}
    bare = path.removeprefix("/v1")
    meant = next((f"/v1{name}" for name in (bare, bare.removeprefix("/v1")) if f"/v1{name}" in routes), None)
    if meant is None:
        return "/openapi.json lists what there is"
    cure = "leave /v1 out of the client's base URL" if bare != path else "end the client's base URL with /v1"
    return f"{meant} is meant; {cure}"


async def _too_deep(request: Request, error: Exception) -> Response:
    return error_response(ApiError(400, "the JSON is nested too deeply"), request.url.path)
