"""A decoding loop for Transformers: `model.generate(..., custom_generate=saltus.custom_generate("lookup"))`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from saltus import methods
from saltus.core.control.acceptance import Acceptance
from saltus.core.control.call_cost import CallCost
from saltus.core.control.controller import Controller
from saltus.core.picking import DEFAULT_COUPLING, Coupling
from saltus.core.sampling import Sampling
from saltus.engine.checkpoints import Checkpoint, fills_holes, load_checkpoint
from saltus.engine.decoder import (
    Decoder,
    LoadedDraftNetwork,
    check_max_draft_tokens,
    check_rule,
    default_max_draft_tokens,
)
from saltus.engine.request import Request
from saltus.engine.scheduler import run_requests
from saltus.engine.target_network import make_network
from saltus.models.causal import CausalNetwork
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.protocols import TargetNetwork
from saltus.models.resized_vocabulary import with_vocabulary_of

SUPPORTED_PROCESSORS: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    RepetitionPenaltyLogitsProcessor: lambda processor, width: {"repetition_penalty": processor.penalty},
    NoRepeatNGramLogitsProcessor: lambda processor, width: {"no_repeat_ngram_size": processor.ngram_size},
    MinLengthLogitsProcessor: lambda processor, width: _least(processor.min_length - width, processor),
    MinNewTokensLengthLogitsProcessor: lambda processor, width: _least(
        processor.min_new_tokens + processor.prompt_length_to_skip - width, processor
    ),
    SuppressTokensLogitsProcessor: lambda processor, width: {"banned": tuple(processor.suppress_tokens.tolist())},
    TemperatureLogitsWarper: lambda processor, width: {"temperature": processor.temperature},
    TopKLogitsWarper: lambda processor, width: {"top_k": processor.top_k},
    TopPLogitsWarper: lambda processor, width: {"top_p": processor.top_p},
    MinPLogitsWarper: lambda processor, width: {"min_p": processor.min_p},
    LogitNormalization: lambda processor, width: {},  # distributions are normalised anyway
}
"""Logits processors as fields of Sampling, given the width of `input_ids`, in the order in which they are applied."""
SUPPORTED_SETTINGS = (
    "repetition_penalty, no_repeat_ngram_size, min_length, min_new_tokens, suppress_tokens, temperature, top_k, top_p"
    " and min_p"
)
BEFORE_WARPERS = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "end_tokens", "banned")

CACHES = ("cache", "past_key_values")  # how generate names the KV cache: from Transformers 5.24, before
IGNORED_ARGUMENTS = {*CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
UNSUPPORTED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass
class _Measurements:
    """What was measured of a model, kept from one call of `generate` to the next."""

    call_cost: CallCost = field(default_factory=CallCost)
    acceptance: Acceptance = field(default_factory=Acceptance)
    controllers: dict[int, Controller] = field(default_factory=dict)


def custom_generate(
    method: str = "lookup",
    *,
    seed: int = 0,
    coupling: Coupling = DEFAULT_COUPLING,
    rule: str = "match",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    max_draft_tokens: int | None = None,
    adaptive: bool = True,
    exact: bool = True,
    streamer: Any = None,
) -> Callable[..., Tensor | GenerateDecoderOnlyOutput]:
    """The `custom_generate` argument of Transformers' `model.generate`.

    Keep the returned function for further calls: it remembers call costs and acceptance rates. Sampling, stopping
    criteria and padding are those that `generate` was given; settings that Saltus does not support are a ValueError.
    The default is not `auto`, since each call of `generate` would load a drafter again.
    Random numbers come from `seed`, given here or to `generate`; row i of `num_return_sequences` uses seed + i. Give a
    streamer here, since `generate` does not pass its own on.
    """
    methods.make_methods(method, options)
    check_rule(rule)
    if max_draft_tokens is None:
        max_draft_tokens = default_max_draft_tokens(adaptive, rule)
    check_max_draft_tokens(max_draft_tokens)
    Sampling(coupling=coupling)  # refuses an unknown one
    measured: WeakKeyDictionary[Any, _Measurements] = WeakKeyDictionary()
    own_seed = seed

    @lru_cache
    def draft_model(name: str, device: str) -> Checkpoint:
        return load_checkpoint(name, device, exact=exact, max_draft_tokens=max_draft_tokens)

    def generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Sequence[Any] | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        generation_config: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        _check_supported(generation_config, kwargs)
        mask = kwargs.get("attention_mask")
        _check_positions(kwargs.get("position_ids"), mask, input_ids)
        prompts = [row if mask is None else row[mask[i].bool()] for i, row in enumerate(input_ids)]
        if not all(map(len, prompts)):
            raise ValueError("a row of input_ids has no tokens; give it one, such as the begin token")
        sampling = _sampling(logits_processor or (), generation_config.do_sample, input_ids.shape[1])
        sampling = replace(sampling, coupling=coupling)
        returns = max(generation_config.num_return_sequences or 1, 1)
        texts = []
        for i, prompt in enumerate(prompts):
            ends, length = _stopping_rule(stopping_criteria or (), input_ids[i], generation_config.max_length)
            row_seed = (own_seed if seed is None else seed) + i % returns
            texts.append(Request(prompt.tolist(), length, row_seed, sampling, ends))
        with _borrowed_network(model, exact, max_draft_tokens, already_checked=model in measured) as network:
            known = measured.setdefault(model, _Measurements())

            def load_draft_model(name: str, _any_vocabulary: bool) -> LoadedDraftNetwork:
                drafter = draft_model(name, str(model.device))
                return LoadedDraftNetwork(with_vocabulary_of(network, drafter.network), drafter.context_length)

            decoder = Decoder(
                network, "this model", load_draft_model, options or {}, rule, max_draft_tokens, adaptive,
                call_cost=known.call_cost,
            )  # fmt: skip
            setup = decoder.setup(method)
            setup.acceptance, setup.controllers = known.acceptance, known.controllers
            _run_with_streamer(run_requests(decoder, texts, method, prefix_tree=False), texts, input_ids, streamer)
        return _pad_outputs(input_ids, texts, generation_config)

    return generate


def _run_with_streamer(
    rounds: Iterable[list[Request]], requests: list[Request], input_ids: Tensor, streamer: Any
) -> None:
    if streamer is not None:
        streamer.put(input_ids.cpu())
    streamed = 0
    for _ in rounds:
        if streamer is not None:
            for token in requests[0].tokens[streamed:]:
                streamer.put(torch.tensor([token]))
                streamed += 1
    if streamer is not None:
        streamer.end()


@contextmanager
def _borrowed_network(model: Any, exact: bool, max_draft_tokens: int, already_checked: bool) -> Iterator[TargetNetwork]:
    """A network around the model, whose attention, experts and training mode are restored afterwards."""
    attention, training = model.config._attn_implementation, model.training
    experts = model.get_experts_implementation()
    try:
        causal = already_checked and not fills_holes(model)
        shapes = FixedShapeSettings.for_max_draft_tokens(max_draft_tokens)
        known = CausalNetwork(model, exact, shapes) if causal else None
        yield known or make_network(model, "this model", exact, max_draft_tokens)
    finally:
        model.set_attn_implementation(attention)
        if experts != model.get_experts_implementation():
            model.set_experts_implementation(experts)
        model.train(training)


def _check_supported(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of generate that Saltus does not support."""
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"custom_generate supports greedy decoding and sampling, not {config.get_generation_mode().value};"
            " leave num_beams and assistants out"
        )
    wanted = [name for name in UNSUPPORTED_OUTPUTS if getattr(config, name, None)]
    extra = [name for name, value in kwargs.items() if name not in IGNORED_ARGUMENTS and value is not None]
    if wanted or extra:
        raise ValueError(f"custom_generate does not support {', '.join(wanted + extra)}; leave it out")
    for name in CACHES:
        cache = kwargs.get(name)
        if cache is not None and cache.get_seq_length():
            raise ValueError(f"custom_generate keeps a KV cache of its own; leave {name} out, pass the whole text")


