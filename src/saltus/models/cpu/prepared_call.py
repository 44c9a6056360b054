"""Evaluate the tree of one text by a call whose arguments were made once: only what changes is written.

A call takes all weights through the caches. After it each function of torch or NumPy takes tens of microseconds when it
is used for the first time, so that a step should use few of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.models.cpu.attention import FROM_FIRST_SLOT_ADDRESS
from saltus.models.cpu.kv_cache import KVCache

if TYPE_CHECKING:
    from saltus.models.cpu.native_decoder import NativeDecoder

MAX_ROWS = 64  # of a prepared call


class PreparedRows:
    """The arguments of a decoder's calls that say which rows of one text it evaluates, written into a given struct."""

    def __init__(self, decoder: NativeDecoder, struct: structs.Decoder) -> None:
        kernels, layers = native.load_kernels(), decoder.layers
        assert kernels is not None
        self.decoder, self.kernels, self.struct = decoder, kernels, struct
        self.num_layers, self.new_rows = layers.attention.num_main_layers, layers.attention.main_rows
        self.parents, self.positions = ((structs.INTEGER * MAX_ROWS)() for _ in range(2))
        self.numbers = (structs.INTEGER * MAX_ROWS)(*range(MAX_ROWS))
        self.visible = (ctypes.c_uint8 * MAX_ROWS**2)()
        self.attentions, self.key_steps, self.value_steps = layers.attention.new_structs(1)
        self.structs = list(self.attentions)
        for each in self.structs:
            each.visible, each.first = ctypes.addressof(self.visible), FROM_FIRST_SLOT_ADDRESS
        self.angles = (structs.Angles * len(decoder.tables))()
        self.tables: list[object] = [None] * len(decoder.tables)  # as they were in the last call
        self.num_positions = 0  # of these
        self.kept = (structs.POINTER * (1 + decoder.num_layers))()
        self.norm, self.head_out = struct.norm, struct.head.out
        self.first_number = ctypes.addressof(self.numbers)
        struct.texts, struct.narrows, struct.angles = 1, True, ctypes.addressof(self.angles)
        struct.attentions, struct.kept = ctypes.addressof(self.attentions), ctypes.addressof(self.kept)
        struct.key_step, struct.value_step = ctypes.addressof(self.key_steps), ctypes.addressof(self.value_steps)

    @staticmethod
    def supports(decoder: NativeDecoder) -> bool:
        """True if all layers see the whole text, share one memory and keep no states."""
        layers = decoder.layers
        return (
            not layers.states.state
            and bool(layers.attention.kinds)
            and all(kind.span is None and kind.own_memory is None for kind in layers.attention.kinds)
            and all(table.is_static for table in decoder.tables)
        )

    def __call__(
        self, kv_cache: KVCache, past_length: int, rows: int, parents: Sequence[int], num_selected: int
    ) -> None:
        """Set the rows: decided tokens after the `past_length` in the cache, then nodes with these parents.

        The last decided token has logits, and so have `num_selected` − 1 rows after it or, without nodes, before it.
        """
        nodes = len(parents)
        decided = rows - nodes
        self.parents[:nodes] = parents
        self.kernels.saltus_tree_rows(self.parents, nodes, decided, past_length, self.positions, self.visible)
        self.point(kv_cache, past_length, rows, past_length + rows, num_selected)

    def point(self, kv_cache: KVCache, past_length: int, rows: int, num_positions: int, num_selected: int) -> None:
        """Let the struct have as many rows as `positions` and `visible` describe now; the last ones have logits.

        All positions are less than `num_positions`.
        """
        struct = self.struct
        self._point_to_angles(num_positions)
        self._point_to_keys(kv_cache, past_length, rows)
        self.decoder.set_gated_rows(None, rows)
        self.norm.rows, struct.rows, struct.num_selected = rows, rows, num_selected
        struct.selected = self.first_number + 8 * (rows - num_selected)
        struct.seconds = None if self.decoder.seconds is None else ctypes.addressof(self.decoder.seconds)

    def _point_to_angles(self, num_positions: int) -> None:
        known = self.tables
        for number, table in enumerate(self.decoder.tables):
            if num_positions > self.num_positions or table.table is not known[number]:
                table.reserve(num_positions)
                known[number] = table.table
                self.angles[number] = *(x.data_ptr() for x in table.table), ctypes.addressof(self.positions)
        self.num_positions = max(self.num_positions, num_positions)

    def _point_to_keys(self, kv_cache: KVCache, past_length: int, rows: int) -> None:
        keys, values, capacity, key_step, value_step = kv_cache.memory(
            self.num_layers, past_length + rows, self.new_rows
        )
        self.key_steps[0], self.value_steps[0] = key_step, value_step
        for each in self.structs:
            each.keys, each.values, each.capacity, each.rows, each.past = keys, values, capacity, rows, past_length


class PreparedCall:
    """The arguments of a decoder's calls for the tree of one text."""

    def __init__(self, decoder: NativeDecoder) -> None:
        self.decoder = decoder
        self.size, self.item = decoder.hidden.shape[1], decoder.hidden.element_size()
        self.struct = struct = structs.Decoder.from_buffer_copy(decoder.constants)
        self.set_rows = PreparedRows(decoder, struct)
        self.tokens = (structs.INTEGER * MAX_ROWS)()
        self.embedding = struct.embedding
        struct.tokens = self.embedding.rows = ctypes.addressof(self.tokens)
        self.vocab = struct.head.outs[0]

    def __call__(
        self,
        kv_cache: KVCache,
        past_length: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        output_hidden_states: bool,
        hidden_state_layers: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """The logits of the last decided token and of all nodes, and hidden states, as those of `NativeDecoder`.

        `tokens` are the decided ones after the `past_length` in the cache, then those of nodes, whose `parents` are
        numbers of nodes.
        """
        rows, selected = len(tokens), len(parents) + 1
        self.tokens[:rows] = tokens
        self.set_rows(kv_cache, past_length, rows, parents, selected)
        return self.evaluate(rows, selected, output_hidden_states, hidden_state_layers if output_hidden_states else ())

    def evaluate(
        self, rows: int, selected: int, output_hidden_states: bool, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The logits of the last `selected` rows that are set, and their last hidden states.

        With `output_hidden_states` those of all rows, after each of `layers` and after the last one.
        """
        decoder, made, self.embedding.count = self.decoder, self.set_rows, rows
        num_states = rows if output_hidden_states else selected
        states = decoder.hidden.new_empty((1 + len(layers)) * num_states, self.size)
        logits = decoder.hidden.new_empty(selected, self.vocab)
        place, part = states.data_ptr(), num_states * self.size * self.item
        for layer in layers:
            made.kept[layer] = place
            place += part
        made.norm.out, made.head_out[0], self.struct.all_states = place, logits.data_ptr(), output_hidden_states
        code = decoder.decode(ctypes.byref(self.struct))
        for layer in layers:
            made.kept[layer] = None
        if code:
            decoder.raise_failure(code)
        if layers:
            beside = decoder.hidden.new_empty(rows, (1 + len(layers)) * self.size)
            made.kernels.saltus_set_beside(
                states.data_ptr(), 1 + len(layers), rows, self.size * self.item, beside.data_ptr()
            )
            states = beside
        return logits, states
