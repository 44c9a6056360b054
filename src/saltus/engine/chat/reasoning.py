"""Reasoning models think between tags before they answer: separate the two, and let a grammar begin with the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from saltus.core.constraint import Constraint
from saltus.engine.chat.channel_reader import ChannelReader
from saltus.engine.chat.tool_formats.tool_format import overlap
from saltus.engine.grammar import Grammar, MakesConstraint

TAIL_TOKENS = 16  # of a prompt, in which a chat template may open or close the reasoning

Begin = Literal["tag", "inside", "answer"]
"""How a text begins: perhaps with the first tag, behind it, or with the answer."""


class ReasoningTags(NamedTuple):
    """What a model writes before its reasoning and after it, and before an answer without reasoning."""

    begin: str
    end: str
    answer: str = ""


TAGS = (
    ReasoningTags("<think>", "</think>"),  # Qwen3, QwQ, DeepSeek R1, GLM 4.5 and most others
    ReasoningTags("[THINK]", "[/THINK]"),  # Magistral
    ReasoningTags("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ReasoningTags("◁think▷", "◁/think▷"),  # Kimi
    ReasoningTags("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningTags(  # gpt-oss, whose answers are messages of channels
        "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
)  # fmt: skip


def reasoning_tags(tokenizer: Any) -> ReasoningTags | None:
    """The tags of a model: those that its chat template handles, or that are tokens of its own."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    template = str(tokenizer.chat_template or "")
    return next(
        (
            tags
            for tags in TAGS
            if tags.end in template or (tags.answer and tags.begin in template) or added.issuperset(tags[:2])
        ),
        None,
    )


class TagTokens(NamedTuple):
    """The tags of a model in its tokens; without any where a tag is none of its tokens."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    answer: tuple[int, ...] = ()

    def end_place(self, text: Sequence[int], start: int = 0) -> int | None:
        """The place behind the first tag from `start` on that ends the reasoning."""
        place = start - 1
        while True:  # by `index`, since texts of reasoning are long
            try:
                place = text.index(self.end[0], place + 1)
            except ValueError:
                return None
            if _begins_with(text, place, self.end):
                return place + len(self.end)

    def other_message_place(self, text: Sequence[int], start: int = 0) -> int | None:
        """The place from `start` on of the first message, in a channel, that is neither reasoning nor the answer."""
        between = self.end[: len(self.end) - len(self.answer)]
        place = start - 1
        while self.answer:
            try:
                place = text.index(between[0], place + 1)
            except ValueError:
                return None
            start = place + len(between)
            head = tuple(text[start : start + max(len(self.begin), len(self.answer))])
            known = any(tag[: len(head)] == head[: len(tag)] for tag in (self.begin, self.answer))
            if _begins_with(text, place, between) and not known:
                return place + 1
        return None


def _begins_with(text: Sequence[int], place: int, tag: tuple[int, ...]) -> bool:
    """True if these tokens stand at a place of the text."""
    return tuple(text[place : place + len(tag)]) == tag


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of a text that follows a prompt."""

    tokenizer: Any
    tags: ReasoningTags
    continued: str = ""  # what there is of the answer already, at the end of the prompt
    in_text: bool = False  # it stays in the text, with its tags

    def begin(self, prompt: Sequence[int]) -> Begin:
        """How the text after these tokens begins."""
        if self.continued:
            opened = self.continued.rfind(self.tags.begin) > self.continued.rfind(self.tags.end)
            return "inside" if opened else "answer"
        tail = self.tokenizer.decode(list(prompt[-TAIL_TOKENS:])).rstrip()
        if tail.endswith(self.tags.begin):
            return "inside"
        return "answer" if tail.endswith(self.tags.answer or self.tags.end) else "tag"

    def reader(self, prompt: Sequence[int]) -> ReasoningReader | ChannelReader | None:
        """What separates reasoning and answer; None for a text without reasoning, and if it stays in the text."""
        begin = self.begin(prompt)
        if begin == "answer" or self.in_text:
            return None
        inside = begin == "inside"
        return ChannelReader(inside) if self.tags.answer else ReasoningReader(self.tags, inside)

    @cached_property
    def tokens(self) -> TagTokens | None:
        """The tags in tokens; None where the last one does not begin with a token of its own."""

        def ids(tag: str) -> tuple[int, ...]:
            return tuple(self.tokenizer(tag, add_special_tokens=False).input_ids) if tag else ()

        own, end = frozenset(self.shown_tokens), ids(self.tags.end)
        if not own.intersection(end[:1]):
            return None
        begin = ids(self.tags.begin)
        return TagTokens(begin if own.intersection(begin[:1]) else (), end, ids(self.tags.answer))

    @cached_property
    def shown_tokens(self) -> tuple[int, ...]:
        """The tokens of the tags, special ones too, which are read in the text."""
        parts = self.tokenizer.added_tokens_decoder.items()
        return tuple(
            number for number, token in parts if token.content and any(token.content in tag for tag in self.tags)
        )

    def count(self, prompt: Sequence[int], text: Sequence[int], num_known: int = 0) -> int:
        """How many of the text's tokens are reasoning, tags included, where these are tokens.

        `num_known` is the count of a beginning that was all reasoning, or 0: it is not read again.
        """
        if self.tokens is None:
            return 0
        if not num_known:
            begin, first = self.begin(prompt), self.tokens.begin
            if begin == "answer":
                return 0
            space = next((place for place, token in enumerate(text) if token not in line_breaks(self.tokenizer)), 0)
            if begin == "tag" and not (first and _begins_with(text, space, first)):
                return 0
        start = max(num_known - len(self.tokens.end), 0)
        ends = self.tokens.end_place(text, start), self.tokens.other_message_place(text, start)
        return min((end for end in ends if end is not None), default=len(text))

    def before(self, grammar: MakesConstraint) -> MakesConstraint:
        """A grammar that the answer after the reasoning must follow, where the tags are tokens."""
        if isinstance(grammar, Grammar) and grammar.has_reasoning:
            return WithReasoning(grammar, self)
        return grammar if self.tokens is None else AfterReasoning(grammar, self)


