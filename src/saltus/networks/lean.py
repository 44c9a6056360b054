"""Run Llama-type decoders without a framework's overhead: the model's own weights, six kernel calls a layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.networks import native
from saltus.networks.attention import Call
from saltus.networks.gated import Adapter, Gate
from saltus.networks.linear import Exact, linear

LINEARS = (  # of a layer, product by product
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
STEADY = {"default", "linear", "llama3", "yarn"}  # rotary embeddings whose angles depend on the position alone
TURNS = 1024  # positions of their table, at first
DECODERS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def supports(model: Any) -> bool:
    """Is this a decoder that `Lean` knows, as its authors wrote it, on a machine with kernels?"""
    return (
        type(model).__name__ in DECODERS
        and all(_untouched(module) for module in model.modules())
        and model.config.hidden_act == "silu"
        and native.kernel("linear", model.dtype, model.device) is not None
        and all(weight.is_contiguous() and weight.dtype == model.dtype for weight in model.parameters())
    )


def _untouched(module: Any) -> bool:
    """No adapter in place of a layer, no hook, no forward of somebody's own: Lean would pass them by."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not hooked and type(module).__module__.startswith(("torch.nn.", "transformers."))


class Lean:
    """The decoder's layers as kernel calls over fixed scratch: nothing is allocated between them.

    Rounds to the model's dtype where Transformers does; what differs is the order of sums inside a product.
    """

    def __init__(self, model: Any, rows: int) -> None:
        config, dtype = model.config, model.dtype
        self.model, self.dtype = model, dtype
        self.base = model.model
        first = self.base.layers[0].self_attn
        self.dim = first.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = first.scaling
        self.hidden = torch.zeros(rows, config.hidden_size, dtype=dtype)
        self.q, self.out = (torch.zeros(rows, self.heads, self.dim, dtype=dtype) for _ in range(2))
        self.k, self.v = (torch.zeros(rows, self.kv_heads, self.dim, dtype=dtype) for _ in range(2))
        self.gate, self.up = (torch.zeros(rows, config.intermediate_size, dtype=dtype) for _ in range(2))
        kernels = [native.kernel(name, dtype, model.device) for name in ("linear", "rotate", "attend", "norm")]
        self.linear, self.rotate, self.attend, self.norm = (kernel for kernel in kernels if kernel is not None)
        self.adapter: Adapter | None = None
        self.parts: list[Tensor] = []  # the adapter's, which the structs point to
        self.gated = False  # do the structs gate rows?
        self.turns = [torch.empty(0), torch.empty(0)]  # cosines and sines of the first positions
        self.layers = [self._layer(layer) for layer in self.base.layers]
        self.windows = [self._window(layer) for layer in self.base.layers]

    def _layer(self, layer: Any) -> tuple[list[native.Linear], list[native.Rotary]]:
        """The structs of one layer; only rows and angles change from call to call."""
        a, mlp, before, after = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
        products = [
            _product(self.hidden, [(a.q_proj, self.q), (a.k_proj, self.k), (a.v_proj, self.v)], norm=before),
            _product(self.out, [(a.o_proj, self.hidden)], add=self.hidden),
            _product(self.hidden, [(mlp.gate_proj, self.gate), (mlp.up_proj, self.up)], norm=after),
            _product(self.up, [(mlp.down_proj, self.hidden)], gate=self.gate, add=self.hidden),
        ]
        turns = []
        for x, heads, norm in ((self.q, self.heads, "q_norm"), (self.k, self.kv_heads, "k_norm")):
            turn = native.Rotary(x=x.data_ptr(), heads=heads, dim=self.dim)
            if (module := getattr(a, norm, None)) is not None:
                turn.norm, turn.epsilon = module.weight.data_ptr(), module.variance_epsilon
            turns.append(turn)
        return products, turns

    def attach(self, adapter: Adapter | None) -> None:
        """Let the kernels add an adapter's low-rank parts to gated rows; they keep copies in the model's own format."""
        self.adapter, self.parts = adapter, []
        for number, (products, _) in enumerate(self.layers):
            for struct, names in zip(products, LINEARS, strict=True):
                _add_low_rank(struct, [f"model.layers.{number}.{name}" for name in names], adapter, self)

    def _gate(self, gate: Gate | None, rows: int) -> None:
        """Tell the structs which rows the adapter acts on in this call."""
        if gate is None and not self.gated:
            return
        self.gated = gate is not None
        self.places = torch.full((rows,), -1, dtype=torch.int32)
        if gate is not None:
            self.places[gate.rows] = torch.arange(len(gate.rows), dtype=torch.int32)
        for products, _ in self.layers:
            for struct in products:
                adapted = gate is not None and struct.rank > 0
                struct.place = self.places.data_ptr() if adapted else None
                struct.gated = len(gate.rows) if adapted and gate is not None else 0

    def _window(self, layer: Any) -> int | None:
        if hasattr(layer.self_attn, "sliding_window"):
            return layer.self_attn.sliding_window
        return getattr(self.model.config, "sliding_window", None)

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        call: Call,
        wanted: Tensor,
        features: bool = False,
        gate: Gate | None = None,
        taps: Sequence[int] = (),
        say: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Logits of the wanted rows and features, of all rows where they are asked for.

        Inputs are tokens [rows] or their embeddings [rows, hidden], positions are [rows]. Features are the states
        after `taps` layers each, then the last ones. Not to `say`: no logits, and features of the wanted rows at least.
        """
        rows = len(inputs)
        hidden = self.hidden[:rows]
        hidden.copy_(inputs if inputs.is_floating_point() else F.embedding(inputs, self.base.embed_tokens.weight))
        self._gate(gate, rows)
        with Exact():
            if gate is not None and self.adapter is not None:
                hidden[gate.rows] = self.adapter.embed(gate, hidden[gate.rows]).to(self.dtype)
            angles = self._angles(positions)
        attentions, heard = self._attentions(call), {}
        for number, ((qkv, o, gate_up, down), turns) in enumerate(self.layers):
            if features and number in taps:
                heard[number] = hidden.clone()
            qkv.rows = o.rows = gate_up.rows = down.rows = rows
            failed = self.linear(ctypes.byref(qkv))
            for turn in turns:
                turn.rows, turn.cos, turn.sin = rows, angles[0].data_ptr(), angles[1].data_ptr()
                self.rotate(ctypes.byref(turn))
            for structs, keys, values, step, value_step in attentions:
                struct = structs[self.windows[number]]
                struct.keys, struct.values = keys + number * step, values + number * value_step
                failed |= self.attend(ctypes.byref(struct))
            for product in (o, gate_up, down):
                failed |= self.linear(ctypes.byref(product))
            if failed:
                raise MemoryError("a call ran out of memory; ask for a shorter text")
        normed = self._normed(hidden if features else hidden[wanted])
        if not say:
            return normed.new_empty(0), normed
        read = normed[wanted] if features else normed
        logits = linear(read, [self.model.lm_head.weight], [self.model.lm_head.bias])[0]
        return logits, torch.cat([*(heard[tap] for tap in taps), normed], -1) if heard else normed

    def _normed(self, x: Tensor) -> Tensor:
        norm, out = self.base.norm, torch.empty_like(x)
        struct = native.Norm(x=x.data_ptr(), weight=norm.weight.data_ptr(), out=out.data_ptr())
        struct.rows, struct.size, struct.epsilon = *x.shape, norm.variance_epsilon
        self.norm(ctypes.byref(struct))
        return out

    def _angles(self, positions: Tensor) -> list[Tensor]:
        """Cosines and sines of the positions' angles, [rows, dim] each: from a table, where they never change."""
        if self.base.rotary_emb.rope_type not in STEADY:
            return self._rotary(positions)
        if (end := int(positions.max()) + 1) > len(self.turns[0]):
            self.turns = self._rotary(torch.arange(max(end, 2 * len(self.turns[0]), TURNS)))
        return [table[positions] for table in self.turns]

    def _rotary(self, positions: Tensor) -> list[Tensor]:
        return [x[0].contiguous() for x in self.base.rotary_emb(self.hidden[None], position_ids=positions[None])]

    def _attentions(self, call: Call) -> list[tuple[dict, int, int, int, int]]:
        """For each text of the call: its structs by window, and where its memory lies."""
        found, start = [], 0
        for part in call.parts:
            part.memory.reserve(call.layers, part.past + part.rows, self.k.transpose(0, 1), self.v.transpose(0, 1))
            keys, values = part.memory.keys, part.memory.values
            assert keys is not None and values is not None
            q, k, v, out = (x[start : start + part.rows] for x in (self.q, self.k, self.v, self.out))
            structs = {
                window: part.struct(window, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), out, self.scale)
                for window in set(self.windows)
            }
            for struct in structs.values():
                struct.capacity = keys.shape[2]
            sizes = keys.stride(0) * keys.element_size(), values.stride(0) * values.element_size()
            found.append((structs, keys.data_ptr(), values.data_ptr(), *sizes))
            start += part.rows
        return found


