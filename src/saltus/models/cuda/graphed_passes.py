"""Run the passes of drafters over pages of keys and values in one pool; passes of a shape are one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from saltus.models.cuda.cuda_graphs import GraphCapture
from saltus.models.cuda.fixed_shape_attention import StaticInputs
from saltus.models.cuda.fixed_shape_calls import (
    Call,
    FixedShape,
    FixedShapeSettings,
    TextRows,
    size_class,
)
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.kv_pages import FixedShapeKVCache, KVPagePool

SETTINGS = FixedShapeSettings()
READING = replace(SETTINGS, varied_rows=True, rows_per_call=SETTINGS.prefill_chunk)  # of calls that read texts


class PassInputs:
    """The inputs of passes of one shape, at addresses that never change."""

    def __init__(self, shape: FixedShape, device: torch.device) -> None:
        self.static = StaticInputs(shape, SETTINGS.max_tree_depth, device)

    def clear(self) -> None:
        """Make all rows padding, which writes to no text's pages."""
        self.static.clear()


Inputs = TypeVar("Inputs", bound=PassInputs)
Outputs = TypeVar("Outputs")


@dataclass
class GraphedPasses:
    """The passes of one drafter, which run the layers of `decoder`, over pages of its own or the target's."""

    decoder: GPUDecoder
    use_cuda_graphs: bool = True
    shared_pool: KVPagePool | None = None
    pool: KVPagePool = field(init=False)
    inputs: dict[Hashable, Any] = field(default_factory=dict)
    drafter: object = field(default_factory=object, init=False)  # in the keys of its graphs: a pool may have several

    def __post_init__(self) -> None:
        self.pool = self.shared_pool or KVPagePool(len(self.decoder.layers), SETTINGS.page_size)
        self.capture = GraphCapture(self.decoder.base.norm.weight.device)

    def new_kv_cache(self) -> FixedShapeKVCache:
        return FixedShapeKVCache(self.pool)

    def prepared(
        self, key: Hashable, num_positions: int, make: Callable[[], Inputs], evaluate: Callable[[Inputs], Outputs]
    ) -> tuple[Inputs, Callable[[], Outputs]]:
        """The inputs of passes of this key, to be filled, and what then runs them, any number of times.

        Positions are below `num_positions`, and caches have the pages of all rows. Outputs of a run are overwritten by
        the next one.
        """
        if key not in self.inputs:
            self.inputs[key] = make()
        inputs = self.inputs[key]
        if self.decoder.reserve_positions(num_positions):
            self.pool.graphs.clear()
        of_drafter = self.drafter, key
        if self.use_cuda_graphs and of_drafter not in self.pool.graphs:
            inputs.clear()  # what was written last may belong to pages of other texts by now
            captured = self.capture.capture_or_warn(lambda: evaluate(inputs), self.pool.graphs)
            self.use_cuda_graphs = captured is not None
            self.pool.graphs |= {} if captured is None else {of_drafter: captured}
        if not self.use_cuda_graphs:
            return inputs, lambda: evaluate(inputs)
        graph, outputs = self.pool.graphs[of_drafter]

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return inputs, replay


def whole_call(parts: Sequence[TextRows]) -> tuple[Call, int]:
    """One call of all these rows, whose groups begin with a text each, and the number of positions that it reads."""
    groups = size_class(sum(-(-part.num_rows // SETTINGS.rows_per_group) for part in parts))
    positions = 1 + max(int(part.entries[-1]) for part in parts)
    shape = FixedShape(groups, SETTINGS.rows_per_group, SETTINGS.num_pages(positions), 0)
    return Call(shape, tuple(parts)), positions


def write_rows(
    call: Call, rows: Sequence[Float[Tensor, "_rows size"]], starts: Sequence[int], out: Float[Tensor, "_padded size"]
) -> None:
    """Copy to `out` the rows of a call, of texts whose `rows` begin at the positions `starts`."""
    for start, part in call.placed():
        first = int(part.positions[0]) - starts[part.text]
        out[start : start + part.num_rows] = rows[part.text][first : first + part.num_rows]
