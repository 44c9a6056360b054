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

from saltus.core.forward import Forward, Reply
from saltus.core.sampling import float_row
from saltus.networks import circuits, native
from saltus.networks.circuits import Circuit, Reader
from saltus.networks.drafter import normed
from saltus.networks.linear import linear
from saltus.networks.slots import SlotMemory, SlotReader, tapped
from saltus.networks.upper_layers import UpperLayers

MADE = {"cp": circuits.mixture, "hmm": circuits.chain, "btree": circuits.tree}
LIKELY = 1024  # tokens of a position that are drafted, the likeliest, so that each state costs a softmax over few


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
        if self.circuit != "ff" and self.circuit not in MADE:
            raise ValueError(f"heads' circuit is {self.circuit!r}, but must be one of ff, {', '.join(MADE)}")
        if self.layers < 0:
            raise ValueError(f"heads' layers is {self.layers}, but must be 0 or more")
        for name in ("window", "rank", "directions", "lora"):
            if getattr(self, name) < 1:
                raise ValueError(f"heads' {name} is {getattr(self, name)}, but must be 1 or more")
        if not self.told and self.window < 2:
            raise ValueError("heads' window is 1, but its first token is known; take 2 or more, or let it be told")

    @cached_property
    def structure(self) -> Circuit:
        """The circuit."""
        return circuits.independent(self.window) if self.circuit == "ff" else MADE[self.circuit](self.window, self.rank)

    @property
    def drafts(self) -> int:
        """Tokens that can be drafted."""
        return self.window - (not self.told)


@dataclass(frozen=True, eq=False)
class Parameters:
    """What heads say of some texts: the sums of their circuits, and what the laws of tokens are made of."""

    start: Float[Tensor, "*batch rank"]
    steps: Float[Tensor, "*batch steps rank rank"]
    features: Float[Tensor, "*batch window hidden"]  # that the unembedding reads
    codes: Float[Tensor, "*batch window rank directions"] | None  # of components, in their subspace


