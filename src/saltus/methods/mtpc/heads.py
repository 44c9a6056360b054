"""Heads that predict the joint distribution of the next tokens from the target's last hidden state (MtPC, §3.3).

A head reads the hidden state before the text's last token and, unless `embeds_last_token` is false, that token. It
outputs the parameters of a circuit over a window of positions. Each position's features go through the target's own
unembedding, restricted to frequent tokens. Components of a circuit differ in a small subspace: a component's logits are
the position's logits plus a few coordinates times the logits of as many directions. This saves each component a product
with the unembedding, though not a softmax. For a small vocabulary, as of bytes, every position and component can have
an unembedding of its own instead (`untied_unembedding`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.core.value_types import require_at_least
from saltus.kernels.batch_invariant_ops import linear
from saltus.methods.mtpc import circuits
from saltus.methods.mtpc.circuits import Circuit
from saltus.methods.mtpc.upper_layers import UpperLayers
from saltus.methods.shared.hidden_state_correction import rms_normalized
from saltus.models.output_layer import last_norm_factors

CIRCUITS = {"cp": circuits.mixture_circuit, "hmm": circuits.chain_circuit, "btree": circuits.tree_circuit}


@dataclass(frozen=True)
class HeadShape:
    """The sizes of heads, as in saltus.json."""

    hidden: int  # the target's hidden size
    circuit: str = "btree"  # ff, cp, hmm or btree
    window: int = 8  # positions of the joint distribution
    rank: int = 8  # states of each latent; ff has 1
    subspace_dim: int = 16  # of the subspace that components differ in
    untied_unembedding: bool = False  # a matrix for every position and component, in place of the target's unembedding
    embeds_last_token: bool = True  # the text's last token is an input; else it is the window's first token, and known
    features: str = "learned"  # by layers of the heads, or "state": the hidden state itself, for untied_unembedding
    contextual: bool = True  # the circuit's weights depend on the text
    homogeneous: bool = False  # all transitions of a circuit share one table
    self_transition_init: float = 6.0  # initial logit of a latent for its parent's state; 0: no preference
    layers: int = 0  # the target's last layers that run on the text again, with low-rank adapters
    lora_rank: int = 16  # of these adapters
    hidden_state_layers: tuple[int, ...] = ()  # the layer whose states these layers read

    def __post_init__(self) -> None:
        if self.circuit != "ff" and self.circuit not in CIRCUITS:
            raise ValueError(f"heads' circuit is {self.circuit!r}, but must be one of ff, {', '.join(CIRCUITS)}")
        require_at_least(self, "heads' ", layers=0, window=1, rank=1, subspace_dim=1, lora_rank=1)
        if self.features not in ("learned", "state"):
            raise ValueError(f"heads' features is {self.features!r}, but must be learned or state")
        if self.features == "state" and (self.embeds_last_token or not self.untied_unembedding):
            raise ValueError(
                "heads that read the state itself have untied matrices alone; take untied_unembedding=true and"
                " embeds_last_token=false"
            )
        if not self.embeds_last_token and self.window < 2:
            raise ValueError(
                "heads' window is 1, but its first token is known; take 2 or more, or embeds_last_token=true"
            )

    @cached_property
    def circuit_structure(self) -> Circuit:
        if self.circuit == "ff":
            return circuits.independent_circuit(self.window)
        return CIRCUITS[self.circuit](self.window, self.rank)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that can be drafted."""
        return self.window - (not self.embeds_last_token)


@dataclass(frozen=True, eq=False)
class CircuitParameters:
    """The outputs of heads for some texts: log-weights of their circuits, and what token distributions are made of."""

    initial: Float[Tensor, "*batch rank"]
    transitions: Float[Tensor, "*batch steps rank rank"]
    position_features: Float[Tensor, "*batch window hidden"]  # inputs of the unembedding
    state_codes: Float[Tensor, "*batch window rank directions"] | None  # of components, in their subspace


