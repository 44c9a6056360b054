"""Reasoning models think between tags before they answer: separate the two, and let a grammar begin with the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from saltus.core.constraint import Constraint
from saltus.engine.grammar import MakesConstraint

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
        return "inside" if tail.endswith(self.tags.begin) else "answer" if tail.endswith(self.tags.end) else "tag"

    def reader(self, prompt: Sequence[int]) -> ReasoningReader | None:
        """What separates reasoning and answer; None for a text without reasoning, and if it stays in the text."""
        begin = self.begin(prompt)
        return None if begin == "answer" or self.in_text else ReasoningReader(self.tags, begin == "inside")

    @cached_property
    def tokens(self) -> tuple[int | None, int | None]:
        """The tags as tokens; None for one that is several."""
        known = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        return known.get(self.tags.begin), known.get(self.tags.end)

    @cached_property
    def shown_tokens(self) -> tuple[int, ...]:
        """The tokens of the tags, special ones too, which are read in the text."""
        parts = self.tokenizer.added_tokens_decoder.items()
        return tuple(number for number, token in parts if any(token.content in tag for tag in self.tags))

    def count(self, prompt: Sequence[int], text: Sequence[int]) -> int:
        """How many of the text's tokens are reasoning, tags included, where these are tokens."""
        first, last = (
            list(self.tokenizer(tag, add_special_tokens=False).input_ids) for tag in (self.tags.begin, self.tags.end)
        )
        begin, text = self.begin(prompt), list(text)
        space = 0
        while space < len(text) and text[space] in line_breaks(self.tokenizer):
            space += 1
        begun = text[space : space + len(first)] == first
        if last[0] not in self.shown_tokens or begin == "answer" or (begin == "tag" and not begun):
            return 0
        ends = (place + len(last) for place in range(len(text)) if text[place : place + len(last)] == last)
        return next(ends, len(text))

    def before(self, grammar: MakesConstraint) -> MakesConstraint:
        """A grammar that the answer after the reasoning must follow, where the tags are tokens."""
        return grammar if self.tokens[1] is None else AfterReasoning(grammar, self)


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
            elif self.tags.answer and begun.startswith(self.tags.answer):
                self.place, self.buffer = "answer", begun[len(self.tags.answer) :]
            elif last or not any(tag.startswith(begun) for tag in (self.tags.begin, self.tags.answer)):
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
        if whole:
            return text.rstrip()
        tag = self.tags.end
        partial = next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)
        return text[: len(text) - partial].rstrip()

    def _without_first_space(self, text: str) -> str:
        text = text.lstrip() if self.fresh else text
        self.fresh = self.fresh and not text
        return text


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
        first, last = self.reasoning.tokens
        assert last is not None
        tags = None if begin == "inside" else first, last
        return ConstraintAfterReasoning(inner, *tags, begin == "inside", end_tokens, line_breaks(tokenizer))


@lru_cache(maxsize=4)
def line_breaks(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that models write between their reasoning and the answer."""
    written = (tokenizer(text, add_special_tokens=False).input_ids for text in ("\n", "\n\n"))
    return tuple(sorted({tokens[0] for tokens in written if len(tokens) == 1}))


class ConstraintAfterReasoning:
    """A constraint on what follows the reasoning, after at most one token of line breaks."""

    def __init__(
        self,
        inner: Constraint,
        begin: int | None,
        end: int,
        inside: bool,
        end_tokens: frozenset[int],
        breaks: tuple[int, ...],
    ) -> None:
        self.inner, self.begin, self.end, self.inside = inner, begin, end, inside
        self.end_tokens, self.breaks = sorted(end_tokens), breaks

    def allowed(self, text: Sequence[int]) -> np.ndarray | None:
        start = self._start(text)
        if self._awaits_tag(text):
            allowed = np.zeros_like(self._first)
            allowed[self.begin] = True
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
            if start is None and (token in self.end_tokens or (self._awaits_tag(so_far) and token != self.begin)):
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

    def _awaits_tag(self, text: Sequence[int]) -> bool:
        """True after line breaks that no answer begins with: only the first tag may follow."""
        return not self.inside and self.begin is not None and len(text) == 1 and text[0] in self._skipped

    def _start(self, text: Sequence[int]) -> int | None:
        """Where the answer begins; None if the reasoning goes on."""
        if self._awaits_tag(text):
            return None
        if not self.inside and self.begin not in (*text[:1], *(text[1:2] if self._awaits_tag(text[:1]) else ())):
            return 0
        if self.end not in text:
            return None
        start = text.index(self.end) + 1
        return start + (start < len(text) and text[start] in self._skipped)

    def _more(self, text: Sequence[int]) -> frozenset[int]:
        """What may follow besides the answer's own tokens: the first tag, and line breaks behind the last one."""
        if not len(text):
            return frozenset() if self.inside or self.begin is None else self._skipped | {self.begin}
        ended = text[-1] == self.end and self._start(text) == len(text) and text.index(self.end) == len(text) - 1
        return self._skipped if ended else frozenset()
