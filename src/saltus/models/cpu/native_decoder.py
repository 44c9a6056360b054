"""Run Llama-type decoders by compiled kernels on the model's own weights, without the overhead of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.kernels.packed_weight import kernel_arguments, select_rows, uses_integers
from saltus.models.cpu.attention import AttentionCall
from saltus.models.gated_lora import Adapter, Gate
from saltus.models.packed_decoder import PackedDecoder, check_decoder_config

LAYER_PRODUCTS = (  # the linear layers of each matrix product
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}  # angles depend on the position alone
INITIAL_ROPE_POSITIONS = 1024  # of the table of angles, at first
SUPPORTED_DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def supports_native_decoder(model: Any) -> bool:
    """True for an unmodified decoder of a supported type, on a machine with compiled kernels."""
    return (
        (isinstance(model, PackedDecoder) or is_unmodified_decoder(model))
        and model.config.hidden_act == "silu"
        and native.kernel("linear", model.dtype, model.device) is not None
        and all(
            weight.is_contiguous() and weight.dtype == model.dtype and weight.device.type == "cpu"
            for weight in model.parameters()
        )
    )


def is_unmodified_decoder(model: Any) -> bool:
    """True for a decoder without hooks, replaced layers or own `forward`, which NativeDecoder would skip."""

    def is_unmodified(module: Any) -> bool:
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        return not hooked and type(module).__module__.startswith(("torch.nn.", "transformers."))

    return type(model).__name__ in SUPPORTED_DECODERS and all(map(is_unmodified, model.modules()))


def sliding_window(model: Any, layer: Any) -> int | None:
    """How many of the last positions a layer sees; None: all."""
    if hasattr(layer.self_attn, "sliding_window"):
        return layer.self_attn.sliding_window
    return getattr(model.config, "sliding_window", None)


@dataclass(frozen=True)
class DecoderCall:
    """One call's arguments, and the tensors that the kernel writes."""

    struct: native.Decoder
    logits: Tensor
    hidden_states: list[Tensor]  # after each layer that was asked for, and the last ones
    pointed_to: tuple[Any, ...]  # kept alive, since the struct points to them

    @property
    def states(self) -> Tensor:
        """All hidden states, those of a row beside each other."""
        return self.hidden_states[0] if len(self.hidden_states) == 1 else torch.cat(self.hidden_states, -1)