class HeadModel(nn.Module):
    """The heads. The target's embeddings come from outside and are not trained."""

    tokens: Tensor  # [draft] ascending ids of the target's vocabulary that are drafted
    unembedding: Tensor  # [draft, hidden]

    def __init__(
        self, shape: HeadShape, tokens: Int[Tensor, "draft"], embeddings: Tensor, unembedding: Tensor,
        upper: UpperLayers | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.shape, circuit = shape, shape.structure
        size, window, rank = shape.hidden, shape.window, circuit.rank
        self.fuse = nn.Linear((1 + shape.told) * size, size, bias=False)
        self.blocks = nn.Linear(size, window * size, bias=False)
        self.norm = nn.Parameter(torch.ones(size))
        tables = 1 if shape.homogeneous and circuit.latents > 1 else circuit.latents - 1
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

    def forward(self, states: Float[Tensor, "*batch hidden"], tokens: Int[Tensor, "*batch"]) -> Parameters:
        """From the target's states before each text's last token, and that token."""
        shape, circuit = self.shape, self.shape.structure
        dtype = self.fuse.weight.dtype
        parts = [states.to(dtype)]
        if shape.told:
            parts.append(F.embedding(tokens, self.embeddings[0]).to(dtype))
        here = self._linear(self.fuse, normed(torch.stack(parts, -2)).flatten(-2))
        moved = F.silu(self._linear(self.blocks, here)).unflatten(-1, (shape.window, shape.hidden))
        features = normed(here[..., None, :] + moved) * self.norm
        sums = self._linear(self.sums, here if shape.contextual else torch.zeros_like(here)).float()
        start, steps = sums[..., : circuit.rank], sums[..., circuit.rank :]
        steps = (
            steps.unflatten(-1, (-1, circuit.rank, circuit.rank))
            if circuit.latents > 1
            else steps.new_zeros(*steps.shape[:-1], 0, circuit.rank, circuit.rank)
        )
        if shape.homogeneous:
            steps = steps.expand(*steps.shape[:-3], circuit.latents - 1, -1, -1)
        codes = None
        if self.codes is not None:
            codes = self._linear(self.codes, here).unflatten(-1, (shape.window, circuit.rank, shape.directions))
        return Parameters(start.log_softmax(-1), steps.log_softmax(-1), features, codes)

    def laws(self, found: Parameters, place: int) -> Float[Tensor, "*batch rank draft"]:
        """Log-probabilities of the drafted tokens in each state of a position."""
        return self.logits(found, place).log_softmax(-1)

    def logits(self, found: Parameters, place: int) -> Float[Tensor, "*batch rank draft"]:
        """The same, before they are normalised."""
        features = found.features[..., place, :]
        if self.own is not None:
            said = self._product(features, self.own[place].flatten(0, 1))
            return said.float().unflatten(-1, self.own.shape[1:3])
        codes = None if found.codes is None else found.codes[..., place, :, :]
        return self.apart(self.shared(features), codes, self.reach())

    def shared(self, features: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows draft"]:
        """The logits that all states of a position share."""
        return self._product(features, self.unembedding).float()

    def reach(self) -> Float[Tensor, "directions draft"] | None:
        """The logits of the directions that states differ in; None where there is one state."""
        if self.directions is None:
            return None
        return self._product(self.directions.to(self.unembedding.dtype), self.unembedding).float()

    @staticmethod
    def apart(
        shared: Float[Tensor, "*rows draft"],
        codes: Float[Tensor, "*rows rank directions"] | None,
        reach: Float[Tensor, "directions draft"] | None,
    ) -> Float[Tensor, "*rows rank draft"]:
        """The logits of each state."""
        own = shared[..., None, :]
        return own if codes is None or reach is None else own + codes.to(reach.dtype) @ reach

    def _linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        out = self._product(x, layer.weight)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ: by our kernels where nothing is learned."""
        if torch.is_grad_enabled() or x.device.type != "cpu" or not len(weight):
            return F.linear(x.to(weight.dtype), weight)
        return linear(x.to(weight.dtype), [weight], [None])[0]


def new_heads(shape: HeadShape, tokens: Int[Tensor, "draft"], target: Any, generator: np.random.Generator) -> HeadModel:
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
    model, circuit = HeadModel(shape, tokens, embeddings, places[0], upper), shape.structure
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
        if circuit.latents > 1:
            stays = shape.stay * torch.eye(circuit.rank).flatten()
            model.sums.bias[circuit.rank :] = stays.repeat(len(model.sums.bias[circuit.rank :]) // len(stays))
        if model.own is not None:
            for place, own in enumerate(model.own):
                own.copy_(places[min(place + shape.told, len(places) - 1), tokens])
        if model.codes is not None and model.directions is not None:
            model.codes.weight.zero_()
            drawn(model.directions, 1 / shape.hidden**0.5)
        for part in () if upper is None else upper.low:
            drawn(part.down, part.down.shape[1] ** -0.5)
    return model


def upper_layers(shape: HeadShape, target: Any) -> UpperLayers | None:
    """What heads of this shape adapt of a Hugging Face model."""
    return UpperLayers(target, shape.layers, shape.lora) if shape.layers else None


@dataclass
class HeadMemory:
    """The window that a text is being drafted from: what the heads said, and what has been read of it.

    In NumPy: of one text so little is computed for each token that the framework would cost more than the sums.
    """

    base: int = 0  # decided tokens when the window began
    found: Parameters | None = None
    start: np.ndarray = field(default_factory=lambda: np.empty(0))
    steps: np.ndarray = field(default_factory=lambda: np.empty(0))
    shared: np.ndarray | None = None  # [window, draft] logits
    codes: np.ndarray | None = None  # [window, rank, directions]
    laws: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # of places asked for
    read: list[int] = field(default_factory=list)  # tokens of the window
    reader: Reader[np.ndarray] | None = None
    slots: SlotMemory = field(default_factory=SlotMemory)  # that adapted layers have read


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
        self.read = None if upper is None else SlotReader(upper.merged())
        with torch.inference_mode():
            self.reach = _array(self.model.reach())

    def memory(self) -> HeadMemory:
        return HeadMemory()

    @torch.inference_mode()
    def forward(self, asks: Sequence[Forward], memories: Sequence[HeadMemory]) -> list[Reply]:
        """Logits over the drafted tokens behind the decided text: of the window's next position given those before."""
        started = time.perf_counter()
        with native.in_charge() if self.device.type == "cpu" else nullcontext():
            self._begin(asks, memories)
            answers = [self._answer(ask.canvas.decided, memory) for ask, memory in zip(asks, memories, strict=True)]
        seconds = time.perf_counter() - started
        return [
            Reply(torch.from_numpy(logits), None, seconds, 0, len(asks), torch.from_numpy(tokens))
            for tokens, logits in answers
        ]

    def _answer(
        self, decided: np.ndarray, memory: HeadMemory
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rows likely"]]:
        shape = self.model.shape
        assert memory.found is not None
        wanted = decided[memory.base - (not shape.told) :].tolist()
        if memory.reader is None or wanted[: len(memory.read)] != memory.read:
            memory.reader, memory.read = Reader(shape.structure, memory.start, memory.steps), []
        for token in wanted[len(memory.read) : shape.window]:
            self._read(memory, memory.reader, token)
        tokens, logits = self.tokens, np.empty((0, len(self.tokens)), dtype=np.float32)
        if len(wanted) < shape.window:
            tokens, law = self._law(memory, len(wanted))
            with np.errstate(divide="ignore"):
                logits = np.log(np.exp(memory.reader.expected) @ law)[None]
        return tokens, logits

    def _state(self, memory: HeadMemory, given: Tensor, decided: np.ndarray) -> Float[Tensor, "hidden"]:
        """What the heads read: the target's state before the last token, or what adapted layers make of the text."""
        if self.read is None:
            return given[-1, -self.model.shape.hidden :]
        begin, slots = len(decided) - len(given), memory.slots
        past = slots.recall(decided, begin)
        inputs = tapped(given[past - begin :], self.target.taps, self.model.shape.taps)
        state = self.read(inputs, slots, past - slots.start, 1, say=False)[-1]
        slots.read = decided[slots.start :].copy()
        return state

    def _begin(self, asks: Sequence[Forward], memories: Sequence[HeadMemory]) -> None:
        """The heads' say of all texts that begin windows, at once: their weights are read but once."""
        begun = [
            (ask.canvas.decided, ask.hidden, memory)
            for ask, memory in zip(asks, memories, strict=True)
            if ask.hidden is not None
        ]
        if not begun:
            return
        states = torch.stack([self._state(memory, given, decided) for decided, given, memory in begun])
        last = torch.tensor([int(decided[-1]) for decided, *_ in begun], device=self.device)
        every = self.model(states, last)
        shared = None if self.model.shape.own else self.model.shared(every.features)
        for number, (decided, _, memory) in enumerate(begun):
            codes = None if every.codes is None else every.codes[number]
            found = Parameters(every.start[number], every.steps[number], every.features[number], codes)
            memory.start, memory.steps, memory.codes = _array(found.start), _array(found.steps), _array(found.codes)
            memory.shared = None if shared is None else _array(shared[number])
            memory.found, memory.base = found, len(decided)
            memory.reader, memory.read, memory.laws = None, [], {}

    def _law(
        self, memory: HeadMemory, place: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        """A position's likeliest tokens, ascending, and their probabilities in each state.

        The position's own logits choose them, so that states cost little each; the law is over these tokens alone.
        """
        if place not in memory.laws:
            tokens, logits = self._logits(memory, place)
            law = np.exp(logits - logits.max(-1, keepdims=True))
            memory.laws[place] = tokens, law / law.sum(-1, keepdims=True)
        return memory.laws[place]

    def _logits(
        self, memory: HeadMemory, place: int
    ) -> tuple[Int[np.ndarray, "likely"], Float[np.ndarray, "rank likely"]]:
        tokens, reach = self.tokens, self.reach
        if memory.shared is None:
            assert memory.found is not None
            return tokens, _array(self.model.logits(memory.found, place))
        shared = memory.shared[place]
        if memory.codes is None or reach is None:
            return tokens, shared[None]
        if len(shared) > LIKELY:
            chosen = np.sort(np.argpartition(-shared, LIKELY)[:LIKELY])
            tokens, shared, reach = tokens[chosen], shared[chosen], reach[:, chosen]
        return tokens, shared + memory.codes[place] @ reach

    def _read(self, memory: HeadMemory, reader: Reader[np.ndarray], token: int) -> None:
        """Condition on the window's next token; one that the law does not hold tells nothing."""
        tokens, law = self._law(memory, len(memory.read))
        place = int(np.searchsorted(tokens, token))
        known = place < len(tokens) and int(tokens[place]) == token
        with np.errstate(divide="ignore"):
            reader.read(np.log(law[:, place]) if known else np.zeros_like(law[:, 0]))
        memory.read.append(token)


def _array(x: Tensor | None) -> Any:
    """Float32, on the CPU."""
    return None if x is None else float_row(x)
