"""Refuse texts that cannot fit into a model's context by their length, before they are tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from saltus.core.value_types import SettingError

NORMALIZED_BYTES = {"Prepend": 1, "NFC": 4, "NFD": 4}
"""Bytes of a text that may become one byte, for normalizers that drop nothing. In Unicode's tables it is 3."""
PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split")  # that drop nothing


class PromptTooLongError(SettingError):
    """A prompt, or a text with holes, is longer than the model's context."""

    def __init__(self, message: str, setting: str = "prompt") -> None:
        super().__init__(message, setting)


@dataclass(frozen=True)
class TokenLength:
    """The most bytes of a text that one token stands for, apart from bytes that the vocabulary has no token of."""

    longest: int
    unknown: bytes = b""


def require_fits(texts: Iterable[str], tokenizer: Any, context: int | None, model_name: str, what: str) -> None:
    """Raise PromptTooLongError if the texts together have more bytes than the context's tokens can stand for."""
    if context is None:
        return
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    if sum(map(len, encoded)) <= context:  # a token is a byte or more; to know how many takes a while
        return
    if (length := token_length(tokenizer)) is None:
        return
    limit = context * length.longest
    size = sum(len(text.translate(None, length.unknown)) for text in encoded)
    if size > limit:
        raise PromptTooLongError(
            f"{what} has {size:,} bytes, but {model_name} reads at most {context:,} tokens, which are {limit:,} bytes"
            " or fewer; shorten it"
        )


def cut_to_context(text: str, tokenizer: Any, context: int | None) -> str:
    """The beginning of a text, with all that fits into the context."""
    if context is None or len(text) <= context or (length := token_length(tokenizer)) is None or length.unknown:
        return text
    return text[: context * length.longest]


@lru_cache(maxsize=8)
def token_length(tokenizer: Any) -> TokenLength | None:
    """How much of a text a token can stand for; None if nothing known limits it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    given = json.loads(backend.to_str())
    added, model = given["added_tokens"], given["model"]
    pre_tokenizers, factor = _members(given["pre_tokenizer"]), _factor(_members(given["normalizer"]))
    byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)  # a character of the vocabulary is a byte
    unknown = _unknown_bytes(model, byte_level)
    if (
        unknown is None
        or factor is None
        or (unknown and factor > 1)  # a character may become another one, of unknown bytes
        or any(part["lstrip"] or part["rstrip"] for part in added)  # they take spaces with them
        or any(part["type"] not in PRE_TOKENIZERS or part.get("behavior") == "Removed" for part in pre_tokenizers)
    ):
        return None
    lengths = [len(text if byte_level else text.encode()) for text in model["vocab"]]
    return TokenLength(factor * max(*lengths, *(len(part["content"].encode()) for part in added)), unknown)


def _factor(normalizers: list[Mapping[str, Any]]) -> int | None:
    """How many bytes of a text may become one."""
    factor = 1
    for normalizer in normalizers:
        if normalizer["type"] == "Replace":  # such as " " by "▁"
            pattern = normalizer["pattern"].get("String", "").encode()
            if not 0 < len(pattern) <= len(normalizer["content"].encode()):
                return None
        elif normalizer["type"] not in NORMALIZED_BYTES:
            return None
        factor *= NORMALIZED_BYTES.get(normalizer["type"], 1)
    return factor


def _members(given: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The parts of a normalizer or pre-tokenizer."""
    if given is None:
        return []
    if given["type"] == "Sequence":
        return [
            member for part in given.get("normalizers", given.get("pretokenizers", ())) for member in _members(part)
        ]
    return [given]


def _unknown_bytes(model: Mapping[str, Any], byte_level: bool) -> bytes | None:
    """Bytes that are dropped, since no token has them; None if a token can stand for any number of them."""
    if model["type"] != "BPE":
        return None
    if model["byte_fallback"]:
        return b"" if all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)) else None
    if not byte_level or model["unk_token"] is not None:
        return None
    return bytes(byte for byte, character in byte_characters().items() if character not in model["vocab"])


def byte_characters() -> dict[int, str]:
    """How byte-level vocabularies write bytes (GPT-2): printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
