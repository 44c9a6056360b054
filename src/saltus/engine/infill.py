"""Turn a template with holes into a request, and the decided tokens into the filled text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from saltus.core.canvas import continuation
from saltus.core.value_types import SettingError
from saltus.engine.checkpoints import Checkpoint
from saltus.engine.detokenizer import Detokenizer, TextOutput
from saltus.engine.encoding import require_unicode
from saltus.engine.fim import fim_prompt
from saltus.engine.infill_template import InfillLayout, InfillTemplate, hole_end_rules, tokenize_template
from saltus.engine.request import Request
from saltus.engine.results import Infilling, statistics_of
from saltus.engine.settings import InfillSettings, make_sampling
from saltus.engine.text_request import TextRequest, make_text_request
from saltus.models.protocols import FillsHoles


@dataclass
class InfillOutput:
    """The text of a template so far: decided tokens fill its holes from left to right."""

    layout: InfillLayout
    tokenizer: Any
    whole: bool = True  # `add` also returns the texts before the first hole and after the last one
    token_texts: list[list[str]] = field(init=False)  # for each hole the text that each of its tokens adds
    _positions: Iterator[tuple[int, int]] = field(init=False)  # (hole, position) of the tokens to come

    def __post_init__(self) -> None:
        self.token_texts = [[] for _ in self.layout.hole_spans]
        self._tokens = self.layout.canvas.tokens.copy()
        self._positions = iter([(hole, at) for hole, span in enumerate(self.layout.hole_spans) for at in span])
        self._detokenizer = Detokenizer(self.tokenizer)

    def add(self, tokens: Sequence[int]) -> str:
        """Take the next tokens; returns what they add to the whole text, the given pieces next to holes included."""
        added = ""
        for token, (hole, at) in zip(tokens, self._positions, strict=False):
            span = self.layout.hole_spans[hole]
            if at == span.start:
                self._detokenizer = Detokenizer(self.tokenizer, self._tokens[:at].tolist())
                added += self.layout.pieces[hole] if hole or self.whole else ""
            self._tokens[at] = token
            self.token_texts[hole].append(self._detokenizer.add(token))
            added += self.token_texts[hole][-1]
            if self.whole and at == span.stop - 1 and hole == len(self.layout.hole_spans) - 1:
                added += self.layout.pieces[-1]
        return added


@dataclass
class HolesRequest:
    """A template, its request, and its text so far."""

    layout: InfillLayout
    request: Request
    tokenizer: Any

    def __post_init__(self) -> None:
        self._between, self._num_released = InfillOutput(self.layout, self.tokenizer, whole=False), 0

    @property
    def output(self) -> HolesRequest:
        """What `release` is a method of, as for other requests."""
        return self

    def release(self, finished: bool) -> str:
        """What was decided since the last release: the text from the first hole to the last, given pieces included."""
        new = self.request.tokens[self._num_released :]
        self._num_released += len(new)
        return self._between.add(new)

    def writer(self) -> InfillOutput:
        """What turns the tokens of calls into the whole text, piece by piece."""
        return InfillOutput(self.layout, self.tokenizer)

    def infilling(self) -> Infilling:
        """The result as far as it has been decoded."""
        request, output = self.request, InfillOutput(self.layout, self.tokenizer)
        output.add(request.tokens)
        return _infilling(self.layout, request, ["".join(parts) for parts in output.token_texts], output.token_texts)


def infill_request(
    target: Checkpoint,
    template: InfillTemplate,
    verbatim: bool,
    open_tokens: int,
    seed: int,
    logprobs: bool,
    sampling: Mapping[str, Any],
) -> HolesRequest:
    """The request that fills the holes of a template. Errors: ValueError of one line."""
    assert isinstance(target.network, FillsHoles)
    tokenizer, blank = target.tokenizer, target.network.blank_token
    if None in template.hole_lengths and blank is None:
        raise ValueError(f"{target.name} cannot end a hole by itself; give each hole a length, such as [[8]]")
    given = make_sampling(sampling, InfillSettings)
    for name in ("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "min_new_tokens"):
        if getattr(given, name):
            raise SettingError(f"{name} is about the tokens of one continuation, not of holes; leave it out", name)
    for piece in template.pieces:
        require_unicode(piece, "the text")
    layout = tokenize_template(template, tokenizer, open_tokens, target.context_length, verbatim)
    special = {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
    target.check_sampling(given)
    made = replace(given, banned=tuple(sorted({*special, *target.end_tokens, *given.banned} - {blank})))
    if blank is not None:
        banned_at, ends = hole_end_rules(layout, template.hole_lengths, blank)
        made = replace(made, banned_at_index=(*given.banned_at_index, *banned_at), hole_end_tokens=ends)
    canvas = layout.canvas
    tokens = canvas.tokens[canvas.given_positions].tolist()
    target.check_tokens(tokens, "the text")
    request = Request(tokens, len(canvas.order), seed, made, logprobs=logprobs, canvas=canvas)
    return HolesRequest(layout, request, tokenizer)


@dataclass
class FimRequest:
    """A text with one hole that a causal model fills by its fill-in-the-middle prompt."""

    layout: InfillLayout
    request: Request
    output: TextOutput  # of the middle
    started: bool = field(default=False, init=False)  # to write the text

    def writer(self) -> FimRequest:
        """What turns the tokens of calls into the whole text, piece by piece."""
        return self

    def add(self, tokens: Sequence[int]) -> str:
        """What calls up to now add to the whole text, the given pieces next to the hole included."""
        before, after = self.layout.pieces
        finished = self.request.finish_reason is not None
        added = ("" if self.started else before) + self.output.release(finished) + (after if finished else "")
        self.started = True
        return added

    def infilling(self) -> Infilling:
        """The result as far as it has been decoded."""
        request, text = self.request, self.output.text
        before = self.layout.canvas.tokens[self.layout.canvas.given_positions].tolist()
        shown = self.output.detokenizer
        detokenizer = Detokenizer(shown.tokenizer, before, shown.hidden)
        parts = [detokenizer.add(token) for token in request.tokens]
        return replace(_infilling(self.layout, request, [text], [parts]), finish_reason=request.finish_reason)


AnyRequest = TextRequest | HolesRequest | FimRequest
"""One text to decode: all have a `request`, and an `output` to `release` text from."""


def fim_request(
    target: Checkpoint, template: InfillTemplate, max_tokens: int, settings: Mapping[str, Any]
) -> FimRequest:
    """The request that fills the one hole of a template by a causal model. Errors: ValueError of one line."""
    before, *_, after = template.pieces
    middle = make_text_request(target, before, dict(suffix=after, max_new_tokens=max_tokens, **settings))
    layout = fim_layout(template, fim_prompt(target.tokenizer, target.name, before, after).before, max_tokens)
    return FimRequest(layout, middle.request, middle.output)


def _infilling(layout: InfillLayout, request: Request, texts: list[str], token_texts: list[list[str]]) -> Infilling:
    """The result of a request whose holes have these texts by now."""
    return Infilling(
        layout, layout.text(texts), texts, token_texts, request.tokens, list(request.calls),
        request.log_probabilities if request.logprobs else None, statistics_of(request),
    )  # fmt: skip


def fim_layout(template: InfillTemplate, before: Sequence[int], max_tokens: int) -> InfillLayout:
    """The layout of a template with one open hole. Errors: ValueError for another one."""
    if template.hole_lengths != (None,):
        raise ValueError(
            "a causal model fills one hole and ends it itself: mark it [[…]], and leave out others; an any-subset model"
            " such as stories fills several, of any length"
        )
    return InfillLayout(
        continuation(before, max_tokens), (range(len(before), len(before) + max_tokens),), template.pieces
    )
