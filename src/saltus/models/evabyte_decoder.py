"""Hold the weights of an EvaByte model by their published names; its layers are Llama's, its attention is EVA."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from saltus.models.cpu.eva_kv_cache import ChunkSummaries
from saltus.models.packed_decoder import DecoderConfig, PackedDecoder, UninitializedLinear


class EvaByteDecoder(PackedDecoder):
    """The modules of an EvaByteForCausalLM, on "meta" at first; `finish` is called once the weights are set.

    A published output layer predicts several bytes: `prediction_heads` is all of it, `lm_head` its first rows, those of
    the next byte. Norms hold what they multiply by, which in a checkpoint may be that minus one.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, _refuse_transformers)
        size = 1, config.num_attention_heads, 1, 1, config.head_dim
        with torch.device("meta"):
            for number, layer in enumerate(self.model.layers):
                layer.self_attn.layer_idx = number
                for name in ("adaptive_mu_k", "adaptive_phi"):
                    setattr(layer.self_attn, name, nn.Parameter(torch.empty(size), requires_grad=False))
            outputs = config.num_pred_heads * config.vocab_size
            self.prediction_heads = UninitializedLinear(config.hidden_size, outputs, bias=False)

    def finish(self) -> None:
        """Make the output layer of the next byte from `prediction_heads`, and add what norms leave out."""
        every, vocab = self.prediction_heads.weight, self.config.vocab_size
        self.lm_head.weight = nn.Parameter(every.detach()[:vocab], requires_grad=False)
        if self.config.norm_add_unit_offset:
            for norm in self._norms():
                norm.weight = nn.Parameter(1 + norm.weight.detach(), requires_grad=False)
            self.config.norm_add_unit_offset = False

    def _norms(self) -> list[Any]:
        layers = [(layer.input_layernorm, layer.post_attention_layernorm) for layer in self.model.layers]
        return [*(norm for pair in layers for norm in pair), self.model.norm]

    def chunk_summaries(self) -> ChunkSummaries:
        """How its KV caches summarise the chunks of a window."""
        config = self.config
        return ChunkSummaries(
            config.window_size, config.chunk_size, self._directions("adaptive_mu_k"), self._directions("adaptive_phi")
        )

    def _directions(self, name: str) -> Float[Tensor, "layers heads size"]:
        vectors = [getattr(layer.self_attn, name).detach().float() for layer in self.model.layers]
        return torch.stack(vectors)[:, 0, :, 0, 0]

    def get_output_embeddings(self) -> nn.Linear:
        """The whole output layer: the rows of the next byte, then those of the bytes after it."""
        return self.prediction_heads

    def tie_weights(self) -> None:
        """Input and output embeddings are separate."""


def _refuse_transformers() -> Any:
    raise ValueError(
        "EvaByte has no class in Transformers, and Saltus runs no code of a checkpoint; use engine.network.model"
    )
