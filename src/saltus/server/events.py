"""Server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

Item = TypeVar("Item")

LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
KEEP_ALIVE = ": \n\n"  # a comment, which clients skip


def event_text(data: Any, kind: str = "") -> str:
    """An event with JSON data. Characters at which some clients split lines are escaped."""
    written = json.dumps(data, ensure_ascii=False).translate(LINE_ENDS)
    return f"event: {kind}\ndata: {written}\n\n" if kind else f"data: {written}\n\n"


async def with_pauses(items: AsyncIterator[Item], seconds: float) -> AsyncGenerator[Item | None, None]:
    """The items as they come, and None each time that none has come for so many seconds."""
    coming: asyncio.Future[Item] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items))
            await asyncio.wait({coming}, timeout=seconds)
            if not coming.done():
                yield None
                continue
            try:
                item, coming = coming.result(), None
            except StopAsyncIteration:
                return
            yield item
    finally:
        if coming is not None:
            coming.cancel()
