"""Draft a block of tokens in one pass that fills masks, from the target's hidden states (DFlash, Chen et al. 2026).

One projection fuses the hidden states of some target layers at each position. The result is no row of the network: the
key and value projections of every layer read it directly. The rows are a block: the last decided token and a mask for
each token to draft. They see all context positions and each other, in both directions. The layers are those of Qwen3,
and the target's own embeddings and unembedding, perhaps restricted to frequent tokens, are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.kernels import native
from saltus.kernels.packed_weight import select_rows
from saltus.methods.shared.hidden_state_correction import TokenCorrectionModel
from saltus.methods.shared.rotary import rotary_embedding
from saltus.models.cpu.torch_decoder import normed, rotated
from saltus.models.packed_decoder import DecoderConfig, PackedDecoder, RMSNorm, check_decoder_sizes

DFLASH = "dflash"  # the network of such a drafter, as in saltus.json and in recipes


@dataclass(frozen=True)
class DFlashShape:
    """The sizes of such a drafter, as in saltus.json."""

    hidden: int  # the target's hidden size
    intermediate: int
    hidden_state_layers: tuple[int, ...]  # the target's layers whose states are inputs
    mask_token: int  # whose embedding a query starts with
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    window: int = 7  # masks of a block
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    correction: int = 0  # width of the correction by the tokens before each draft, see TokenCorrectionModel; 0: none
    network: str = DFLASH
    rope: Mapping[str, Any] | None = None  # rotary embeddings of another type, as Transformers' `rope_parameters`
    max_positions: int = 1 << 20
    spans: tuple[int | None, ...] = ()  # sliding windows of the layers; None, and without this: the whole text
    causal: bool = False  # a row sees no later row of the block
    causal_windows: bool = False  # the same in layers with a sliding window
    from_anchor: bool = False  # the last token's row predicts the first draft, so there is a mask less
    sinks: bool = False  # each head has a score that takes weight and has no value, by compiled kernels alone

    reads_uniforms: ClassVar[bool] = False  # queries have no uniforms

    def __post_init__(self) -> None:
        check_decoder_sizes(
            self.heads, self.kv_heads, hidden=self.hidden, intermediate=self.intermediate,
            layers=self.layers, window=self.window, head_dim=self.head_dim,
        )  # fmt: skip

    @property
    def masks(self) -> int:
        """Masks of a block."""
        return self.window - self.from_anchor

    @property
    def layer_spans(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: it sees the whole text."""
        return self.spans or (None,) * self.layers

    @property
    def decoder_config(self) -> dict[str, Any]:
        """The fields of a Qwen3 model's config.json."""
        window = max((span for span in self.spans if span), default=None)
        return {
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_epsilon, "hidden_act": "silu", "attention_bias": False,
            **({"attention_sinks": True} if self.sinks else {}),
            "rope_parameters": dict(self.rope or {"rope_type": "default", "rope_theta": self.rope_theta}),
            "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
            "layer_types": ["full_attention" if span is None else "sliding_attention" for span in self.layer_spans],
            "sliding_window": window, "use_sliding_window": window is not None,
        }  # fmt: skip


