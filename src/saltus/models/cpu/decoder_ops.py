"""Make the operations of a described decoder: the kernels' arguments, with buffers and weights that fit each other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.kernels.native import altup, structs
from saltus.models.cpu.altup_ops import StreamOps
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.attention_kinds import AttentionKinds
from saltus.models.cpu.attention_ops import AttentionOps
from saltus.models.cpu.decoder_weights import Resolver, linear_struct
from saltus.models.cpu.expert_ops import experts_struct
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, RecurrentCall, StateSizes
from saltus.models.cpu.hyper_ops import HyperOps
from saltus.models.cpu.mixer_ops import MixerOps
from saltus.models.cpu.per_layer_ops import PerLayerOps
from saltus.models.decoder_description import (
    MLP,
    DecoderDescription,
    Experts,
    Laurel,
    Layer,
    MLPAndExperts,
    PositionEmbedding,
    mixers_of,
)
from saltus.models.mixer_description import Angles, Attention, LatentAttention, Mixer, Norm, PositionLogarithms, Weight


class DecoderOps:
    """The operations of a decoder's layers over buffers of as many rows as `hidden` has."""

    def __init__(
        self, description: DecoderDescription, weights: Resolver, hidden: Tensor, same_everywhere: bool
    ) -> None:
        self.weights, self.hidden = weights, hidden
        self.buffers: dict[tuple[str, int], Tensor] = {}
        self.products: list[tuple[structs.Linear, Sequence[Weight]]] = []  # and the layers whose outputs they are
        self.angles: list[Angles | PositionEmbedding | PositionLogarithms] = []
        mixers = [mixer for layer in description.layers for mixer, _ in mixers_of(layer)]
        self.attention = AttentionKinds(mixers, same_everywhere)
        self.states = StateSizes(0, 0, tuple(filter(None, map(_kept_sizes, mixers))))
        self.structs: list[Any] = []  # that operations point to
        self.list: list[tuple[int, Any, int, int]] = []
        if description.input_scale != 1:
            self.add(hidden, None, description.input_scale)
        if description.input_norm is not None:
            self.normalize(hidden, description.input_norm, hidden)
        if description.position_embedding is not None:
            x = hidden.data_ptr()
            self.op(structs.ADD_POSITIONS, structs.Addition(x=x, out=x, size=hidden.shape[1]), len(self.angles))
            self.angles.append(description.position_embedding)
        self.per_layer = None
        if (inputs := description.per_layer_embeddings) is not None:
            tokens = len(weights.module(description.embedding).weight)
            self.per_layer = PerLayerOps(self, inputs, len(description.layers), tokens)
        self.streams = None if description.streams is None else StreamOps(self, description.streams)
        if self.streams is not None:
            self.streams.begin()
        self.hyper = None if description.hyper_streams is None else HyperOps(self, description.hyper_streams)
        if self.hyper is not None:
            self.hyper.begin()
        self.residual = hidden if self.hyper is None else None  # what outputs of mixers and MLPs are added to
        self.last_mixer = _last_mixer(description)
        shortcut = None
        for number, layer in enumerate(description.layers):
            self._layer(number, layer)
            if shortcut is not None:
                self.add(shortcut, hidden, 1.0)
            shortcut = None if layer.shortcut is None else self.buffer("shortcut", hidden.shape[1])
        assert shortcut is None
        if self.hyper is not None and description.hyper_streams is not None:
            self.hyper.collapse(description.hyper_streams.last)
        self.op(structs.LAYER_BEGINS, which=len(description.layers))  # none does, but the states may be wanted
        if self.streams is not None:
            self.streams.end()
        self.ops = (structs.Op * len(self.list))()
        for op, (kind, struct, which, place) in zip(self.ops, self.list, strict=True):
            op.kind, op.which, op.place = kind, which, place
            op.of = None if struct is None else ctypes.addressof(struct)

    def buffer(self, name: str, width: int) -> Tensor:
        """[rows, width]; the same memory for the same name and width."""
        if (name, width) not in self.buffers:
            self.buffers[name, width] = torch.zeros(len(self.hidden), width, dtype=self.hidden.dtype)
        return self.buffers[name, width]

    def op(self, kind: int, struct: Any = None, which: int = 0, place: int = 0) -> None:
        if struct is not None:
            self.structs.append(struct)
        self.list.append((kind, struct, which, place))

    @contextmanager
    def skipped_unless_choosing(self, indexer: structs.Indexer) -> Iterator[None]:
        """What is added within is done if a row of a call may see more keys than the indexer chooses."""
        begin = len(self.list)
        self.op(structs.SKIP_UNLESS_CHOOSING, indexer)
        yield
        kind, struct, which, _ = self.list[begin]
        self.list[begin] = kind, struct, which, len(self.list) - begin - 1

    def product(
        self, x: Tensor, outputs: Sequence[tuple[Weight, Tensor]], norm: Norm | None = None, **settings: Any
    ) -> None:
        given = None if norm is None else self.weights.norm(norm, x.shape[1])
        matrices = [(self.weights.matrix(weight), out) for weight, out in outputs]
        struct = linear_struct(x, matrices, given, **settings)
        self.products.append((struct, [weight for weight, _ in outputs]))
        self.op(structs.PRODUCT, struct)

    def normalize(self, x: Tensor, norm: Norm, out: Tensor, add: Tensor | None = None) -> None:
        given = self.weights.norm(norm, x.shape[1])
        assert x.shape == out.shape and (add is None or add.shape == x.shape)
        added = None if add is None else add.data_ptr()
        self.op(structs.NORMALIZE, structs.Norm(
            x=x.data_ptr(), out=out.data_ptr(), size=x.shape[1], add=added, **given.arguments("weight", "kind"),
        ))  # fmt: skip

    def add(self, x: Tensor, add: Tensor | None, scale: float, out: Tensor | None = None) -> None:
        """out = add + scale · x; the hidden states without another output."""
        out = self.hidden if out is None else out
        assert x.shape == out.shape
        added = None if add is None else add.data_ptr()
        struct = structs.Addition(x=x.data_ptr(), add=added, out=out.data_ptr(), size=x.shape[1], scale=scale)
        self.op(structs.ADD, struct)

    def copy(self, x: Tensor, out: Tensor, first: int = 0) -> None:
        """Columns of x from the first one on."""
        assert 0 <= first <= x.shape[1] - out.shape[1]
        self.op(structs.COPY_COLUMNS, structs.Columns(
            x=x.data_ptr(), out=out.data_ptr(), width=x.shape[1], first=first, size=out.shape[1],
        ))  # fmt: skip

    def _layer(self, number: int, layer: Layer) -> None:
        if self.hyper is not None:
            self._with_hyper_connections(number, layer, self.hyper)
            return
        self.op(structs.LAYER_BEGINS, which=number)
        x, outputs, streams = self.hidden, [self.hidden], self.streams
        if streams is None or layer.altup is None:
            self._mixer_and_mlp(number, layer)
        else:
            prediction = streams.predict(layer.altup)
            self._mixer_and_mlp(number, layer)
            streams.correct(prediction)
            x, outputs = streams.output(layer.altup), streams.every[1:]
        if self.per_layer is not None and layer.per_layer_input is not None:
            self.per_layer.add(number, layer.per_layer_input, x, outputs)
        if layer.output_scale is not None:
            self.add(self.hidden, None, float(self.weights.tensor(layer.output_scale)))

    def _with_hyper_connections(self, number: int, layer: Layer, hyper: HyperOps) -> None:
        """A layer whose mixer and MLP read a mean of several streams each, and are added to all."""
        assert (
            not layer.parallel and layer.laurel is layer.shortcut is layer.per_layer_input is layer.output_scale is None
        )
        assert layer.mixer_streams is not None and layer.mlp_streams is not None and len(mixers_of(layer)) == 1
        connection = hyper.collapse(layer.mixer_streams)
        self.op(structs.LAYER_BEGINS, which=number)
        ((mixer, scale),) = mixers_of(layer)
        x = self._mixer(number, mixer, layer.mixer_norm)
        if number == self.last_mixer:
            self._keep_selected([x, *hyper.kept])
        self._to_hidden(x, mixer.output, layer.mixer_output_norm, scale * layer.residual_scale)
        hyper.spread(connection)
        connection = hyper.collapse(layer.mlp_streams)
        self._mlp(layer, None)
        hyper.spread(connection)

    def _mixer_and_mlp(self, number: int, layer: Layer) -> None:
        beside = None if layer.laurel is None else self._laurel(layer.laurel, layer.mixer_norm)
        mixed = [
            (self._mixer(number, mixer, layer.mixer_norm), mixer.output, layer.mixer_output_norm, scale)
            for mixer, scale in mixers_of(layer)
        ]
        if number == self.last_mixer:
            self._keep_selected([self.hidden, *(x for x, *_ in mixed)])
        if not layer.parallel:
            self._add_mixed(mixed, layer.residual_scale)
        if beside is not None:
            self.add(beside, self.hidden, 1.0)
            self.add(self.hidden, None, 0.5**0.5)
        assert isinstance(layer.mlp, MLP | Experts) or not layer.parallel
        if layer.shortcut is not None:
            assert not layer.parallel
            self._mix(layer.shortcut, layer.mlp_norm, self.buffer("shortcut", self.hidden.shape[1]))
        self._mlp(layer, mixed if layer.parallel else None)

    def _mlp(self, layer: Layer, mixed: Sequence[tuple[Tensor, Weight, Norm | None, float]] | None) -> None:
        """Add what the MLP or the experts give to the hidden states; first the outputs of mixers, if they are given."""
        if isinstance(layer.mlp, Experts):
            self._experts(layer.mlp, layer, mixed)
        elif isinstance(layer.mlp, MLPAndExperts):
            self._mlp_and_experts(layer.mlp, layer.mlp_norm, layer.mlp_output_norm, layer.residual_scale)
        elif layer.mlp is not None:
            x, settings = self._inner(layer.mlp, layer.mlp_norm)
            if mixed is not None:
                self._add_mixed(mixed, layer.residual_scale)
            scale = layer.residual_scale * layer.mlp.output_scale
            self._to_hidden(x, layer.mlp.down, layer.mlp_output_norm, scale, **settings)

    def _keep_selected(self, needed: Sequence[Tensor]) -> None:
        """Leave out rows without logits from here on; of the buffers before, only these are needed."""
        kept = structs.KeptRows(count=len(needed))
        for number, x in enumerate(needed):
            kept.x[number], kept.step[number], kept.size[number] = x.data_ptr(), x.stride(0), x.shape[1]
        self.op(structs.KEEP_SELECTED, kept)

    def _laurel(self, branch: Laurel, norm: Norm | None) -> Tensor:
        """n + norm(up(down n)) of the hidden states' norm n."""
        size = self.hidden.shape[1]
        assert norm is not None
        normed, out = self.buffer("laurel normed", size), self.buffer("laurel", size)
        low = self.buffer("laurel low", len(self.weights.matrix(branch.down).weight))
        self.normalize(self.hidden, norm, normed)
        self.product(normed, [(branch.down, low)])
        self.product(low, [(branch.up, out)])
        self.normalize(out, branch.norm, out, add=normed)
        return out

    def _add_mixed(self, mixed: Sequence[tuple[Tensor, Weight, Norm | None, float]], scale: float) -> None:
        """Add the outputs of mixers to the hidden states."""
        for x, output, norm, own_scale in mixed:
            self._to_hidden(x, output, norm, scale * own_scale)

    def _inner(
        self, mlp: MLP, norm: Norm | None, others: Sequence[tuple[Weight, Tensor]] = ()
    ) -> tuple[Tensor, dict[str, Any]]:
        """What the last product of an MLP multiplies, and how it is prepared; other outputs are computed beside it."""
        width = len(self.weights.matrix(mlp.up).weight)
        up = self.buffer("up", width)
        if mlp.gate is None:
            self.product(self.hidden, [(mlp.up, up), *others], norm)
            if mlp.activation == "xielu":
                self.op(structs.XIELU, self._xielu(mlp, up))
                return up, {}
            alone = structs.SILU_ALONE if mlp.activation == "silu" else structs.ACTIVATION_NUMBERS[mlp.activation]
            return up, {"activation": alone}
        gate = self.buffer("gate", width)
        self.product(self.hidden, [(mlp.gate, gate), (mlp.up, up), *others], norm)
        if mlp.gate_scale != 1:
            self.add(gate, None, mlp.gate_scale, gate)
        if mlp.gate_cutoff is not None:
            self.op(altup.CUT_OFF, altup.Cutoff(x=gate.data_ptr(), size=width, deviations=mlp.gate_cutoff))
        return up, {"gate": gate, "activation": structs.ACTIVATION_NUMBERS[mlp.activation], "limit": mlp.limit}

    def _xielu(self, mlp: MLP, x: Tensor) -> structs.Xielu:
        """The activation of x, in place. Its numbers are rounded as those of the model."""
        assert mlp.xielu is not None
        given = self.weights.module(mlp.xielu)
        above, below = F.softplus(given.alpha_p), given.beta + F.softplus(given.alpha_n)
        return structs.Xielu(
            x=x.data_ptr(), size=x.shape[1], above=above.item(), below=below.item(), slope=given.beta.item(),
            most=given.eps.item(),
        )  # fmt: skip

    def _to_hidden(self, x: Tensor, weight: Weight, norm: Norm | None, scale: float, **settings: Any) -> None:
        """Add the product of x, through its norm and scaled, to the hidden states.

        With hyper-connections it takes their place.
        """
        if norm is None and scale == 1:
            self.product(x, [(weight, self.hidden)], add=self.residual, **settings)
            return
        made = self.buffer("made", self.hidden.shape[1])
        self.product(x, [(weight, made)], **settings)
        self._add_normed(made, norm, scale)

    def _add_normed(self, made: Tensor, norm: Norm | None, scale: float) -> None:
        if norm is None:
            self.add(made, self.residual, scale)
        elif scale == 1:
            self.normalize(made, norm, self.hidden, add=self.residual)
        else:
            self.normalize(made, norm, made)
            self.add(made, self.residual, scale)

    def _experts(self, experts: Experts, layer: Layer, mixed: Sequence[Any] | None) -> None:
        """Add what a mixture of experts gives, through its norm and scaled, to the hidden states.

        The outputs of mixers beside it, if they are given, are added first.
        """
        scale = layer.residual_scale * experts.output_scale
        if layer.mlp_output_norm is None and scale == 1 and mixed is None:
            self._mix(experts, layer.mlp_norm, self.hidden, add=self.residual)
            return
        given = self.buffer("given by experts", self.hidden.shape[1])
        self._mix(experts, layer.mlp_norm, given)
        if mixed is not None:
            self._add_mixed(mixed, layer.residual_scale)
        self._add_normed(given, layer.mlp_output_norm, scale)

    def _mix(self, experts: Experts, norm: Norm | None, out: Tensor, add: Tensor | None = None) -> None:
        """out = a mixture of experts of the hidden states + add"""
        size = self.hidden.shape[1]
        if experts.latent is not None:
            self._mix_latent(experts, norm, out, add)
            return
        given = {} if norm is None else self.weights.norm(norm, size).arguments()
        struct = experts_struct(experts, self.weights, size, given)
        if experts.shared is not None:
            shared, gate = self.buffer("shared", size), self.buffer("shared gate", 1)
            beside = [] if experts.shared_gate is None else [(experts.shared_gate, gate)]
            x, settings = self._inner(experts.shared, norm, beside)
            self.product(x, [(experts.shared.down, shared)], **settings)
            struct.shared = shared.data_ptr()
            struct.shared_gate = gate.data_ptr() if beside else None
        if experts.router_norm is not None:
            routed = self.buffer("routed", size)
            self.normalize(self.hidden, experts.router_norm, routed)
            struct.routed = routed.data_ptr()
        struct.x, struct.out = self.hidden.data_ptr(), out.data_ptr()
        struct.add = None if add is None else add.data_ptr()
        self.op(structs.MIX_EXPERTS, struct)

    def _mix_latent(self, experts: Experts, norm: Norm | None, out: Tensor, add: Tensor | None) -> None:
        """The same where experts read latent vectors: the router and the shared expert read the hidden states."""
        assert experts.latent is not None and norm is not None and experts.shared_gate is experts.router_norm is None
        (down, up), size = experts.latent, self.hidden.shape[1]
        width = len(self.weights.matrix(down).weight)
        normed, made = self.buffer("routed", size), self.buffer("given of latent vectors", size)
        read, given = self.buffer("latent of experts", width), self.buffer("latent given by experts", width)
        self.normalize(self.hidden, norm, normed)
        self.product(normed, [(down, read)])
        struct = experts_struct(experts, self.weights, width, {}, size)
        struct.x, struct.routed, struct.out = read.data_ptr(), normed.data_ptr(), given.data_ptr()
        self.op(structs.MIX_EXPERTS, struct)
        self.product(given, [(up, made)])
        if experts.shared is not None:
            x, settings = self._inner(experts.shared, norm)
            self.product(x, [(experts.shared.down, made)], add=made, **settings)
        self.add(made, add, 1.0, out)

    def _mlp_and_experts(self, both: MLPAndExperts, norm: Norm | None, output_norm: Norm | None, scale: float) -> None:
        """Add the sum of both, through its norm and scaled, to the hidden states."""
        made, mixed = (self.buffer(name, self.hidden.shape[1]) for name in ("made", "mixed"))
        x, settings = self._inner(both.mlp, norm)
        self.product(x, [(both.mlp.down, made)], **settings)
        self.normalize(made, both.mlp_output_norm, made)
        self._mix(both.experts, both.experts_norm, mixed)
        self.normalize(mixed, both.experts_output_norm, made, add=made)
        self._add_normed(made, output_norm, scale)

    def _mixer(self, number: int, mixer: Mixer, norm: Norm | None) -> Tensor:
        """What the output layer of a mixer multiplies."""
        if isinstance(mixer, Attention):
            return AttentionOps(self, self.attention).add(number, mixer, norm)
        if isinstance(mixer, LatentAttention):
            return AttentionOps(self, self.attention).add_latent(number, mixer, norm)
        return MixerOps(self).add(mixer, norm)

    def set_angle_widths(self, widths: Sequence[int]) -> None:
        """How many dimensions of a head each kind of angles rotates."""
        for kind, struct, which, _ in self.list:
            if kind == structs.ROTATE and which >= 0:
                assert widths[which] % 2 == 0 and 0 < widths[which] <= struct.dim
                struct.turned = widths[which]

    def recurrent_calls(self, call: AttentionCall) -> list[RecurrentCall]:
        """What layers that keep a state get of each text; to be ended after the call."""
        if not self.states.state:
            return []
        calls, first = [], 0
        for sequence in call.sequences:
            cache, decided = sequence.kv_cache, sequence.num_rows - len(sequence.parents)
            assert isinstance(cache, HybridKVCache) and cache.sizes == self.states
            calls.append(cache.begin_call(first, sequence.past_length, decided, sequence.parents, sequence.ends_text))
            first += sequence.num_rows
        return calls


def _last_mixer(description: DecoderDescription) -> int | None:
    """The last layer with a mixer, if what follows needs only the hidden states and that layer's outputs of mixers."""
    if description.streams is not None or description.per_layer_embeddings is not None:
        return None
    if any(layer.laurel is not None or layer.shortcut is not None for layer in description.layers):
        return None
    return max((number for number, layer in enumerate(description.layers) if mixers_of(layer)), default=None)


def _kept_sizes(mixer: Mixer) -> tuple[int, int] | None:
    """Heads of keys and values that a layer keeps, and their size; None if it has none.

    Latent vectors are halved, and so is what is kept to choose among them.
    """
    if isinstance(mixer, LatentAttention):
        latent = 0 if mixer.latent is None else mixer.latent_dim + mixer.rope_dim
        return 1, -(-(latent + (0 if mixer.indexer is None else mixer.indexer.kept)) // 2)
    return (mixer.kv_heads, mixer.dim) if isinstance(mixer, Attention) else None