class NativeDecoder:
    """The decoder's layers as kernel calls over preallocated buffers.

    It rounds to the model's dtype where Transformers does; the order of sums inside a product differs.
    """

    def __init__(self, model: Any, max_rows: int) -> None:
        config, dtype = model.config, model.dtype
        check_decoder_config(config)
        self.model, self.dtype = model, dtype
        self.base = model.model
        first = self.base.layers[0].self_attn
        self.dim = first.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.hidden = torch.zeros(max_rows, config.hidden_size, dtype=dtype)
        self.q, self.out = (torch.zeros(max_rows, self.heads, self.dim, dtype=dtype) for _ in range(2))
        self.k, self.v = (torch.zeros(max_rows, self.kv_heads, self.dim, dtype=dtype) for _ in range(2))
        self.gate, self.up = (torch.zeros(max_rows, config.intermediate_size, dtype=dtype) for _ in range(2))
        decode = native.kernel("decode", dtype, model.device)
        assert decode is not None, "only supported decoders come here"
        self.decode = decode
        self.adapter: Adapter | None = None
        self.lora_tensors: list[Tensor] = []  # of the adapter; the structs point to them
        self.rows_are_gated = False  # True if the structs gate rows
        self.seconds: native.SecondsOfParts | None = None  # of its calls, while somebody asks for them
        self.rope_table = [torch.empty(0), torch.empty(0)]  # cosines and sines of the first positions
        layers = [self._layer_structs(layer) for layer in self.base.layers]
        products, rotations = [x for layer, _ in layers for x in layer], [x for _, layer in layers for x in layer]
        self.products = (native.Linear * len(products))(*products)
        self.rotations = (native.Rotary * len(rotations))(*rotations)
        windows = [sliding_window(model, layer) for layer in self.base.layers]
        self.sliding_windows = list(dict.fromkeys(windows))
        self.window_of_layer = (ctypes.c_int32 * len(layers))(*map(self.sliding_windows.index, windows))
        self.num_layers = len(layers)
        self.new_rows = [x.transpose(0, 1) for x in (self.k, self.v)]  # [kv_heads, rows, dim] each
        buffers = self.q, self.k, self.v, self.out
        self.row_bytes = [x.stride(0) * x.element_size() for x in buffers]
        attention = native.Attention(
            **{name: x.data_ptr() for name, x in zip(("query", "key", "value", "out"), buffers, strict=True)},
            **{f"{name}_row": x.stride(0) for name, x in zip(("query", "key", "value"), buffers, strict=False)},
            **{f"{name}_head": x.stride(1) for name, x in zip(("query", "key", "value"), buffers, strict=False)},
            heads=self.heads, kv_heads=self.kv_heads, dim=self.dim, value_dim=self.dim, scale=first.scaling,
            same_everywhere=uses_integers(model),
        )  # fmt: skip
        self.attention_bytes = bytes(attention)  # what is the same in every call
        self.constants = self._constants()
        self.has_rope_table = self.base.rotary_emb.rope_type in STATIC_ROPE_TYPES
        self.no_layers_kept = (native.POINTER * self.num_layers)()

    def _layer_structs(self, layer: Any) -> tuple[list[native.Linear], list[native.Rotary]]:
        """The kernel arguments of one layer, without rows and angles."""
        a, mlp, before, after = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        products = [
            linear_struct(self.hidden, [(a.q_proj, self.q), (a.k_proj, self.k), (a.v_proj, self.v)], norm=before),
            linear_struct(self.out, [(a.o_proj, self.hidden)], add=self.hidden),
            linear_struct(self.hidden, [(mlp.gate_proj, self.gate), (mlp.up_proj, self.up)], norm=after),
            linear_struct(self.up, [(mlp.down_proj, self.hidden)], gate=self.gate, add=self.hidden),
        ]
        rotations = []
        for x, heads, norm in ((self.q, self.heads, "q_norm"), (self.k, self.kv_heads, "k_norm")):
            rotation = native.Rotary(x=x.data_ptr(), heads=heads, dim=self.dim)
            if (module := getattr(a, norm, None)) is not None:
                assert len(module.weight) == self.dim
                rotation.norm, rotation.epsilon = module.weight.data_ptr(), module.variance_epsilon
            rotations.append(rotation)
        return products, rotations

    def _constants(self) -> native.Decoder:
        """The kernel arguments that are the same in every call."""
        embedding, norm, head = self.base.embed_tokens.weight, self.base.norm, self.model.lm_head
        weight, format = kernel_arguments(embedding)
        vocab, size = embedding.shape
        assert size == len(norm.weight) == self.hidden.shape[1]
        hidden = self.hidden.data_ptr()
        return native.Decoder(
            embedding=native.Expansion(weight=weight, out=hidden, format=format, inputs=size),
            norm=native.Norm(x=hidden, weight=norm.weight.data_ptr(), size=size, epsilon=norm.variance_epsilon),
            head=linear_struct(self.hidden, [(head, None)]),
            products=ctypes.addressof(self.products), rotations=ctypes.addressof(self.rotations),
            window=ctypes.addressof(self.window_of_layer), layers=self.num_layers, vocab=vocab,
        )  # fmt: skip

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Add an adapter's low-rank parts to gated rows from now on; copies them in the model's dtype."""
        self.adapter, self.lora_tensors = adapter, []
        for number in range(len(self.products)):
            layer, product = divmod(number, len(LAYER_PRODUCTS))
            names = [f"model.layers.{layer}.{name}" for name in LAYER_PRODUCTS[product]]
            _set_lora(self.products[number], names, adapter, self)

    def _set_gated_rows(self, gate: Gate | None, num_rows: int) -> None:
        """Set the rows that the adapter acts on in this call."""
        if gate is None and not self.rows_are_gated:
            return
        self.rows_are_gated = gate is not None
        self.gated_row_numbers = torch.full((num_rows,), -1, dtype=torch.int32)
        if gate is not None:
            self.gated_row_numbers[gate.rows] = torch.arange(len(gate.rows), dtype=torch.int32)
        for struct in self.products:
            adapted = gate is not None and struct.rank > 0
            struct.place = self.gated_row_numbers.data_ptr() if adapted else None
            struct.gated = len(gate.rows) if adapted and gate is not None else 0

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
        self._set_gated_rows(gate, rows)
        if inputs.is_floating_point() or gate is not None:
            self._write_inputs(self.hidden[:rows], inputs, gate)
        else:
            made.struct.embedding.rows, made.struct.embedding.count = inputs.data_ptr(), rows
        raise_if_failed(self.decode(ctypes.byref(made.struct)), made.struct.vocab)
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
        struct = native.Decoder.from_buffer_copy(self.constants)
        (cos, sin), indexed = self._rope(positions)
        struct.cos, struct.sin = cos.data_ptr(), sin.data_ptr()
        struct.position = positions.data_ptr() if indexed else None
        attentions, key_steps, value_steps = self._attention_structs(call)
        struct.attentions, struct.texts, struct.rows = ctypes.addressof(attentions), len(call.sequences), rows
        struct.key_step, struct.value_step = ctypes.addressof(key_steps), ctypes.addressof(value_steps)
        collected = {layer: torch.empty_like(hidden) for layer in hidden_state_layers if output_hidden_states}
        kept = (native.POINTER * self.num_layers)() if collected else self.no_layers_kept
        for layer, states in collected.items():
            kept[layer] = states.data_ptr()
        normed = hidden.new_empty(rows if output_hidden_states else selected, hidden.shape[1])
        logits = hidden.new_empty(selected if output_logits else 0, struct.head.outs[0])
        struct.kept, struct.norm.rows, struct.norm.out = ctypes.addressof(kept), rows, normed.data_ptr()
        struct.head.out[0] = logits.data_ptr() if output_logits else None
        struct.selected, struct.num_selected = logit_rows.data_ptr(), selected
        struct.all_states = output_hidden_states
        struct.seconds = None if self.seconds is None else ctypes.addressof(self.seconds)
        pointed_to = cos, sin, positions, call, attentions, key_steps, value_steps, kept, logit_rows
        return DecoderCall(
            struct, logits, [*(collected[layer] for layer in hidden_state_layers if collected), normed], pointed_to
        )

    def _write_inputs(self, hidden: Tensor, inputs: Tensor, gate: Gate | None) -> None:
        """Write embeddings that are given, or those of tokens and of an adapter's queries, to the hidden states."""
        hidden.copy_(inputs if inputs.is_floating_point() else select_rows(self.base.embed_tokens.weight, inputs))
        if gate is not None and self.adapter is not None:
            with BatchInvariantMode():
                hidden[gate.rows] = self.adapter.embed_queries(gate, hidden[gate.rows]).to(self.dtype)

    def _rope(self, positions: Tensor) -> tuple[list[Tensor], bool]:
        """Cosines and sines of angles, [.., dim] each, and whether they are indexed by the position or by the row."""
        if not self.has_rope_table:
            return self._compute_rope(positions), False
        end = max(positions.tolist()) + 1
        if end > self.rope_table[0].shape[0]:
            self.rope_table = self._compute_rope(
                torch.arange(max(end, 2 * self.rope_table[0].shape[0], INITIAL_ROPE_POSITIONS))
            )
        return self.rope_table, True

    def _compute_rope(self, positions: Tensor) -> list[Tensor]:
        with BatchInvariantMode():
            return [x[0].contiguous() for x in self.base.rotary_emb(self.hidden[None], position_ids=positions[None])]

    def _attention_structs(self, call: AttentionCall) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """Kernel arguments by window and text, and the bytes between layers of each text's keys and values."""
        texts, start = len(call.sequences), 0
        count = texts * len(self.sliding_windows)
        structs = (native.Attention * count).from_buffer_copy(self.attention_bytes * count)
        key_steps, value_steps = ((native.INTEGER * texts)() for _ in range(2))
        for number, sequence in enumerate(call.sequences):
            cache = sequence.kv_cache
            cache.reserve(call.num_layers, sequence.past_length + sequence.num_rows, *self.new_rows)
            keys, values = cache.keys, cache.values
            assert keys is not None and values is not None
            for index, window in enumerate(self.sliding_windows):
                struct = structs[index * texts + number]
                struct.keys, struct.values, struct.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[2]
                if start:
                    for name, step in zip(("query", "key", "value", "out"), self.row_bytes, strict=True):
                        setattr(struct, name, getattr(struct, name) + start * step)
                sequence.fill_rows(struct, window)
            key_steps[number] = keys.stride(0) * keys.element_size()
            value_steps[number] = values.stride(0) * values.element_size()
            start += sequence.num_rows
        return structs, key_steps, value_steps