def _check_positions(position_ids: Tensor | None, mask: Tensor | None, input_ids: Tensor) -> None:
    """Raise ValueError for other positions than those that count the tokens of each row, as Saltus does."""
    read = torch.ones_like(input_ids) if mask is None else mask.long()
    counted = read.cumsum(-1) - 1
    if position_ids is not None and (
        position_ids.ndim > 2
        or position_ids.shape[-1] != counted.shape[-1]
        or bool(((position_ids != counted) & (read != 0)).any())
    ):
        raise ValueError("custom_generate counts positions by the attention mask; leave position_ids out")


def _least(count: int, processor: Any) -> dict[str, Any]:
    """At least so many new tokens before an end."""
    return {"min_new_tokens": max(count, 0), "end_tokens": tuple(processor.eos_token_id.tolist())}


def _sampling(processors: Sequence[Any], do_sample: bool, width: int) -> Sampling:
    """The Sampling that does what the processors do after `width` tokens. Errors: ValueError for another processor."""
    fields: dict[str, Any] = {}
    order, place = list(SUPPORTED_PROCESSORS), -1
    for processor in processors:
        name = type(processor).__name__
        if type(processor) not in SUPPORTED_PROCESSORS:
            raise ValueError(f"custom_generate cannot apply {name}; leave it out, it can do {SUPPORTED_SETTINGS}")
        if order.index(type(processor)) <= place:
            raise ValueError(f"custom_generate applies {name} once and before what follows it; set it by its argument")
        if (
            getattr(processor, "min_tokens_to_keep", 1) != 1
            or getattr(processor, "filter_value", -torch.inf) != -torch.inf
        ):
            raise ValueError(f"custom_generate has no min_tokens_to_keep or filter_value for {name}; leave them out")
        if isinstance(getattr(processor, "prompt_ignore_length", None), int):
            raise ValueError(f"custom_generate has no prompt_ignore_length for {name}; leave it out")
        place = order.index(type(processor))
        new = SUPPORTED_PROCESSORS[type(processor)](processor, width)
        if "min_new_tokens" in new:  # min_length and min_new_tokens: the longer one
            new["min_new_tokens"] = max(new["min_new_tokens"], fields.get("min_new_tokens", 0))
        fields |= new
    if not do_sample:  # the warpers do not change the likeliest token
        fields = {name: fields[name] for name in BEFORE_WARPERS if name in fields}
    fields.setdefault("temperature", 1.0 if do_sample else 0.0)
    return Sampling(**fields)


