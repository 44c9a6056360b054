"""Make the operations on the streams of a token's hidden states (AltUp), of which layers compute one."""

from __future__ import annotations

from torch import Tensor

from saltus.kernels.native import altup, structs
from saltus.models.cpu.operations import Operations
from saltus.models.decoder_description import AltUp, Streams
from saltus.models.mixer_description import Norm, Weight

LEAST_SQUARE = 1e-5  # mean square of a projection by which it is scaled, at least


class StreamOps:
    """Adds what surrounds layers to the operations of a decoder. The active stream is the decoder's hidden states."""

    def __init__(self, ops: Operations, streams: Streams) -> None:
        self.ops, self.description, self.size = ops, streams, ops.hidden.shape[1]
        self.every = [ops.buffer(f"stream {number}", self.size) for number in range(1 + len(streams.projections))]
        self.every[streams.active] = ops.hidden
        assert len(streams.projections) == len(streams.last_projections) < altup.MAX_STREAMS

    def begin(self) -> None:
        """Make the streams of input embeddings, which are in the hidden states."""
        first, *others = self.every
        if first is not self.ops.hidden:
            self.ops.copy(self.ops.hidden, first)
        for weight, stream in zip(self.description.projections, others, strict=True):
            self._project(first, weight, stream)

    def end(self) -> None:
        """Make the last hidden states of all streams."""
        average = altup.Average(out=self.ops.hidden.data_ptr(), size=self.size, count=len(self.every))
        average.x[0] = self.every[0].data_ptr()
        for number, weight in enumerate(self.description.last_projections, 1):
            last = self.ops.buffer(f"last {number}", self.size)
            self._project(self.every[number], weight, last)
            average.x[number] = last.data_ptr()
        self.ops.op(altup.AVERAGE, average)

    def _project(self, x: Tensor, weight: Weight, out: Tensor) -> None:
        """A projection of x, as large as the first stream."""
        self.ops.product(x, [(weight, out)])
        pointers = {"x": out.data_ptr(), "like": self.every[0].data_ptr()}
        self.ops.op(altup.MATCH_MAGNITUDE, altup.Magnitude(**pointers, size=self.size, least=LEAST_SQUARE))

    def predict(self, layer: AltUp) -> altup.AltUp:
        """Predict all streams before a layer; for `correct`."""
        count, weights = len(self.every), self.ops.weights
        norm = weights.norm(Norm(f"{layer.path}.router_norm", layer.epsilon, "rms-float32"), self.size)
        router, predict, correct = (
            weights.dense(weights.module(f"{layer.path}.{name}").weight).float()
            for name in ("modality_router", "prediction_coefs", "correction_coefs")
        )
        struct = altup.AltUp(
            predicted=self.ops.buffer("predicted", self.size).data_ptr(), norm=norm.values.data_ptr(),
            router=weights.floats((router / self.size).flatten(), count * self.size).data_ptr(),
            predict=weights.floats(predict.flatten(), count**3).data_ptr(),
            correct=weights.floats(correct.flatten(), count**2).data_ptr(),
            size=self.size, count=count, active=self.description.active, epsilon=layer.epsilon,
        )  # fmt: skip
        for number, stream in enumerate(self.every):
            struct.streams[number] = stream.data_ptr()
        self.ops.op(altup.PREDICT_STREAMS, struct)
        return struct

    def correct(self, struct: altup.AltUp) -> None:
        """Correct the predictions by what the layer made of the active one."""
        self.ops.op(altup.CORRECT_STREAMS, struct)

    def output(self, layer: AltUp) -> Tensor:
        """What a per-layer input reads: the corrected active stream, perhaps scaled."""
        if not layer.scales_output:
            return self.ops.hidden
        out = self.ops.buffer("scaled", self.size)
        self.ops.copy(self.ops.hidden, out)
        scale = self.ops.weights.floats(self.ops.weights.tensor(f"{layer.path}.correct_output_scale"), self.size)
        self.ops.op(
            structs.SCALE_COLUMNS, structs.ColumnScale(x=out.data_ptr(), scale=scale.data_ptr(), size=self.size)
        )
        return out