def raise_if_failed(code: int, vocab: int) -> None:
    """Errors: IndexError, MemoryError, by what a kernel returned."""
    if code == native.UNKNOWN_TOKEN:
        raise IndexError(f"a token lies beyond the model's vocabulary of {vocab}")
    if code:
        raise MemoryError("a call ran out of memory; decode a shorter text")


def linear_struct(
    x: Tensor,
    weights: Sequence[tuple[Any, Tensor | None]],
    norm: Any = None,
    gate: Tensor | None = None,
    add: Tensor | None = None,
) -> native.Linear:
    """The kernel's arguments of a product but its rows: of `x` with the weights of some modules, to their outputs."""
    inputs = weights[0][0].weight.shape[1]
    _check_widths(x, inputs, weights, norm, gate, add)
    struct = native.Linear(x=x.data_ptr(), inputs=inputs, count=len(weights))
    for i, (module, out) in enumerate(weights):
        struct.weight[i], struct.format[i] = kernel_arguments(module.weight)
        struct.out[i], struct.outs[i] = None if out is None else out.data_ptr(), len(module.weight)
        struct.bias[i] = None if module.bias is None else module.bias.data_ptr()
    if norm is not None:
        struct.norm, struct.epsilon = norm.weight.data_ptr(), norm.variance_epsilon
    struct.gate = None if gate is None else gate.data_ptr()
    struct.add = None if add is None else add.data_ptr()
    return struct


