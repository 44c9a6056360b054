"""What parts of a decoder add their operations to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from saltus.models.cpu.hybrid_kv_cache import StateSizes
from saltus.models.decoder_description import PositionEmbedding
from saltus.models.mixer_description import Angles, Norm, PositionLogarithms, Weight


@runtime_checkable
class Operations(Protocol):
    """What is needed of DecoderOps."""

    hidden: Tensor
    weights: Any
    states: StateSizes
    angles: list[Angles | PositionEmbedding | PositionLogarithms]  # of rotations, and what else positions give

    def buffer(self, name: str, width: int) -> Tensor: ...

    def op(self, kind: int, struct: Any = None, which: int = 0, place: int = 0) -> None: ...

    def product(
        self, x: Tensor, outputs: Sequence[tuple[Weight, Tensor]], norm: Norm | None = None, **settings: Any
    ) -> None: ...

    def normalize(self, x: Tensor, norm: Norm, out: Tensor, add: Tensor | None = None) -> None: ...

    def add(self, x: Tensor, add: Tensor | None, scale: float, out: Tensor | None = None) -> None: ...

    def copy(self, x: Tensor, out: Tensor, first: int = 0) -> None: ...

    def skipped_unless_choosing(self, indexer: Any) -> AbstractContextManager[None]: ...