@dataclass(frozen=True, eq=False)
class HeadOutputs:
    """What drafting needs of some texts' circuits."""

    initial: Float[Tensor, "*batch rank"]
    transitions: Float[Tensor, "*batch steps rank rank"]
    logits: Float[Tensor, "*batch window states draft"]  # of each state, or what states share that `codes` tell apart
    codes: Float[Tensor, "*batch window rank directions"] | None = None

    def of_text(self, number: int) -> HeadOutputs:
        """Those of one text of a batch."""
        codes = None if self.codes is None else self.codes[number]
        return HeadOutputs(self.initial[number], self.transitions[number], self.logits[number], codes)


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
        learned = shape.features == "learned"
        self.fuse = nn.Linear((1 + shape.embeds_last_token) * size, size, bias=False) if learned else None
        self.blocks = nn.Linear(size, window * size, bias=False) if learned else None
        self.norm = nn.Parameter(torch.ones(size)) if learned else None
        tables = 1 if shape.homogeneous and circuit.num_latents > 1 else circuit.num_latents - 1
        self.sums = nn.Linear(size, rank + tables * rank * rank)
        several = rank > 1 and not shape.untied_unembedding
        self.codes = nn.Linear(size, window * rank * shape.subspace_dim, bias=False) if several else None
        self.directions = nn.Parameter(torch.zeros(shape.subspace_dim, size)) if several else None
        untied = torch.zeros(window, rank, len(tokens), size) if shape.untied_unembedding else None
        self.untied_unembedding = None if untied is None else nn.Parameter(untied)
        self.upper = upper
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("unembedding", unembedding[tokens].clone(), persistent=False)
        self.embeddings = [embeddings]  # in a list: neither a parameter nor a buffer of this module

    def saved_weights(self) -> dict[str, Tensor]:
        """The weights for files."""
        return self.state_dict()

    @property
    def matrices(self) -> list[Tensor]:
        """The weight matrices between hidden states, which some optimizers (Muon) treat apart."""
        return [] if self.fuse is None else [self.fuse.weight]

    def forward(
        self, hidden_states: Float[Tensor, "*batch hidden"], tokens: Int[Tensor, "*batch"]
    ) -> CircuitParameters:
        """The circuit's parameters, from the target's hidden state before each text's last token, and that token."""
        shape, circuit = self.shape, self.shape.circuit_structure
        fused, features = self._features(hidden_states.to(self.sums.weight.dtype), tokens)
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
            codes = self._linear(self.codes, fused).unflatten(-1, (shape.window, circuit.rank, shape.subspace_dim))
        return CircuitParameters(initial.log_softmax(-1), steps.log_softmax(-1), features, codes)

    def draft_outputs(
        self, hidden_states: Float[Tensor, "*batch hidden"], tokens: Int[Tensor, "*batch"]
    ) -> HeadOutputs:
        """The circuits for the same inputs, and the logits of the whole window."""
        made = self(hidden_states, tokens)
        if self.untied_unembedding is None:
            logits = self.shared_logits(made.position_features)[..., None, :]
        else:
            logits = torch.stack([self.logits(made, position) for position in range(self.shape.window)], -3)
        return HeadOutputs(made.initial, made.transitions, logits, made.state_codes)

    def _features(
        self, states: Float[Tensor, "*batch hidden"], tokens: Int[Tensor, "*batch"]
    ) -> tuple[Float[Tensor, "*batch hidden"], Float[Tensor, "*batch window hidden"]]:
        """What the circuit's weights are read from, and what the tokens of each position are."""
        shape, parts = self.shape, [states]
        if self.fuse is None or self.blocks is None or self.norm is None:
            return states, states[..., None, :].expand(*states.shape[:-1], shape.window, -1)
        if shape.embeds_last_token:
            parts.append(F.embedding(tokens, self.embeddings[0]).to(states.dtype))
        fused = self._linear(self.fuse, rms_normalized(torch.stack(parts, -2)).flatten(-2))
        moved = F.silu(self._linear(self.blocks, fused)).unflatten(-1, (shape.window, shape.hidden))
        return fused, rms_normalized(fused[..., None, :] + moved) * self.norm

    def log_probabilities(self, parameters: CircuitParameters, position: int) -> Float[Tensor, "*batch rank draft"]:
        """Log-probabilities of the drafted tokens in each state of a position."""
        return self.logits(parameters, position).log_softmax(-1)

    def logits(self, parameters: CircuitParameters, position: int) -> Float[Tensor, "*batch rank draft"]:
        """Logits of the drafted tokens in each state of a position."""
        features = parameters.position_features[..., position, :]
        if self.untied_unembedding is not None:
            logits = self._product(features, self.untied_unembedding[position].flatten(0, 1))
            return logits.float().unflatten(-1, self.untied_unembedding.shape[1:3])
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
    as FF, and HMM and BTree nearly as CP, since latents copy their parent's state (`self_transition_init`). The
    circuit's weights differ between texts from the start, which breaks the symmetry of components.
    """
    embeddings, unembedding = (
        module.weight.detach().float() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    tables = unembedding.unflatten(0, (-1, len(embeddings)))  # [positions that the target predicts, vocab, hidden]
    if len(tables) > 1 and not shape.untied_unembedding:
        count = len(tables)
        raise ValueError(f"the target predicts {count} tokens by matrices of their own; set untied_unembedding=true")
    upper = upper_layers(shape, target)
    model, circuit = HeadModel(shape, tokens, embeddings, tables[0], upper), shape.circuit_structure
    norm = last_norm_factors(target)

    def draw_normal(weight: Tensor, scale: float) -> None:
        weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))

    with torch.no_grad():
        if norm is not None and model.norm is not None:
            model.norm.copy_(norm)
        if model.fuse is not None and model.blocks is not None:
            draw_normal(model.fuse.weight, 0.005)
            model.fuse.weight[:, : shape.hidden] += torch.eye(shape.hidden)
            model.blocks.weight.zero_()
        draw_normal(model.sums.weight, 0.02)
        model.sums.bias.zero_()
        if circuit.num_latents > 1:
            copies = shape.self_transition_init * torch.eye(circuit.rank).flatten()
            model.sums.bias[circuit.rank :] = copies.repeat(len(model.sums.bias[circuit.rank :]) // len(copies))
        if model.untied_unembedding is not None:
            for position, matrices in enumerate(model.untied_unembedding):
                matrices.copy_(tables[min(position + shape.embeds_last_token, len(tables) - 1), tokens])
        if model.codes is not None and model.directions is not None:
            model.codes.weight.zero_()
            draw_normal(model.directions, 1 / shape.hidden**0.5)
        for part in () if upper is None else upper.lora_layers:
            draw_normal(part.down, part.down.shape[1] ** -0.5)
    return model


def own_heads(target: Any) -> HeadModel | None:
    """The heads that a target has itself, such as EvaByte: independent tokens; None if it predicts one token only."""
    embeddings, matrices = (
        module.weight.detach() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    vocab, hidden = embeddings.shape
    window = len(matrices) // vocab
    if window < 2:
        return None
    shape = HeadShape(
        hidden, "ff", window, 1, untied_unembedding=True, embeds_last_token=False, features="state", contextual=False
    )
    tables = matrices.unflatten(0, (window, vocab))
    model = HeadModel(shape, torch.arange(vocab, device=matrices.device), embeddings, tables[0]).to(tables.dtype)
    model.untied_unembedding = nn.Parameter(tables[:, None], requires_grad=False)
    nn.init.zeros_(model.sums.weight)  # of one state: nothing to choose
    nn.init.zeros_(model.sums.bias)
    return model.to(matrices.device).eval()


def upper_layers(shape: HeadShape, target: Any) -> UpperLayers | None:
    """The adapted last layers of a Hugging Face model; None if heads of this shape have none."""
    return UpperLayers(target, shape.layers, shape.lora_rank) if shape.layers else None
