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
from saltus.models.cpu.attention import FROM_FIRST_SLOT_ADDRESS
from saltus.models.cpu.kv_cache import KVCache

if TYPE_CHECKING:
    from saltus.models.cpu.native_decoder import NativeDecoder

MAX_ROWS = 64  # of a prepared call


class PreparedCall:
    """The arguments of a decoder's calls for the tree of one text."""

    def __init__(self, decoder: NativeDecoder) -> None:
        kernels, layers = native.load_kernels(), decoder.layers
        assert kernels is not None
        self.decoder, self.kernels = decoder, kernels
        self.size, self.item = decoder.hidden.shape[1], decoder.hidden.element_size()
        self.num_layers, self.new_rows = layers.num_main_layers, layers.main_rows
        self.struct = struct = native.Decoder.from_buffer_copy(decoder.constants)
        self.tokens, self.parents, self.positions, self.numbers = (
            (native.INTEGER * MAX_ROWS)(*range(MAX_ROWS)) for _ in range(4)
        )
        self.visible = (ctypes.c_uint8 * MAX_ROWS**2)()
        self.attentions, self.key_steps, self.value_steps = layers.new_attention_structs(1)
        self.structs = list(self.attentions)
        for each in self.structs:
            each.visible, each.first = ctypes.addressof(self.visible), FROM_FIRST_SLOT_ADDRESS
        self.angles = (native.Angles * len(decoder.tables))()
        self.tables: list[object] = [None] * len(decoder.tables)  # as they were in the last call
        self.num_positions = 0  # of these
        self.kept = (native.POINTER * decoder.num_layers)()
        self.norm, self.embedding, self.head_out = struct.norm, struct.embedding, struct.head.out
        self.first_number = ctypes.addressof(self.numbers)
        struct.texts, struct.tokens = 1, ctypes.addressof(self.tokens)
        self.embedding.rows, struct.angles = struct.tokens, ctypes.addressof(self.angles)
        struct.attentions, struct.kept = ctypes.addressof(self.attentions), ctypes.addressof(self.kept)
        struct.key_step, struct.value_step = ctypes.addressof(self.key_steps), ctypes.addressof(self.value_steps)
        self.vocab = struct.head.outs[0]

    @staticmethod
    def supports(decoder: NativeDecoder) -> bool:
        """True if all layers see the whole text, share one memory and keep no states."""
        layers = decoder.layers
        return (
            not layers.states.state
            and bool(layers.kinds)
            and all(kind.span is None and kind.own_memory is None for kind in layers.kinds)
            and all(table.is_static for table in decoder.tables)
        )

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
        decoder, struct, rows, nodes = self.decoder, self.struct, len(tokens), len(parents)
        decided, selected = rows - nodes, nodes + 1
        self.tokens[:rows], self.parents[:nodes] = tokens, parents
        self.kernels.saltus_tree_rows(self.parents, nodes, decided, past_length, self.positions, self.visible)
        self._point_to_angles(past_length + rows)
        self._point_to_keys(kv_cache, past_length, rows)
        decoder.set_gated_rows(None, rows)
        layers = hidden_state_layers if output_hidden_states else ()
        num_states = rows if output_hidden_states else selected
        states = decoder.hidden.new_empty((1 + len(layers)) * num_states, self.size)
        logits = decoder.hidden.new_empty(selected, self.vocab)
        place, part = states.data_ptr(), num_states * self.size * self.item
        for layer in layers:
            self.kept[layer] = place
            place += part
        self.norm.out, self.norm.rows = place, rows
        self.head_out[0], self.embedding.count = logits.data_ptr(), rows
        struct.rows, struct.num_selected, struct.all_states = rows, selected, output_hidden_states
        struct.selected = self.first_number + 8 * (decided - 1)
        struct.seconds = None if decoder.seconds is None else ctypes.addressof(decoder.seconds)
        code = decoder.decode(ctypes.byref(struct))
        for layer in layers:
            self.kept[layer] = None
        if code:
            decoder.raise_failure(code)
        if layers:
            beside = decoder.hidden.new_empty(rows, (1 + len(layers)) * self.size)
            self.kernels.saltus_set_beside(
                states.data_ptr(), 1 + len(layers), rows, self.size * self.item, beside.data_ptr()
            )
            states = beside
        return logits, states

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
