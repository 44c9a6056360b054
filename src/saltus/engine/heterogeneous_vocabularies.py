"""Let a model of another vocabulary draft: texts are translated into its tokens, and its drafts into the target's.

The draft model reads a text as its own tokenizer splits it, and writes tokens of its own. What it has written is then
split by the target's tokenizer, so that drafts match as strings, whatever pieces they were drafted in (string-level
exact match; Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", Section 3). A token that both vocabularies have is picked with the text's own random
numbers, so that sampled drafts agree wherever the distributions do.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any

import numpy as np
import torch

from saltus.core.canvas import Canvas, continuation
from saltus.core.distributions import Step
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.protocols import Drafter, checked_draft_call, checked_drafts
from saltus.core.tree import Branch, Drafts, each_branch
from saltus.engine.encoding import begin_tokens, tokens_inside_text
from saltus.engine.token_texts import has_no_text, token_bytes

MAX_TAIL = 64  # tokens of the target that are split anew when the text grows, at most
WORD_START = re.compile(rb" [A-Za-z]")  # where tokenizers split a text, whatever follows


class VocabularyTranslation:
    """From the tokens of a target to those of a draft model, and back.

    What the draft model writes has ids beside the target's: a token that the target has, too, has the target's id, any
    other one `num_target_ids` more than its own. Errors: ValueError of one line where the bytes of tokens are unknown.
    """

    def __init__(self, tokenizer: Any, target_tokenizer: Any, num_target_ids: int, context_length: int | None) -> None:
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self.num_target_ids, self.context_length = num_target_ids, context_length
        self.begin = begin_tokens(tokenizer)
        known, named = _contents(target_tokenizer), {}
        for token, content in reversed(known.items()):
            named[content] = token
        ids = np.arange(len(tokenizer)) + num_target_ids
        self.special: dict[bytes | str, int] = {}
        for token, content in _contents(tokenizer).items():
            if isinstance(content, str):
                self.special[content] = token
            if (same := named.pop(content, num_target_ids)) < num_target_ids:
                ids[token] = same
        self.columns = torch.from_numpy(np.argsort(ids))  # of the logits, in the order of the ids
        self.token_ids = torch.from_numpy(np.sort(ids))
        self.own = dict(zip(ids.tolist(), range(len(ids)), strict=True))  # the draft model's token by its id

    def outputs(self, outputs: ForwardOutputs) -> ForwardOutputs:
        """The draft model's, by these ids; none stay none."""
        if not len(outputs.logits):
            return outputs
        logits = outputs.logits.index_select(1, self.columns.to(outputs.logits.device))
        return replace(outputs, logits=logits, token_ids=self.token_ids, likeliest=None, picked=None, candidates=None)

    def from_target(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's tokens for a part of a text; control tokens that it lacks are spelled out."""
        made, words = [], b""
        for token in tokens:
            if not has_no_text(self.target_tokenizer, token):
                words += token_bytes(self.target_tokenizer, [token]) or b""
                continue
            made, words = made + self._split(words), b""
            name = self.target_tokenizer.convert_ids_to_tokens(token) if token < len(self.target_tokenizer) else None
            if name in self.special:
                made.append(self.special[name])
            elif name is not None and token != self.target_tokenizer.bos_token_id:
                made += tokens_inside_text(self.tokenizer, name, parse_special=False)
        return made + self._split(words)

    def _split(self, words: bytes) -> list[int]:
        text = words.decode("utf-8", "ignore")  # half a character is read when it is whole
        return tokens_inside_text(self.tokenizer, text, parse_special=False) if text else []

    def into_target(self, branch: Branch, max_depth: int) -> Branch:
        """A branch of these ids as the target splits it, up to the first token that is no text.

        A token's probability is that of all drafts that begin in it.
        """
        words, begins, last = b"", [], None
        for token in branch.tokens:
            own = self.own.get(token)  # None: a token that `forced_at_index` asks for, and the draft model lacks
            if own is None or has_no_text(self.tokenizer, own):
                last = token if token < self.num_target_ids else None
                break
            begins.append(len(words))
            words += token_bytes(self.tokenizer, [own]) or b""
        text = words.decode("utf-8", "ignore")
        tokens = tokens_inside_text(self.target_tokenizer, text, parse_special=False) if text else []
        ends = np.cumsum([len(token_bytes(self.target_tokenizer, [token]) or b"") for token in tokens])
        chances = np.ones(len(tokens))
        for begin, chance in zip(begins, branch.acceptance_probabilities, strict=False):
            if (place := int(np.searchsorted(ends, begin, side="right"))) < len(chances):
                chances[place] *= chance
        if last is not None and len(text.encode()) == len(words):
            tokens, chances = [*tokens, last], [*chances, branch.acceptance_probabilities[len(begins)]]
        return Branch(tokens[:max_depth], list(map(float, chances[:max_depth])), branch.source)


@dataclass
class _TranslatedText:
    """A text in the draft model's tokens, which grows with it."""

    translation: VocabularyTranslation
    tokens: list[int] = field(default_factory=list)  # the target's
    translated: list[int] = field(default_factory=list)  # without the begin token
    settled: tuple[int, int] = (0, 0)  # how many of both no further token changes

    def read(self, tokens: list[int]) -> list[int]:
        """The whole text, begin token included. The end of what was read before is split anew with what follows."""
        if tokens == self.tokens:
            return [*self.translation.begin, *self.translated]
        first, own = self.settled
        if tokens[:first] != self.tokens[:first]:
            first, own = 0, 0
        self.tokens, self.translated = tokens, self.translated[:own] + self.translation.from_target(tokens[first:])
        self._settle()
        return [*self.translation.begin, *self.translated]

    def _settle(self) -> None:
        """Keep what stands before one of the last words."""
        tokenizer, translate = self.translation.target_tokenizer, self.translation.from_target
        for place in range(len(self.tokens) - 8, max(self.settled[0], len(self.tokens) - MAX_TAIL), -1):
            if WORD_START.match(token_bytes(tokenizer, [self.tokens[place]]) or b""):
                break
        else:
            if len(self.tokens) - self.settled[0] <= MAX_TAIL:
                return
            place = len(self.tokens) - MAX_TAIL // 2
        self.settled = place, len(self.translated) - len(translate(self.tokens[place:]))


def translating_drafter(drafter: Drafter, translation: VocabularyTranslation) -> Drafter:
    """A drafter for one text whose draft model has another vocabulary."""
    text = _TranslatedText(translation)

    def draft(
        canvas: Canvas, last: Step | None, max_depth: int
    ) -> Generator[ForwardInputs, ForwardOutputs, Sequence[Drafts]]:
        drafts = drafter(canvas, last, max_depth)
        if not isinstance(drafts, Generator):
            return drafts
        try:
            inputs = next(drafts)
            while True:
                read = checked_draft_call(drafter, inputs).canvas.decided_prefix.tolist()
                decided = len(read) - (inputs.canvas.num_decided - canvas.num_decided)
                drafted = [translation.own.get(token) for token in read[decided:]]
                own = [*text.read(read[:decided]), *(token for token in drafted if token is not None)]
                # No logits where the text is too long for the draft model, half a character, or has a token it lacks.
                outputs = ForwardOutputs(torch.empty(0, 0))
                if (
                    own
                    and None not in drafted
                    and (translation.context_length is None or len(own) < translation.context_length)
                ):
                    translated = continuation(own, len(inputs.canvas.open_positions))
                    made = yield ForwardInputs(
                        translated, network_name=inputs.network_name, draft_probabilities=inputs.draft_probabilities
                    )
                    outputs = translation.outputs(made)
                inputs = drafts.send(outputs)
        except StopIteration as end:
            branches = each_branch(checked_drafts(drafter, end.value))
            return [translation.into_target(branch, max_depth) for branch in branches]

    return update_wrapper(draft, drafter, updated=())


def _contents(tokenizer: Any) -> dict[int, bytes | str]:
    """What each token stands for: bytes, or the name of one that is no text. Errors: ValueError of one line."""
    found: dict[int, bytes | str] = {}
    for token in range(len(tokenizer)):
        if has_no_text(tokenizer, token):
            found[token] = tokenizer.convert_ids_to_tokens(token)
        elif (content := token_bytes(tokenizer, [token])) is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} does not tell what its tokens stand for, so that a model of"
                " another vocabulary cannot draft; choose a draft model of the target's family"
            )
        elif content:
            found[token] = content
    return found
