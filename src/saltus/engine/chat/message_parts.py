"""Give contents of messages as lists of parts to the chat templates that read nothing else, as vision models' do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from saltus.engine.chat.template_limits import render_chat

PROBE = "saltus_probe"  # a word that no template writes by itself


@lru_cache(maxsize=8)
def template_reads_parts(tokenizer: Any, template: str) -> bool:
    """True if the tokenizer's template loses a content that is a text, and writes one that is a list of parts."""
    return bool(template) and not writes_probe(tokenizer, PROBE) and writes_probe(tokenizer, _parts(PROBE))


@lru_cache(maxsize=8)
def template_loses_messages(tokenizer: Any, template: str) -> bool:
    """True if the tokenizer's template takes a user's message and writes it in neither form."""
    written = _written(tokenizer, PROBE)
    return written is not None and PROBE not in written and not writes_probe(tokenizer, _parts(PROBE))


def with_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with contents that are texts as lists of one part."""
    return [
        {**message, "content": _parts(message["content"])} if isinstance(message.get("content"), str) else dict(message)
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def writes_probe(tokenizer: Any, content: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
    """True if the chat template takes a message of this content, and PROBE is in what it writes."""
    return PROBE in (_written(tokenizer, content, tools) or "")


def _written(tokenizer: Any, content: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> str | None:
    """What the chat template writes of a user's message before an answer; None if it refuses that."""
    messages = [{"role": "user", "content": content}]
    try:
        return render_chat(tokenizer, messages, tools=tools, add_generation_prompt=True)
    except ValueError:
        return None
