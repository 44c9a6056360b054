"""Make the operations of hyper-connections: what is done to a token's streams before and after each mixer and MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from saltus.kernels.native import hyper, structs
from saltus.models.cpu.operations import Operations
from saltus.models.decoder_description import HyperConnection, HyperStreams


class HyperOps:
    """Adds them to the operations of a decoder. Layers read its hidden states, and write there what they give."""

    def __init__(self, ops: Operations, description: HyperStreams) -> None:
        self.ops, self.description, self.size = ops, description, ops.hidden.shape[1]
        self.streams = ops.buffer("streams", description.count * self.size)
        self.gates = ops.hidden  # of the last connection, in float32
        if not 1 <= description.count <= hyper.MAX_STREAMS:
            raise ValueError(
                f"a decoder's hc_mult is {description.count}, but must be from 1 to {hyper.MAX_STREAMS}; fetch it again"
            )

    def begin(self) -> None:
        """Make each stream of the input embeddings, which are in the hidden states."""
        runs = self.ops.weights.keep(torch.tensor([[0, self.size]] * self.description.count))
        self.ops.op(structs.REARRANGE, structs.Rearrangement(
            x=self.ops.hidden.data_ptr(), out=self.streams.data_ptr(), runs=runs.data_ptr(), inputs=self.size,
            size=self.streams.shape[1], num_runs=len(runs),
        ))  # fmt: skip

    def collapse(self, connection: HyperConnection | None) -> hyper.HyperConnection:
        """Make what a mixer or an MLP reads, or the last norm; for `spread`."""
        count = self.description.count
        struct = hyper.HyperConnection(
            streams=self.streams.data_ptr(), x=self.ops.hidden.data_ptr(), size=self.size, count=count,
        )  # fmt: skip
        if connection is not None:
            weights = self.ops.weights
            mix, base, scale = (weights.tensor(path) for path in (connection.mix, connection.base, connection.scale))
            kinds, outs = len(scale), len(base)
            if outs != (count, 2 * count, (2 + count) * count)[kinds - 1]:
                raise ValueError(f"a decoder's {connection.base} has {outs} numbers; fetch it again")
            self.gates = self.ops.buffer("gates of streams", outs * 4 // self.streams.element_size())
            struct.gates = self.gates.data_ptr()
            struct.mix = weights.floats(weights.dense(mix).flatten(), outs * count * self.size).data_ptr()
            struct.base, struct.scale = (weights.floats(each, len(each)).data_ptr() for each in (base, scale))
            struct.outs, struct.rounds, struct.epsilon = outs, connection.rounds, connection.epsilon
            struct.least, struct.written_least = connection.least, connection.written_least
            struct.magnitude = connection.magnitude
        self.ops.op(hyper.COLLAPSE_STREAMS, struct)
        return struct

    def spread(self, struct: hyper.HyperConnection) -> None:
        """Add what a mixer or an MLP gave to the streams."""
        assert struct.outs > struct.count
        self.ops.op(hyper.SPREAD_STREAMS, struct)

    @property
    def kept(self) -> list[Tensor]:
        """What `spread` and later operations read of a row."""
        return [self.streams, self.gates]
