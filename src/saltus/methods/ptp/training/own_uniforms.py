"""Find the uniforms under which an adapter itself writes a text: inverse autoregressive training (PTP, Alg. 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from saltus.core.picking import Coupling
from saltus.models.gated_lora import Adapter
from saltus.training.data.packed_forward import PackedMemory, packed_logits
from saltus.training.data.uniform_intervals import sample_uniforms, uniform_intervals
from saltus.training.data.window_dataset import Batch
from saltus.training.data.window_packing import pack_windows, slice_rows, valid_prefix


@torch.no_grad()
def find_own_uniforms(
    model: Any,
    adapter: Adapter,
    batch: Batch,
    generator: np.random.Generator,
    coupling: Coupling = "probability",
    beta: float = 1.0,
) -> tuple[Float[Tensor, "batch windows window"], Bool[Tensor, "batch windows window"]]:
    """u_k in [F_{t_k − 1}, F_{t_k}) of P(t_k | t_<i, u_i … u_{k−1}), and which tokens have one (Alg. 3, lines 4–7).

    Depth after depth, since each distribution depends on the uniforms before it; the context is read once. Windows at
    temperature 0 have no uniforms.
    """
    shape = batch.targets.shape
    uniforms = torch.full(shape, torch.nan, dtype=torch.float64, device=batch.tokens.device)
    valid = torch.ones(shape, dtype=torch.bool, device=batch.tokens.device)
    query_start = adapter.settings.query_start
    packed = pack_windows(batch.tokens, batch.window_starts, uniforms, query_start=query_start)
    memory, windows = PackedMemory(packed.positions), packed.num_windows
    rows = torch.arange(shape[0] * windows, device=batch.tokens.device)
    packed_logits(model, slice_rows(packed, 0, packed.context_length), rows[:1], memory=memory)
    greedy = batch.temperatures == 0
    scale = torch.where(greedy, 1.0, batch.temperatures)[..., None]
    for depth in range(shape[-1]):
        start = packed.context_length + depth * windows
        if depth:  # a query is conditioned on the uniform of the token before its own (C-PTP)
            packed.uniforms[:, start : start + windows] = uniforms[..., depth - 1]
        part = slice_rows(packed, start, start + windows)
        logits = packed_logits(model, part, rows, adapter, batch.temperatures, memory=memory)
        logits = logits.view(shape[0], windows, -1)
        intervals = uniform_intervals(logits / scale.to(logits.dtype), batch.targets[..., depth], coupling=coupling)
        sampled, valid[..., depth] = sample_uniforms(intervals, generator, beta)
        uniforms[..., depth] = torch.where(greedy, torch.nan, sampled)
    return uniforms, valid_prefix(valid | greedy[..., None])
