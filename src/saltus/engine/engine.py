"""The library's front door: `load` a model with a method, then generate, stream or infill."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack, cast, overload

import torch

from saltus.core.constraint import Constraint
from saltus.core.noise import Noise
from saltus.core.value_types import short_repr, with_checked_types
from saltus.engine.checkpoints import Checkpoint
from saltus.engine.decoder import Decoder, engine_is_closed
from saltus.engine.detokenizer import (
    Detokenizer,
    SeparatesReasoning,
    TextOutput,
    check_stop_strings,
    shown_special_tokens,
)
from saltus.engine.encoding import (
    PromptSettings,
    encode_prompt,
    is_batch,
    is_tokens,
    require_unicode,
    uses_chat_template,
)
from saltus.engine.fim import fim_prompt
from saltus.engine.fim_formats import find_fim_format
from saltus.engine.grammar import MakesConstraint
from saltus.engine.infill import FimRequest, HolesRequest, fim_layout, infill_request
from saltus.engine.infill_template import DEFAULT_MIDDLE_TOKENS, DEFAULT_OPEN_TOKENS, InfillTemplate, as_template
from saltus.engine.request import Request
from saltus.engine.results import (
    Chunk,
    Generation,
    Infilling,
    InfillSettings,
    InfillStream,
    PromptLike,
    Settings,
    Stream,
    make_sampling,
    statistics_of,
)
from saltus.engine.scheduler import run_requests
from saltus.engine.text_bounds import PromptTooLongError, cut_to_context, require_fits
from saltus.engine.token_texts import TokenTexts
from saltus.engine.tool_calls import call_markers
from saltus.models.packed_decoder import transformers_model
from saltus.models.protocols import TargetNetwork

SHARE_OF_NEW_TOKENS = 4  # other files leave a fourth of the context to the text in a hole, if it may become so long


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


@dataclass(frozen=True)
class _Closed:
    """What a closed engine has in place of its parts. Errors: ValueError for whatever is asked of them."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        raise engine_is_closed(self.name)


AnyRequest = TextRequest | HolesRequest | FimRequest  # all have a `request`, and an `output` to `release` text from


