"""Run decoders by compiled kernels on the model's own weights, without the overhead of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.kernels.model_weights import uses_integers
from saltus.kernels.native import structs
from saltus.kernels.packed_weight import PackedWeight, kernel_arguments, select_rows
from saltus.models.architectures import describe_decoder, find_architecture
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.decoder_ops import DecoderOps
from saltus.models.cpu.decoder_weights import Resolver, linear_struct
from saltus.models.cpu.hybrid_kv_cache import HybridKVCache, RecurrentCall
from saltus.models.cpu.kv_cache import KVCache
from saltus.models.cpu.prepared_call import PreparedCall, PreparedRows
from saltus.models.decoder_description import PositionEmbedding, weights_perhaps_in_float32
from saltus.models.decoder_of import decoder_of
from saltus.models.gated_lora import Adapter, Gate
from saltus.models.mixer_description import Angles, PositionLogarithms
from saltus.models.packed_decoder import PackedDecoder, check_widths
from saltus.models.packed_experts import has_forward_of_ours
from saltus.models.rotary_angles import angles_of_positions
from saltus.models.temperature_tuning import is_own_hook

# angles depend on the position alone
STATIC_ROPE_TYPES = {"default", "linear", "llama3", "ntk_alpha", "proportional", "yarn"}
INITIAL_ROPE_POSITIONS = 1024  # of a table of angles, at first
MANY_SLOTS = 2**31  # more than a text has tokens
MODULES_OF_LAYERS = "torch.nn.", "transformers.", "saltus.models.text_parts"  # whose layers files describe


def supports_native_decoder(model: Any) -> bool:
    """True for an unmodified decoder that a file of `architectures` describes, where there are compiled kernels."""
    description = describe_decoder(model)
    if description is None or not (isinstance(model, PackedDecoder) or is_unmodified_decoder(model)):
        return False
    in_float32 = weights_perhaps_in_float32(description)
    return native.kernel("linear", model.dtype, model.device) is not None and all(
        _is_dense(weight)
        and weight.device.type == "cpu"
        and (weight.dtype == model.dtype or (weight.dtype == torch.float32 and name.endswith(in_float32)))
        for name, weight in model.named_parameters()
    )


def _is_dense(weight: Any) -> bool:
    """True without gaps; matrices of experts may lie transposed."""
    return weight.is_contiguous() or (weight.ndim == 3 and weight.transpose(1, 2).is_contiguous())


def is_unmodified_decoder(model: Any) -> bool:
    """True for a decoder of a described class without hooks, replaced layers or own `forward`, which are skipped."""

    def is_unmodified(module: Any) -> bool:
        hooks = [hook for hook in module._forward_pre_hooks.values() if not is_own_hook(hook)]
        hooked = module._forward_hooks or hooks or ("forward" in vars(module) and not has_forward_of_ours(module))
        return not hooked and type(module).__module__.startswith(MODULES_OF_LAYERS)

    architecture = find_architecture(model.config.get_text_config().model_type)
    return (
        architecture is not None
        and type(model).__name__ in architecture.CLASSES
        and all(map(is_unmodified, model.modules()))
    )


@dataclass(frozen=True)
class DecoderCall:
    """One call's arguments, and the tensors that the kernel writes."""

    struct: structs.Decoder
    logits: Tensor
    hidden_states: list[Tensor]  # after each layer that was asked for, and the last ones
    pointed_to: tuple[Any, ...]  # kept alive, since the struct points to them
    recurrent: list[RecurrentCall]  # to be ended after the call

    @property
    def states(self) -> Tensor:
        """All hidden states, those of a row beside each other."""
        return self.hidden_states[0] if len(self.hidden_states) == 1 else torch.cat(self.hidden_states, -1)


