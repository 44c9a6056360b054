"""Receive the bodies of requests within limits: of size, of time, and of all of them together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

MAX_BODY_BYTES = 16 * 2**20
MAX_BODIES_BYTES = 64 * 2**20  # of all requests that are not in the queue yet
MAX_BODY_SECONDS = 60.0  # until all of a body is here
MAX_VALUES = 2**20  # of JSON in a body; more of them would hold up all other requests while they are read
TOO_LONG = f"the body has more than {MAX_BODY_BYTES:,} bytes; shorten it"
CLOSE = {"Connection": "close"}  # the rest of a body that is refused is not read

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass
class BodyBudget:
    """The bytes of bodies that are held now."""

    used: int = 0


@dataclass
class Body:
    """The body of a request as it arrives. Its bytes count until `release`, when its texts are in the queue."""

    budget: BodyBudget
    copy: bytearray | None = None  # gets the bytes, too
    has_length: bool = False  # its length was told before, and is at most `MAX_BODY_BYTES`
    num_bytes: int = 0
    num_held: int = 0
    num_values: int = 1
    complete: bool = False
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_BODY_SECONDS)

    def release(self) -> None:
        """Let others have its bytes."""
        self.budget.used -= self.num_held
        self.num_held = 0

    def receiver(self, receive: Receive) -> Receive:
        """Receives the body, and refuses one that grows beyond the limits or takes too long.

        The errors are HTTPExceptions, since FastAPI lets no others through while it reads a body.
        """

        async def limited() -> MutableMapping[str, Any]:
            try:
                left = None if self.complete else self.deadline - time.monotonic()
                message = await asyncio.wait_for(receive(), left)
            except TimeoutError as error:
                late = f"the body was not complete after {MAX_BODY_SECONDS:g} seconds; send it faster"
                raise HTTPException(408, late, CLOSE) from error
            self._add(message.get("body", b""))
            self.complete = not message.get("more_body", False)
            return message

        return limited

    def _add(self, part: bytes) -> None:
        # A client that is cut off while it sends may not read the answer, so what has an end is read and dropped.
        headers = {} if self.has_length else CLOSE
        self.num_bytes += len(part)
        self.num_values += part.count(b",")  # those in texts, too: to count without them is to read it
        if self.num_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, TOO_LONG, CLOSE)
        if self.num_values > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES:,} values or commas; shorten it"
            raise HTTPException(413, message, headers)
        if self.budget.used + len(part) > MAX_BODIES_BYTES:
            message = "the server reads as many large requests as it has memory for; try again later"
            raise HTTPException(503, message, {**headers, "Retry-After": "1"})
        self.budget.used += len(part)
        self.num_held += len(part)
        if self.copy is not None:
            self.copy.extend(part)
