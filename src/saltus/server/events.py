"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
KEEP_ALIVE = ": \n\n"  # a comment, which clients skip


def event_text(data: Any, kind: str = "") -> str:
    """An event with JSON data. Characters at which some clients split lines are escaped."""
    written = json.dumps(data, ensure_ascii=False).translate(LINE_ENDS)
    return f"event: {kind}\ndata: {written}\n\n" if kind else f"data: {written}\n\n"