def _check_widths(
    x: Tensor,
    inputs: int,
    weights: Sequence[tuple[Any, Tensor | None]],
    norm: Any,
    gate: Tensor | None,
    add: Tensor | None,
) -> None:
    """Fail unless weights fit the rows that the kernel reads and writes; `x` of one dimension only holds a place."""
    assert x.dim() == 1 or x[0].numel() == inputs
    assert norm is None or len(norm.weight) == inputs
    assert gate is None or gate[0].numel() == inputs
    for module, out in weights:
        outputs = len(module.weight)
        assert module.weight.shape == (outputs, inputs)
        assert module.bias is None or len(module.bias) == outputs
        assert all(each is None or each[0].numel() == outputs for each in (out, add))


def _set_lora(struct: native.Linear, paths: Sequence[str], adapter: Adapter | None, decoder: NativeDecoder) -> None:
    """Point a struct to the low-rank parts of its weights; the decoder owns their memory."""
    struct.rank = 0
    for i, path in enumerate(paths):
        struct.down[i] = struct.up[i] = None
        if adapter is not None and (part := adapter.lora_layer(path)) is not None:
            down, up = (x.detach().to(decoder.dtype).contiguous() for x in (part.down, part.up.T))
            decoder.lora_tensors += [down, up]
            struct.down[i], struct.up[i] = down.data_ptr(), up.data_ptr()
            struct.rank, struct.scale = adapter.settings.rank, adapter.settings.scale
