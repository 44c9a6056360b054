"""Keep a user's words words: of the control tokens in a conversation only those of the chat template are tokens.

A message may spell a control token, such as the end of a turn. Such words are marked before the template is rendered;
afterwards what is not marked is the template's own, and gets a name that no message can spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from saltus.engine.fim_formats import find_fim_format

MARK = "\U0010fffe"  # stands in a word that reads like a control token; it is no character, as is the next one
RENAMED = "\U0010ffff"  # begins the names of tokens that no text may spell
TAG = re.compile(r"</?\w+>")  # such as <think> and <tool_call>: text, unless the tokenizer calls it special
MARKER = re.compile(r"<[|｜].+[|｜]>|\[/?[A-Z_]+\]")  # such as <|im_start|> and [INST], whatever the tokenizer calls it


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer, and how a text is tokenised in which they have other names."""

    tokenizer: Any
    tokens: Mapping[int, str]  # their names
    names: frozenset[str]
    lengths: tuple[int, ...]  # of the names, longest first
    first: re.Pattern[str]  # the characters that they begin with

    @cached_property
    def encoder(self) -> Any:
        """Of the tokenizers library: it reads RENAMED and a name as the token, and the name alone as words."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(with_renamed_tokens(self.tokenizer.backend_tokenizer.to_str(), self.tokens))

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Where a text has their names."""
        end = 0
        for match in self.first.finditer(text):
            start = match.start()
            if start >= end and (size := next((n for n in self.lengths if text[start : start + n] in self.names), 0)):
                end = start + size
                yield start, end

    def marked(self, value: Any) -> Any:
        """A text, or what lists and dicts have of them, with marks in the words that are names. Errors: ValueError."""
        if isinstance(value, str):
            if MARK in value or RENAMED in value:
                raise ValueError("a message has U+10FFFE or U+10FFFF, which stand for no characters; leave them out")
            return self._edited(value, lambda name: name[0] + MARK + name[1:])
        if isinstance(value, Mapping):
            return {key: self.marked(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.marked(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered conversation whose messages were marked."""
        named = self._edited(text, lambda name: RENAMED + name)
        escaped = (repr(MARK)[1:-1], json.dumps(MARK)[1:-1])  # as templates write an object
        for mark in (MARK, *escaped):
            named = named.replace(mark, "")
        return list(self.encoder.encode(named, add_special_tokens=False).ids)

    def _edited(self, text: str, edit: Callable[[str], str]) -> str:
        pieces, end = [], 0
        for start, stop in self.spans(text):
            pieces += [text[end:start], edit(text[start:stop])]
            end = stop
        return "".join([*pieces, text[end:]]) if pieces else text


@lru_cache(maxsize=4)
def control_tokens(tokenizer: Any, template: str, end_tokens: frozenset[int] = frozenset()) -> ControlTokens | None:
    """The control tokens of a tokenizer with a chat template; None if it has none.

    They are its special tokens, and of the other added ones those that end a text, that mark a hole, that the template
    writes, or that have the form of a marker: many tokenizers do not call them special. Tags such as <think> stay as
    the tokenizer has them.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    form = find_fim_format(tokenizer)
    holes = form.names if form is not None else frozenset()
    tokens = {
        token: added.content for token, added in tokenizer.added_tokens_decoder.items()
        if len(added.content) > 1 and (
            added.special or token in end_tokens or added.content in holes
            or MARKER.fullmatch(added.content)
            or (added.content.strip() and added.content in template and not TAG.fullmatch(added.content))
        )
    }  # fmt: skip
    if not tokens:
        return None
    names = frozenset(tokens.values())
    first = re.compile("[" + "".join(map(re.escape, sorted({name[0] for name in names}))) + "]")
    lengths = tuple(sorted({len(name) for name in names}, reverse=True))
    return ControlTokens(tokenizer, tokens, names, lengths, first)


def with_renamed_tokens(definition: str, tokens: Collection[int]) -> str:
    """A tokenizer.json some of whose added tokens have names that no text contains; and no tokens around a text."""
    content = json.loads(definition)
    names = {token["content"]: RENAMED + token["content"] for token in content["added_tokens"] if token["id"] in tokens}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): place for piece, place in vocab.items()}
    elif vocab is not None:  # pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("merges"):  # none makes an added token of its letters
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps({**content, "post_processor": None, "truncation": None, "padding": None})


def _merged(merge: Sequence[str] | str) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