class NativeDecoder:
    """A described decoder as kernel calls over preallocated buffers.

    It rounds to the model's dtype where Transformers does; the order of sums inside a product differs.
    """

    def __init__(self, model: Any, max_rows: int) -> None:
        config, dtype = model.config.get_text_config(), model.dtype
        check_widths(config)
        description = describe_decoder(model)
        decode = native.kernel("decode", dtype, model.device)
        assert decode is not None and description is not None, "only supported decoders come here"
        self.model, self.dtype, self.decode, self.description = model, dtype, decode, description
        self.base = decoder_of(model)
        weights = Resolver(self.base)
        self.hidden = torch.zeros(max_rows, config.hidden_size, dtype=dtype)
        self.layers = DecoderOps(description, weights, self.hidden, uses_integers(model))
        self.num_layers = len(description.layers)
        self.adapter: Adapter | None = None
        self.lora_tensors: list[Tensor] = []  # of the adapter; the structs point to them
        self.rows_are_gated = False  # True if the structs gate rows
        self.seconds: structs.SecondsOfParts | None = None  # of its calls, while somebody asks for them
        self.tables = [self._table(each) for each in self.layers.angles]
        self.layers.set_angle_widths([table.width for table in self.tables])
        self.constants = self._constants(weights)
        self.angles = (structs.Angles * len(self.tables))()
        self.no_layers_kept = (structs.POINTER * (1 + self.num_layers))()
        self.prepared_call = PreparedCall(self) if PreparedRows.supports(self) else None

    def _table(
        self, given: Angles | PositionEmbedding | PositionLogarithms
    ) -> _AngleTable | _PositionTable | _LogarithmTable:
        if isinstance(given, Angles):
            return _AngleTable(self.base, given, self.hidden)
        return _PositionTable(self.base, given) if isinstance(given, PositionEmbedding) else _LogarithmTable(self.dtype)

    def _constants(self, weights: Resolver) -> structs.Decoder:
        """The kernel arguments that are the same in every call."""
        description, layers = self.description, self.layers
        embedding = weights.module(description.embedding).weight
        weight, format = kernel_arguments(embedding)
        vocab, size = embedding.shape
        norm = weights.norm(description.norm, self.hidden.shape[1])
        assert size == self.hidden.shape[1]
        hidden = self.hidden.data_ptr()
        scale = float(torch.tensor(description.embedding_scale, dtype=self.dtype))
        return structs.Decoder(
            embedding=structs.Expansion(weight=weight, out=hidden, format=format, inputs=size),
            embedding_scale=scale, logit_scale=description.logit_scale, logit_softcap=description.logit_softcap,
            norm=structs.Norm(x=hidden, size=size, **norm.arguments("weight", "kind")),
            head=linear_struct(self.hidden, [(weights.output_layer(self.model), None)]),
            ops=ctypes.addressof(layers.ops), num_ops=len(layers.ops), vocab=vocab,
        )  # fmt: skip

    def new_kv_cache(self) -> KVCache:
        """An empty KV cache for one text, with states where layers keep them."""
        if not self.layers.states.state:
            return KVCache()
        cache = HybridKVCache(sizes=self.layers.states)
        if not self.layers.attention.kinds:  # no layer has keys
            cache.keys = cache.values = torch.empty(0, 1, MANY_SLOTS, 1, dtype=self.dtype)
        return cache

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Add an adapter's low-rank parts to gated rows from now on; copies them in the model's dtype."""
        self.adapter, self.lora_tensors = adapter, []
        prefix = next(name for name, module in self.model.named_modules() if module is self.base)
        for struct, parts in self.layers.products:
            struct.rank = 0
            for i, part in enumerate(parts):
                struct.down[i] = struct.up[i] = None
                layer = adapter and adapter.lora_layer(f"{prefix}.{part.path}" if prefix else part.path)
                if adapter is not None and layer:
                    up = layer.up[part.start : part.stop].T
                    down, up = (x.detach().to(self.dtype).contiguous() for x in (layer.down, up))
                    self.lora_tensors += [down, up]
                    struct.down[i], struct.up[i] = down.data_ptr(), up.data_ptr()
                    struct.rank, struct.scale = adapter.settings.rank, adapter.settings.scale

    def set_gated_rows(self, gate: Gate | None, num_rows: int) -> None:
        """Set the rows that the adapter acts on in this call."""
        if gate is None and not self.rows_are_gated:
            return
        self.rows_are_gated = gate is not None
        self.gated_row_numbers = torch.full((num_rows,), -1, dtype=torch.int32)
        gated = 0 if gate is None else len(gate.uniforms)
        if gate is not None:
            rows = slice(None) if gate.rows is None else gate.rows
            self.gated_row_numbers[rows] = torch.arange(gated, dtype=torch.int32)
        for struct, _ in self.layers.products:
            adapted = gate is not None and struct.rank > 0
            struct.place = self.gated_row_numbers.data_ptr() if adapted else None
            struct.gated = gated if adapted else 0

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        call: AttentionCall,
        logit_rows: Tensor,
        output_hidden_states: bool = False,
        gate: Gate | None = None,
        hidden_state_layers: Sequence[int] = (),
        output_logits: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The logits of `logit_rows`, and hidden states: of all rows with `output_hidden_states`.

        Inputs are tokens [rows] or their embeddings [rows, hidden]; positions are [rows]. The hidden states are those
        after each of `hidden_state_layers`, then the last ones, concatenated. Without `output_logits` there are no
        logits, and the last hidden states of `logit_rows` at least.
        """
        rows = inputs.shape[0]
        made = self.prepare(rows, positions, call, logit_rows, output_hidden_states, hidden_state_layers, output_logits)
        self.set_gated_rows(gate, rows)
        made.struct.narrows = gate is None
        if not inputs.is_floating_point():
            made.struct.tokens = inputs.data_ptr()
        if inputs.is_floating_point() or gate is not None:
            self._write_inputs(self.hidden[:rows], inputs, gate)
        else:
            made.struct.embedding.rows, made.struct.embedding.count = inputs.data_ptr(), rows
        if code := self.decode(ctypes.byref(made.struct)):
            self.raise_failure(code)
        for recurrent in made.recurrent:
            recurrent.end()
        return made.logits, made.states

    def prepare(
        self,
        rows: int,
        positions: Tensor,
        call: AttentionCall,
        logit_rows: Tensor,
        output_hidden_states: bool = False,
        hidden_state_layers: Sequence[int] = (),
        output_logits: bool = True,
    ) -> DecoderCall:
        """The kernel's arguments of a call but its inputs, and the tensors that it will write; see `__call__`."""
        selected, hidden = logit_rows.shape[0], self.hidden[:rows]
        struct = structs.Decoder.from_buffer_copy(self.constants)
        tables, angles = [table.at(positions) for table in self.tables], self.angles
        for number, (cos, sin, indexed) in enumerate(tables):
            place = positions.data_ptr() if indexed else None
            angles[number] = cos.data_ptr(), sin.data_ptr(), place
        struct.angles = ctypes.addressof(angles)
        recurrent, texts = self.layers.recurrent_calls(call), None
        if recurrent:
            texts = (structs.RecurrentText * len(recurrent))(*(each.struct for each in recurrent))
            struct.recurrent = ctypes.addressof(texts)
        attentions, key_steps, value_steps = self.layers.attention.structs_of(call)
        struct.attentions, struct.texts, struct.rows = ctypes.addressof(attentions), len(call.sequences), rows
        struct.key_step, struct.value_step = ctypes.addressof(key_steps), ctypes.addressof(value_steps)
        kept, collected = self.no_layers_kept, []
        if output_hidden_states and hidden_state_layers:
            kept, collected = (
                (structs.POINTER * (1 + self.num_layers))(),
                [torch.empty_like(hidden) for _ in hidden_state_layers],
            )
            for layer, states in zip(hidden_state_layers, collected, strict=True):
                kept[layer] = states.data_ptr()
        normed = hidden.new_empty(rows if output_hidden_states else selected, hidden.shape[1])
        logits = hidden.new_empty(selected if output_logits else 0, struct.head.outs[0])
        struct.kept, struct.norm.rows, struct.norm.out = ctypes.addressof(kept), rows, normed.data_ptr()
        struct.head.out[0] = logits.data_ptr() if output_logits else None
        struct.selected, struct.num_selected = logit_rows.data_ptr(), selected
        struct.all_states = output_hidden_states
        struct.seconds = None if self.seconds is None else ctypes.addressof(self.seconds)
        pointed_to = angles, tables, positions, call, attentions, key_steps, value_steps, kept, logit_rows, texts
        return DecoderCall(struct, logits, [*collected, normed], pointed_to, recurrent)

    def raise_failure(self, code: int) -> None:
        """Errors: those of `raise_if_failed`."""
        raise_if_failed(code, self.constants.vocab)

    def _write_inputs(self, hidden: Tensor, inputs: Tensor, gate: Gate | None) -> None:
        """Write embeddings that are given, or those of tokens and of an adapter's queries, to the hidden states."""
        if inputs.is_floating_point():
            hidden.copy_(inputs)
        else:
            hidden.copy_(select_rows(self.base.get_submodule(self.description.embedding).weight, inputs))
            if self.constants.embedding_scale != 1:
                hidden *= self.constants.embedding_scale
        if gate is not None and self.adapter is not None:
            with BatchInvariantMode():
                hidden[gate.rows] = self.adapter.embed_queries(gate, hidden[gate.rows]).to(self.dtype)


