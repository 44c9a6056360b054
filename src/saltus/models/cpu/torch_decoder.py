"""Run a decoder of Saltus's own classes by torch, where there are no compiled kernels for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.kernels.packed_weight import select_rows
from saltus.models.cpu import attention
from saltus.models.cpu.attention import AttentionCall
from saltus.models.gated_lora import Adapter, Gate
from saltus.models.rotary_angles import angles_of_positions


class TorchDecoder:
    """The layers of a PackedDecoder of Llama's type, without windows and norms of heads, called as a NativeDecoder is.

    Rows round alike, unless shapes are free.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.base, self.device = model, model.model, model.device

    def attach_adapter(self, adapter: Adapter | None) -> None:
        """Adapters are for kernels and for models of Transformers."""
        assert adapter is None

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        call: AttentionCall,
        logit_rows: Tensor,
        output_hidden_states: bool = False,
        gate: Gate | None = None,
        hidden_state_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """The logits of `logit_rows`, and hidden states: of all rows with `output_hidden_states`."""
        assert gate is None
        inputs, logit_rows = inputs.to(self.device), logit_rows.to(self.device)
        exact = BatchInvariantMode() if call.batch_invariant and self.device.type == "cpu" else nullcontext()
        with attention.attention_context(call), exact:
            hidden, collected = select_rows(self.base.embed_tokens.weight, inputs), []
            cos, sin = angles_of_positions(self.base.rotary_emb, hidden[None], positions[None])
            angles = cos[0].to(self.device), sin[0].to(self.device)
            for number, layer in enumerate(self.base.layers):
                if number in hidden_state_layers:
                    collected.append(hidden)
                hidden = hidden + self._attention(layer.self_attn, normed(layer.input_layernorm, hidden), angles)
                x, mlp = normed(layer.post_attention_layernorm, hidden), layer.mlp
                hidden = hidden + mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
            if len(self.base.layers) in hidden_state_layers:
                collected.append(hidden)
            last = normed(self.base.norm, hidden)
            logits = self.model.lm_head(last[logit_rows])
        return logits, torch.cat([*collected, last], -1) if output_hidden_states else last[logit_rows]

    @staticmethod
    def _attention(layer: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1)[None]
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        q, k = rotated(q, *angles), rotated(k, *angles)
        out, _ = attention.attend(layer, q, k, v, scaling=layer.scaling)
        return layer.o_proj(out[0].flatten(1))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embeddings of heads (Su et al. 2021)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def normed(norm: Any, x: Tensor) -> Tensor:
    """RMS norm by the weight of a module, in float32 (Zhang & Sennrich 2019)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * wide.to(x.dtype)
