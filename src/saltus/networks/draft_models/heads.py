"""Heads that predict the joint distribution of the next tokens from the target's last hidden state (MtPC, §3.3).

A head reads the hidden state before the text's last token and, unless `told` is false, that token. It outputs the
parameters of a circuit over a window of positions. Each position's features go through the target's own unembedding,
restricted to frequent tokens. Components of a circuit differ in a small subspace: a component's logits are the
position's logits plus a few coordinates times the logits of as many directions. This saves each component a product
with the unembedding, though not a softmax. For a small vocabulary, as of bytes, every position and component can have
an unembedding of its own instead (`own`).
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
from saltus.core.sampling import Distribution, float_row
from saltus.drafting.drawn_window import DrawnWindow
from saltus.networks.draft_models import circuits
from saltus.networks.draft_models.circuits import Circuit, CircuitFilter
from saltus.networks.draft_models.context_layers import ContextKVCache, ContextLayers, select_hidden_states
from saltus.networks.draft_models.drafter import rms_normalized
from saltus.networks.draft_models.upper_layers import UpperLayers
from saltus.networks.draft_models.window_sampling import LEAST, draw_window
from saltus.networks.models.exact import native
from saltus.networks.models.exact.batch_invariant_ops import linear

CIRCUITS = {"cp": circuits.mixture_circuit, "hmm": circuits.chain_circuit, "btree": circuits.tree_circuit}
NO_LOGITS = np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32)
MAX_CANDIDATE_TOKENS = 1024  # a position drafts its most likely tokens only, so that a state's softmax is small


@dataclass(frozen=True)
class HeadShape:
    """The sizes of heads, as in saltus.json; the names are kept for files that exist."""

    hidden: int  # the target's hidden size
    circuit: str = "btree"  # ff, cp, hmm or btree
    window: int = 8  # positions of the joint distribution
    rank: int = 8  # states of each latent; ff has 1
    directions: int = 16  # dimensions of the subspace that components differ in
    own: bool = False  # an unembedding of its own for every position and component, in place of directions
    told: bool = True  # the text's last token is an input; else it is the window's first token, and known
    contextual: bool = True  # the circuit's weights depend on the text
    homogeneous: bool = False  # all transitions of a circuit share one table
    stay: float = 6.0  # initial logit of a latent for its parent's state; 0: no preference
    layers: int = 0  # the target's last layers that run on the text again, with low-rank adapters
    lora: int = 16  # rank of these adapters
    taps: tuple[int, ...] = ()  # the layer whose states these layers read

    def __post_init__(self) -> None:
        if self.circuit != "ff" and self.circuit not in CIRCUITS:
            raise ValueError(f"heads' circuit is {self.circuit!r}, but must be one of ff, {', '.join(CIRCUITS)}")
        if self.layers < 0:
            raise ValueError(f"heads' layers is {self.layers}, but must be 0 or more")
        for name in ("window", "rank", "directions", "lora"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads' {name} is {getattr(self, name)}, but must be 1 or more")
        if not self.told and self.window < 2:
            raise ValueError("heads' window is 1, but its first token is known; take 2 or more, or told=true")

    @cached_property
    def circuit_structure(self) -> Circuit:
        if self.circuit == "ff":
            return circuits.independent_circuit(self.window)
        return CIRCUITS[self.circuit](self.window, self.rank)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that can be drafted."""
        return self.window - (not self.told)


@dataclass(frozen=True, eq=False)
class CircuitParameters:
    """The outputs of heads for some texts: log-weights of their circuits, and what token distributions are made of."""

    initial: Float[Tensor, "*batch rank"]
    transitions: Float[Tensor, "*batch steps rank rank"]
    position_features: Float[Tensor, "*batch window hidden"]  # inputs of the unembedding
    state_codes: Float[Tensor, "*batch window rank directions"] | None  # of components, in their subspace


