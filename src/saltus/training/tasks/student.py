"""Build small transformers from scratch that write token by token, or a window at once when given uniforms."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, GPT2Model

from saltus.networks.adapters.uniform_embedding import UniformEmbedding
from saltus.networks.draft_models.drafter import MASKED_SCORE
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import TokenOrder, pick_tokens
from saltus.training.data.window_packing import PackedBatch


class Student(nn.Module):
    """GPT-2's layers with a vocabulary of our own, one more token that starts every text, and queries (PTP, §3.1).

    A query's embedding is that of its uniform in the place of a token's; a query given none has one of its own.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        *,
        hidden: int,
        layers: int,
        heads: int,
        embedding: str = "bits",
        seed: int = 0,
    ) -> None:
        super().__init__()
        settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        settings |= {"bos_token_id": None, "eos_token_id": None}
        settings |= {"activation_function": "gelu_pytorch_tanh"}  # GPT-2's own, as one operation
        self.body = GPT2Model(
            GPT2Config(
                vocab_size=vocab_size + 1,
                n_positions=max_length + 1,
                n_embd=hidden,
                n_layer=layers,
                n_head=heads,
                **settings,
            )
        )
        self.auxiliary = UniformEmbedding(hidden, embedding)
        self.none = nn.Parameter(torch.zeros(hidden))
        self.vocab_size = vocab_size
        _initialize(self, layers, seed)

    @property
    def start_token(self) -> int:
        """The token that stands before every text, at position 0."""
        return self.vocab_size

    def prepend_start_token(self, texts: Int[Tensor, "batch length"]) -> Int[Tensor, "batch begun"]:
        """Texts with the starting token before them."""
        return torch.cat([torch.full_like(texts[:, :1], self.start_token), texts], 1)

    def next_token_logits(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length vocab"]:
        """The law after each token, as a causal model's."""
        return self._logits(self.body(input_ids=tokens).last_hidden_state)

    def forward(self, packed: PackedBatch) -> Float[Tensor, "batch windows window vocab"]:
        """The laws of all queries, in one call."""
        return self._logits(packed.queries_by_window(self._hidden_states(packed, None)))

    def forward_cached(self, packed: PackedBatch, cache: DynamicCache) -> Float[Tensor, "batch rows vocab"]:
        """The laws after some rows, the rows before them being in the cache, as these are then."""
        return self._logits(self._hidden_states(packed, cache))

    def generate(
        self, uniforms: Float[Tensor, "batch length"], token_order: TokenOrder = "pick"
    ) -> tuple[Int[Tensor, "batch length"], Float[Tensor, "batch length vocab"]]:
        """Texts token by token, each the pick of its uniform, and the laws they were picked from."""
        batch, length = uniforms.shape
        token = torch.full((batch, 1), self.start_token, device=uniforms.device)
        cache, tokens, distributions = DynamicCache(), [], []
        with torch.no_grad():
            for k in range(length):
                outputs = self.body(input_ids=token, past_key_values=cache, use_cache=True)
                distributions.append(self._logits(outputs.last_hidden_state))
                token = pick_tokens(uniforms[:, k : k + 1], distributions[-1], token_order=token_order)
                tokens.append(token)
        return torch.cat(tokens, 1), torch.cat(distributions, 1)

    def _hidden_states(self, packed: PackedBatch, cache: DynamicCache | None) -> Float[Tensor, "batch rows hidden"]:
        given = self.auxiliary(packed.uniforms.nan_to_num(0.0), torch.ones_like(packed.uniforms))
        given = torch.where(packed.uniforms.isnan()[..., None], self.none, given)
        query = (packed.tokens < 0)[..., None]
        embedded = torch.where(query, given, self.body.wte(packed.tokens.clamp_min(0)))
        return self.body(
            inputs_embeds=embedded,
            position_ids=packed.positions,
            attention_mask=_additive_mask(packed.mask, embedded.dtype),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.body.wte.weight[: self.vocab_size].T


def _additive_mask(
    mask: Bool[Tensor, "batch rows columns"], dtype: torch.dtype
) -> Float[Tensor, "batch 1 rows columns"]:
    return torch.where(mask, 0.0, MASKED_SCORE).to(dtype)[:, None]


def _initialize(student: Student, layers: int, seed: int) -> None:
    """GPT-2's starting values, from the seed alone: 0.02 at its width, less for what is added up."""
    generator, spread = seeded_generator(seed, "weights"), 0.02 * math.sqrt(768 / student.body.config.hidden_size)
    with torch.no_grad():
        for name, weight in student.named_parameters():
            if weight.dim() < 2 or not (name.startswith("body.") or weight.any()):
                continue
            scale = spread / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else spread
            if name.startswith("auxiliary."):
                scale = 1 / math.sqrt(weight.shape[1])
            weight.copy_(torch.from_numpy(generator.normal(0.0, scale, tuple(weight.shape))))
        for name, bias in student.named_parameters():
            if name.startswith("auxiliary.") and bias.dim() == 1:
                bias.zero_()
