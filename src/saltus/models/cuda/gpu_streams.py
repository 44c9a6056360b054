"""The streams of a token's hidden states on a GPU (AltUp), of which layers compute one, and a low-rank branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cuda.layer_weights import norm_of, one_weight
from saltus.models.decoder_description import AltUp, Laurel, Streams
from saltus.models.mixer_description import Norm, Weight

Product = tuple[Sequence[Tensor], Any]  # weights, and how to cut their product


@dataclass(frozen=True)
class GPULaurel:
    """n + norm(up(down n)) of what a mixer reads."""

    down: Product
    up: Product
    norm: Any

    @classmethod
    def described(cls, laurel: Laurel, weights: Resolver) -> GPULaurel:
        down = one_weight(weights.module(laurel.down.path), parts=False)
        return cls(down, one_weight(weights.module(laurel.up.path)), norm_of(laurel.norm, weights))

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        """[1, rows, hidden], float32, of x [padded rows, hidden]."""
        from saltus.models.cuda import linear_kernels, row_kernels

        low, own = x.new_empty(len(x), len(self.down[0][0])), x.clone()
        linear_kernels.linear(x, self.down[0], low, self.down[1], rows)
        parts = linear_kernels.linear_parts(low, *self.up, rows)
        row_kernels.add_and_norm(parts, own, None, own, rows, self.norm)
        return own[None, :rows].float()


@dataclass(frozen=True)
class GPUAltUp:
    """What `AltUp` describes; all weights are in float32."""

    norm: Tensor
    router: Tensor  # [count, hidden], over the hidden size
    predictions: Tensor  # [count, count, count]
    corrections: Tensor  # [count, count]
    output_scale: Tensor | None
    epsilon: float

    @classmethod
    def described(cls, altup: AltUp, weights: Resolver) -> GPUAltUp:
        router, predict, correct = (
            weights.module(f"{altup.path}.{name}").weight.detach().float()
            for name in ("modality_router", "prediction_coefs", "correction_coefs")
        )
        norm = norm_of(Norm(f"{altup.path}.router_norm", altup.epsilon, "rms-float32"), weights)
        scale = weights.tensor(f"{altup.path}.correct_output_scale") if altup.scales_output else None
        router = router / router.shape[1]
        return cls(norm.weight, router.contiguous(), predict.contiguous(), correct.contiguous(), scale, altup.epsilon)


@dataclass(frozen=True)
class GPUStreams:
    """What `Streams` describes."""

    active: int
    projections: Sequence[Product]
    last_projections: Sequence[Product]

    @classmethod
    def described(cls, streams: Streams, weights: Resolver) -> GPUStreams:
        def products(paths: Sequence[Weight]) -> list[Product]:
            return [one_weight(weights.module(each.path), parts=False) for each in paths]

        return cls(streams.active, products(streams.projections), products(streams.last_projections))

    def of_call(self, hidden: Tensor, rows: int) -> StreamsOfCall:
        """Those of input embeddings [padded rows, hidden]."""
        every = hidden.new_empty(1 + len(self.projections), *hidden.shape)
        every[0] = hidden
        for product, stream in zip(self.projections, every[1:], strict=True):
            _project(hidden, product, stream, hidden, rows)
        return StreamsOfCall(self, every, torch.empty_like(every), rows)


@dataclass(frozen=True)
class StreamsOfCall:
    """The streams [count, padded rows, hidden] of a call's rows, and what is predicted of them."""

    streams: GPUStreams
    every: Tensor
    predicted: Tensor
    rows: int

    @property
    def active(self) -> Tensor:
        return self.every[self.streams.active]

    def predict(self, altup: GPUAltUp, hidden: Tensor) -> None:
        """Let `hidden` [padded rows, hidden] be the prediction of the active stream."""
        from saltus.models.cuda import stream_kernels

        weights = altup.norm, altup.router, altup.predictions
        active = self.streams.active
        stream_kernels.predict(self.every, self.predicted, hidden, weights, altup.epsilon, active, self.rows)

    def correct(self, altup: GPUAltUp, hidden: Tensor, out: Tensor) -> None:
        """Correct predictions by what a layer made; `out` [padded rows, hidden]: what a per-layer input reads."""
        from saltus.models.cuda import stream_kernels

        weights = altup.norm, altup.router, altup.corrections
        stream_kernels.correct(
            self.predicted, self.every, hidden, weights, altup.output_scale, out, altup.epsilon, self.streams.active,
            self.rows,
        )  # fmt: skip

    def add_to_others(self, parts: Tensor, norm: Any) -> None:
        """Add the norm of parts [parts, rows, hidden] to all streams but the first."""
        from saltus.models.cuda import row_kernels

        for stream in self.every[1:]:
            row_kernels.add_and_norm(parts, stream, None, stream, self.rows, norm)

    def end(self, hidden: Tensor) -> None:
        """Write the last hidden states of all streams to `hidden` [padded rows, hidden]."""
        from saltus.models.cuda import stream_kernels

        self.predicted[0] = self.every[0]
        for number, product in enumerate(self.streams.last_projections, 1):
            _project(self.every[number], product, self.predicted[number], self.every[0], self.rows)
        stream_kernels.average(self.predicted, hidden, self.rows)


def _project(x: Tensor, product: Product, out: Tensor, like: Tensor, rows: int) -> None:
    """A projection of x, as large as the rows of `like`."""
    from saltus.models.cuda import linear_kernels, stream_kernels

    linear_kernels.linear(x, product[0], out, product[1], rows)
    stream_kernels.match_magnitude(out, like, rows)
