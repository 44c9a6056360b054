"""Turn a prompt and the settings of its text into a request, and into what makes text of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from saltus.core.constraint import Constraint
from saltus.core.noise import Noise
from saltus.core.value_types import SettingError, about_setting, hints_of, short_repr, typed_values
from saltus.engine.chat.tool_calls import call_markers
from saltus.engine.checkpoints import Checkpoint
from saltus.engine.detokenizer import (
    Detokenizer,
    SeparatesReasoning,
    TextOutput,
    check_stop_strings,
    shown_special_tokens,
)
from saltus.engine.encoding import PromptSettings, encode_prompt, is_tokens, require_unicode, uses_chat_template
from saltus.engine.fim import fim_prompt
from saltus.engine.fim_formats import find_fim_format
from saltus.engine.grammar import MakesConstraint
from saltus.engine.request import Request
from saltus.engine.results import Generation, statistics_of
from saltus.engine.settings import PromptLike, Settings, make_sampling
from saltus.engine.text_bounds import PromptTooLongError, cut_to_context
from saltus.engine.token_texts import TokenTexts

SHARE_OF_NEW_TOKENS = 4  # other files leave a fourth of the context to the text in a hole, if it may become so long


@dataclass(frozen=True)
class TextSettings:
    """What a text is, and what ends it. The other settings of a text are those of `PromptSettings` and `Sampling`."""

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    seed: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: MakesConstraint | None = None
    suffix: str | None = None  # a model with fill-in-the-middle tokens writes what stands between prompt and suffix
    files: Sequence[tuple[str, str]] = ()  # (name, text) of others that it reads before: the last ones that have room
    prediction: str | None = None
    logprobs: bool = False
    top_logprobs: int = 0  # of how many of the likeliest tokens at each position
    skip_special_tokens: bool = True
    shown_tokens: Sequence[int] = ()  # special tokens whose texts belong to the text
    # makes what reads the reasoning of a text after a prompt; stop strings are looked for behind it
    reasoning_reader: Callable[[Sequence[int]], SeparatesReasoning | None] = lambda prompt: None

    def __post_init__(self) -> None:
        if self.files and self.suffix is None:
            message = "files are read before a hole; give a suffix, the text after it, which may be empty"
            raise SettingError(message, "suffix")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, but must be 0 or more")
        if self.top_logprobs < 0:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, but must be 0 or more")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}, but max_new_tokens is {self.max_new_tokens}; lower it"
            )
        Noise(self.seed)  # refuses a negative seed

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs or self.top_logprobs > 0


@dataclass
class TextRequest:
    """A prompt, its request, and its text so far."""

    prompt: PromptLike
    request: Request
    output: TextOutput

    def generation(self) -> Generation:
        request = self.request
        log_probabilities = request.log_probabilities if request.logprobs else None
        return Generation(
            self.prompt, self.output.text, request.tokens, request.finish_reason, list(request.calls),
            log_probabilities, statistics_of(request),
        )  # fmt: skip

    def with_seed(self, seed: int, constraint: Constraint | None = None) -> TextRequest:
        """The same before its first call, for another seed; a constraint is of one text."""
        output = self.output.unread()
        request = replace(self.request, seed=seed, is_end=output.add, constraint=constraint)
        return TextRequest(self.prompt, request, output)


def make_text_request(target: Checkpoint, prompt: Any, given: Mapping[str, Any]) -> TextRequest:
    """The request for a prompt, with fields of `PromptSettings`, `TextSettings` and `Sampling` by name.

    Errors: ValueError of one line; a SettingError where it is about one of them.
    """
    of_prompt, of_text = hints_of(PromptSettings), hints_of(TextSettings)
    checked = typed_values(given, {**of_prompt, **of_text})
    prompt_settings = PromptSettings(**{name: value for name, value in checked.items() if name in of_prompt})
    if prompt_settings.tools and is_tokens(prompt):
        raise SettingError("tools stand in the prompt, which token ids are already; give messages", "tools")
    settings = TextSettings(**{name: value for name, value in checked.items() if name in of_text})
    sampling = {name: value for name, value in checked.items() if name not in of_prompt and name not in of_text}

    with about_setting("stop_token_ids"):
        target.check_tokens(settings.stop_token_ids, "stop_token_ids")
    with about_setting("prompt"):
        encoded = _encode(target, prompt, prompt_settings, settings)
        target.check_tokens(encoded.tokens, "the prompt")
    max_new_tokens = _room_after(target, len(encoded.tokens), settings)
    end_tokens = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else encoded.end_tokens)
    output = _text_output(target.tokenizer, encoded, settings, end_tokens, bool(prompt_settings.tools))
    if settings.min_new_tokens:
        sampling |= {"min_new_tokens": settings.min_new_tokens, "end_tokens": tuple(sorted(end_tokens))}
    request = Request(
        encoded.tokens, max_new_tokens, settings.seed, make_sampling(sampling, Settings), output.add,
        logprobs=settings.wants_logprobs, top_logprobs=settings.top_logprobs,
    )  # fmt: skip
    target.check_sampling(request.sampling)
    if settings.grammar is not None:
        with about_setting("grammar"):
            request.constraint = _constraint(target, settings, end_tokens, encoded.tokens)
    if settings.prediction:
        with about_setting("prediction"):
            request.prediction = _predicted_tokens(target, settings.prediction)
    if is_tokens(prompt):
        prompt = target.tokenizer.decode(encoded.tokens, clean_up_tokenization_spaces=False)
    return TextRequest(prompt, request, output)


@dataclass(frozen=True)
class _EncodedPrompt:
    """The tokens of a prompt, those among them that the text goes on with, and the tokens that end the text."""

    tokens: list[int]
    continued: Sequence[int]
    end_tokens: frozenset[int]


def _encode(target: Checkpoint, prompt: Any, prompt_settings: PromptSettings, settings: TextSettings) -> _EncodedPrompt:
    tokenizer, ends = target.tokenizer, target.end_tokens
    if settings.suffix is None or (not settings.suffix and find_fim_format(tokenizer) is None):
        tokens = encode_prompt(tokenizer, prompt, prompt_settings, target.name, target.context_length, ends)
        in_template = not is_tokens(prompt) and uses_chat_template(tokenizer, prompt, prompt_settings.raw)
        begins_anew = in_template and not prompt_settings.continues(prompt)
        return _EncodedPrompt(tokens, () if begins_anew else tokens, ends)
    if not isinstance(prompt, str):
        raise SettingError("with a suffix the prompt is the text before it, as a str", "suffix")
    target.require_fits("the prompt", prompt, settings.suffix)
    context = target.context_length
    most = None if context is None else context - min(settings.max_new_tokens, context // SHARE_OF_NEW_TOKENS)
    fim = fim_prompt(tokenizer, target.name, prompt, settings.suffix, settings.files, most)
    return _EncodedPrompt(fim.tokens, fim.before, ends | fim.end_tokens)


def _room_after(target: Checkpoint, num_tokens: int, settings: TextSettings) -> int:
    """How many new tokens a text may have after a prompt of so many. Errors: PromptTooLongError."""
    context, most = target.context_length, settings.max_new_tokens
    if context is None:
        return most
    sizes = f"the prompt has {num_tokens:,} tokens, but {target.name} reads at most {context:,}"
    if num_tokens > context:
        raise PromptTooLongError(f"{sizes}; shorten it")
    least = min(max(settings.min_new_tokens, 1), most)
    if num_tokens + least > context:
        raise PromptTooLongError(f"{sizes}, so that no room is left for {least:,} new ones; shorten it")
    return min(most, context - num_tokens)


def _text_output(
    tokenizer: Any, encoded: _EncodedPrompt, settings: TextSettings, end_tokens: frozenset[int], has_tools: bool
) -> TextOutput:
    """What makes text of the tokens. Tokens that end texts are not shown, also where these do not end with them."""
    stops, hidden = check_stop_strings(settings.stop), end_tokens | encoded.end_tokens
    shown = shown_special_tokens(tokenizer, stops, settings.shown_tokens, not settings.skip_special_tokens, hidden)
    markers = call_markers(tokenizer) if has_tools else {}
    spelled_by_stops = (end_tokens & shown.keys()) - {*settings.shown_tokens, *markers}
    unshown_ends = {token: shown[token] for token in spelled_by_stops}
    shown |= markers
    return TextOutput(
        Detokenizer(tokenizer, encoded.continued, hidden, shown), end_tokens, stops, settings.min_new_tokens,
        TokenTexts(tokenizer, shown) if settings.wants_logprobs else None, unshown_ends,
        partial(settings.reasoning_reader, encoded.tokens),
    )  # fmt: skip


def _constraint(
    target: Checkpoint, settings: TextSettings, end_tokens: frozenset[int], prompt_tokens: Sequence[int]
) -> Constraint:
    if not isinstance(settings.grammar, MakesConstraint):
        given = short_repr(settings.grammar)
        raise ValueError(f"grammar is {given}, but must be a saltus.Grammar, such as Grammar.regex(…)")
    if settings.ignore_eos:
        raise ValueError("ignore_eos and a grammar contradict each other: a complete text has to end")
    return settings.grammar.constraint(target.tokenizer, end_tokens, prompt_tokens)


def _predicted_tokens(target: Checkpoint, prediction: str) -> Sequence[int]:
    """The tokens of what a text will probably repeat; no text is longer than the context."""
    context, text = target.context_length, require_unicode(prediction, "the prediction")
    text = cut_to_context(text, target.tokenizer, context)
    tokens = target.tokenizer(text, add_special_tokens=False).input_ids[:context]
    target.check_tokens(tokens, "the prediction")
    return tokens