class DFlashModel(nn.Module):
    """The layers of such a drafter. The target's embeddings are shared and not trained.

    Without `trainable`, where there are kernels, the layers' weights are empty ("meta"), and only `DFlashNetwork` can
    run them, by kernels.
    """

    tokens: Tensor  # [draft] ids of the target's vocabulary that are drafted
    mask: Tensor  # [hidden] the input of a query
    state_scale: Tensor  # [states] factors of the hidden states in training; 1 in files

    def __init__(
        self,
        shape: DFlashShape,
        tokens: Int[Tensor, "draft"],
        embeddings: Tensor,
        unembedding: Tensor,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.shape, tokens = shape, tokens.to(unembedding.device)
        on_kernels = not trainable and native.kernel("linear", unembedding.dtype, unembedding.device) is not None
        config = shape.decoder_config | {"vocab_size": 1, "max_position_embeddings": shape.max_positions}
        self.decoder: Any = (
            PackedDecoder(DecoderConfig(model_type="qwen3", **config), lambda: _qwen3(config))
            if on_kernels
            else _qwen3(config)
        )
        if on_kernels:
            self.decoder.model.rotary_emb = rotary_embedding(self.decoder.config)
        unread = torch.zeros(1, shape.hidden, dtype=unembedding.dtype, device=unembedding.device)
        self.decoder.model.embed_tokens.weight = nn.Parameter(unread, requires_grad=False)  # inputs are embeddings
        self.decoder.lm_head = nn.Linear(1, 1, bias=False)  # small, since its weight is given
        whole = len(tokens) == len(unembedding) and not trainable  # the target's own, and not a copy
        weight = unembedding if whole else select_rows(unembedding, tokens).clone()
        self.decoder.lm_head.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, False)
        self.fc = nn.Linear(len(shape.hidden_state_layers) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_epsilon)
        self.hidden_norm.weight = nn.Parameter(torch.ones(shape.hidden))
        self.correction = TokenCorrectionModel(shape.hidden, shape.correction) if shape.correction else None
        self.register_buffer("tokens", tokens, persistent=False)
        mask = select_rows(embeddings, torch.tensor([shape.mask_token], device=embeddings.device))[0]
        self.register_buffer("mask", mask.clone(), persistent=False)
        self.register_buffer("state_scale", torch.ones(self.fc.in_features, device=tokens.device), persistent=False)
        self.embeddings = [embeddings]  # in a list: neither a parameter nor a buffer of this module

    @property
    def lm_head(self) -> nn.Linear:
        """The target's own, perhaps restricted to the drafted tokens."""
        return self.decoder.lm_head

    @property
    def matrices(self) -> list[Tensor]:
        """The weight matrices between hidden states, which some optimizers (Muon) treat apart."""
        layers = [weight for weight in self.decoder.model.layers.parameters() if weight.dim() == 2]
        return [self.fc.weight, *layers, *(self.correction.parameters() if self.correction else ())]

    def own_modules(self) -> nn.ModuleList:
        """The modules whose weights are not shared with the target."""
        head = () if len(self.tokens) == len(self.embeddings[0]) else (self.lm_head,)
        correction = () if self.correction is None else (self.correction,)
        return nn.ModuleList([self.fc, self.decoder.model, *head, *correction])

    def saved_weights(self) -> dict[str, Tensor]:
        """The weights for files, with the factors of the hidden states in them."""
        return self.state_dict() | {"fc.weight": self.fc.weight * self.state_scale}

    def trained_weights(self, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights that `saved_weights` gave, without this module's factors."""
        return saved | {"fc.weight": saved["fc.weight"] / self.state_scale}

    def context_inputs(self, hidden_states: Float[Tensor, "*slots states"]) -> Float[Tensor, "*slots hidden"]:
        """What the layers' key and value projections read at context positions."""
        return normed(self.hidden_norm, self.fc(hidden_states.to(self.fc.weight.dtype) * self.state_scale))

    def block_inputs(self, last_tokens: Int[Tensor, "*blocks"]) -> Float[Tensor, "*blocks rows hidden"]:
        """The rows of blocks: the last decided token, then the masks."""
        embedded = select_rows(self.embeddings[0], last_tokens).to(self.mask.dtype)[..., None, :]
        masks = self.mask.expand(*embedded.shape[:-2], self.shape.masks, -1)
        return torch.cat([embedded, masks], -2)

    def forward(
        self,
        context: Float[Tensor, "batch slots hidden"],
        rows: Float[Tensor, "batch rows hidden"],
        positions: Int[Tensor, "batch columns"],
        attention_mask: Bool[Tensor, "batch rows columns"],
    ) -> Float[Tensor, "batch rows hidden"]:
        """Last hidden states of rows, for training. Columns are the context positions and then the rows."""
        base, hidden = self.decoder.model, rows.to(self.fc.weight.dtype)
        angles = [each[:, None] for each in base.rotary_emb(hidden, position_ids=positions)]
        own_angles = [each[:, :, context.shape[1] :] for each in angles]
        for layer in base.layers:
            attention, x = layer.self_attn, normed(layer.input_layernorm, hidden)
            read = torch.cat([context.to(x.dtype), x], 1)
            q, k, v = (
                project(each).unflatten(-1, (-1, self.shape.head_dim))
                for project, each in ((attention.q_proj, x), (attention.k_proj, read), (attention.v_proj, read))
            )
            q = rotated(normed(attention.q_norm, q).transpose(1, 2), *own_angles)
            k = rotated(normed(attention.k_norm, k).transpose(1, 2), *angles)
            v, mask = v.transpose(1, 2), attention_mask[:, None]
            out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), mask, enable_gqa=True)
            hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(normed(layer.post_attention_layernorm, hidden))
        return normed(base.norm, hidden)


def _qwen3(config: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM  # seconds to import

    return Qwen3ForCausalLM(Qwen3Config(**config))