class _AngleTable:
    """Cosines and sines of angles; a table of the first positions where they depend on the position alone."""

    def __init__(self, base: Any, angles: Angles, hidden: Tensor) -> None:
        self.angles, self.hidden = angles, hidden
        self.module = base.get_submodule(angles.path)
        kind = self.module.rope_type
        kind = kind[angles.layer_type] if isinstance(kind, dict) else kind
        self.is_static = kind in STATIC_ROPE_TYPES
        self.table = [torch.empty(0), torch.empty(0)]
        self.width = self._compute(torch.zeros(1, dtype=torch.int64))[0].shape[-1]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Cosines and sines, [.., width] each, and whether they are indexed by the position or by the row."""
        if self.is_static:
            self.reserve(int(positions.numpy().max()) + 1)
        cos, sin = self.table if self.is_static else self._compute(positions)
        return cos, sin, self.is_static

    def reserve(self, end: int) -> None:
        """Let the table have the positions before `end`."""
        have = self.table[0].shape[0]
        if end > have:
            self.table = self._compute(torch.arange(max(end, 2 * have, INITIAL_ROPE_POSITIONS)))

    def _compute(self, positions: Tensor) -> list[Tensor]:
        if self.angles.zeros:
            zeros = torch.zeros(1, len(positions), self.angles.zeros)
            found = zeros.cos(), zeros
        else:
            found = self._of_module(positions)
        if self.angles.backwards:
            found = found[0], -found[1]
        if self.angles.growth:
            steps = torch.floor((positions + self.angles.shift).float() / self.angles.steps)
            found = [x * (1 + self.angles.growth * torch.log1p(steps))[None, :, None] for x in found]
        return [x[0].to(self.hidden.dtype).contiguous() for x in found]

    def _of_module(self, positions: Tensor) -> Sequence[Tensor]:
        """Cosines and sines in both halves."""
        with BatchInvariantMode():
            found = angles_of_positions(self.module, self.hidden[None], positions[None], self.angles.layer_type)
        if isinstance(found, torch.Tensor):  # of complex numbers
            found = found.real, found.imag
        if self.angles.layout == "halves":
            return found
        return [x[..., :: 2 if self.angles.layout == "interleaved" else 1].repeat(1, 1, 2) for x in found]


class _SingleTable:
    """One number or more of each position, as a table of angles: the first of its two."""

    is_static = True
    table: list[Tensor]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor, bool]:
        """See _AngleTable."""
        self.reserve(int(positions.numpy().max()) + 1)
        return self.table[0], self.table[1], True

    def reserve(self, end: int) -> None:
        """Let the table have the positions before `end`."""
        raise NotImplementedError


class _PositionTable(_SingleTable):
    """Learned embeddings of positions."""

    def __init__(self, base: Any, positions: PositionEmbedding) -> None:
        weight = base.get_submodule(positions.path).weight.detach()
        whole = weight.dequantize() if isinstance(weight, PackedWeight) else weight
        self.table = [whole[positions.first :]] * 2
        self.width = whole.shape[1]

    def reserve(self, end: int) -> None:
        """Let the table have the positions before `end`; none of a text lies beyond the model's own, drafts may."""
        have = self.table[0]
        if end > len(have):
            self.table = [torch.cat([have, have[-1:].expand(end - len(have), -1)])] * 2


class _LogarithmTable(_SingleTable):
    """log(1 + position)."""

    width = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.table = [torch.empty(0, dtype=dtype)] * 2

    def reserve(self, end: int) -> None:
        """Let the table have the positions before `end`."""
        have = self.table[0]
        if end > len(have):
            upto = max(end, 2 * len(have), INITIAL_ROPE_POSITIONS)
            self.table = [torch.arange(1, upto + 1).double().log().to(have.dtype)] * 2


def raise_if_failed(code: int, vocab: int) -> None:
    """Errors: IndexError, MemoryError, by what a kernel returned."""
    if code == structs.UNKNOWN_TOKEN:
        raise IndexError(f"a token lies beyond the model's vocabulary of {vocab}")
    if code:
        raise MemoryError("a call ran out of memory; decode a shorter text")
