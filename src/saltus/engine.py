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

from saltus import methods, profiles
from saltus.core.control import Costs
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling
from saltus.holes import OPEN, Layout, Template, as_template, blank_rules, fillings, laid_out
from saltus.networks.loading import Checkpoint, first_line, load_checkpoint, same_vocabulary
from saltus.networks.progress import Progress
from saltus.networks.sources import DEFAULT
from saltus.networks.trained import bring, is_trained
from saltus.networks.trained_files import fingerprint
from saltus.text import Detokenizer, Script, stop_strings
from saltus.writing import Call, Ensemble, Shelf, Text, checked_rule, write

MOST_NODES = 128  # drafted tokens of a call

Prompt = str | Sequence[Mapping[str, Any]]
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

    prompt: Prompt
    text: str
    tokens: list[int]
    finish_reason: str | None  # "stop": an end token or a stop string; "length"; None: it was interrupted
    steps: list[Call]
    logprobs: list[float] | None
    statistics: Statistics


@dataclass(frozen=True)
class Infilling:
    """A text whose holes were filled, and how that came about."""

    layout: Layout = field(repr=False)
    text: str  # all of it
    fillings: list[str]  # the text in each hole
    pieces: list[list[str]]  # the same by the tokens of the hole
    tokens: list[int]  # that were decided, hole by hole
    steps: list[Call]
    logprobs: list[float] | None
    statistics: Statistics


@dataclass(frozen=True)
class Chunk:
    """What one call added to a stream. Text that may turn into a stop string, or half a character, comes later."""

    text: str
    tokens: list[int]
    call: int  # index of the call that decided the tokens; −1 where there was none
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
class _Job:
    """A prompt, its text of tokens, and their characters."""

    prompt: Prompt
    text: Text
    script: Script

    @property
    def finish_reason(self) -> str | None:
        if self.text.ended:
            return "stop"
        return "length" if self.text.finished else None

    def generation(self) -> Generation:
        text = self.text
        log_probabilities = text.log_probabilities if text.logprobs else None
        return Generation(
            self.prompt, self.script.text, text.tokens, self.finish_reason, list(text.calls), log_probabilities,
            _statistics(text),
        )  # fmt: skip


