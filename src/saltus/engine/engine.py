"""The library's front door: `load` a model with a method, then generate, stream or infill."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Unpack, cast, overload

import torch

from saltus.core.value_types import with_checked_types
from saltus.engine.checkpoints import Checkpoint
from saltus.engine.decoder import Decoder, engine_is_closed
from saltus.engine.encoding import PromptSettings, encode_prompt, is_batch
from saltus.engine.infill import FimRequest, HolesRequest, fim_request, infill_request
from saltus.engine.infill_template import DEFAULT_MIDDLE_TOKENS, DEFAULT_OPEN_TOKENS, InfillTemplate, as_template
from saltus.engine.request import Request
from saltus.engine.results import Chunk, Generation, Infilling, InfillStream, Stream
from saltus.engine.scheduler import run_requests
from saltus.engine.settings import InfillSettings, PromptLike, Settings
from saltus.engine.text_request import TextRequest, make_text_request
from saltus.models.packed_decoder import transformers_model
from saltus.models.protocols import TargetNetwork


@dataclass(frozen=True)
class _Closed:
    """What a closed engine has in place of its parts. Errors: ValueError for whatever is asked of them."""

    name: str

    def __getattr__(self, attribute: str) -> Any:
        raise engine_is_closed(self.name)


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

    def text_request(self, prompt: Any, **settings: Any) -> TextRequest:
        """What `generate` decodes for a prompt (also token ids), for callers that decode it themselves.

        The settings are the fields of `PromptSettings`, `TextSettings` and `Sampling`. Errors: ValueError of one line.
        """
        return make_text_request(self.target, prompt, settings)

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
        self.target.require_fits("the text", *template.pieces)
        if not self.network.any_subset:
            return fim_request(self.target, template, open_tokens, {"seed": seed, "logprobs": logprobs, **sampling})
        return infill_request(
            self.target, template, verbatim or suffix is not None, open_tokens, seed, logprobs, sampling
        )


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
