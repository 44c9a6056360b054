"""Restrict texts to a JSON schema, a regular expression, one of several texts, or a grammar, by llguidance."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from saltus.core.constraint import Constraint
from saltus.engine.chat.control_tokens import with_renamed_tokens
from saltus.engine.gbnf import gbnf_to_lark
from saltus.engine.json_schemas import MAX_LENGTH, followed_schema, grammar_limits, matcher_class
from saltus.loading.fetching import first_line

BYTES_PER_TOKEN = 32  # that are read ahead for each fast-forward token; few tokens have more
CANNOT_FOLLOW = (
    "the grammar cannot be followed: it leaves no token of this model; allow other characters where it forces one text"
)


@runtime_checkable
class MakesConstraint(Protocol):
    """What restricts texts: a grammar, or one that begins later in the text."""

    def constraint(self, tokenizer: Any, end_tokens: frozenset[int], prompt: Sequence[int] = ()) -> Constraint:
        """The constraint on one text, which follows the tokens of a prompt. Errors: ValueError of one line."""
        ...


@dataclass(frozen=True)
class Grammar:
    """What a whole text must be. A text that ends at `max_new_tokens` may be incomplete.

    Needs llguidance, of the extra `serve`.
    """

    definition: str  # in llguidance's form
    schema: str | None = None  # of JSON, where it is no more than that
    has_reasoning: bool = False  # it begins with the reasoning before an answer

    def __post_init__(self) -> None:
        _require_length(self.definition)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, strict: bool = True) -> Grammar:
        """JSON that follows a schema. Without `strict` keywords that no grammar can follow are ignored.

        Errors: ValueError of one line that names the keyword.
        """
        try:
            given = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(given, Mapping):
                raise ValueError("it must be an object")
            followed = json.dumps(followed_schema(given, strict))
            return cls(matcher_class().grammar_from_json_schema(followed), followed)
        except RecursionError:
            raise ValueError("the JSON schema is nested too deeply") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"the JSON schema is not JSON (line {error.lineno}: {error.msg}); mend it") from None
        except ValueError as error:
            raise ValueError(f"the grammar of a JSON schema cannot be used: {first_line(error)}") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression (Rust's syntax) matches from its start to its end."""
        return cls(matcher_class().grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts. Errors: ValueError."""
        if not texts or "" in texts:
            raise ValueError("a choice needs one text or more, and none may be empty")
        return cls.lark("start: " + " | ".join(map(json.dumps, texts)))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A context-free grammar in Lark's syntax, with llguidance's extensions (`%json {...}`)."""
        return cls(matcher_class().grammar_from_lark(grammar))

    @classmethod
    def gbnf(cls, grammar: str) -> Grammar:
        """A context-free grammar in llama.cpp's syntax. Errors: ValueError."""
        _require_length(grammar)
        try:
            translated = gbnf_to_lark(grammar)
        except ValueError as error:
            raise ValueError(f"the grammar is not in llama.cpp's GBNF: {error}") from None
        _require_length(translated, "the grammar, translated to Lark's syntax,")
        return cls.lark(translated)

    def validate(self) -> None:
        """Raise ValueError of one line for a grammar that cannot be used, whatever the model."""
        if problem := matcher_class().validate_grammar(self.definition, limits=grammar_limits()):
            raise ValueError(_described(problem))

    def constraint(self, tokenizer: Any, end_tokens: frozenset[int], prompt: Sequence[int] = ()) -> Constraint:
        """The constraint on one text. Errors: ValueError of one line for a grammar that cannot be used."""
        ends = frozenset(token for token in end_tokens if token < len(tokenizer))  # a model may have more tokens
        if not ends:
            raise ValueError("a text with a grammar has to end, but no token ends it; give stop_token_ids")
        compile_anew = partial(_matcher, self.definition, tokenizer, ends)
        compiled = _compile(self.definition, tokenizer, ends)
        words = ends.difference(_plain_text(tokenizer).special_token_ids)  # by stop_token_ids
        return GrammarConstraint(compiled.deep_copy(), compile_anew, _grammar_tokenizer(tokenizer, ends), ends, words)


def _require_length(definition: str, what: str = "the grammar") -> None:
    if len(definition) > MAX_LENGTH:
        raise ValueError(f"{what} has {len(definition):,} characters; at most {MAX_LENGTH:,} are read")


class GrammarConstraint:
    """A grammar and how far a text has come in it.

    `end_words` are end tokens that are no special tokens: a grammar may have their characters, but they only end texts.
    Matchers have limits, and what has once been looked at counts, also wrong drafts, and other texts of a matcher that
    was copied. At a limit a matcher is in error or refuses any text. So a text is an error only if it is one for a
    matcher that has looked at nothing else.
    """

    def __init__(
        self,
        matcher: Any,
        compile_anew: Callable[[], Any],
        tokenizer: Any,
        end_tokens: frozenset[int],
        end_words: frozenset[int] = frozenset(),
    ) -> None:
        self.matcher, self.compile_anew = matcher, compile_anew
        self.end_words, self.cannot_follow = sorted(end_words), CANNOT_FOLLOW
        if end_words:
            self.cannot_follow += (
                f", or leave {_listed(self.end_words)} out of stop_token_ids: they end complete texts alone"
            )
        self.tokenizer, self.end_tokens = tokenizer, end_tokens
        self.read: list[int] = []  # by the matcher

    def allowed(self, text: Sequence[int]) -> np.ndarray | None:
        """The tokens that may follow; None if all may, as after a text that has ended.

        Errors: ValueError for a text that the grammar forbids, where no token may follow, and for one that is too much.
        """
        try:
            return self._allowed(text)
        except ValueError:
            self.matcher, self.read = self.compile_anew(), []
            allowed = self._allowed(text)
            _compile.cache_clear()  # copies have the same limit in common
            return allowed

    def num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of the tokens may follow the text, one after the other; 0 if a limit does not let it tell."""
        try:
            return self._num_allowed(text, tokens)
        except ValueError:
            return 0

    def fast_forward(self, text: Sequence[int], max_tokens: int) -> Sequence[int]:
        """The usual tokens of the characters that must come next, and the end of a text that is complete then."""
        try:
            return self._fast_forward(text, max_tokens)
        except ValueError:
            return ()

    def _allowed(self, text: Sequence[int]) -> np.ndarray | None:
        if self._has_ended(text):
            return None
        if not self._go_to(text):
            raise ValueError(self.cannot_follow)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self.tokenizer.vocab_size, bitorder="little").astype(bool)
        if self.end_words and not self.matcher.is_accepting():
            allowed[self.end_words] = False
        places = np.flatnonzero(allowed)
        # A single token that llguidance asks for may be one that it then refuses, but for the end.
        refusable = len(places) == 1 and not self.matcher.is_stopped()
        if not len(places) or (refusable and not self.matcher.validate_tokens(places.tolist())):
            raise ValueError(self.cannot_follow)
        return allowed

    def _num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        if self._has_ended(text):
            return len(tokens)
        if not self._go_to(text):
            return 0
        known = itertools.takewhile(lambda token: token < self.tokenizer.vocab_size, map(int, tokens))
        count = self.matcher.validate_tokens(list(known))  # any other token is an error, which would end the text
        self._check()
        if self.matcher.is_stopped() and len(tokens):  # llguidance knows no end behind a text that is complete
            count = int(tokens[0] in self.end_tokens)
        return len(tokens) if self._has_ended(tokens[:count]) else count

    def _fast_forward(self, text: Sequence[int], max_tokens: int) -> Sequence[int]:
        fast_forwarded: list[int] = []
        while (left := max_tokens - len(fast_forwarded)) > 0:
            so_far = [*text, *fast_forwarded]
            if self._has_ended(so_far) or not self._go_to(so_far):
                break
            if self.matcher.is_stopped():
                return [*fast_forwarded, *sorted(self.end_tokens)[:1]]
            # Only as many bytes as the tokens may have: all that a grammar forces may be as long as the grammar allows.
            next_bytes = self.matcher.compute_ff_bytes()[: left * BYTES_PER_TOKEN]
            self._check()
            tokens = self.tokenizer.tokenize_bytes(next_bytes)[:left]
            if not tokens or self.matcher.validate_tokens(tokens) < len(tokens):  # llguidance asks for others
                break
            fast_forwarded += tokens
        return fast_forwarded

    def _has_ended(self, text: Sequence[int]) -> bool:
        return not self.end_tokens.isdisjoint(text)

    def _go_to(self, text: Sequence[int]) -> bool:
        """Read the text; False if the grammar forbids it."""
        self._check()
        shared = min(len(self.read), len(text))
        if self.read[:shared] != list(text[:shared]):
            shared = next(place for place in range(shared) if self.read[place] != text[place])
        if shared < len(self.read):
            self.matcher.rollback(len(self.read) - shared)
        rest = [int(token) for token in text[shared:]]
        count = self.matcher.try_consume_tokens(rest) if rest else 0
        self.read = [*self.read[:shared], *rest[:count]]
        self._check()
        return count == len(rest)

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ValueError(f"the grammar is too complex: {first_line(self.matcher.get_error())}")


def _listed(tokens: Sequence[int]) -> str:
    """The first of some tokens, for an error message."""
    return ", ".join(map(str, tokens[:3])) + ", …" * (len(tokens) > 3)


@lru_cache(maxsize=32)
def _compile(definition: str, tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    return _matcher(definition, tokenizer, end_tokens)


def _matcher(definition: str, tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    """A matcher of its own for a grammar. Errors: ValueError of one line."""
    matcher = matcher_class()(
        _grammar_tokenizer(tokenizer, end_tokens), definition, log_level=0, limits=grammar_limits()
    )
    if matcher.is_error():
        raise ValueError(_described(matcher.get_error()))
    return matcher


def _described(problem: str) -> str:
    """What llguidance says of a grammar that cannot be used, in one line."""
    message = re.sub(r"^at \d+\(\d+\): ", "", problem)  # a place in llguidance's form of the grammar
    if "regex parse error" in message:
        reason = re.search(r"error: (.+)", message.partition("regex parse error")[2])
        message = f"its regular expression is not valid ({reason[1] if reason else first_line(message)})"
    return f"the grammar cannot be used: {first_line(message)}"


@lru_cache(maxsize=4)
def _grammar_tokenizer(tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    """The tokenizer as llguidance reads it."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    ends, plain = sorted(end_tokens), copy(_plain_text(tokenizer))
    plain.eos_token_id = ends[0]
    return LLTokenizer(TokenizerWrapper(plain), n_vocab=len(tokenizer), eos_token=ends)


@lru_cache(maxsize=4)
def _plain_text(tokenizer: Any) -> _PlainText:
    """What the tokenizers of all end tokens share: to read a vocabulary takes seconds."""
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("grammars need a tokenizer of the tokenizers library (tokenizer.json); this model has another")
    definition, size = backend.to_str(), len(tokenizer)
    known = LLTokenizer(definition, n_vocab=size)
    special = [token for token in range(known.vocab_size) if known.is_special_token(token)]
    return _PlainText(known, LLTokenizer(with_renamed_tokens(definition, special), n_vocab=size), special)


class _PlainText:
    """A tokenizer, as llguidance asks for it, that writes the text of a special token by ordinary tokens."""

    def __init__(self, known: Any, plain: Any, special: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = known.eos_token, None
        self.tokens = [known.decode_bytes([token]) for token in range(known.vocab_size)]
        self.special_token_ids = list(special)
        self.plain = plain

    def __call__(self, text: bytes | str) -> list[int]:
        return self.plain.tokenize_bytes(text if isinstance(text, bytes) else text.encode())
