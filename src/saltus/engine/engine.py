"""Text in, text out: load a model with a method, then generate or stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypedDict, Unpack, overload

import numpy as np
from jinja2 import TemplateError

from saltus import methods
from saltus.core.control.call_cost import CallCost
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling
from saltus.engine import profiles
from saltus.engine.detokenizer import Detokenizer, TextOutput, check_stop_strings
from saltus.engine.infill_template import (
    DEFAULT_OPEN_TOKENS,
    InfillLayout,
    InfillTemplate,
    as_template,
    hole_end_rules,
    token_texts_of_holes,
    tokenize_template,
)
from saltus.engine.request import CallRecord, DecodingSetup, PrefixCache, Request, check_rule, run_requests
from saltus.networks.loading.checkpoints import Checkpoint, first_line, load_checkpoint, require_same_vocabulary
from saltus.networks.loading.drafter_files import model_fingerprint
from saltus.networks.loading.progress import Progress
from saltus.networks.loading.sources import DEFAULT_MODEL
from saltus.networks.loading.target_drafters import is_drafter_spec, load_drafter_for_target

MAX_DRAFT_TOKENS = 128  # drafted tokens of a call

PromptLike = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a conversation."""


class Settings(TypedDict, total=False):
    """How a text is written; each has the default given here."""

    max_new_tokens: int  # 256; where the model's context ends before, the text ends there, by "length"
    temperature: float  # 0, which is greedy decoding
    top_k: int  # 0, which is off, as are the next three
    top_p: float  # 1
    min_p: float  # 0
    repetition_penalty: float  # 1
    seed: int  # 0; it counts where temperature > 0
    stop: str | Sequence[str] | None  # strings that end the text and are cut off
    logprobs: bool  # False; log-probabilities of the tokens under the model's own law, at temperature 1
    raw: bool  # False; a `str` is put into the tokenizer's chat template as a user's message, unless raw
    ignore_eos: bool  # False; write on behind end tokens


@dataclass(frozen=True)
class Statistics:
    """What a text took. Seconds are wall time; in a batch they are shared with the other texts."""

    calls: int  # of the target
    tokens: int  # written, the end token included; not those that follow from a hole's end
    tokens_per_call: float  # of the target, those in which a method drafts by it included
    seconds: float  # prefill included
    tokens_per_second: float
    prefill_seconds: float  # of the call that read the prompt, and decided the first token or more
    accepted: list[int]  # tokens that each verifying call decided, the verifier's own included
    draft_calls: int  # of a method's own networks
    ms_per_call: float  # median, prefill apart
    nodes_per_call: float  # drafted tokens that a call checked, mean


@dataclass(frozen=True)
class Generation:
    """A text and how it came about."""

    prompt: PromptLike
    text: str
    tokens: list[int]
    finish_reason: str | None  # "stop": an end token or a stop string; "length"; None: it was interrupted
    calls: list[CallRecord]
    logprobs: list[float] | None
    statistics: Statistics


@dataclass(frozen=True)
class Infilling:
    """A text whose holes were filled, and how that came about."""

    layout: InfillLayout = field(repr=False)
    text: str  # all of it
    fillings: list[str]  # the text in each hole
    token_texts: list[list[str]]  # the same by the tokens of the hole
    tokens: list[int]  # that were decided, hole by hole
    calls: list[CallRecord]
    logprobs: list[float] | None
    statistics: Statistics


@dataclass(frozen=True)
class Chunk:
    """What one call added to a stream. Text that may turn into a stop string, or half a character, comes later."""

    text: str
    tokens: list[int]
    call_index: int  # index of the call that decided the tokens; −1 where there was none
    finish_reason: str | None = None  # of the last chunk


class Stream:
    """Iterate over the chunks. It may be left at any time; `generation` is what was written until then."""

    def __init__(self, chunks: Generator[Chunk], generation: Callable[[], Generation]) -> None:
        self._chunks, self._generation = chunks, generation

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()

    @property
    def generation(self) -> Generation:
        return self._generation()


@dataclass
class _TextRequest:
    """A prompt, its text of tokens, and their characters."""

    prompt: PromptLike
    request: Request
    output: TextOutput

    @property
    def finish_reason(self) -> str | None:
        if self.request.ended:
            return "stop"
        return "length" if self.request.finished else None

    def generation(self) -> Generation:
        text = self.request
        log_probabilities = text.log_probabilities if text.logprobs else None
        return Generation(
            self.prompt, self.output.text, text.tokens, self.finish_reason, list(text.calls), log_probabilities,
            _statistics(text),
        )  # fmt: skip


