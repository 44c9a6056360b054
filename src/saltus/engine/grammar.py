"""Restrict texts to a JSON schema, a regular expression, one of several texts, or a grammar, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from saltus.core.constraint import Constraint
from saltus.networks.loading.fetching import first_line

# JSON has one fixed spacing, Python's: then keys and punctuation follow from the schema, and are drafted.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MAX_LENGTH = 1 << 18  # characters of a grammar


@dataclass(frozen=True)
class Grammar:
    """What a whole text must be. A text that ends at `max_new_tokens` may be incomplete.

    Needs llguidance, of the extra `serve`.
    """

    definition: str  # in llguidance's form

    def __post_init__(self) -> None:
        if len(self.definition) > MAX_LENGTH:
            raise ValueError(f"the grammar has {len(self.definition):,} characters; at most {MAX_LENGTH:,} are read")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that follows a schema. Errors: ValueError."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return cls(_matcher_class().grammar_from_json_schema(text, overrides=JSON_FORM))
        except RecursionError:
            raise ValueError("the JSON schema is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"JSON schema: {first_line(error)}") from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression (Rust's syntax) matches from its start to its end."""
        return cls(_matcher_class().grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts. Errors: ValueError."""
        if not texts or "" in texts:
            raise ValueError("a choice needs one text or more, and none may be empty")
        return cls.lark("start: " + " | ".join(map(json.dumps, texts)))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """A context-free grammar in Lark's syntax, with llguidance's extensions (`%json {...}`)."""
        return cls(_matcher_class().grammar_from_lark(grammar))

    def constraint(self, tokenizer: Any, end_tokens: frozenset[int]) -> Constraint:
        """The constraint on one text. Errors: ValueError of one line for a grammar that cannot be used."""
        compiled = _compile(self.definition, tokenizer, end_tokens)
        return GrammarConstraint(compiled.deep_copy(), _grammar_tokenizer(tokenizer, end_tokens), end_tokens)


class GrammarConstraint:
    """A grammar and how far a text has come in it."""

    def __init__(self, matcher: Any, tokenizer: Any, end_tokens: frozenset[int]) -> None:
        self.matcher, self.tokenizer, self.end_tokens = matcher, tokenizer, end_tokens
        self.read: list[int] = []  # by the matcher

    def allowed(self, text: Sequence[int]) -> np.ndarray | None:
        """The tokens that may follow; None if all may, as after a text that is forbidden or has ended."""
        if not self._go_to(text):
            return None
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self.tokenizer.vocab_size, bitorder="little").astype(bool)

    def num_allowed(self, text: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of the tokens may follow the text, one after the other."""
        return self.matcher.validate_tokens([int(token) for token in tokens]) if self._go_to(text) else len(tokens)

    def forced(self, text: Sequence[int]) -> Sequence[int]:
        """The usual tokens of the characters that must come next, and the end of a text that is complete then."""
        if not self._go_to(text):
            return ()
        if self.matcher.is_stopped():
            return (min(self.end_tokens),) if self.end_tokens else ()
        tokens = self.tokenizer.tokenize_bytes(self.matcher.compute_ff_bytes())
        return [*tokens, *self.forced([*text, *tokens])] if tokens else ()

    def _go_to(self, text: Sequence[int]) -> bool:
        """Read the text; False if the grammar forbids it or if it has ended."""
        if text and text[-1] in self.end_tokens:
            return False
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


@lru_cache(maxsize=32)
def _compile(definition: str, tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    matcher = _matcher_class()(_grammar_tokenizer(tokenizer, end_tokens), definition, log_level=0)
    if matcher.is_error():
        raise ValueError(f"the grammar cannot be used: {first_line(matcher.get_error())}")
    return matcher


@lru_cache(maxsize=4)
def _grammar_tokenizer(tokenizer: Any, end_tokens: frozenset[int]) -> Any:
    """The tokenizer as llguidance reads it."""
    from llguidance import LLTokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("grammars need a tokenizer of the tokenizers library (tokenizer.json); this model has another")
    return LLTokenizer(backend.to_str(), n_vocab=len(tokenizer), eos_token=sorted(end_tokens))


def _matcher_class() -> Any:
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError:
        raise ValueError('grammars need the package llguidance: pip install "saltus[serve]"') from None
    return LLMatcher
