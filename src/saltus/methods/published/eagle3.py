"""Draft token by token with one layer that reads the target's hidden states and its own (EAGLE-3, Li et al. 2025).

A row holds the embedding of a token and the state before it: of a decided token the fused hidden states of some target
layers, of a draft token the layer's own output at the row before. The drafts of a call are the likeliest chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.kernels.packed_weight import select_rows
from saltus.methods.shared.context_layers import ContextKVCache, unread_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.query_predictions import QueryPredictor, rows_linear
from saltus.methods.shared.timed_outputs import timed_outputs
from saltus.models.cpu import attention
from saltus.models.cpu.attention import AttentionCall, SequenceRows
from saltus.models.cpu.torch_decoder import normed, rotated
from saltus.models.packed_decoder import DecoderConfig, RMSNorm, RotaryEmbedding, check_decoder_sizes

UNREAD_STATES = 1024  # hidden states that are read at once


@dataclass(frozen=True)
class Eagle3Shape:
    """The sizes of an EAGLE-3 head, and which states are normalised."""

    hidden: int  # the target's hidden size
    intermediate: int
    hidden_state_layers: tuple[int, ...]  # the target's layers whose states are inputs
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    norm_before_residual: bool = False  # the residual is the normalised state
    norm_output: bool = False  # the next row reads the normalised output

    reads_uniforms: ClassVar[bool] = False  # queries have no uniforms

    def __post_init__(self) -> None:
        check_decoder_sizes(
            self.heads, self.kv_heads, hidden=self.hidden, intermediate=self.intermediate,
            head_dim=self.head_dim,
        )  # fmt: skip


class Eagle3Model(nn.Module):
    """The weights of an EAGLE-3 head by their published names, empty ("meta") at first."""

    tokens: Tensor  # [draft] ascending ids of the tokens that are drafted
    correction: None = None

    def __init__(self, shape: Eagle3Shape, tokens: Int[Tensor, "draft"], embeddings: Tensor, lm_head: Tensor) -> None:
        super().__init__()
        self.shape, hidden, epsilon = shape, shape.hidden, shape.norm_epsilon
        with torch.device("meta"):
            self.fc = nn.Linear(len(shape.hidden_state_layers) * hidden, hidden, bias=False)
            layer: Any = nn.Module()
            attend: Any = nn.Module()
            layer.self_attn, layer.mlp = attend, nn.Module()
            for name, size in (("q_proj", shape.heads), ("k_proj", shape.kv_heads), ("v_proj", shape.kv_heads)):
                setattr(layer.self_attn, name, nn.Linear(2 * hidden, size * shape.head_dim, bias=False))
            layer.self_attn.o_proj = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
            layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(hidden, shape.intermediate, bias=False) for _ in "gu")
            layer.mlp.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
            layer.input_layernorm, layer.hidden_norm, layer.post_attention_layernorm, self.norm = (
                RMSNorm(hidden, epsilon) for _ in range(4)
            )
        attend.layer_idx = 0
        self.layers = nn.ModuleList([layer])
        self.head = [nn.Linear(1, 1, bias=False)]  # in a list, as the embeddings: not a submodule
        self.head[0].weight = lm_head if isinstance(lm_head, nn.Parameter) else nn.Parameter(lm_head, False)
        self.register_buffer("tokens", tokens, persistent=False)
        self.embeddings = [embeddings]
        self.config = DecoderConfig(
            num_hidden_layers=1, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, hidden_size=hidden,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )  # fmt: skip
        self.rotary = RotaryEmbedding(self.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def lm_head(self) -> nn.Linear:
        """Over the drafted tokens."""
        return self.head[0]


@dataclass
class Eagle3Network:
    """An EAGLE-3 head as a network; its inputs carry the target's hidden states of the newly decided tokens."""

    model: Eagle3Model
    target: Any  # the network whose hidden states it reads
    max_unread: int = UNREAD_STATES

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        self.predictor = QueryPredictor(self.model)
        self.layer: Any = self.model.layers[0]

    def new_kv_cache(self) -> ContextKVCache:
        return ContextKVCache()

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens: of each query, given the likeliest tokens before it; row 0 repeats the first.

        Queries cost a pass of one row each.
        """
        return timed_outputs(lambda: self._forward(batch, kv_caches), self.device)

    def _forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        with BatchInvariantMode() if self.device.type == "cpu" else nullcontext():
            return self._run(batch, kv_caches)

    def _run(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        layers, read_layers = self.target.hidden_state_layers, self.model.shape.hidden_state_layers
        states = [unread_states(each, cache, layers, read_layers) for each, cache in zip(batch, kv_caches, strict=True)]
        counts = [len(each) for each in states]
        decided = [inputs.canvas.decided_prefix for inputs in batch]
        ends = [len(text) - cache.first_position for text, cache in zip(decided, kv_caches, strict=True)]
        tokens = np.concatenate([text[-count:] for text, count in zip(decided, counts, strict=True)])
        fused = rows_linear(self.model.fc, torch.cat(states).to(self.model.fc.weight.dtype))
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        hidden = self._rows(torch.from_numpy(tokens), fused, kv_caches, starts, counts)
        last = hidden[torch.tensor(counts).cumsum(0).to(self.device) - 1]
        drafts = self._chains(last, [len(inputs.uniforms) for inputs in batch], kv_caches, ends)
        outputs, num_rows = [], sum(counts) + sum(max(len(inputs.uniforms) - 1, 0) for inputs in batch)
        for inputs, cache, count, rows in zip(batch, kv_caches, counts, drafts, strict=True):
            cache.tokens = inputs.canvas.decided_prefix[cache.first_position :].copy()
            kept = [rows[0], *rows[: len(inputs.uniforms)]]
            logits, states_of_rows = (torch.stack(part) for part in zip(*kept, strict=True))
            predictions = self.predictor(logits[1:], states_of_rows[1:])
            outputs.append(
                DraftOutputs(logits, states_of_rows, 0.0, count, num_rows, self.model.tokens, predictions=predictions)
            )  # fmt: skip
        return outputs

    def _chains(
        self, last: Tensor, queries: Sequence[int], kv_caches: Sequence[ContextKVCache], ends: Sequence[int]
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """For each text the logits and normalised states of its queries, of one at least.

        `last` holds the outputs before the first query, and `ends` the numbers of context positions.
        """
        model, active = self.model, list(range(len(queries)))
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
        while True:
            normalised = normed(model.norm, last)
            logits = rows_linear(model.lm_head, normalised)
            for place, number in enumerate(active):
                found[number].append((logits[place], normalised[place]))
            kept = [place for place, number in enumerate(active) if len(found[number]) < queries[number]]
            if not kept:
                return found
            active = [active[place] for place in kept]
            tokens = model.tokens[logits[kept].float().nan_to_num().argmax(-1)]
            before = (normalised if model.shape.norm_output else last)[kept]
            starts = [ends[number] + len(found[number]) - 1 for number in active]
            last = self._rows(tokens, before, [kv_caches[number] for number in active], starts, [1] * len(active))

    def _rows(
        self,
        tokens: Int[Tensor, "rows"],
        hidden: Float[Tensor, "rows hidden"],
        kv_caches: Sequence[ContextKVCache],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Float[Tensor, "rows hidden"]:
        """The layer over new rows of texts, `counts` of them from the position `starts` on: outputs before the norm."""
        model, layer = self.model, self.layer
        attend = layer.self_attn
        places = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        call = AttentionCall(
            [
                SequenceRows(cache.kv_cache, start, rows, np.tri(len(rows), dtype=np.uint8))
                for cache, start, rows in zip(kv_caches, starts, places, strict=True)
            ],
            1,
        )
        cos, sin = (x[0].to(self.device) for x in model.rotary(hidden, torch.from_numpy(np.concatenate(places))[None]))
        embedded = select_rows(model.embeddings[0], tokens.to(self.device)).to(hidden.dtype)
        state = normed(layer.hidden_norm, hidden)
        residual = state if model.shape.norm_before_residual else hidden
        x = torch.cat([normed(layer.input_layernorm, embedded), state], -1)
        q, k, v = (
            rows_linear(project, x).unflatten(-1, (-1, model.shape.head_dim)).transpose(0, 1)[None]
            for project in (attend.q_proj, attend.k_proj, attend.v_proj)
        )
        with attention.attention_context(call):
            scale = model.shape.head_dim**-0.5
            out, _ = attention.attend(attend, rotated(q, cos, sin), rotated(k, cos, sin), v, scaling=scale)
        residual = residual + rows_linear(attend.o_proj, out[0].flatten(1))
        x, mlp = normed(layer.post_attention_layernorm, residual), layer.mlp
        return residual + rows_linear(
            mlp.down_proj, F.silu(rows_linear(mlp.gate_proj, x)) * rows_linear(mlp.up_proj, x)
        )
