"""Run Llama-type decoders by compiled kernels on the model's own weights, without the overhead of torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saltus.networks.adapters.gated_lora import Adapter, Gate
from saltus.networks.models.exact import native
from saltus.networks.models.exact.attention import AttentionCall
from saltus.networks.models.exact.batch_invariant_ops import BatchInvariantMode, linear
from saltus.networks.models.exact.packed_weight import kernel_arguments, select_rows
from saltus.networks.models.packed_decoder import PackedDecoder

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
        (isinstance(model, PackedDecoder) or _is_unmodified_decoder(model))
        and model.config.hidden_act == "silu"
        and native.kernel("linear", model.dtype, model.device) is not None
        and all(weight.is_contiguous() and weight.dtype == model.dtype for weight in model.parameters())
    )


def _is_unmodified_decoder(model: Any) -> bool:
    """True for a decoder without hooks, replaced layers or own `forward`, which NativeDecoder would skip."""

    def is_unmodified(module: Any) -> bool:
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        return not hooked and type(module).__module__.startswith(("torch.nn.", "transformers."))

    return type(model).__name__ in SUPPORTED_DECODERS and all(map(is_unmodified, model.modules()))


class NativeDecoder:
    """The decoder's layers as kernel calls over preallocated buffers.

    It rounds to the model's dtype where Transformers does; the order of sums inside a product differs.
    """

    def __init__(self, model: Any, max_rows: int) -> None:
        config, dtype = model.config, model.dtype
        self.model, self.dtype = model, dtype
        self.base = model.model
        first = self.base.layers[0].self_attn
        self.dim = first.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = first.scaling
        self.hidden = torch.zeros(max_rows, config.hidden_size, dtype=dtype)
        self.q, self.out = (torch.zeros(max_rows, self.heads, self.dim, dtype=dtype) for _ in range(2))
        self.k, self.v = (torch.zeros(max_rows, self.kv_heads, self.dim, dtype=dtype) for _ in range(2))
        self.gate, self.up = (torch.zeros(max_rows, config.intermediate_size, dtype=dtype) for _ in range(2))
        kernels = [native.kernel(name, dtype, model.device) for name in ("decode", "norm")]
        self.decode, self.norm = (kernel for kernel in kernels if kernel is not None)
        self.adapter: Adapter | None = None
        self.lora_tensors: list[Tensor] = []  # of the adapter; the structs point to them
        self.rows_are_gated = False  # True if the structs gate rows
        self.rope_table = [torch.empty(0), torch.empty(0)]  # cosines and sines of the first positions
        layers = [self._layer_structs(layer) for layer in self.base.layers]
        self.products = (native.Linear * (len(layers) * len(LAYER_PRODUCTS)))(*(x for layer, _ in layers for x in layer))
        self.rotations = (native.Rotary * (2 * len(layers)))(*(x for _, layer in layers for x in layer))
        windows = [self._sliding_window(layer) for layer in self.base.layers]
        self.sliding_windows = list(dict.fromkeys(windows))
        self.window_of_layer = (ctypes.c_int32 * len(layers))(*map(self.sliding_windows.index, windows))
        self.num_layers = len(layers)

    def _layer_structs(self, layer: Any) -> tuple[list[native.Linear], list[native.Rotary]]:
        """The kernel arguments of one layer, without rows and angles."""
        a, mlp, before, after = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        products = [
            _linear_struct(self.hidden, [(a.q_proj, self.q), (a.k_proj, self.k), (a.v_proj, self.v)], norm=before),
            _linear_struct(self.out, [(a.o_proj, self.hidden)], add=self.hidden),
            _linear_struct(self.hidden, [(mlp.gate_proj, self.gate), (mlp.up_proj, self.up)], norm=after),
            _linear_struct(self.up, [(mlp.down_proj, self.hidden)], gate=self.gate, add=self.hidden),
        ]
        rotations = []
        for x, heads, norm in ((self.q, self.heads, "q_norm"), (self.k, self.kv_heads, "k_norm")):
            rotation = native.Rotary(x=x.data_ptr(), heads=heads, dim=self.dim)
            if (module := getattr(a, norm, None)) is not None:
                rotation.norm, rotation.epsilon = module.weight.data_ptr(), module.variance_epsilon
            rotations.append(rotation)
        return products, rotations

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

    def _sliding_window(self, layer: Any) -> int | None:
        if hasattr(layer.self_attn, "sliding_window"):
            return layer.self_attn.sliding_window
        return getattr(self.model.config, "sliding_window", None)

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
        rows = len(inputs)
        hidden = self.hidden[:rows]
        hidden.copy_(inputs if inputs.is_floating_point() else select_rows(self.base.embed_tokens.weight, inputs))
        self._set_gated_rows(gate, rows)
        with BatchInvariantMode():
            if gate is not None and self.adapter is not None:
                hidden[gate.rows] = self.adapter.embed_queries(gate, hidden[gate.rows]).to(self.dtype)
            angles = self._rope(positions)
        collected = {layer: torch.empty_like(hidden) for layer in hidden_state_layers if output_hidden_states}
        self._run_layers(rows, angles, call, collected)
        normed = self._final_norm(hidden if output_hidden_states else hidden[logit_rows])
        if not output_logits:
            return normed.new_empty(0), normed
        selected = normed[logit_rows] if output_hidden_states else normed
        logits = linear(selected, [self.model.lm_head.weight], [self.model.lm_head.bias])[0]
        states = torch.cat([*(collected[layer] for layer in hidden_state_layers), normed], -1) if collected else normed
        return logits, states

    def _run_layers(
        self, rows: int, angles: Sequence[Tensor], call: AttentionCall, collected: dict[int, Tensor]
    ) -> None:
        """Take the hidden states of the rows through all layers; copy those before a layer to `collected`."""
        attentions, key_steps, value_steps = self._attention_structs(call)
        kept = (native.POINTER * self.num_layers)()
        for layer, states in collected.items():
            kept[layer] = states.data_ptr()
        cos, sin = angles
        struct = native.Decoder(
            products=ctypes.addressof(self.products), rotations=ctypes.addressof(self.rotations),
            attentions=ctypes.addressof(attentions), window=ctypes.addressof(self.window_of_layer),
            key_step=ctypes.addressof(key_steps), value_step=ctypes.addressof(value_steps),
            cos=cos.data_ptr(), sin=sin.data_ptr(), kept=ctypes.addressof(kept),
            layers=self.num_layers, texts=len(call.sequences), rows=rows,
        )  # fmt: skip
        if self.decode(ctypes.byref(struct)):
            raise MemoryError("a call ran out of memory; decode a shorter text")

    def _final_norm(self, x: Tensor) -> Tensor:
        norm, out = self.base.norm, torch.empty_like(x)
        struct = native.Norm(x=x.data_ptr(), weight=norm.weight.data_ptr(), out=out.data_ptr())
        struct.rows, struct.size, struct.epsilon = *x.shape, norm.variance_epsilon
        self.norm(ctypes.byref(struct))
        return out

    def _rope(self, positions: Tensor) -> list[Tensor]:
        """Cosines and sines of the positions' angles, [rows, dim] each, from a table if it is static."""
        if self.base.rotary_emb.rope_type not in STATIC_ROPE_TYPES:
            return self._compute_rope(positions)
        if (end := int(positions.max()) + 1) > len(self.rope_table[0]):
            self.rope_table = self._compute_rope(
                torch.arange(max(end, 2 * len(self.rope_table[0]), INITIAL_ROPE_POSITIONS))
            )
        return [table[positions] for table in self.rope_table]

    def _compute_rope(self, positions: Tensor) -> list[Tensor]:
        return [x[0].contiguous() for x in self.base.rotary_emb(self.hidden[None], position_ids=positions[None])]

    def _attention_structs(self, call: AttentionCall) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """Kernel arguments by window and text, and the bytes between layers of each text's keys and values."""
        structs, start = [], 0
        key_steps, value_steps = ((native.INTEGER * len(call.sequences))() for _ in range(2))
        for number, sequence in enumerate(call.sequences):
            sequence.kv_cache.reserve(
                call.num_layers,
                sequence.past_length + sequence.num_rows,
                self.k.transpose(0, 1),
                self.v.transpose(0, 1),
            )
            keys, values = sequence.kv_cache.keys, sequence.kv_cache.values
            assert keys is not None and values is not None
            q, k, v, out = (x[start : start + sequence.num_rows] for x in (self.q, self.k, self.v, self.out))
            structs.append(
                [
                    sequence.kernel_arguments(
                        window, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), out, self.scale
                    )
                    for window in self.sliding_windows
                ]
            )
            for struct in structs[-1]:
                struct.keys, struct.values, struct.capacity = keys.data_ptr(), values.data_ptr(), keys.shape[2]
            key_steps[number] = keys.stride(0) * keys.element_size()
            value_steps[number] = values.stride(0) * values.element_size()
            start += sequence.num_rows
        by_window = [struct for same_window in zip(*structs, strict=True) for struct in same_window]
        return (native.Attention * len(by_window))(*by_window), key_steps, value_steps


def _linear_struct(
    x: Tensor,
    weights: Sequence[tuple[Any, Tensor]],
    norm: Any = None,
    gate: Tensor | None = None,
    add: Tensor | None = None,
) -> native.Linear:
    struct = native.Linear(x=x.data_ptr(), inputs=weights[0][0].weight.shape[1], count=len(weights))
    for i, (module, out) in enumerate(weights):
        struct.weight[i], struct.format[i] = kernel_arguments(module.weight)
        struct.out[i], struct.outs[i] = out.data_ptr(), len(module.weight)
        struct.bias[i] = None if module.bias is None else module.bias.data_ptr()
    if norm is not None:
        struct.norm, struct.epsilon = norm.weight.data_ptr(), norm.variance_epsilon
    struct.gate = None if gate is None else gate.data_ptr()
    struct.add = None if add is None else add.data_ptr()
    return struct


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
