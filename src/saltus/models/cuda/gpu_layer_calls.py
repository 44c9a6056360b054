"""Run a decoder's layer on the rows of a call, by our kernels on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.gpu_attention import AttentionOfCall
from saltus.models.cuda.gpu_layers import KINDS_OF_ATTENTION, GPULayer, GPUMLPAndExperts
from saltus.models.cuda.gpu_recurrent import StatesOfCall
from saltus.models.cuda.gpu_streams import StreamsOfCall


class HiddenStates:
    """The hidden states of a call's rows [padded rows, hidden], and parts that the next kernel adds to them.

    Copies of the states after some layers, `wanted`, are kept.
    """

    def __init__(self, hidden: Tensor, rows: int, wanted: Sequence[int]) -> None:
        self.hidden, self.rows, self.wanted = hidden, rows, wanted
        self.layers_read = 0
        self.collected: dict[int, Tensor] = {}
        self.parts: Tensor | None = None
        self.output: dict[str, Any] = {}  # what parts go through

    def add(self, parts: Tensor, **output: Any) -> None:
        """Add parts [parts, rows, hidden]; see `add_and_norm`."""
        if self.parts is not None:
            self.normalise(None, torch.empty_like(self.hidden))
        self.parts, self.output = parts, output

    def normalise(self, norm: Any, out: Tensor, other: tuple[Any, Tensor] | None = None) -> None:
        """Let `out` [padded rows, hidden] be the norm of the states, or the states; `other`: see `add_and_norm`."""
        from saltus.models.cuda import row_kernels

        row_kernels.add_and_norm(self.parts, self.hidden, norm, out, self.rows, other=other, **self.output)
        self.parts, self.output = None, {}
        self.keep(self.hidden)

    def keep(self, hidden: Tensor) -> None:
        """Copy these states [padded rows, hidden] if those after the layers so far are wanted."""
        if self.layers_read in self.wanted and self.layers_read not in self.collected:
            self.collected[self.layers_read] = hidden[: self.rows].clone()


@dataclass(frozen=True, eq=False)
class CallOfLayers:
    """What the layers of one call share."""

    inputs: StaticInputs
    page_size: int
    states: HiddenStates
    x: Tensor  # what the parts of a layer read, [padded rows, hidden]
    attention: AttentionOfCall
    angles: Sequence[Any]  # tables
    recurrent: StatesOfCall | None
    places_of_states: Mapping[int, int]  # of recurrent layers, by their numbers
    streams: StreamsOfCall | None
    per_layer_parts: Tensor | None


def run_layer(layer: GPULayer, number: int, call: CallOfLayers, input_of_mixers: Tensor | None) -> None:
    """Add to the hidden states what a layer gives. Its mixers read their norm, unless they are given another input."""
    states, streams, altup = call.states, call.streams, layer.altup
    states.layers_read = number
    if streams is not None and altup is not None:
        states.keep(streams.active)
        streams.predict(altup, states.hidden)
    input_of_mlp = torch.empty_like(call.x) if layer.parallel and layer.post_norm is not None else call.x
    if input_of_mixers is None and layer.mixers:
        other = None if input_of_mlp is call.x else (layer.post_norm, input_of_mlp)
        states.normalise(layer.input_norm, call.x, other)
    _mix(layer, number, call, call.x if input_of_mixers is None else input_of_mixers)
    if layer.mlp is not None:
        _feed_forward(layer, call, input_of_mlp)
    if streams is not None and altup is not None:
        states.normalise(None, call.x)
        streams.correct(altup, states.hidden, call.x)
    if layer.per_layer_input is not None:
        _add_per_layer_input(layer, number, call)
    states.output["state_scale"] = layer.output_scale


def _mix(layer: GPULayer, number: int, call: CallOfLayers, read: Tensor) -> None:
    """Attention and recurrent mixers, and what stands beside them."""
    states = call.states
    beside = None if layer.laurel is None else layer.laurel(call.x, states.rows)
    for mixer, scale in layer.mixers:
        if isinstance(mixer, KINDS_OF_ATTENTION):
            parts = mixer.parts(read, number, [call.angles[each] for each in mixer.angles], call.attention)
        else:
            assert call.recurrent is not None
            parts = mixer.parts(read, call.places_of_states[number], call.recurrent)
        states.add(parts, output_norm=layer.mixer_output_norm, scale=scale * layer.residual_scale)
    if beside is not None:
        states.add(beside, state_scale=0.5**0.5)


def _feed_forward(layer: GPULayer, call: CallOfLayers, read: Tensor) -> None:
    """The MLP or the experts."""
    states = call.states
    if not layer.parallel:
        states.normalise(layer.post_norm, call.x)
    if isinstance(layer.mlp, GPUMLPAndExperts):
        parts = layer.mlp.parts(read, states.hidden, call.inputs, call.page_size)
    else:
        assert layer.mlp is not None
        parts = layer.mlp.parts(read, call.inputs, call.page_size)
    states.add(parts, output_norm=layer.mlp_output_norm, scale=layer.mlp_scale * layer.residual_scale)


def _add_per_layer_input(layer: GPULayer, number: int, call: CallOfLayers) -> None:
    """What each token has for this layer alone (Gemma 3n)."""
    assert call.per_layer_parts is not None
    assert layer.per_layer_input is not None
    states, norm = call.states, layer.per_layer_input.norm
    if call.streams is None:
        states.normalise(None, call.x)
    parts = layer.per_layer_input.parts(call.x, call.per_layer_parts[number], states.rows)
    if call.streams is None:
        states.add(parts, output_norm=norm)
    else:
        call.streams.add_to_others(parts, norm)