@dataclass
class Engine:
    """A model with a decoding method, as `load` makes it. Threads may share it: texts take turns, call by call.

    `with saltus.load(…) as engine:` closes it at the end.
    """

    target: Checkpoint = field(repr=False)
    method: str  # the method of calls that name none
    decoder: Decoder

    def __repr__(self) -> str:
        return f"<saltus.Engine of {self.target.name}, method {self.method}>"

    def close(self) -> None:
        """Free the memory of the weights, of draft models and of kept texts, and files that are mapped.

        A call that runs in another thread is waited for; streams that have begun end with an error, as does any other
        use of a closed engine: ValueError. Closing twice is fine. What else refers to the model keeps it, such as a
        copy of the engine (`copy_with`) or `model`. The kernels' threads sleep, and belong to the process.
        """
        if isinstance(self.decoder, Decoder):
            self.decoder.close()
        self.target = self.decoder = cast(Any, _Closed(self.target.name))
        gc.collect()  # modules and their hooks refer to each other
        torch.cuda.empty_cache()  # nothing without a GPU

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def model(self) -> Any:
        """The Hugging Face model (PreTrainedModel). It still works as one: `engine.model.generate(...)`."""
        return transformers_model(self.target.network.model)

    @property
    def network(self) -> TargetNetwork:
        """What evaluates forward passes over draft trees: a network of `saltus.models`."""
        return self.target.network

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.target.tokenizer

    def copy_with(self, network: TargetNetwork | None = None, **changes: Any) -> Engine:
        """The same model decoded otherwise: another network for it, or changed fields of the decoder."""
        target = self.target if network is None else replace(self.target, network=network)
        return Engine(target, self.method, self.decoder.copy_with(target=target.network, **changes))

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]: a str is no sequence of prompts here
        self, prompt: PromptLike, *, method: str | None = None, **settings: Unpack[Settings]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[PromptLike], *, method: str | None = None, **settings: Unpack[Settings]
    ) -> list[Generation]: ...

    @with_checked_types
    def generate(
        self, prompt: Any, *, method: str | None = None, **settings: Unpack[Settings]
    ) -> Generation | list[Generation]:
        """Continue a prompt, or answer the messages of a conversation. A list of either gives a list.

        The settings are those of `saltus.Settings`, all optional: max_new_tokens (256), temperature (0: greedily),
        top_k, top_p, min_p, seed, stop, raw, grammar, logprobs, repetition_penalty … A text does not depend on the
        method, nor on the other texts of a list. Errors: ValueError of one line.
        """
        requests = _each(prompt, is_batch(prompt), "prompt", lambda item: self.text_request(item, **settings))
        for _ in self._run([item.request for item in requests], method):
            pass
        results = [item.generation() for item in requests]
        return results if is_batch(prompt) else results[0]

    @with_checked_types
    def stream(self, prompt: PromptLike, *, method: str | None = None, **settings: Unpack[Settings]) -> Stream:
        """`generate` for one prompt, one chunk a call. Chunks hold decided text only, never half a character."""
        if is_batch(prompt):
            raise ValueError("stream writes one prompt; use generate for a batch")
        text_request = self.text_request(prompt, **settings)
        rounds = self._run([text_request.request], method)

        def chunks() -> Generator[Chunk]:
            for index, tokens in _new_tokens(text_request.request, rounds):
                reason = text_request.request.finish_reason
                yield Chunk(text_request.output.release(reason is not None), tokens, index, reason)
            if not text_request.request.calls:
                yield Chunk("", [], -1, text_request.request.finish_reason)

        return Stream(chunks(), text_request.generation)

    @overload
    def infill(  # pyright: ignore[reportOverlappingOverload]: a str is no sequence of texts here
        self, text: str | InfillTemplate, *, method: str | None = None, **settings: Unpack[InfillSettings]
    ) -> Infilling: ...

    @overload
    def infill(
        self, text: Sequence[str | InfillTemplate], *, method: str | None = None, **settings: Unpack[InfillSettings]
    ) -> list[Infilling]: ...

    @with_checked_types
    def infill(
        self, text: Any, *, method: str | None = None, **settings: Unpack[InfillSettings]
    ) -> Infilling | list[Infilling]:
        """Fill the holes of a text, such as `The [[8]] sat on the [[…]].`; a list of texts gives a list.

        `[[8]]` has exactly 8 tokens; the model ends `[[…]]` itself, after at most `open_tokens`. The settings are those
        of `InfillSettings`. Errors: ValueError of one line, also for a model that reads left to right only.
        """
        many = not isinstance(text, str | InfillTemplate)
        requests = _each(text, many, "text", lambda item: self.infill_request(item, **settings))
        for _ in self._run([item.request for item in requests], method):
            pass
        results = [item.infilling() for item in requests]
        return results if many else results[0]

    @with_checked_types
    def stream_infill(
        self, text: str | InfillTemplate, *, method: str | None = None, **settings: Unpack[InfillSettings]
    ) -> InfillStream:
        """`infill` for one text, one chunk a call. The chunks' texts together are the whole filled text."""
        infill_request = self.infill_request(text, **settings)
        rounds = self._run([infill_request.request], method)

        def chunks() -> Generator[Chunk]:
            output = infill_request.writer()
            for index, tokens in _new_tokens(infill_request.request, rounds):
                yield Chunk(output.add(tokens), tokens, index, infill_request.request.finish_reason)

        return InfillStream(chunks(), infill_request.infilling)

    def limit_context(self, tokens: int) -> None:
        """Let prompt and text together have at most so many tokens, where the model would read more."""
        longest = self.target.context_length
        self.target = replace(self.target, context_length=tokens if longest is None else min(tokens, longest))

    def encode(
        self, prompt: PromptLike, raw: bool = False, unchecked_length: int | None = None, **settings: Any
    ) -> list[int]:
        """The token ids that `generate` would read, chat template included unless `raw`.

        With `unchecked_length` a text of more characters is refused if it cannot fit into the context. `settings` are
        fields of `PromptSettings`. Errors: ValueError of one line.
        """
        target = self.target
        context = None if unchecked_length is None else target.context_length
        tokens = encode_prompt(
            self.tokenizer, prompt, PromptSettings(raw=raw, **settings), target.name, context, target.end_tokens,
            unchecked_length or 0,
        )  # fmt: skip
        target.check_tokens(tokens, "the prompt")
        return tokens

    def _run(self, requests: Sequence[Request], method: str | None) -> Generator[list[Request]]:
        return run_requests(self.decoder, requests, self.method if method is None else method)

    @with_checked_types
    def text_request(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 256,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        logprobs: bool = False,
        ignore_eos: bool = False,
        prediction: str | None = None,
        top_logprobs: int = 0,
        grammar: MakesConstraint | None = None,
        suffix: str | None = None,
        files: Sequence[tuple[str, str]] = (),
        min_new_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown_tokens: Sequence[int] = (),
        reasoning_reader: Callable[[Sequence[int]], SeparatesReasoning | None] = lambda prompt: None,
        raw: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        add_special_tokens: bool | None = None,
        parse_special: bool = False,
        **sampling: Any,
    ) -> TextRequest:
        """What `generate` decodes for a prompt (also token ids), for callers that decode it themselves.

        With a `suffix` a model with fill-in-the-middle tokens writes what stands between the prompt and the suffix;
        `files` (name, text) are other files that it reads before, the last ones where there is no room for all.
        `shown_tokens` are special tokens whose texts belong
        to the text. `reasoning_reader` makes what reads the reasoning of a text after a prompt; stop strings are looked
        for behind it.
        Errors: ValueError of one line.
        """
        if tools and is_tokens(prompt):
            raise ValueError("tools stand in the prompt, which token ids are already; give messages")
        if files and suffix is None:
            raise ValueError("files are read before a hole; give a suffix, the text after it, which may be empty")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be 0 or more")
        if top_logprobs < 0:
            raise ValueError(f"top_logprobs is {top_logprobs}, but must be 0 or more")
        if min_new_tokens > max_new_tokens:
            raise ValueError(f"min_new_tokens is {min_new_tokens}, but max_new_tokens is {max_new_tokens}; lower it")
        Noise(seed)  # refuses a negative seed
        self.target.check_tokens(stop_token_ids, "stop_token_ids")
        settings = PromptSettings(
            raw, tools, chat_template_kwargs or {}, add_generation_prompt, continue_final_message, add_special_tokens,
            parse_special,
        )  # fmt: skip
        tokens, continues, ends = self._prompt_tokens(prompt, settings, suffix, files, max_new_tokens)
        self.target.check_tokens(tokens, "the prompt")
        max_new_tokens = self._room_after(len(tokens), max_new_tokens, min_new_tokens)
        if is_tokens(prompt):
            prompt = self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        stops = check_stop_strings(stop)
        stopping = frozenset(stop_token_ids) | (frozenset() if ignore_eos else ends)
        shown = shown_special_tokens(self.tokenizer, stops, shown_tokens, not skip_special_tokens, stopping | ends)
        markers = call_markers(self.tokenizer) if tools else {}
        unshown = {token: shown[token] for token in stopping & shown.keys() if token not in {*shown_tokens, *markers}}
        shown |= markers
        detokenizer = Detokenizer(self.tokenizer, continues, stopping | ends, shown)
        wants_logprobs = logprobs or top_logprobs > 0
        token_texts = TokenTexts(self.tokenizer, shown) if wants_logprobs else None
        output = TextOutput(
            detokenizer, stopping, stops, min_new_tokens, token_texts, unshown, partial(reasoning_reader, tokens)
        )
        if min_new_tokens:
            sampling |= {"min_new_tokens": min_new_tokens, "end_tokens": tuple(sorted(stopping))}
        request = Request(
            tokens, max_new_tokens, seed, make_sampling(sampling, Settings), output.add, wants_logprobs,
            top_logprobs=top_logprobs,
        )  # fmt: skip
        self.target.check_sampling(request.sampling)
        if grammar is not None:
            if not isinstance(grammar, MakesConstraint):
                given = short_repr(grammar)
                raise ValueError(f"grammar is {given}, but must be a saltus.Grammar, such as Grammar.regex(…)")
            if ignore_eos:
                raise ValueError("ignore_eos and a grammar contradict each other: a complete text has to end")
            request.constraint = grammar.constraint(self.tokenizer, stopping, tokens)
        if prediction:
            text = require_unicode(prediction, "the prediction")
            context = self.target.context_length
            text = cut_to_context(text, self.tokenizer, context)  # no text is longer
            request.prediction = self.tokenizer(text, add_special_tokens=False).input_ids[:context]
            self.target.check_tokens(request.prediction, "the prediction")
        return TextRequest(prompt, request, output)

    def _prompt_tokens(
        self,
        prompt: Any,
        settings: PromptSettings,
        suffix: str | None,
        files: Sequence[tuple[str, str]],
        max_new_tokens: int,
    ) -> tuple[list[int], Sequence[int], frozenset[int]]:
        """The tokens of a prompt, those among them that the text goes on with, and the tokens that end the text."""
        target, ends = self.target, self.target.end_tokens
        if suffix is None or (not suffix and find_fim_format(self.tokenizer) is None):
            tokens = encode_prompt(self.tokenizer, prompt, settings, target.name, target.context_length, ends)
            chat = not is_tokens(prompt) and uses_chat_template(self.tokenizer, prompt, settings.raw)
            return tokens, () if chat and not settings.continues(prompt) else tokens, ends
        if not isinstance(prompt, str):
            raise ValueError("with a suffix the prompt is the text before it, as a str")
        self._require_fits("the prompt", prompt, suffix)
        context = target.context_length
        most = None if context is None else context - min(max_new_tokens, context // SHARE_OF_NEW_TOKENS)
        fim = fim_prompt(self.tokenizer, target.name, prompt, suffix, files, most)
        return fim.tokens, fim.before, ends | fim.end_tokens

    def _room_after(self, num_tokens: int, max_new_tokens: int, min_new_tokens: int) -> int:
        """How many new tokens a text may have after a prompt of so many. Errors: PromptTooLongError."""
        context = self.target.context_length
        if context is None:
            return max_new_tokens
        sizes = f"the prompt has {num_tokens:,} tokens, but {self.target.name} reads at most {context:,}"
        if num_tokens > context:
            raise PromptTooLongError(f"{sizes}; shorten it")
        least = min(max(min_new_tokens, 1), max_new_tokens)
        if num_tokens + least > context:
            raise PromptTooLongError(f"{sizes}, so that no room is left for {least:,} new ones; shorten it")
        return min(max_new_tokens, context - num_tokens)

    @with_checked_types
    def infill_request(
        self,
        text: str | InfillTemplate,
        *,
        suffix: str | None = None,
        open_tokens: int | None = None,
        seed: int = 0,
        logprobs: bool = False,
        verbatim: bool = False,
        **sampling: Any,
    ) -> HolesRequest | FimRequest:
        """What `infill` decodes for a text, for callers that decode it themselves. Errors: ValueError of one line.

        With `verbatim` a space before a hole stays, as it does with a `suffix`.
        """
        if open_tokens is None:
            open_tokens = DEFAULT_OPEN_TOKENS if self.network.any_subset else DEFAULT_MIDDLE_TOKENS
        if open_tokens < 1:
            raise ValueError(f"open_tokens is {open_tokens}, but a hole has one token or more")
        template = as_template(text, suffix)
        self._require_fits("the text", *template.pieces)
        if not self.network.any_subset:
            return self._fim_request(template, open_tokens, seed=seed, logprobs=logprobs, **sampling)
        return infill_request(
            self.target, template, verbatim or suffix is not None, open_tokens, seed, logprobs, sampling
        )

    def _require_fits(self, what: str, *texts: str) -> None:
        require_fits(texts, self.tokenizer, self.target.context_length, self.target.name, what)

    def _fim_request(self, template: InfillTemplate, max_tokens: int, **settings: Any) -> FimRequest:
        before, *_, after = template.pieces
        text_request = self.text_request(before, suffix=after, max_new_tokens=max_tokens, **settings)
        layout = fim_layout(template, fim_prompt(self.tokenizer, self.target.name, before, after).before, max_tokens)
        return FimRequest(layout, text_request.request, text_request.output)


def _each(given: Any, many: bool, what: str, make: Callable[[Any], Any]) -> list[Any]:
    """`make` of each item, or of the only one; errors in a list name the item's number."""
    made = []
    for number, item in enumerate(given if many else [given]):
        try:
            made.append(make(item))
        except ValueError as error:
            raise ValueError(f"{what} {number}: {error}") if many else error from error
    return made


def _new_tokens(request: Request, rounds: Generator[list[Request]]) -> Generator[tuple[int, list[int]]]:
    """The index and the tokens of each call as it is recorded."""
    seen = 0
    with closing(rounds):
        for _ in rounds:
            for call in request.calls[seen:]:
                seen += 1
                yield call.index, list(call.tokens)