def _stopping_rule(stopping_criteria: Sequence[Any], row: Tensor, max_length: int) -> tuple[Callable[[int], bool], int]:
    """`is_end` of a row's request (to be called with each new token), and how many new tokens the row may have."""
    ends: set[int] = set()
    others = []
    for criterion in stopping_criteria:
        if type(criterion) is EosTokenCriteria:
            ends |= set(criterion.eos_token_id.tolist())
        elif type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, criterion.max_length)
        else:
            others.append(criterion)
    text = row.tolist()

    def end(token: int) -> bool:
        text.append(token)
        if token in ends:
            return True
        ids = torch.tensor([text], device=row.device) if others else None
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in others)

    return end, max(max_length - len(row), 0)


def _pad_outputs(input_ids: Tensor, requests: list[Request], config: Any) -> Tensor | GenerateDecoderOnlyOutput:
    ends = config.eos_token_id if isinstance(config.eos_token_id, (list, tuple)) else [config.eos_token_id]
    pad = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)  # as `generate`
    width = max(len(text.tokens) for text in requests)
    new = torch.tensor(
        [text.tokens + [pad] * (width - len(text.tokens)) for text in requests],
        dtype=torch.long,
        device=input_ids.device,
    )
    sequences = torch.cat([input_ids, new.reshape(len(requests), width)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences  # pyright: ignore