def _statistics(text: Text) -> Statistics:
    accepted = [len(call.tokens) - call.closed for call in text.calls]
    calls, tokens = text.asked["target"], sum(accepted)
    later = text.calls[1:] or text.calls
    return Statistics(
        calls=calls,
        tokens=tokens,
        tokens_per_call=tokens / calls if calls else 0.0,
        seconds=text.seconds,
        tokens_per_second=tokens / text.seconds if text.seconds else 0.0,
        prefill_seconds=text.calls[0].seconds if calls else 0.0,
        accepted=accepted,
        draft_calls=sum(text.asked.values()) - calls,
        ms_per_call=1000 * statistics.median(call.seconds for call in later) if calls else 0.0,
        nodes_per_call=statistics.fmean(call.nodes for call in text.calls) if calls else 0.0,
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
    load: Callable[[str], Checkpoint] = field(repr=False)  # for a method's own models
    costs: Costs = field(default_factory=Costs, repr=False)
    ensembles: dict[str, Ensemble] = field(default_factory=dict, repr=False)
    shelf: Shelf = field(default_factory=Shelf, repr=False)
    profile: profiles.Profile | None = None  # of jacobi

    @property
    def network(self):
        return self.target.network

    @property
    def tokenizer(self):
        return self.target.tokenizer

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]: a str is no sequence of prompts here
        self, prompt: Prompt, *, method: str | None = None, **settings: Unpack[Settings]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, method: str | None = None, **settings: Unpack[Settings]
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
                jobs.append(self._job(one, **settings))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") if many else error from error
        for _ in self._write(jobs, method):
            pass
        done = [job.generation() for job in jobs]
        return done if many else done[0]

    def stream(self, prompt: Prompt, *, method: str | None = None, **settings: Unpack[Settings]) -> Stream:
        """`generate` for one prompt, a chunk a call: decided text only, never half a character."""
        if _is_batch(prompt):
            raise ValueError("stream writes one prompt; use generate for a batch")
        job = self._job(prompt, **settings)
        return Stream(self._chunks(job, self._write([job], method)), job.generation)

    @overload
    def infill(  # pyright: ignore[reportOverlappingOverload]: a str is no sequence of texts here
        self, text: str | Template, **settings: Any
    ) -> Infilling: ...

    @overload
    def infill(self, text: Sequence[str | Template], **settings: Any) -> list[Infilling]: ...

    def infill(
        self,
        text: Any,
        *,
        suffix: str | None = None,
        method: str | None = None,
        open_tokens: int = OPEN,
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
        many, jobs = not isinstance(text, str | Template), []
        for number, one in enumerate(text if many else [text]):
            try:
                jobs.append(self._hole_job(as_template(one, suffix), suffix is not None, open_tokens, seed, sampling))
            except ValueError as error:
                raise ValueError(f"text {number}: {error}") if many else error from error
        for _, job in jobs:
            job.logprobs = logprobs
        for _ in write(self._ensemble(method or self.method), [job for _, job in jobs], self.batch_size):
            pass
        done = [self._infilled(layout, job) for layout, job in jobs]
        return done if many else done[0]

    def _hole_job(
        self, template: Template, as_is: bool, most: int, seed: int, sampling: dict[str, Any]
    ) -> tuple[Layout, Text]:
        blank = self.network.blank
        if None in template.holes and blank is None:
            raise ValueError(f"{self.target.name} cannot end a hole by itself; give each hole a length, such as [[8]]")
        layout = laid_out(template, self.tokenizer, most, self.target.context, as_is)
        special = {token for token, kind in self.tokenizer.added_tokens_decoder.items() if kind.special}
        settings = {**sampling, "banned": tuple(sorted({*special, *sampling.get("banned", ())} - {blank}))}
        if blank is not None:
            banned_at, ends = blank_rules(layout, template.holes, blank)
            settings |= {"banned_at": (*sampling.get("banned_at", ()), *banned_at), "closing": ends}
        canvas = layout.canvas
        given = canvas.tokens[canvas.given].tolist()
        return layout, Text(given, len(canvas.order), seed, Sampling(**settings), holes=canvas)

    def _infilled(self, layout: Layout, job: Text) -> Infilling:
        found = fillings(layout, layout.canvas.fill(np.array(job.tokens)).tokens.tolist(), self.tokenizer)
        texts = ["".join(pieces) for pieces in found]
        log_probabilities = job.log_probabilities if job.logprobs else None
        return Infilling(
            layout, layout.text(texts), texts, found, job.tokens, list(job.calls), log_probabilities, _statistics(job)
        )

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """The tokens that the model reads: by the chat template where `generate` would use it."""
        if not prompt:
            raise ValueError("the prompt is empty; write at least a word")
        chat = not isinstance(prompt, str) or (not raw and bool(self.tokenizer.chat_template))
        if not chat:
            tokens = self.tokenizer(prompt).input_ids
        else:
            tokens = self.tokenizer(self._templated(prompt), add_special_tokens=False).input_ids
        if not tokens:
            raise ValueError("the prompt has no tokens; write at least a word")
        return list(tokens)

    def _templated(self, prompt: str | Sequence[Any]) -> str:
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

    def _job(
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
    ) -> _Job:
        if not isinstance(prompt, str) and not _is_conversation(prompt):
            raise ValueError(f"a prompt is of type {type(prompt).__name__}, but must be a str or a list of messages")
        law = Sampling(**sampling)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, but must be 0 or more")
        Noise(seed)  # a negative seed is refused here
        tokens = self.encode(prompt, raw)
        context = self.target.context
        if context is not None:
            if len(tokens) > context:
                raise ValueError(
                    f"the prompt has {len(tokens):,} tokens, but {self.target.name} reads at most {context:,};"
                    " shorten it"
                )
            max_new_tokens = min(max_new_tokens, context - len(tokens))
        joins = isinstance(prompt, str) and (raw or not self.tokenizer.chat_template)
        ends = frozenset() if ignore_eos else self.target.ends
        script = Script(Detokenizer(self.tokenizer, tokens if joins else ()), ends, stop_strings(stop))
        return _Job(prompt, Text(tokens, max_new_tokens, seed, law, script.read, logprobs), script)

    def _write(self, jobs: Sequence[_Job], method: str | None) -> Generator[None]:
        ensemble = self._ensemble(method or self.method)
        network = self.network  # on a shelf a text is known by how it begins
        exact = network.model.device.type == "cpu" and not network.free and not network.any_subset
        return write(ensemble, [job.text for job in jobs], self.batch_size, self.shelf if exact else None)

    def _chunks(self, job: _Job, rounds: Generator[None]) -> Generator[Chunk]:
        told = 0
        with closing(rounds):
            for _ in rounds:
                for call in job.text.calls[told:]:
                    told += 1
                    reason = job.finish_reason
                    yield Chunk(job.script.release(reason is not None), list(call.tokens), call.index, reason)
        if not told:
            yield Chunk("", [], -1, job.finish_reason)

    def _ensemble(self, method: str) -> Ensemble:
        if method not in self.ensembles:
            options, budget = self.options, self.budget
            if self.profile is not None and "jacobi" in method.split("+"):
                tuned = {**self.profile.options, **options.get("jacobi", {})}
                options, budget = {**options, "jacobi": tuned}, self.profile.budget
            made = methods.make(method, options)
            networks, contexts = {"target": self.target.network}, {}
            for name, where in (pair for one in made for pair in one.models.items()):
                assert name not in networks, f"two methods of {method} call a network {name}"
                if not is_trained(where):
                    own = self.load(where)
                    same_vocabulary(self.target, own)
                    networks[name], contexts[name] = own.network, own.context
                elif (brought := bring(where, self.network, self.target.name, name)) is not None:
                    networks[name] = brought
            self.ensembles[method] = Ensemble(made, networks, self.rule, budget, self.adaptive, contexts, self.costs)
        return self.ensembles[method]


def _is_sequence(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)


def _is_conversation(prompt: Any) -> bool:
    return _is_sequence(prompt) and all(isinstance(message, Mapping) for message in prompt)


def _is_batch(prompt: Any) -> bool:
    """A list of prompts? A list of dicts is one conversation."""
    return _is_sequence(prompt) and not (prompt and isinstance(prompt[0], Mapping))


def load(
    model: str = DEFAULT,
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
    checked_rule(rule)
    if budget is not None and not 0 <= budget <= MOST_NODES:
        raise ValueError(f"budget is {budget}, but must lie in 0…{MOST_NODES} drafted tokens a call")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be 1 or more")
    methods.make(method, options)  # a wrong name costs no loading
    nodes = 16 if budget is None else budget

    @lru_cache
    def checkpoint(name: str) -> Checkpoint:
        return load_checkpoint(name, device, dtype, exact, progress, nodes)

    engine = Engine(checkpoint(model), method, rule, options or {}, nodes, adaptive, batch_size, checkpoint)
    engine.profile = _profile(model, engine, budget) if profile else None
    engine._ensemble(method)
    return engine


def _profile(model: str, engine: Engine, budget: int | None) -> profiles.Profile | None:
    """What `saltus tune` found for jacobi, unless options of it are given besides its adapter.

    Where shapes are fixed the budget never widens them, since the text depends on that.
    """
    given = engine.options.get("jacobi", {})
    if set(given) - {"model"}:
        return None
    machine = profiles.machine_of(engine.network.model.device)
    found = profiles.find("jacobi", model, machine, given.get("model", ""))
    if found is None or found.fingerprint != fingerprint(engine.network.model):
        return None
    room = MOST_NODES if engine.network.fixed is None else engine.network.width - 1
    return replace(found, budget=min(found.budget, room) if budget is None else budget)