class ReasoningCounter:
    """Counts the tokens of a text that are reasoning, as they arrive."""

    def __init__(self, reasoning: Reasoning | None, prompt: Sequence[int]) -> None:
        self.reasoning, self.prompt = reasoning, prompt
        self.num_reasoning = self.num_read = 0

    def count(self, text: Sequence[int]) -> int:
        """How many of the text's tokens are reasoning by now; 0 for a model without."""
        if self.reasoning is not None and self.num_reasoning in (0, self.num_read):  # else the answer has begun
            self.num_reasoning = self.reasoning.count(self.prompt, text, self.num_reasoning)
        self.num_read = len(text)
        return self.num_reasoning


class ReasoningReader:
    """Separates the reasoning from the answer as a text arrives. Space around either is dropped."""

    def __init__(self, tags: ReasoningTags, inside: bool) -> None:
        self.tags, self.place = tags, "inside" if inside else "tag"
        self.buffer, self.fresh = "", True  # fresh: nothing but space has come since the tag

    def read(self, text: str, last: bool = False) -> tuple[str, str]:
        """The next text of the reasoning and of the answer. `last` releases what was held back."""
        self.buffer += text
        reasoning = ""
        if self.place == "tag":
            begun = self.buffer.lstrip()
            if begun.startswith(self.tags.begin):
                self.place, self.buffer = "inside", begun[len(self.tags.begin) :]
            elif last or not self.tags.begin.startswith(begun):
                self.place, self.fresh = "answer", False
        if self.place == "inside":
            end = self.buffer.find(self.tags.end)
            whole = self.buffer if end < 0 else self.buffer[:end]
            reasoning = self._certain(whole, last or end >= 0)
            self.buffer = self.buffer[len(reasoning) :] if end < 0 else self.buffer[end + len(self.tags.end) :]
            reasoning = self._without_first_space(reasoning)
            if end >= 0:
                self.place, self.fresh = "answer", True
        if self.place != "answer":
            return reasoning, ""
        answer, self.buffer = self._without_first_space(self.buffer), ""
        return reasoning, answer

    def _certain(self, text: str, whole: bool) -> str:
        """The reasoning up to what may be the space before the tag, or its beginning."""
        partial = 0 if whole else overlap(text, self.tags.end)
        return text[: len(text) - partial].rstrip()

    def _without_first_space(self, text: str) -> str:
        text = text.lstrip() if self.fresh else text
        self.fresh = self.fresh and not text
        return text


@dataclass(frozen=True)
class WithReasoning:
    """A grammar of reasoning and answer, the first tag of which may stand in the prompt."""

    grammar: MakesConstraint
    reasoning: Reasoning

    def constraint(self, tokenizer: Any, end_tokens: frozenset[int], prompt: Sequence[int] = ()) -> Constraint:
        """The constraint on a text after a prompt. Errors: ValueError."""
        inner, tags = self.grammar.constraint(tokenizer, end_tokens, prompt), self.reasoning.tags
        tag = {"tag": "", "inside": tags.begin, "answer": tags.answer}[self.reasoning.begin(prompt)]
        begun = tokenizer(tag, add_special_tokens=False).input_ids if tag else []
        fits = begun and inner.num_allowed([], begun) == len(begun)
        return ContinuedConstraint(inner, begun) if fits else inner


@dataclass(frozen=True)
class ContinuedConstraint:
    """A constraint on a text whose first tokens stand in the prompt."""

    inner: Constraint
    begun: Sequence[int]

    def allowed(self, text: Sequence[int]) -> np.ndarray | None:
        return self.inner.allowed([*self.begun, *text])

    def num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        return self.inner.num_allowed([*self.begun, *text], tokens)

    def fast_forward(self, text: Sequence[int], max_tokens: int) -> Sequence[int]:
        return self.inner.fast_forward([*self.begun, *text], max_tokens)


