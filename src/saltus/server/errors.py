"""Errors of the API, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saltus.core.out_of_memory import is_out_of_memory

CONTEXT_EXCEEDED = "context_length_exceeded"  # the code for a prompt that is too long
MAX_MESSAGE, MAX_PARAM = 1000, 100  # characters; what a request has wrong may be longer
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    **ERROR_TYPES, 403: "permission_error", 408: "timeout_error", 413: "request_too_large", 503: "overloaded_error",
}  # fmt: skip
ANTHROPIC_STATUS = {503: 529}  # of what is overloaded


class ApiError(Exception):
    """An answer that is an error: an HTTP status, one line that says what to do, and the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:  # what is wrong stands at the beginning, the cure at the end
            message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else param[:MAX_PARAM]
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object that OpenAI's clients read."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_status(self) -> int:
        """The HTTP status that Anthropic's clients know."""
        return ANTHROPIC_STATUS.get(self.status, self.status)

    def anthropic_body(self) -> dict[str, Any]:
        """The JSON object that Anthropic's clients read. Agents shorten a conversation where it begins as here."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        begin = "prompt is too long: " if self.code == CONTEXT_EXCEEDED else ""
        details = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": kind, "message": begin + self.message, **details}}


def as_api_error(error: Exception, doing: str = "") -> ApiError:
    """An error of the engine as an answer of one line; `doing` says where it came from."""
    if isinstance(error, ApiError):
        return error
    if is_out_of_memory(error):
        message = "the server has too little memory left for this text; try again later, or send a shorter one"
        return ApiError(503, message, headers={"Retry-After": "1"})
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ApiError(400 if isinstance(error, ValueError) else 500, doing + line.strip())


def place_of(error: BaseException) -> str:
    """An error and where it happened, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    return " ".join(f"{type(error).__name__}: {error}".split()) + place
