"""Heads that give the joint law of the next tokens from the target's last state: circuits' parameters (MtPC, §3.3).

A head reads the state before a text's last token and, if it was made so, that token; a window of positions follows.
Features of each position go through the target's own unembedding, cut to common tokens. Components of a circuit differ
from that in a small subspace of it: a component's logits are the position's, and a few coordinates times the logits of
as many directions. That spares each component a product with the unembedding, though not a softmax of its own. Where
the vocabulary is small, as of bytes, every position and component can have an unembedding of its own instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.sampling import float_row
from saltus.networks.draft_models import circuits
from saltus.networks.draft_models.circuits import Circuit, CircuitFilter
from saltus.networks.draft_models.context_layers import ContextKVCache, ContextLayers, select_hidden_states
from saltus.networks.draft_models.drafter import rms_normalized
from saltus.networks.draft_models.upper_layers import UpperLayers
from saltus.networks.models.exact import native
from saltus.networks.models.exact.batch_invariant_ops import linear

CIRCUITS = {"cp": circuits.mixture_circuit, "hmm": circuits.chain_circuit, "btree": circuits.tree_circuit}
MAX_CANDIDATE_TOKENS = (
    1024  # tokens of a position that are drafted, the likeliest, so that each state costs a softmax over few
)


@dataclass(frozen=True)
class HeadShape:
    """What heads are made of; the hidden size is the target's."""

    hidden: int
    circuit: str = "btree"  # ff, cp, hmm or btree
    window: int = 8  # positions of the joint law
    rank: int = 8  # states of each latent; 1 where the circuit is ff
    directions: int = 16  # of the subspace that components differ in
    own: bool = False  # an unembedding of its own for every position and component, in place of directions
    told: bool = True  # the text's last token; else it is the window's first, and known
    contextual: bool = True  # do sums depend on the text?
    homogeneous: bool = False  # one table for all steps of a circuit?
    stay: float = 6.0  # logit by which a latent favours its parent's state before training; 0: none is favoured
    layers: int = 0  # of the target, the last ones, that heads read the text by once more, adapted
    lora: int = 16  # rank of what is adapted in these
    taps: tuple[int, ...] = ()  # the layer that they begin at

    def __post_init__(self) -> None:
        if self.circuit != "ff" and self.circuit not in CIRCUITS:
            raise ValueError(f"heads' circuit is {self.circuit!r}, but must be one of ff, {', '.join(CIRCUITS)}")
        if self.layers < 0:
            raise ValueError(f"heads' layers is {self.layers}, but must be 0 or more")
        for name in ("window", "rank", "directions", "lora"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads' {name} is {getattr(self, name)}, but must be 1 or more")
        if not self.told and self.window < 2:
            raise ValueError("heads' window is 1, but its first token is known; take 2 or more, or let it be told")

    @cached_property
    def circuit_structure(self) -> Circuit:
        """The circuit."""
        return (
            circuits.independent_circuit(self.window)
            if self.circuit == "ff"
            else CIRCUITS[self.circuit](self.window, self.rank)
        )

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that can be drafted."""
        return self.window - (not self.told)


@dataclass(frozen=True, eq=False)
class CircuitParameters:
    """What heads say of some texts: the sums of their circuits, and what the laws of tokens are made of."""

    initial: Float[Tensor, "*batch rank"]
    transitions: Float[Tensor, "*batch steps rank rank"]
    position_features: Float[Tensor, "*batch window hidden"]  # that the unembedding reads
    state_codes: Float[Tensor, "*batch window rank directions"] | None  # of components, in their subspace


class HeadModel(nn.Module):
    """The heads. The target's embeddings come from outside and are not trained."""

    tokens: Tensor  # [draft] ascending ids of the target's vocabulary that are drafted
    unembedding: Tensor  # [draft, hidden]

    def __init__(
        self, shape: HeadShape, tokens: Int[Tensor, "draft"], embeddings: Tensor, unembedding: Tensor,
        upper: UpperLayers | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape, circuit = shape, shape.circuit_structure
        size, window, rank = shape.hidden, shape.window, circuit.rank
        self.fuse = nn.Linear((1 + shape.told) * size, size, bias=False)
        self.blocks = nn.Linear(size, window * size, bias=False)
        self.norm = nn.Parameter(torch.ones(size))
        tables = 1 if shape.homogeneous and circuit.num_latents > 1 else circuit.num_latents - 1
        self.sums = nn.Linear(size, rank + tables * rank * rank)
        several = rank > 1 and not shape.own
        self.codes = nn.Linear(size, window * rank * shape.directions, bias=False) if several else None
        self.directions = nn.Parameter(torch.zeros(shape.directions, size)) if several else None
        self.own = nn.Parameter(torch.zeros(window, rank, len(tokens), size)) if shape.own else None
        self.upper = upper
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("unembedding", unembedding[tokens].clone(), persistent=False)
        self.embeddings = [embeddings]  # in a list: neither a parameter nor a buffer of ours

    @property
    def matrices(self) -> list[Tensor]:
        """The weights that turn states into states, for optimisers that treat such apart."""
        return [self.fuse.weight]

    def forward(
        self, hidden_states: Float[Tensor, "*batch hidden"], tokens: Int[Tensor, "*batch"]
    ) -> CircuitParameters:
        """From the target's states before each text's last token, and that token."""
        shape, circuit = self.shape, self.shape.circuit_structure
        dtype = self.fuse.weight.dtype
        parts = [hidden_states.to(dtype)]
        if shape.told:
            parts.append(F.embedding(tokens, self.embeddings[0]).to(dtype))
        here = self._linear(self.fuse, rms_normalized(torch.stack(parts, -2)).flatten(-2))
        moved = F.silu(self._linear(self.blocks, here)).unflatten(-1, (shape.window, shape.hidden))
        features = rms_normalized(here[..., None, :] + moved) * self.norm
        sums = self._linear(self.sums, here if shape.contextual else torch.zeros_like(here)).float()
        start, steps = sums[..., : circuit.rank], sums[..., circuit.rank :]
        steps = (
            steps.unflatten(-1, (-1, circuit.rank, circuit.rank))
            if circuit.num_latents > 1
            else steps.new_zeros(*steps.shape[:-1], 0, circuit.rank, circuit.rank)
        )
        if shape.homogeneous:
            steps = steps.expand(*steps.shape[:-3], circuit.num_latents - 1, -1, -1)
        codes = None
        if self.codes is not None:
            codes = self._linear(self.codes, here).unflatten(-1, (shape.window, circuit.rank, shape.directions))
        return CircuitParameters(start.log_softmax(-1), steps.log_softmax(-1), features, codes)

    def log_probabilities(self, parameters: CircuitParameters, position: int) -> Float[Tensor, "*batch rank draft"]:
        """Log-probabilities of the drafted tokens in each state of a position."""
        return self.logits(parameters, position).log_softmax(-1)

    def logits(self, parameters: CircuitParameters, position: int) -> Float[Tensor, "*batch rank draft"]:
        """The same, before they are normalised."""
        features = parameters.position_features[..., position, :]
        if self.own is not None:
            said = self._product(features, self.own[position].flatten(0, 1))
            return said.float().unflatten(-1, self.own.shape[1:3])
        codes = None if parameters.state_codes is None else parameters.state_codes[..., position, :, :]
        return self.state_logits(self.shared_logits(features), codes, self.direction_logits())

    def shared_logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows draft"]:
        """The logits that all states of a position share."""
        return self._product(features, self.unembedding).float()

    def direction_logits(self) -> Float[Tensor, "directions draft"] | None:
        """The logits of the directions that states differ in; None where there is one state."""
        if self.directions is None:
            return None
        return self._product(self.directions.to(self.unembedding.dtype), self.unembedding).float()

    @staticmethod
    def state_logits(
        shared_logits: Float[Tensor, "*rows draft"],
        codes: Float[Tensor, "*rows rank directions"] | None,
        direction_logits: Float[Tensor, "directions draft"] | None,
    ) -> Float[Tensor, "*rows rank draft"]:
        """The logits of each state."""
        own = shared_logits[..., None, :]
        return (
            own
            if codes is None or direction_logits is None
            else own + codes.to(direction_logits.dtype) @ direction_logits
        )

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        out = self._product(x, layer.weight)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ: by our kernels where nothing is learned."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or not len(weight):
            return F.linear(x.to(weight.dtype), weight)
        return linear(x.to(weight.dtype), [weight], [None])[0]


def new_head_model(
    shape: HeadShape, tokens: Int[Tensor, "draft"], target: Any, generator: np.random.Generator
) -> HeadModel:
    """Untrained heads of these tokens for a Hugging Face model, in float32.

    Every position begins with the target's own law of the next token, or, where the target itself says several tokens
    (EvaByte's unembedding is that of eight), with its law of that place; components have their position's. So CP is
    FF, and HMM and BTree are nearly CP where states stay as they are (`shape.stay`). The sums differ by text from the
    beginning, which is what lets components part.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    places = unembedding.unflatten(0, (-1, len(embeddings)))  # [tokens that the target says, vocab, hidden]
    if len(places) > 1 and not shape.own:
        raise ValueError(f"the target says {len(places)} tokens by matrices of their own; set own=true")
    upper = upper_layers(shape, target)
    model, circuit = HeadModel(shape, tokens, embeddings, places[0], upper), shape.circuit_structure
    norm = getattr(target.get_decoder(), "norm", None)

    def drawn(weight: Tensor, scale: float) -> None:
        weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))

    with torch.no_grad():
        if norm is not None:
            model.norm.copy_(norm.weight + getattr(target.config, "norm_add_unit_offset", False))
        drawn(model.fuse.weight, 0.005)
        model.fuse.weight[:, : shape.hidden] += torch.eye(shape.hidden)
        model.blocks.weight.zero_()
        drawn(model.sums.weight, 0.02)
        model.sums.bias.zero_()
        if circuit.num_latents > 1:
            stays = shape.stay * torch.eye(circuit.rank).flatten()
            model.sums.bias[circuit.rank :] = stays.repeat(len(model.sums.bias[circuit.rank :]) // len(stays))
        if model.own is not None:
            for place, own in enumerate(model.own):
                own.copy_(places[min(place + shape.told, len(places) - 1), tokens])
        if model.codes is not None and model.directions is not None:
            model.codes.weight.zero_()
            drawn(model.directions, 1 / shape.hidden**0.5)
        for part in () if upper is None else upper.lora_layers:
            drawn(part.down, part.down.shape[1] ** -0.5)
    return model


def upper_layers(shape: HeadShape, target: Any) -> UpperLayers | None:
    """What heads of this shape adapt of a Hugging Face model."""
    return UpperLayers(target, shape.layers, shape.lora) if shape.layers else None


@dataclass
class WindowCache:
    """The window that a text is being drafted from: what the heads said, and what has been read of it.

    In NumPy: of one text so little is computed for each token that the framework would cost more than the sums.
    """

    num_decided: int = 0  # decided tokens when the window began
    parameters: CircuitParameters | None = None
    initial: np.ndarray = field(default_factory=lambda: np.empty(0))
    transitions: np.ndarray = field(default_factory=lambda: np.empty(0))
    shared_logits: np.ndarray | None = None  # [window, draft] logits
    state_codes: np.ndarray | None = None  # [window, rank, directions]
    distributions: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # of places asked for
    window_tokens: list[int] = field(default_factory=list)  # tokens of the window
    circuit_filter: CircuitFilter[np.ndarray] | None = None
    context_kv_cache: ContextKVCache = field(default_factory=ContextKVCache)  # that adapted layers have read


@dataclass
class HeadNetwork:
    """Heads behind Forward and Reply, as a network that says what follows: a Forward with a state begins a window.

    Later ones, whose text goes on with drafts, go on in that window, until it ends: then there are no logits.
    """

    model: HeadModel
    target: Any  # the network whose states it reads

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        self.tokens = self.model.tokens.cpu().numpy()
        upper = self.model.upper
        self.context_layers = None if upper is None else ContextLayers(upper.merged())
        with torch.inference_mode():
            self.direction_logits = _float_array(self.model.direction_logits())

    def new_kv_cache(self) -> WindowCache:
        return WindowCache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[WindowCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens behind the decided text: of the window's next position given those before."""
        started = time.perf_counter()
        with native.kernel_threads_only() if self.device.type == "cpu" else nullcontext():
            self._start_windows(batch, kv_caches)
            answers = [
                self._next_token_logits(inputs.canvas.decided_prefix, kv_cache)
                for inputs, kv_cache in zip(batch, kv_caches, strict=True)
            ]
        seconds = time.perf_counter() - started
        return [
            ForwardOutputs(torch.from_numpy(logits), None, seconds, 0, len(batch), torch.from_numpy(tokens))
            for tokens, logits in answers
        ]

    def _next_token_logits(
        self, decided: np.ndarray, kv_cache: WindowCache
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rows likely"]]:
        shape = self.model.shape
        assert kv_cache.parameters is not None
        wanted = decided[kv_cache.num_decided - (not shape.told) :].tolist()
        if kv_cache.circuit_filter is None or wanted[: len(kv_cache.window_tokens)] != kv_cache.window_tokens:
            kv_cache.circuit_filter, kv_cache.window_tokens = (
                CircuitFilter(shape.circuit_structure, kv_cache.initial, kv_cache.transitions),
                [],
            )
        for token in wanted[len(kv_cache.window_tokens) : shape.window]:
            self._observe_token(kv_cache, kv_cache.circuit_filter, token)
        tokens, logits = self.tokens, np.empty((0, len(self.tokens)), dtype=np.float32)
        if len(wanted) < shape.window:
            tokens, distribution = self._state_distributions(kv_cache, len(wanted))
            with np.errstate(divide="ignore"):
                logits = np.log(np.exp(kv_cache.circuit_filter.state_log_weights) @ distribution)[None]
        return tokens, logits

    def _input_hidden_state(
        self, kv_cache: WindowCache, hidden_states: Tensor, decided: np.ndarray
    ) -> Float[Tensor, "hidden"]:
        """What the heads read: the target's state before the last token, or what adapted layers make of the text."""
        if self.context_layers is None:
            return hidden_states[-1, -self.model.shape.hidden :]
        begin, slots = len(decided) - len(hidden_states), kv_cache.context_kv_cache
        past = slots.reuse_prefix(decided, begin)
        inputs = select_hidden_states(
            hidden_states[past - begin :], self.target.hidden_state_layers, self.model.shape.taps
        )
        state = self.context_layers(inputs, slots, past - slots.first_position, 1, output_logits=False)[-1]
        slots.tokens = decided[slots.first_position :].copy()
        return state

    def _start_windows(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[WindowCache]) -> None:
        """The heads' say of all texts that begin windows, at once: their weights are read but once."""
        begun = [
            (inputs.canvas.decided_prefix, inputs.hidden_states, kv_cache)
            for inputs, kv_cache in zip(batch, kv_caches, strict=True)
            if inputs.hidden_states is not None
        ]
        if not begun:
            return
        states = torch.stack([self._input_hidden_state(kv_cache, given, decided) for decided, given, kv_cache in begun])
        last = torch.tensor([int(decided[-1]) for decided, *_ in begun], device=self.device)
        every = self.model(states, last)
        shared = None if self.model.shape.own else self.model.shared_logits(every.position_features)
        for number, (decided, _, kv_cache) in enumerate(begun):
            codes = None if every.state_codes is None else every.state_codes[number]
            found = CircuitParameters(
                every.initial[number], every.transitions[number], every.position_features[number], codes
            )
            kv_cache.initial, kv_cache.transitions, kv_cache.state_codes = (
                _float_array(found.initial),
                _float_array(found.transitions),
                _float_array(found.state_codes),
            )
            kv_cache.shared_logits = None if shared is None else _float_array(shared[number])
            kv_cache.parameters, kv_cache.num_decided = found, len(decided)
            kv_cache.circuit_filter, kv_cache.window_tokens, kv_cache.distributions = None, [], {}

    def _state_distributions(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        """A position's likeliest tokens, ascending, and their probabilities in each state.

        The position's own logits choose them, so that states cost little each; the law is over these tokens alone.
        """
        if position not in kv_cache.distributions:
            tokens, logits = self._logits(kv_cache, position)
            distribution = np.exp(logits - logits.max(-1, keepdims=True))
            kv_cache.distributions[position] = tokens, distribution / distribution.sum(-1, keepdims=True)
        return kv_cache.distributions[position]

    def _logits(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        tokens, reach = self.tokens, self.direction_logits
        if kv_cache.shared_logits is None:
            assert kv_cache.parameters is not None
            return tokens, _float_array(self.model.logits(kv_cache.parameters, position))
        shared = kv_cache.shared_logits[position]
        if kv_cache.state_codes is None or reach is None:
            return tokens, shared[None]
        if len(shared) > MAX_CANDIDATE_TOKENS:
            chosen = np.sort(np.argpartition(-shared, MAX_CANDIDATE_TOKENS)[:MAX_CANDIDATE_TOKENS])
            tokens, shared, reach = tokens[chosen], shared[chosen], reach[:, chosen]
        return tokens, shared + kv_cache.state_codes[position] @ reach

    def _observe_token(self, kv_cache: WindowCache, circuit_filter: CircuitFilter[np.ndarray], token: int) -> None:
        """Condition on the window's next token; one that the law does not hold tells nothing."""
        tokens, distribution = self._state_distributions(kv_cache, len(kv_cache.window_tokens))
        place = int(np.searchsorted(tokens, token))
        known = place < len(tokens) and int(tokens[place]) == token
        with np.errstate(divide="ignore"):
            circuit_filter.observe(np.log(distribution[:, place]) if known else np.zeros_like(distribution[:, 0]))
        kv_cache.window_tokens.append(token)


def _float_array(x: Tensor | None) -> Any:
    """Float32, on the CPU."""
    return None if x is None else float_row(x)