def _product(
    x: Tensor,
    weights: Sequence[tuple[Any, Tensor]],
    norm: Any = None,
    gate: Tensor | None = None,
    add: Tensor | None = None,
) -> native.Linear:
    struct = native.Linear(x=x.data_ptr(), inputs=weights[0][0].weight.shape[1], count=len(weights))
    for i, (module, out) in enumerate(weights):
        struct.weight[i], struct.out[i], struct.outs[i] = module.weight.data_ptr(), out.data_ptr(), len(module.weight)
        struct.bias[i] = None if module.bias is None else module.bias.data_ptr()
    if norm is not None:
        struct.norm, struct.epsilon = norm.weight.data_ptr(), norm.variance_epsilon
    struct.gate = None if gate is None else gate.data_ptr()
    struct.add = None if add is None else add.data_ptr()
    return struct


def _add_low_rank(struct: native.Linear, paths: Sequence[str], adapter: Adapter | None, keeper: Lean) -> None:
    """Point a struct to the low-rank parts of its weights; the keeper holds their memory."""
    struct.rank = 0
    for i, path in enumerate(paths):
        struct.down[i] = struct.up[i] = None
        if adapter is not None and (part := adapter.part(path)) is not None:
            down, up = (x.detach().to(keeper.dtype).contiguous() for x in (part.down, part.up.T))
            keeper.parts += [down, up]
            struct.down[i], struct.up[i] = down.data_ptr(), up.data_ptr()
            struct.rank, struct.scale = adapter.settings.rank, adapter.settings.scale
