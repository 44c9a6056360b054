"""Compute parts of a decoder layer over the rows of several texts, in torch: a row does not depend on the others."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from saltus.methods.shared.query_predictions import rows_linear
from saltus.models.attention_span import AttentionSpan
from saltus.models.cpu import attention
from saltus.models.cpu.attention import AttentionCall
from saltus.models.cpu.torch_decoder import normed, rotated


def attend_rows(
    module: Any,
    x: Float[Tensor, "rows inputs"],
    angles: tuple[Float[Tensor, "rows dim"], Float[Tensor, "rows dim"]],
    call: AttentionCall,
    span: AttentionSpan = None,
) -> Float[Tensor, "rows hidden"]:
    """Attention by the modules of Llama, or those of Qwen3 with norms of queries and keys; writes to the KV caches.

    `angles` are cosines and sines.
    """
    q, k, v = (
        rows_linear(project, x).unflatten(-1, (-1, module.head_dim))
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        q, k = normed(module.q_norm, q), normed(module.k_norm, k)
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    with attention.attention_context(call):
        out, _ = attention.attend(
            module, rotated(q, *angles), rotated(k, *angles), v, scaling=module.head_dim**-0.5, sliding_window=span
        )
    return rows_linear(module.o_proj, out[0].flatten(1))


def gated_mlp(mlp: Any, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
    """The gated feed-forward layer of Llama."""
    return rows_linear(mlp.down_proj, F.silu(rows_linear(mlp.gate_proj, x)) * rows_linear(mlp.up_proj, x))