class HeadModel(nn.Module):
    """The trained modules of heads. The target's embeddings are shared and not trained."""

    tokens: Tensor  # [draft] ascending ids of the tokens that are drafted
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
        self.embeddings = [embeddings]  # in a list: neither a parameter nor a buffer of this module

    @property
    def matrices(self) -> list[Tensor]:
        """The weight matrices between hidden states, which some optimisers (Muon) treat apart."""
        return [self.fuse.weight]

    def forward(
        self, hidden_states: Float[Tensor, "*batch hidden"], tokens: Int[Tensor, "*batch"]
    ) -> CircuitParameters:
        """The circuit's parameters, from the target's hidden state before each text's last token, and that token."""
        shape, circuit = self.shape, self.shape.circuit_structure
        dtype = self.fuse.weight.dtype
        parts = [hidden_states.to(dtype)]
        if shape.told:
            parts.append(F.embedding(tokens, self.embeddings[0]).to(dtype))
        fused = self._linear(self.fuse, rms_normalized(torch.stack(parts, -2)).flatten(-2))
        moved = F.silu(self._linear(self.blocks, fused)).unflatten(-1, (shape.window, shape.hidden))
        features = rms_normalized(fused[..., None, :] + moved) * self.norm
        sums = self._linear(self.sums, fused if shape.contextual else torch.zeros_like(fused)).float()
        initial, steps = sums[..., : circuit.rank], sums[..., circuit.rank :]
        steps = (
            steps.unflatten(-1, (-1, circuit.rank, circuit.rank))
            if circuit.num_latents > 1
            else steps.new_zeros(*steps.shape[:-1], 0, circuit.rank, circuit.rank)
        )
        if shape.homogeneous:
            steps = steps.expand(*steps.shape[:-3], circuit.num_latents - 1, -1, -1)
        codes = None
        if self.codes is not None:
            codes = self._linear(self.codes, fused).unflatten(-1, (shape.window, circuit.rank, shape.directions))
        return CircuitParameters(initial.log_softmax(-1), steps.log_softmax(-1), features, codes)

    def log_probabilities(self, parameters: CircuitParameters, position: int) -> Float[Tensor, "*batch rank draft"]:
        """Log-probabilities of the drafted tokens in each state of a position."""
        return self.logits(parameters, position).log_softmax(-1)

    def logits(self, parameters: CircuitParameters, position: int) -> Float[Tensor, "*batch rank draft"]:
        """Logits of the drafted tokens in each state of a position."""
        features = parameters.position_features[..., position, :]
        if self.own is not None:
            logits = self._product(features, self.own[position].flatten(0, 1))
            return logits.float().unflatten(-1, self.own.shape[1:3])
        codes = None if parameters.state_codes is None else parameters.state_codes[..., position, :, :]
        return self.state_logits(self.shared_logits(features), codes, self.direction_logits())

    def shared_logits(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows draft"]:
        """The logits that all states of a position share."""
        return self._product(features, self.unembedding).float()

    def direction_logits(self) -> Float[Tensor, "directions draft"] | None:
        """The logits of the directions that states differ in; None if there is one state."""
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
        shared = shared_logits[..., None, :]
        if codes is None or direction_logits is None:
            return shared
        return shared + codes.to(direction_logits.dtype) @ direction_logits

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        out = self._product(x, layer.weight)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ, by compiled kernels where no gradient is needed."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or not len(weight):
            return F.linear(x.to(weight.dtype), weight)
        return linear(x.to(weight.dtype), [weight], [None])[0]


def new_head_model(
    shape: HeadShape, tokens: Int[Tensor, "draft"], target: Any, generator: np.random.Generator
) -> HeadModel:
    """Untrained heads of these tokens for a Hugging Face model, in float32.

    Every position and component starts with the target's distribution of the next token, or, where the target itself
    predicts several tokens (EvaByte's unembedding is for eight), with its distribution of that position. So CP starts
    as FF, and HMM and BTree nearly as CP, since latents copy their parent's state (`shape.stay`). The circuit's weights
    differ between texts from the start, which breaks the symmetry of components.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    tables = unembedding.unflatten(0, (-1, len(embeddings)))  # [positions that the target predicts, vocab, hidden]
    if len(tables) > 1 and not shape.own:
        raise ValueError(f"the target predicts {len(tables)} tokens by matrices of their own; set own=true")
    upper = upper_layers(shape, target)
    model, circuit = HeadModel(shape, tokens, embeddings, tables[0], upper), shape.circuit_structure
    norm = getattr(target.get_decoder(), "norm", None)

    def draw_normal(weight: Tensor, scale: float) -> None:
        weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))

    with torch.no_grad():
        if norm is not None:
            model.norm.copy_(norm.weight + getattr(target.config, "norm_add_unit_offset", False))
        draw_normal(model.fuse.weight, 0.005)
        model.fuse.weight[:, : shape.hidden] += torch.eye(shape.hidden)
        model.blocks.weight.zero_()
        draw_normal(model.sums.weight, 0.02)
        model.sums.bias.zero_()
        if circuit.num_latents > 1:
            copies = shape.stay * torch.eye(circuit.rank).flatten()
            model.sums.bias[circuit.rank :] = copies.repeat(len(model.sums.bias[circuit.rank :]) // len(copies))
        if model.own is not None:
            for position, own in enumerate(model.own):
                own.copy_(tables[min(position + shape.told, len(tables) - 1), tokens])
        if model.codes is not None and model.directions is not None:
            model.codes.weight.zero_()
            draw_normal(model.directions, 1 / shape.hidden**0.5)
        for part in () if upper is None else upper.lora_layers:
            draw_normal(part.down, part.down.shape[1] ** -0.5)
    return model


def upper_layers(shape: HeadShape, target: Any) -> UpperLayers | None:
    """The adapted last layers of a Hugging Face model; None if heads of this shape have none."""
    return UpperLayers(target, shape.layers, shape.lora) if shape.layers else None


@dataclass
class WindowCache:
    """The heads' outputs for the current window of a text, and the window's tokens so far.

    In NumPy: for one text the overhead of torch would exceed the computation.
    """

    num_decided: int = 0  # decided tokens when the window began
    parameters: CircuitParameters | None = None
    initial: np.ndarray = field(default_factory=lambda: np.empty(0))
    transitions: np.ndarray = field(default_factory=lambda: np.empty(0))
    shared_logits: np.ndarray | None = None  # [window, draft] logits
    state_codes: np.ndarray | None = None  # [window, rank, directions]
    distributions: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # by position
    window_tokens: list[int] = field(default_factory=list)  # observed so far
    circuit_filter: CircuitFilter[np.ndarray] | None = None
    context_kv_cache: ContextKVCache = field(default_factory=ContextKVCache)  # of the adapted layers


@dataclass
class HeadNetwork:
    """Heads as a network: a forward pass with hidden states starts a window of draft positions.

    Later passes without hidden states, whose text continues with draft tokens, stay in that window. Behind its end
    there are no logits.
    """

    model: HeadModel
    target: Any  # the network whose hidden states it reads

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
        """Logits over the drafted tokens for the window's next position, given the window's tokens."""
        started = time.perf_counter()
        with native.kernel_threads_only() if self.device.type == "cpu" else nullcontext():
            self._start_windows(batch, kv_caches)
            outputs = []
            for inputs, kv_cache in zip(batch, kv_caches, strict=True):
                drawn = self._draw_window(inputs, kv_cache) if inputs.query_nodes else None
                found = NO_LOGITS if drawn else self._next_token_logits(inputs.canvas.decided_prefix, kv_cache)
                outputs.append((*found, drawn))
        seconds = time.perf_counter() - started
        return [
            ForwardOutputs(torch.from_numpy(logits), None, seconds, 0, len(batch), torch.from_numpy(tokens), drawn)
            for tokens, logits, drawn in outputs
        ]

    def _draw_window(self, inputs: ForwardInputs, kv_cache: WindowCache) -> DrawnWindow:
        """A token for each uniform query, as far as the window goes, drawn from the joint distribution at once.

        The text's last token is an input of the heads, or else the window's first token, and evidence.
        """
        shape, parameters = self.model.shape, kv_cache.parameters
        assert parameters is not None and kv_cache.num_decided == len(inputs.canvas.decided_prefix)
        first = int(not shape.told)
        uniforms = torch.tensor(inputs.uniforms[: shape.num_draft_tokens], dtype=torch.float64, device=self.device)
        tokens, logits = self._likely_logits(kv_cache, parameters, first + len(uniforms))
        law = (logits / inputs.temperature).softmax(-1).double()
        law = law / law.sum(-1, keepdim=True)
        known = [_leaf(tokens[0], law[0], int(inputs.canvas.decided_prefix[-1]))] if first else []
        initial, transitions = parameters.initial.double(), parameters.transitions.double()
        columns, distributions = draw_window(
            shape.circuit_structure, initial, transitions, law[first:], known, uniforms
        )
        ids, weights = tokens[first:].cpu().numpy(), distributions.cpu().numpy()
        drawn = ids[np.arange(len(ids)), columns.cpu().numpy()].tolist()
        return DrawnWindow(drawn, [Distribution(*pair) for pair in zip(ids, weights, strict=True)])

    def _likely_logits(
        self, kv_cache: WindowCache, parameters: CircuitParameters, count: int
    ) -> tuple[Int[Tensor, "count likely"], Float[Tensor, "count rank likely"]]:
        """The most likely tokens of the first positions, ascending, and their logits in each state."""
        model, codes = self.model, parameters.state_codes
        if kv_cache.shared_logits is None:
            logits = torch.stack([model.logits(parameters, position) for position in range(count)])
            return model.tokens.expand(count, -1), logits
        shared = torch.from_numpy(kv_cache.shared_logits[:count]).to(self.device)
        if self.direction_logits is None or codes is None:
            return model.tokens.expand(count, -1), shared[:, None]
        directions = torch.from_numpy(self.direction_logits).to(self.device)
        if shared.shape[-1] <= MAX_CANDIDATE_TOKENS:
            return model.tokens.expand(count, -1), model.state_logits(shared, codes[:count], directions)
        likely = np.argpartition(-kv_cache.shared_logits[:count], MAX_CANDIDATE_TOKENS)[:, :MAX_CANDIDATE_TOKENS]
        chosen = torch.from_numpy(np.sort(likely)).to(self.device)  # topk of torch takes five times as long
        differences = codes[:count].to(directions.dtype) @ directions[:, chosen].transpose(0, 1)
        return model.tokens[chosen], shared.gather(-1, chosen)[:, None] + differences

    def _next_token_logits(
        self, decided: np.ndarray, kv_cache: WindowCache
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rows likely"]]:
        shape = self.model.shape
        assert kv_cache.parameters is not None
        window = decided[kv_cache.num_decided - (not shape.told) :].tolist()
        if kv_cache.circuit_filter is None or window[: len(kv_cache.window_tokens)] != kv_cache.window_tokens:
            circuit_filter = CircuitFilter(shape.circuit_structure, kv_cache.initial, kv_cache.transitions)
            kv_cache.circuit_filter, kv_cache.window_tokens = circuit_filter, []
        for token in window[len(kv_cache.window_tokens) : shape.window]:
            self._observe_token(kv_cache, kv_cache.circuit_filter, token)
        tokens, logits = self.tokens, np.empty((0, len(self.tokens)), dtype=np.float32)
        if len(window) < shape.window:
            tokens, distribution = self._state_distributions(kv_cache, len(window))
            with np.errstate(divide="ignore"):
                logits = np.log(np.exp(kv_cache.circuit_filter.state_log_weights) @ distribution)[None]
        return tokens, logits

    def _input_hidden_state(
        self, kv_cache: WindowCache, hidden_states: Tensor, decided: np.ndarray
    ) -> Float[Tensor, "hidden"]:
        """The target's hidden state before the last token, or the output of the adapted layers for it."""
        if self.context_layers is None:
            return hidden_states[-1, -self.model.shape.hidden :]
        begin, cache = len(decided) - len(hidden_states), kv_cache.context_kv_cache
        past = cache.reuse_prefix(decided, begin)
        inputs = select_hidden_states(
            hidden_states[past - begin :], self.target.hidden_state_layers, self.model.shape.taps
        )
        state = self.context_layers(inputs, cache, past - cache.first_position, 1, output_logits=False)[1][-1]
        cache.tokens = decided[cache.first_position :].copy()
        return state

    def _start_windows(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[WindowCache]) -> None:
        """One batched pass of the heads for all texts that start a window."""
        starting = [
            (inputs.canvas.decided_prefix, inputs.hidden_states, kv_cache)
            for inputs, kv_cache in zip(batch, kv_caches, strict=True)
            if inputs.hidden_states is not None
        ]
        if not starting:
            return
        states = torch.stack(
            [self._input_hidden_state(kv_cache, given, decided) for decided, given, kv_cache in starting]
        )
        last = torch.tensor([int(decided[-1]) for decided, *_ in starting], device=self.device)
        outputs = self.model(states, last)
        shared = None if self.model.shape.own else self.model.shared_logits(outputs.position_features)
        for number, (decided, _, kv_cache) in enumerate(starting):
            codes = None if outputs.state_codes is None else outputs.state_codes[number]
            parameters = CircuitParameters(
                outputs.initial[number], outputs.transitions[number], outputs.position_features[number], codes
            )
            kv_cache.initial, kv_cache.transitions = map(_float_array, (parameters.initial, parameters.transitions))
            kv_cache.state_codes = _float_array(codes)
            kv_cache.shared_logits = None if shared is None else _float_array(shared[number])
            kv_cache.parameters, kv_cache.num_decided = parameters, len(decided)
            kv_cache.circuit_filter, kv_cache.window_tokens, kv_cache.distributions = None, [], {}

    def _state_distributions(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        """The most likely tokens of a position, ascending, and their probabilities in each state.

        The position's shared logits select the tokens, so that states cost little; probabilities are over these alone.
        """
        if position not in kv_cache.distributions:
            tokens, logits = self._logits(kv_cache, position)
            distribution = np.exp(logits - logits.max(-1, keepdims=True))
            kv_cache.distributions[position] = tokens, distribution / distribution.sum(-1, keepdims=True)
        return kv_cache.distributions[position]

    def _logits(
        self, kv_cache: WindowCache, position: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        tokens, directions = self.tokens, self.direction_logits
        if kv_cache.shared_logits is None:
            assert kv_cache.parameters is not None
            return tokens, _float_array(self.model.logits(kv_cache.parameters, position))
        shared = kv_cache.shared_logits[position]
        if kv_cache.state_codes is None or directions is None:
            return tokens, shared[None]
        if len(shared) > MAX_CANDIDATE_TOKENS:
            chosen = np.sort(np.argpartition(-shared, MAX_CANDIDATE_TOKENS)[:MAX_CANDIDATE_TOKENS])
            tokens, shared, directions = tokens[chosen], shared[chosen], directions[:, chosen]
        return tokens, shared + kv_cache.state_codes[position] @ directions

    def _observe_token(self, kv_cache: WindowCache, circuit_filter: CircuitFilter[np.ndarray], token: int) -> None:
        """Condition on the window's next token; a token outside the distribution is no evidence."""
        tokens, distribution = self._state_distributions(kv_cache, len(kv_cache.window_tokens))
        column = int(np.searchsorted(tokens, token))
        known = column < len(tokens) and int(tokens[column]) == token
        with np.errstate(divide="ignore"):
            circuit_filter.observe(np.log(distribution[:, column]) if known else np.zeros_like(distribution[:, 0]))
        kv_cache.window_tokens.append(token)


def _leaf(tokens: Int[Tensor, "likely"], law: Float[Tensor, "rank likely"], token: int) -> Float[Tensor, "rank"]:
    """The log-probability of a token in each state; 0 for a token outside the distribution, which is no evidence."""
    found = (tokens == token).nonzero()
    return law[:, int(found[0, 0])].clamp_min(LEAST).log() if len(found) else law.new_zeros(len(law))


def _float_array(x: Tensor | None) -> Any:
    """A float32 array; None stays None."""
    return None if x is None else float_row(x)
