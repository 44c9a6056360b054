"""Write log-probabilities as chat completions and responses have them: an entry for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from saltus.engine.token_texts import token_bytes, token_name, written_bytes
from saltus.server.answers import Choice
from saltus.server.served_request import Delta


def token_pieces(tokenizer: Any, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens as llama.cpp lists them: with their texts, or with the bytes of those that are no whole characters."""
    pieces = []
    for token in tokens:
        content = token_bytes(tokenizer, [token])
        if content:
            try:
                piece: Any = content.decode()
            except UnicodeDecodeError:
                piece = list(content)
        else:  # a special token
            piece = tokenizer.decode([token])
        pieces.append({"id": token, "piece": piece})
    return pieces


def token_entries(tokenizer: Any, of: Choice | Delta) -> list[dict[str, Any]]:
    """The tokens of a text, or of a part of it, with their log-probabilities and the likeliest tokens beside."""
    entries, listed = [], of.top_logprobs or [[]] * len(of.scored)
    for one, value, likely in zip(of.scored, of.logprobs, listed, strict=True):
        name = written_bytes(one.content) or token_name(tokenizer, one.token)[0]
        own, top = {"token": name, "bytes": list(one.content)}, []
        for token, alternative in likely:
            other, its_bytes = token_name(tokenizer, token, one.drops_space)
            entry = own if token == one.token else {"token": other, "bytes": list(its_bytes)}
            top.append({**entry, "logprob": alternative})
        entries.append({**own, "logprob": value, "top_logprobs": top})
    return entries
