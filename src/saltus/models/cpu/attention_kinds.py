"""The calls of attention of a decoder: a struct for each kind of layer, and where each layer's keys and values are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from saltus.kernels.native import structs
from saltus.models.attention_span import AttentionSpan
from saltus.models.cpu.attention import AttentionCall
from saltus.models.mixer_description import Attention, LatentAttention, Mixer


@dataclass(frozen=True)
class AttentionKind:
    """What calls of a kernel have in common: the first fields, and which memory they use."""

    struct: bytes
    span: AttentionSpan
    own_memory: int | None  # the layer of the memory that this kind alone uses; None: that of most layers
    row_bytes: tuple[int, ...]  # of new queries, keys, values and outputs
    new_rows: tuple[Tensor, Tensor]  # keys and values, [kv_heads, rows, size]


class AttentionKinds:
    """The kinds of attention in a decoder, filled layer by layer."""

    def __init__(self, mixers: Iterable[Mixer], same_everywhere: bool) -> None:
        self.kinds: list[AttentionKind] = []
        self.same_everywhere = same_everywhere
        self.main_sizes = next(filter(None, map(_memory_sizes, mixers)), (0, 0, 0))
        self.num_main_layers = 0  # whose keys and values have these sizes
        # of layers' keys and values: in the main memory, or their own
        self.places: dict[int, tuple[int, int | None]] = {}
        self.kept: dict[int, Tensor] = {}  # new rows of what is kept beside a layer's keys
        self.indexers: dict[int, structs.Indexer] = {}  # that choose the keys of layers

    def add(
        self,
        number: int,
        layer: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        out: Tensor,
        sinks: Tensor | None,
        index_key: Tensor | None = None,
    ) -> tuple[int, int]:
        """The kind of layer `number`, and the place of its keys and values in their memory.

        Queries, keys, values and outputs are buffers [rows, heads, size]; sinks are float32 [heads]. Without values,
        they are the first numbers of keys, and their memory holds the keys of an indexer [rows, 1, size] or nothing.
        """
        kept = v if v is not None else k[..., :0] if index_key is None else index_key
        if layer.shares is not None and v is None:
            kept = self.kept[layer.shares]
        self.kept[number] = kept
        if layer.shares is None:
            own = None if (layer.kv_heads, layer.dim, kept.shape[-1]) == self.main_sizes else number
            self.places[number] = self.num_main_layers if own is None else 0, own
            self.num_main_layers += own is None
        else:
            self.places[number] = self.places[layer.shares]
        place, own = self.places[number]
        given = {"query": q, "key": k} | ({} if v is None else {"value": v})
        struct = structs.Attention(
            **{name: x.data_ptr() for name, x in (given | {"out": out}).items()},
            **{f"{name}_row": x.stride(0) for name, x in given.items()},
            **{f"{name}_head": x.stride(1) for name, x in given.items()},
            heads=layer.heads, kv_heads=layer.kv_heads, dim=layer.dim, value_dim=out.shape[-1],
            value_size=layer.dim if v is None else v.shape[-1], scale=layer.scale,
            softcap=layer.softcap or 0.0, same_everywhere=self.same_everywhere,
            sinks=None if sinks is None else sinks.data_ptr(), values_in_keys=v is None,
        )  # fmt: skip
        if layer.key is None:
            assert layer.shares is not None and layer.shares < number
            struct.key = None
        row_bytes = tuple(x.stride(0) * x.element_size() for x in (q, k, kept, out))
        new_rows = k.transpose(0, 1), kept.transpose(0, 1)
        kind = AttentionKind(bytes(struct), layer.span, own, row_bytes, new_rows)
        known = [(each.struct, each.span, each.own_memory) for each in self.kinds]
        if (same := (kind.struct, kind.span, own)) not in known:
            self.kinds.append(kind)
            known.append(same)
        return known.index(same), place

    def structs_of(self, call: AttentionCall) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """Kernel arguments by kind and text, and the bytes between layers of each text's keys and values."""
        texts, start = len(call.sequences), 0
        if texts > 1:
            attentions, key_steps, value_steps = self.new_structs(texts)
        else:  # all that differs from call to call is written again
            attentions, key_steps, value_steps = self.structs_of_one_text
        if not self.kinds:
            return attentions, key_steps, value_steps
        main_rows = self.main_rows
        for number, sequence in enumerate(call.sequences):
            cache, slots = sequence.kv_cache, sequence.past_length + sequence.num_rows
            cache.reserve(self.num_main_layers, slots, *main_rows)
            assert cache.keys is not None and cache.values is not None
            main = cache.keys, cache.values
            key_steps[number], value_steps[number] = (x.stride(0) * x.element_size() for x in main)
            for index, kind in enumerate(self.kinds):
                struct, (keys, values) = attentions[index * texts + number], main
                if kind.own_memory is not None:
                    keys, values = cache.reserve_odd_layer(kind.own_memory, slots, *kind.new_rows)
                struct.keys, struct.values, struct.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[-2]
                if start:
                    for name, step in zip(("query", "key", "value", "out"), kind.row_bytes, strict=True):
                        if getattr(struct, name) is not None:
                            setattr(struct, name, getattr(struct, name) + start * step)
                sequence.fill_rows(struct, kind.span)
            start += sequence.num_rows
        return attentions, key_steps, value_steps

    @cached_property
    def structs_of_one_text(self) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        return self.new_structs(1)

    @cached_property
    def main_rows(self) -> tuple[Tensor, Tensor]:
        """New keys and values of the layers that share a memory."""
        return next(kind.new_rows for kind in self.kinds if kind.own_memory is None)

    def new_structs(self, texts: int) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """What `structs_of` fills in."""
        attentions = (structs.Attention * (texts * len(self.kinds))).from_buffer_copy(
            b"".join(kind.struct * texts for kind in self.kinds)
        )
        return attentions, (structs.INTEGER * texts)(), (structs.INTEGER * texts)()


def _memory_sizes(mixer: Mixer) -> tuple[int, int, int] | None:
    """The heads of a layer's keys and values, and the sizes of both; None: it has none."""
    if isinstance(mixer, LatentAttention):
        if mixer.shares is not None:
            return None
        return 1, mixer.latent_dim + mixer.rope_dim, 0 if mixer.indexer is None else mixer.indexer.kept
    return (mixer.kv_heads, mixer.dim, mixer.size_of_values) if isinstance(mixer, Attention) else None