def _statistics(request: Request) -> Statistics:
    accepted = [len(call.tokens) - call.num_forced_tokens for call in request.calls]
    calls, tokens = request.calls_by_network["target"], sum(accepted)
    later = request.calls[1:] or request.calls
    return Statistics(
        calls=calls,
        tokens=tokens,
        tokens_per_call=tokens / calls if calls else 0.0,
        seconds=request.seconds,
        tokens_per_second=tokens / request.seconds if request.seconds else 0.0,
        prefill_seconds=request.calls[0].seconds if calls else 0.0,
        accepted=accepted,
        draft_calls=sum(request.calls_by_network.values()) - calls,
        ms_per_call=1000 * statistics.median(call.seconds for call in later) if calls else 0.0,
        nodes_per_call=statistics.fmean(call.num_draft_tokens for call in request.calls) if calls else 0.0,
    )


@dataclass
class Engine:
    """A model and how it writes. Not for several threads at once."""

    target: Checkpoint = field(repr=False)
    method: str
    rule: str
    options: Mapping[str, Mapping[str, Any]]
    budget: int
    adaptive: bool
    batch_size: int
    load_checkpoint: Callable[[str], Checkpoint] = field(repr=False)  # for a method's own models
    call_cost: CallCost = field(default_factory=CallCost, repr=False)
    decoding_setups: dict[str, DecodingSetup] = field(default_factory=dict, repr=False)
    prefix_cache: PrefixCache = field(default_factory=PrefixCache, repr=False)
    profile: profiles.Profile | None = None  # of jacobi

    @property
    def network(self):
        return self.target.network

    @property
    def tokenizer(self):
        return self.target.tokenizer

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]: a str is no sequence of prompts here
        self, prompt: PromptLike, *, method: str | None = None, **settings: Unpack[Settings]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[PromptLike], *, method: str | None = None, **settings: Unpack[Settings]
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Any, *, method: str | None = None, **settings: Unpack[Settings]
    ) -> Generation | list[Generation]:
        """Write on from a prompt or from messages: a Generation. A list of either gives a list.

        The settings are those of `Settings`. A text is the same alone and in a batch, and with every `method`.
        Errors: ValueError of one line.
        """
        many, jobs = _is_batch(prompt), []
        for number, one in enumerate(prompt if many else [prompt]):
            try:
                jobs.append(self._request(one, **settings))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") if many else error from error
        for _ in self._run(jobs, method):
            pass
        done = [job.generation() for job in jobs]
        return done if many else done[0]

    def stream(self, prompt: PromptLike, *, method: str | None = None, **settings: Unpack[Settings]) -> Stream:
        """`generate` for one prompt, a chunk a call: decided text only, never half a character."""
        if _is_batch(prompt):
            raise ValueError("stream writes one prompt; use generate for a batch")
        job = self._request(prompt, **settings)
        return Stream(self._chunks(job, self._run([job], method)), job.generation)

    @overload
    def infill(  # pyright: ignore[reportOverlappingOverload]: a str is no sequence of texts here
        self, text: str | InfillTemplate, **settings: Any
    ) -> Infilling: ...

    @overload
    def infill(self, text: Sequence[str | InfillTemplate], **settings: Any) -> list[Infilling]: ...

    def infill(
        self,
        text: Any,
        *,
        suffix: str | None = None,
        method: str | None = None,
        open_tokens: int = DEFAULT_OPEN_TOKENS,
        seed: int = 0,
        logprobs: bool = False,
        **sampling: Any,
    ) -> Infilling | list[Infilling]:
        """Fill the holes of a text, `The [[8]] sat on the [[…]].`: of so many tokens, or of `open_tokens` at most.

        With a `suffix` the text is a prefix, as it is, and what is missing stands between the two. A list of texts
        gives a list, and their calls are shared. Sampling settings are those of `Settings`. Errors: ValueError of one
        line, for a model that writes from left to right, too.
        """
        network = self.network
        if not network.any_subset:
            raise ValueError(
                f"{self.target.name} writes from left to right and sees nothing behind a hole; give infill an"
                " any-subset model, such as stories, or let generate continue the text"
            )
        if open_tokens < 1:
            raise ValueError(f"open_tokens is {open_tokens}, but a hole has one token or more")
        many, jobs = not isinstance(text, str | InfillTemplate), []
        for number, one in enumerate(text if many else [text]):
            try:
                jobs.append(
                    self._infill_request(as_template(one, suffix), suffix is not None, open_tokens, seed, sampling)
                )
            except ValueError as error:
                raise ValueError(f"text {number}: {error}") if many else error from error
        for _, job in jobs:
            job.logprobs = logprobs
        for _ in run_requests(self.decoding_setup(method or self.method), [job for _, job in jobs], self.batch_size):
            pass
        done = [self._infilling(layout, job) for layout, job in jobs]
        return done if many else done[0]

    def _infill_request(
        self, template: InfillTemplate, verbatim: bool, max_open_tokens: int, seed: int, sampling: dict[str, Any]
    ) -> tuple[InfillLayout, Request]:
        blank = self.network.blank_token
        if None in template.hole_lengths and blank is None:
            raise ValueError(f"{self.target.name} cannot end a hole by itself; give each hole a length, such as [[8]]")
        layout = tokenize_template(template, self.tokenizer, max_open_tokens, self.target.context_length, verbatim)
        special = {token for token, kind in self.tokenizer.added_tokens_decoder.items() if kind.special}
        settings = {**sampling, "banned": tuple(sorted({*special, *sampling.get("banned", ())} - {blank}))}
        if blank is not None:
            banned_at, ends = hole_end_rules(layout, template.hole_lengths, blank)
            settings |= {"banned_at_index": (*sampling.get("banned_at_index", ()), *banned_at), "hole_end_tokens": ends}
        canvas = layout.canvas
        given = canvas.tokens[canvas.given_positions].tolist()
        return layout, Request(given, len(canvas.order), seed, Sampling(**settings), canvas=canvas)

    def _infilling(self, layout: InfillLayout, request: Request) -> Infilling:
        found = token_texts_of_holes(
            layout, layout.canvas.fill(np.array(request.tokens)).tokens.tolist(), self.tokenizer
        )
        texts = ["".join(pieces) for pieces in found]
        log_probabilities = request.log_probabilities if request.logprobs else None
        return Infilling(
            layout,
            layout.text(texts),
            texts,
            found,
            request.tokens,
            list(request.calls),
            log_probabilities,
            _statistics(request),
        )

    def encode(self, prompt: PromptLike, raw: bool = False) -> list[int]:
        """The tokens that the model reads: by the chat template where `generate` would use it."""
        if not prompt:
            raise ValueError("the prompt is empty; write at least a word")
        chat = not isinstance(prompt, str) or (not raw and bool(self.tokenizer.chat_template))
        if not chat:
            tokens = self.tokenizer(prompt).input_ids
        else:
            tokens = self.tokenizer(self._apply_chat_template(prompt), add_special_tokens=False).input_ids
        if not tokens:
            raise ValueError("the prompt has no tokens; write at least a word")
        return list(tokens)

    def _apply_chat_template(self, prompt: str | Sequence[Any]) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.target.name} has no chat template for messages; give the prompt as one str")
        unfinished = messages[-1].get("role") == "assistant"
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not unfinished, continue_final_message=unfinished
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the chat template of {self.target.name} refuses these messages ({first_line(error)});"
                " each needs a role (user, assistant, system) and a content"
            ) from error

    def _request(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 256,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        logprobs: bool = False,
        raw: bool = False,
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> _TextRequest:
        if not isinstance(prompt, str) and not _is_conversation(prompt):
            raise ValueError(f"a prompt is of type {type(prompt).__name__}, but must be a str or a list of messages")
        distribution = Sampling(**sampling)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be 0 or more")
        Noise(seed)  # a negative seed is refused here
        tokens = self.encode(prompt, raw)
        context = self.target.context_length
        if context is not None:
            if len(tokens) > context:
                raise ValueError(
                    f"the prompt has {len(tokens):,} tokens, but {self.target.name} reads at most {context:,};"
                    " shorten it"
                )
            max_new_tokens = min(max_new_tokens, context - len(tokens))
        joins = isinstance(prompt, str) and (raw or not self.tokenizer.chat_template)
        ends = frozenset() if ignore_eos else self.target.end_tokens
        script = TextOutput(Detokenizer(self.tokenizer, tokens if joins else ()), ends, check_stop_strings(stop))
        return _TextRequest(prompt, Request(tokens, max_new_tokens, seed, distribution, script.add, logprobs), script)

    def _run(self, requests: Sequence[_TextRequest], method: str | None) -> Generator[None]:
        ensemble = self.decoding_setup(method or self.method)
        network = self.network  # on a shelf a text is known by how it begins
        exact = network.model.device.type == "cpu" and not network.free_shapes and not network.any_subset
        return run_requests(
            ensemble, [job.request for job in requests], self.batch_size, self.prefix_cache if exact else None
        )

    def _chunks(self, request: _TextRequest, steps: Generator[None]) -> Generator[Chunk]:
        conditioning = 0
        with closing(steps):
            for _ in steps:
                for call in request.request.calls[conditioning:]:
                    conditioning += 1
                    reason = request.finish_reason
                    yield Chunk(request.output.release(reason is not None), list(call.tokens), call.index, reason)
        if not conditioning:
            yield Chunk("", [], -1, request.finish_reason)

    def decoding_setup(self, method: str) -> DecodingSetup:
        if method not in self.decoding_setups:
            options, budget = self.options, self.budget
            if self.profile is not None and "jacobi" in method.split("+"):
                tuned = {**self.profile.options, **options.get("jacobi", {})}
                options, budget = {**options, "jacobi": tuned}, self.profile.budget
            made = methods.make_methods(method, options)
            networks, contexts = {"target": self.target.network}, {}
            for name, where in (pair for one in made for pair in one.draft_models.items()):
                assert name not in networks, f"two methods of {method} call a network {name}"
                if not is_drafter_spec(where):
                    own = self.load_checkpoint(where)
                    require_same_vocabulary(self.target, own)
                    networks[name], contexts[name] = own.network, own.context_length
                elif (brought := load_drafter_for_target(where, self.network, self.target.name, name)) is not None:
                    networks[name] = brought
            self.decoding_setups[method] = DecodingSetup(
                made, networks, self.rule, budget, self.adaptive, contexts, self.call_cost
            )
        return self.decoding_setups[method]


def _is_sequence(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)


def _is_conversation(prompt: Any) -> bool:
    return _is_sequence(prompt) and all(isinstance(message, Mapping) for message in prompt)


def _is_batch(prompt: Any) -> bool:
    """A list of prompts? A list of dicts is one conversation."""
    return _is_sequence(prompt) and not (prompt and isinstance(prompt[0], Mapping))


def load(
    model: str = DEFAULT_MODEL,
    method: str = "lookup",
    *,
    device: str = "auto",
    dtype: str = "auto",
    rule: str = "match",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    budget: int | None = None,
    adaptive: bool = True,
    exact: bool = True,
    batch_size: int = 16,
    progress: Progress | None = None,
    profile: bool = True,
) -> Engine:
    """An engine for a model: a short name, a local folder or a hub id (`owner/name`). Errors: ValueError of one line.

    `method` can be several, joined by +, and `options` sets their fields: {"lookup": {"longest": 5}}. `budget` is the
    most drafted tokens that a call may check; with `adaptive` a controller chooses how many of them pay. `dtype` "auto"
    is the checkpoint's own. `exact=False` gives up equal rounding for the library's own attention. With `profile` what
    `saltus tune` found for the model on this machine stands where jacobi is given no options.
    """
    check_rule(rule)
    if budget is not None and not 0 <= budget <= MAX_DRAFT_TOKENS:
        raise ValueError(f"budget is {budget}, but must lie in 0…{MAX_DRAFT_TOKENS} drafted tokens a call")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be 1 or more")
    methods.make_methods(method, options)  # a wrong name costs no loading
    nodes = 16 if budget is None else budget

    @lru_cache
    def checkpoint(name: str) -> Checkpoint:
        return load_checkpoint(name, device, dtype, exact, progress, nodes)

    engine = Engine(checkpoint(model), method, rule, options or {}, nodes, adaptive, batch_size, checkpoint)
    engine.profile = _find_profile(model, engine, budget) if profile else None
    engine.decoding_setup(method)
    return engine


def _find_profile(model: str, engine: Engine, budget: int | None) -> profiles.Profile | None:
    """What `saltus tune` found for jacobi, unless options of it are given besides its adapter.

    Where shapes are fixed the budget never widens them, since the text depends on that.
    """
    given = engine.options.get("jacobi", {})
    if set(given) - {"model"}:
        return None
    machine = profiles.machine_name(engine.network.model.device)
    found = profiles.find_profile("jacobi", model, machine, given.get("model", ""))
    if found is None or found.fingerprint != model_fingerprint(engine.network.model):
        return None
    room = MAX_DRAFT_TOKENS if engine.network.fixed_shape_runner is None else engine.network.width - 1
    return replace(found, budget=min(found.budget, room) if budget is None else budget)