@dataclass(frozen=True)
class AfterReasoning:
    """A grammar that begins with the answer. The reasoning may be any text, but does not end the whole one."""

    grammar: MakesConstraint
    reasoning: Reasoning

    def constraint(self, tokenizer: Any, end_tokens: frozenset[int], prompt: Sequence[int] = ()) -> Constraint:
        """The constraint on a text after a prompt. Errors: ValueError."""
        inner = self.grammar.constraint(tokenizer, end_tokens, prompt)
        begin = self.reasoning.begin(prompt)
        if begin == "answer":
            return inner
        tags = self.reasoning.tokens
        assert tags is not None
        return ConstraintAfterReasoning(inner, tags, begin == "inside", end_tokens, line_breaks(tokenizer))


@lru_cache(maxsize=4)
def line_breaks(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that models write between their reasoning and the answer."""
    written = (tokenizer(text, add_special_tokens=False).input_ids for text in ("\n", "\n\n"))
    return tuple(sorted({tokens[0] for tokens in written if len(tokens) == 1}))


class ConstraintAfterReasoning:
    """A constraint on what follows the reasoning, after at most one token of line breaks."""

    def __init__(
        self, inner: Constraint, tags: TagTokens, inside: bool, end_tokens: frozenset[int], breaks: tuple[int, ...]
    ) -> None:
        self.inner, self.tags, self.inside = inner, tags, inside
        self.end_tokens, self.breaks = sorted(end_tokens), breaks

    def allowed(self, text: Sequence[int]) -> np.ndarray | None:
        start = self._start(text)
        if rest := self._rest_of_tag(text):
            allowed = np.zeros_like(self._first)
            allowed[sorted(rest)] = True
            return allowed
        if start is None:
            allowed = np.ones_like(self._first)
            allowed[[token for token in self.end_tokens if token < len(allowed)]] = False
            return allowed
        allowed = self.inner.allowed(text[start:])
        if allowed is not None and (more := self._more(text)):
            allowed = allowed.copy()
            allowed[[token for token in more if token < len(allowed)]] = True
        return allowed

    def num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        so_far = [*text]
        for count, token in enumerate(tokens):
            start = self._start(so_far)
            if start is not None and token not in self._more(so_far):
                return count + self.inner.num_allowed(so_far[start:], tokens[count:])
            rest = self._rest_of_tag(so_far)
            if (rest and token not in rest) or (start is None and not rest and token in self.end_tokens):
                return count
            so_far.append(token)
        return len(tokens)

    def fast_forward(self, text: Sequence[int], max_tokens: int) -> Sequence[int]:
        start = self._start(text)
        return () if start is None or self._more(text) else self.inner.fast_forward(text[start:], max_tokens)

    @cached_property
    def _first(self) -> np.ndarray:
        """What the answer may begin with."""
        allowed = self.inner.allowed([])
        assert allowed is not None
        return allowed

    @cached_property
    def _skipped(self) -> frozenset[int]:
        """Line breaks that do not belong to the answer: those that it may not begin with."""
        first = self._first
        return frozenset(token for token in self.breaks if token < len(first) and not first[token])

    def _rest_of_tag(self, text: Sequence[int]) -> frozenset[int]:
        """What goes on with a tag that is half written, or follows line breaks that no answer begins with."""
        if self.inside or not self.tags.begin or not len(text):
            return frozenset()
        tags, space = (self.tags.begin, self.tags.answer), self._space(text)
        count = len(text) - space
        if count >= max(map(len, tags)):
            return frozenset()
        return frozenset(tag[count] for tag in tags if count < len(tag) and _begins_with(text, space, tag[:count]))

    def _space(self, text: Sequence[int]) -> int:
        """1 if a token of line breaks stands before the first tag."""
        return int(bool(self.tags.begin) and len(text) > 0 and text[0] in self._skipped)

    def _start(self, text: Sequence[int]) -> int | None:
        """Where the answer begins; None if the reasoning goes on."""
        if self._rest_of_tag(text):
            return None
        if not self.inside:
            space, (begin, _, answer) = self._space(text), self.tags
            if answer and _begins_with(text, space, answer):
                return space + len(answer)
            if not begin or not _begins_with(text, space, begin):
                return 0
        start = self.tags.end_place(text)
        return None if start is None else start + (start < len(text) and text[start] in self._skipped)

    def _more(self, text: Sequence[int]) -> frozenset[int]:
        """What may follow besides the answer's own tokens: the first tag, and line breaks behind the last one."""
        if not len(text):
            begins = {tag[0] for tag in (self.tags.begin, self.tags.answer) if tag}
            return self._skipped | begins if begins and not self.inside else frozenset()
        ended = self._start(text) == len(text) == self.tags.end_place(text)
        return self._skipped if ended else frozenset()
