"""The part of a text that each of its tokens stands for, as text and as bytes: what log-probabilities are listed with.

The bytes of all tokens together are the text, and so are the texts of all tokens. A character in several tokens is the
text of the last one, while each has bytes of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from saltus.engine.text_bounds import byte_characters


@dataclass(frozen=True)
class TokenText:
    """A token of a text and what it stands for there."""

    token: int
    text: str
    content: bytes
    drops_space: bool = False  # the space that the token begins with is not in the text, as at its beginning


@dataclass
class TokenTexts:
    """The tokens of one text as they are decided. Those of a character that is not whole yet wait for the others."""

    tokenizer: Any
    shown: Mapping[int, str]  # special tokens that are text
    waiting: list[tuple[int, str]] = field(default_factory=list, init=False)  # tokens and what they completed
    whole: list[tuple[int, list[TokenText]]] = field(default_factory=list, init=False)  # with the text's length so far
    length: int = field(default=0, init=False)  # of the text

    def unread(self) -> TokenTexts:
        """The same for another text."""
        return TokenTexts(self.tokenizer, self.shown)

    def add(self, token: int, new: str, is_whole: bool) -> None:
        """Take the next token, which completes the text `new`. `is_whole`: no character waits for its rest then."""
        self.waiting.append((token, new))
        self.length += len(new)
        if is_whole:
            self._settle()

    def take(self, num_characters: int, final: bool) -> list[TokenText]:
        """The tokens whose text is in the first characters, and was not taken yet. At the end all, the rest cut off."""
        if final and self.waiting:
            self._settle()
        taken: list[TokenText] = []
        while self.whole and (final or self.whole[0][0] <= num_characters):
            end, group = self.whole.pop(0)
            taken += group if end <= num_characters else _cut(group, end, num_characters)
        return taken

    def _settle(self) -> None:
        self.whole.append((self.length, self._token_texts(self.waiting)))
        self.waiting = []

    def _token_texts(self, group: Sequence[tuple[int, str]]) -> list[TokenText]:
        """Tokens with their own bytes, if these are what the text has; else with the bytes of their texts."""
        known = _vocabulary(self.tokenizer)
        written = "".join(text for _, text in group).encode("utf-8", "surrogatepass")
        own = [
            b"" if known.is_special(token) and token not in self.shown else known.content(token) for token, _ in group
        ]
        contents = [content for content in own if content is not None]
        if len(contents) == len(own) and (joined := b"".join(contents)) in (written, b" " + written):
            first = next((place for place, content in enumerate(contents) if content), 0)
            drops = [joined != written and place == first for place in range(len(group))]
            return [
                TokenText(token, text, content[1:] if drop else content, drop)
                for (token, text), content, drop in zip(group, contents, drops, strict=True)
            ]
        return [TokenText(token, text, text.encode("utf-8", "surrogatepass")) for token, text in group]


def _cut(group: Sequence[TokenText], end: int, num_characters: int) -> list[TokenText]:
    """The tokens of a text that is cut off before `end`, where they end."""
    made, place = [], end - sum(len(one.text) for one in group)
    for one in group:
        text = one.text[: max(num_characters - place, 0)]
        place += len(one.text)
        made.append(replace(one, text=text, content=text.encode("utf-8", "surrogatepass")))
    return made


def has_no_text(tokenizer: Any, token: int) -> bool:
    """True for a token that stands for nothing wherever it is: a special one, or one of a padded vocabulary."""
    known = _vocabulary(tokenizer)
    return token >= known.size or known.is_special(token)


def token_bytes(tokenizer: Any, tokens: Sequence[int]) -> bytes | None:
    """The bytes of tokens, special ones left out; None if the text of one depends on others."""
    known = _vocabulary(tokenizer)
    contents = [b"" if known.is_special(token) else known.content(token) for token in tokens]
    return None if None in contents else b"".join(content or b"" for content in contents)


def token_name(tokenizer: Any, token: int, drops_space: bool = False, prefix: str = "") -> tuple[str, bytes]:
    """How a token is written by itself, and its bytes; empty for a special one, which is no text.

    Bytes that are no whole character are written as OpenAI does, such as `\\xf0\\x9f`, after a prefix.
    """
    known = _vocabulary(tokenizer)
    content = known.content(token)
    if content is None:
        content = tokenizer.decode([token]).encode("utf-8", "surrogatepass")
    if drops_space and content.startswith(b" "):
        content = content[1:]
    return written_bytes(content, prefix) or f"token_id:{token}", b"" if known.is_special(token) else content


def written_bytes(content: bytes, prefix: str = "") -> str:
    """Bytes as text, those that are no whole characters with escapes after a prefix."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in content)


@dataclass(frozen=True)
class _Vocabulary:
    """The bytes of each token, where the tokenizer's decoder tells them."""

    tokenizer: Any
    size: int
    added: Mapping[int, Any]
    byte_level: bool  # a character of a token is a byte
    spaces: bool  # "▁" is a space
    byte_fallback: bool  # <0xF0> is a byte

    def is_special(self, token: int) -> bool:
        return token in self.added and self.added[token].special

    def content(self, token: int) -> bytes | None:
        """The bytes of a token; None if its text depends on others."""
        if token in self.added:
            return self.added[token].content.encode()
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # of a padded vocabulary
            return b""
        if self.byte_level:
            return bytes(_bytes_of_characters().get(character, 0) for character in piece)
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode() if self.spaces else None


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: Any) -> _Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = {} if backend is None or backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    spaces = "Metaspace" in kinds or any(step.get("pattern") == {"String": "▁"} for step in steps)
    return _Vocabulary(
        tokenizer, len(tokenizer), tokenizer.added_tokens_decoder, "ByteLevel" in kinds,
        spaces and "ByteLevel" not in kinds, "ByteFallback" in kinds,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _bytes_of_characters() -> dict[str, int]:
    return {character: byte for byte, character in byte_characters().items()}
