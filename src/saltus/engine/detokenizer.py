"""Turn tokens into text as they are decided: no half characters, no text that may begin a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from saltus.core.value_types import SettingError
from saltus.engine.token_texts import TokenTexts, has_no_text, token_bytes

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # how tokenizers show a character that is not whole
CONTEXT_TOKENS = 8  # tokens of the prompt that decide whether a space precedes the continuation
TOKENIZERS_BACKEND = "transformers.tokenization_utils_tokenizers"  # whose `decode` calls the tokenizers library
MAX_PENDING_TOKENS = 64  # tokens to wait for the rest of a character before broken bytes are emitted


class Detokenizer:
    """Decode token by token; emitted text never changes.

    Only a short window is decoded each time: the tokens of the last complete piece, which decide about spaces between
    words, and those since. (DecodeStream of tokenizers does the same for fast tokenizers, but emits nothing for broken
    bytes however many follow.)

    Special tokens are not text, but for those in `shown`, with their texts. Nor are the tokens in `hidden`: end tokens,
    which many tokenizers do not call special.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: Sequence[int] = (),
        hidden: frozenset[int] = frozenset(),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self.tokenizer, self.hidden, self.shown = tokenizer, hidden, shown or {}
        self._text_of = text_decoder(tokenizer)
        self.context_tokens = [token for token in context if token not in hidden][-CONTEXT_TOKENS:]
        self.pending_tokens: list[int] = []
        self.context_text = self.emitted_text = self._decode(self.context_tokens)

    def unread(self) -> Detokenizer:
        """The same for another text. Before the first token."""
        return Detokenizer(self.tokenizer, self.context_tokens, self.hidden, self.shown)

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is not whole, and for tokens that are no text."""
        if token in self.hidden or token in self.shown or has_no_text(self.tokenizer, token):
            return self.shown.get(token, "")
        self.pending_tokens.append(token)
        text = self._decode(self.context_tokens + self.pending_tokens)
        is_whole = len(self.pending_tokens) > MAX_PENDING_TOKENS or self._has_whole_characters(text)
        whole = text if is_whole else text.rstrip(REPLACEMENT)
        if len(whole) < len(text) and not (whole.startswith(self.emitted_text) and len(whole) > len(self.emitted_text)):
            return ""
        if whole.startswith(self.emitted_text):
            new = whole[len(self.emitted_text) :]
        else:  # broken bytes changed the decoding of the tokens before them
            new = self._decode(self.pending_tokens)[len(self.emitted_text) - len(self.context_text) :]
        self.emitted_text = whole
        if new and whole == text:
            self.context_tokens, self.pending_tokens = self.pending_tokens, []
            self.context_text = self.emitted_text = self._decode(self.context_tokens)
        return new

    def _has_whole_characters(self, text: str) -> bool:
        """False if a text may end in half a character. A model may also write U+FFFD itself, which is a whole one."""
        if not text.endswith(REPLACEMENT):
            return True
        try:
            content = token_bytes(self.tokenizer, self.pending_tokens)
            return content is not None and bool(content.decode())
        except UnicodeDecodeError:
            return False

    def _decode(self, tokens: list[int]) -> str:
        return self._text_of(tokens) if tokens else ""


def text_decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """A tokenizer's `decode` without special tokens and clean-up; that of the tokenizers library, where it does all."""
    for kind in type(tokenizer).__mro__:
        if kind.__module__ == TOKENIZERS_BACKEND:
            return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
        if {"decode", "_decode"} & vars(kind).keys():
            break
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@runtime_checkable
class SeparatesReasoning(Protocol):
    """Separates reasoning and answer as a text arrives."""

    def read(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next text of the reasoning and of the answer."""
        ...


@dataclass
class TextOutput:
    """The text of one continuation so far; ends at end tokens and stop strings, but not in its reasoning."""

    detokenizer: Detokenizer
    end_tokens: frozenset[int]  # tokens that end it
    stop_strings: tuple[str, ...] = ()  # strings that end it, and are cut off
    min_tokens: int = 0  # stop strings are looked for in the text of the tokens after these
    token_texts: TokenTexts | None = None  # what each token stands for, where that is asked for
    unshown_ends: Mapping[int, str] = field(default_factory=dict)  # end tokens with texts that only stop strings spell
    reasoning_reader: Callable[[], SeparatesReasoning | None] = lambda: None  # a new one
    text: str = ""
    ended: bool = False
    stop_string: str | None = field(default=None, init=False)  # the one that ended it
    num_released: int = field(default=0, init=False)  # characters given out by `release`
    num_tokens: int = field(default=0, init=False)
    num_free: int = field(default=0, init=False)  # characters in which no stop string is looked for
    reasoning: SeparatesReasoning | None = field(init=False)  # None where the answer has begun
    has_reasoning: bool = field(default=False, init=False)  # of which a part is certain

    def __post_init__(self) -> None:
        self.reasoning = self.reasoning_reader() if self.stop_strings else None
        self.sorted_stops = sorted(self.stop_strings)
        self.longest_stop = max(map(len, self.stop_strings), default=1)

    def unread(self) -> TextOutput:
        """The same for another text. Before the first token."""
        token_texts = None if self.token_texts is None else self.token_texts.unread()
        return TextOutput(
            self.detokenizer.unread(), self.end_tokens, self.stop_strings, self.min_tokens, token_texts,
            self.unshown_ends, self.reasoning_reader,
        )  # fmt: skip

    def add(self, token: int) -> bool:
        """Take the next token; True if the text ends with it."""
        assert not self.ended
        new = self.detokenizer.add(token)
        self.text += new
        if self.token_texts is not None:
            self.token_texts.add(token, new, not self.detokenizer.pending_tokens)
        self.num_tokens += 1
        if self.num_tokens <= self.min_tokens:
            self.num_free = len(self.text)
        self.ended = token in self.end_tokens
        begin = len(self.text) - len(new) - self.longest_stop + 1
        if self.reasoning is not None:
            self._read_reasoning(self.reasoning, new)
            begin = 0  # of the answer, if it has begun
        if new and self.stop_strings and self.reasoning is None:
            begin = max(begin, self.num_free)
            places = [(at, len(stop), stop) for stop in self.stop_strings if (at := self.text.find(stop, begin)) >= 0]
            if places:
                place, _, self.stop_string = min(places)
                self.text, self.ended = self.text[:place], True
                return True
        if self.ended and token in self.unshown_ends:
            self.text = self.text.removesuffix(self.unshown_ends[token])
        return self.ended

    def _read_reasoning(self, reader: SeparatesReasoning, new: str) -> None:
        reasoning, answer = reader.read(new)
        self.has_reasoning |= bool(reasoning)
        if answer:
            self.reasoning = None
            self.num_free = max(self.num_free, len(self.text) - len(answer))

    def release(self, final: bool = False) -> str:
        """The text not yet released, except a tail that may begin a stop string (unless `final`)."""
        held = 0 if final or self.ended else self._held_back_length()
        new = self.text[self.num_released : len(self.text) - held]
        self.num_released += len(new)
        return new

    def _held_back_length(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        if self.reasoning is not None:  # all that may yet be an answer
            return 0 if self.has_reasoning else len(self.text) - self.num_released
        longest = min(self.longest_stop - 1, len(self.text) - self.num_free)
        return next((n for n in range(longest, 0, -1) if self._begins_stop_string(self.text[-n:])), 0)

    def _begins_stop_string(self, text: str) -> bool:
        place = bisect_left(self.sorted_stops, text)  # of the first string that may begin with it
        return place < len(self.sorted_stops) and self.sorted_stops[place].startswith(text)


def check_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple. Errors: SettingError for an empty one, and for what is no string."""
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence | None) else tuple(stop or ())
    if wrong := [one for one in stops if not isinstance(one, str)]:
        raise SettingError(f"stop has {wrong[0]!r}, but must be a string or several", "stop")
    if "" in stops:
        raise SettingError("a stop string is empty and would end every text at once; remove it", "stop")
    return stops


def shown_special_tokens(
    tokenizer: Any, stops: Sequence[str], named: Collection[int], every: bool, ends: frozenset[int]
) -> dict[int, str]:
    """The texts of special tokens that belong to a text: those `named`, with `every` all but those that end it.

    And those that stop strings spell, which end the text there.
    """
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return {
        token: content
        for token, content in special.items()
        if content and (token in named or (every and token not in ends) or any(content in stop for stop in stops))
    }
