"""Draft a block of dependent tokens in one pass of a few layers, from the target's hidden states and the uniforms.

A context position holds the target's hidden states before a token, fused with the embedding of that token. After the
context positions stand queries, one for each position to draft. Each starts as a copy of the last context position
plus the embedding of the uniform that will pick its token (PTP, Eq. 5). The target's own unembedding, restricted to
frequent tokens, gives the logits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels import native
from saltus.methods.ptp.gpu_draft_pass import GPUDraftPass
from saltus.methods.ptp.native_draft_pass import NativeDraftPass
from saltus.methods.shared.context_layers import MASKED_SCORE, ContextLayers
from saltus.methods.shared.context_rows import ContextKVCache, ContextRows, DraftRows, unread_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.hidden_state_correction import TokenCorrectionModel, rms_normalized
from saltus.methods.shared.query_predictions import QueryPredictor, rows_linear
from saltus.methods.shared.timed_outputs import timed_outputs
from saltus.models.cuda.host_copies import to_device
from saltus.models.packed_decoder import DecoderConfig, PackedDecoder, check_decoder_sizes
from saltus.models.uniform_embedding import UniformEmbedding

MAX_QUERY_VECTORS = 64  # that a network keeps: one for each temperature and number of queries


@dataclass(frozen=True)
class DrafterShape:
    """The sizes of a drafter, as in saltus.json."""

    hidden: int  # the target's hidden size
    intermediate: int
    hidden_state_layers: tuple[int, ...] = ()  # the target's layers whose states are inputs, besides the last
    layers: int = 2
    heads: int = 9
    kv_heads: int = 3
    window: int = 6  # queries of a pass, at most
    embedding: str = "bits"  # of uniforms, see UniformEmbedding
    embeds_temperature: bool = True  # the temperature is embedded
    reads_uniforms: bool = True  # False: queries have no uniforms, so predictions are independent
    rope_theta: float = 10000.0
    correction: int = 0  # width of the correction by the tokens before each draft, see TokenCorrectionModel; 0: none

    def __post_init__(self) -> None:
        check_decoder_sizes(
            self.heads, self.kv_heads, hidden=self.hidden, intermediate=self.intermediate,
            layers=self.layers, window=self.window,
        )  # fmt: skip


class DraftModel(nn.Module):
    """The layers and embeddings of a drafter. The target's embeddings are shared and not trained.

    Without `trainable` the layers' weights are empty ("meta"), and only `DraftNetwork` can run them, by kernels:
    Transformers' classes, which take seconds to import, are then not needed.
    """

    tokens: Tensor  # [draft] ids of the target's vocabulary that are drafted

    def __init__(
        self,
        shape: DrafterShape,
        tokens: Int[Tensor, "draft"],
        embeddings: Tensor,
        unembedding: Tensor,
        trainable: bool = True,
    ) -> None:
        super().__init__()
        self.shape = shape
        config = {
            "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": 1,
            "head_dim": shape.hidden // shape.heads, "rms_norm_eps": 1e-5, "max_position_embeddings": 1 << 20,
            "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "attention_bias": False,
            "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        }  # fmt: skip
        self.llama: Any = (
            _llama(config)
            if trainable
            else PackedDecoder(DecoderConfig(model_type="llama", **config), lambda: _llama(config))
        )
        unread = torch.zeros(1, shape.hidden, dtype=unembedding.dtype, device=unembedding.device)
        self.llama.model.embed_tokens.weight = nn.Parameter(unread, requires_grad=False)  # inputs are embeddings
        self.llama.lm_head = nn.Linear(1, 1, bias=False)  # small, since its weight is given
        self.llama.lm_head.weight = nn.Parameter(unembedding[tokens].clone(), requires_grad=False)
        self.fuse = nn.Linear((len(shape.hidden_state_layers) + 2) * shape.hidden, shape.hidden, bias=False)
        self.auxiliary = UniformEmbedding(shape.hidden, shape.embedding, shape.embeds_temperature)
        self.query = nn.Parameter(torch.randn(shape.window, shape.hidden) * 0.02)
        self.correction = TokenCorrectionModel(shape.hidden, shape.correction) if shape.correction else None
        self.register_buffer("tokens", tokens, persistent=False)
        self.embeddings = [embeddings]  # in a list: neither a parameter nor a buffer of this module

    @property
    def lm_head(self) -> nn.Linear:
        """The target's own, restricted to the drafted tokens."""
        return self.llama.lm_head

    def saved_weights(self) -> dict[str, Tensor]:
        """The weights for files."""
        return self.state_dict()

    @property
    def matrices(self) -> list[Tensor]:
        """The weight matrices between hidden states, which some optimizers (Muon) treat apart."""
        layers = [weight for weight in self.llama.model.layers.parameters() if weight.dim() == 2]
        return [self.fuse.weight, *layers, *(self.correction.parameters() if self.correction else ())]

    @property
    def products(self) -> list[nn.Module]:
        """The linear layers of a pass."""
        layers = [module for module in self.llama.model.layers.modules() if isinstance(module, nn.Linear)]
        return [self.fuse, *layers, self.lm_head, *([self.correction.state] if self.correction else [])]

    def context_inputs(
        self, hidden_states: Float[Tensor, "*slots states"], tokens: Int[Tensor, "*context_inputs"]
    ) -> Float[Tensor, "*slots hidden"]:
        """The layers' inputs at context positions."""
        return self.fuse(self.context_features(hidden_states, tokens))

    def context_features(
        self, hidden_states: Float[Tensor, "*slots states"], tokens: Int[Tensor, "*context_inputs"]
    ) -> Float[Tensor, "*slots features"]:
        """What `fuse` reads: the normalised hidden states before each token, and the token's embedding."""
        dtype = self.fuse.weight.dtype
        states = hidden_states.to(dtype).unflatten(-1, (-1, self.shape.hidden))
        embedded = nn.functional.embedding(tokens, self.embeddings[0]).to(dtype)[..., None, :]
        return rms_normalized(torch.cat([states, embedded], -2)).flatten(-2)

    def query_inputs(
        self,
        last_context_input: Float[Tensor, "*queries hidden"],
        uniforms: Float[Tensor, "*query_inputs"],
        temperature: Float[Tensor, "*query_inputs"],
        depths: Int[Tensor, "*query_inputs"],
    ) -> Float[Tensor, "*queries hidden"]:
        """The layers' inputs at queries: the last context input plus uniform and depth; NaN is no uniform."""
        uniforms = uniforms if self.shape.reads_uniforms else torch.full_like(uniforms, torch.nan)
        return last_context_input + (self.query[depths] + self.auxiliary(uniforms, temperature)).to(
            last_context_input.dtype
        )

    def forward(self, inputs: Float[Tensor, "batch rows hidden"], positions: Int[Tensor, "batch rows"],
                attention_mask: Bool[Tensor, "batch rows rows"]) -> Float[Tensor, "batch rows hidden"]:  # fmt: skip
        """Last hidden states, for training; `lm_head` reads them."""
        mask = torch.zeros_like(attention_mask, dtype=inputs.dtype).masked_fill(~attention_mask, MASKED_SCORE)[:, None]
        return self.llama.model(inputs_embeds=inputs, position_ids=positions, attention_mask=mask).last_hidden_state


def _llama(config: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds to import

    return LlamaForCausalLM(LlamaConfig(**config))


@dataclass
class DraftNetwork:
    """A drafter as a network; its inputs carry the target's hidden states of the newly decided tokens."""

    model: DraftModel
    target: Any  # the network whose hidden states it reads

    def __post_init__(self) -> None:
        self.device = self.model.tokens.device
        self.context_layers = ContextLayers(self.model.llama)
        self.predictor = QueryPredictor(self.model)
        self.correction = self.predictor.correction
        self.query_vectors: dict[tuple[int, float], Tensor] = {}  # by number of queries and temperature
        self.whole_pass: NativeDraftPass | GPUDraftPass | None = None
        if NativeDraftPass.supports(self.model, self.context_layers):
            self.whole_pass = NativeDraftPass(self.model, self.context_layers)
        elif GPUDraftPass.supports(self.model):
            self.whole_pass = GPUDraftPass(self.model)

    def _query_vectors(self, uniforms: Sequence[float], temperature: float) -> Float[Tensor, "queries hidden"]:
        """What is added to the last context input of each query; without uniforms always the same."""
        key = len(uniforms), temperature
        constant = not self.model.shape.reads_uniforms or all(map(math.isnan, uniforms))
        if constant and key in self.query_vectors:
            return self.query_vectors[key]
        with torch.inference_mode():
            u = to_device(np.array(uniforms, dtype=np.float64), self.device)
            zeros = torch.zeros(len(u), self.model.shape.hidden, dtype=self.model.query.dtype, device=self.device)
            depths = torch.arange(len(u), device=self.device)
            vectors = self.model.query_inputs(zeros, u, torch.full_like(u, temperature), depths)
            vectors = vectors.to(self.model.fuse.weight.dtype)
        if constant:
            if len(self.query_vectors) >= MAX_QUERY_VECTORS:
                self.query_vectors.clear()
            self.query_vectors[key] = vectors
        return vectors

    def new_kv_cache(self) -> ContextKVCache:
        whole_pass = self.whole_pass
        return ContextKVCache(whole_pass.new_kv_cache) if isinstance(whole_pass, GPUDraftPass) else ContextKVCache()

    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache]) -> list[ForwardOutputs]:
        """Logits over the drafted tokens after the decided text, and of each query.

        Queries beyond the window of training get no logits.
        """
        if len(batch) == 1 and isinstance(self.whole_pass, NativeDraftPass):
            started = time.perf_counter()
            native.share_threads()
            return self._forward(batch, kv_caches, started)
        with torch.inference_mode():
            return timed_outputs(lambda: self._forward(batch, kv_caches), self.device)

    def _forward(
        self, batch: Sequence[ForwardInputs], kv_caches: Sequence[ContextKVCache], started: float | None = None
    ) -> list[ForwardOutputs]:
        """The rows of all texts in one pass; their drafts are predicted one after another."""
        pairs = list(zip(batch, kv_caches, strict=True))
        texts = [self._rows(*pair) for pair in pairs]
        if self.whole_pass is not None:
            drafted = self.whole_pass(texts)
            by_text = [(rows.logits, rows.hidden_states) for rows in drafted]
            predictions = [self.predictor.of_likely_tokens(rows.likely[1:], rows.projected[1:]) for rows in drafted]
        else:
            by_text = self._run(texts)
            predictions = self.predictor.of_texts([(logits[1:], states[1:]) for logits, states in by_text])
        outputs, num_rows = [], sum(text.num_rows for text in texts)
        seconds = 0.0 if started is None else time.perf_counter() - started
        for (inputs, kv_cache), text, (logits, states), predicted in zip(
            pairs, texts, by_text, predictions, strict=True
        ):
            kv_cache.tokens = inputs.canvas.decided_prefix[kv_cache.first_position :].copy()
            outputs.append(
                DraftOutputs(
                    logits, states, seconds, len(text.states), num_rows, self.model.tokens, predictions=predicted
                )
            )
        return outputs

    def _rows(self, inputs: ForwardInputs, kv_cache: ContextKVCache) -> DraftRows:
        """What is new in a text, and its queries."""
        decided, layers = inputs.canvas.decided_prefix, (*self.model.shape.hidden_state_layers, None)
        if isinstance(self.whole_pass, GPUDraftPass):
            self.whole_pass.take_over(kv_cache)
        states = unread_states(inputs, kv_cache, self.target, layers)
        queries = self._query_vectors(inputs.uniforms[: self.model.shape.window], inputs.temperature)
        if states.dtype is not queries.dtype:
            states = states.to(queries.dtype)
        past = len(decided) - len(states) - kv_cache.first_position
        return DraftRows(states, decided[-len(states) :], queries, kv_cache, past)

    def _run(self, texts: Sequence[DraftRows]) -> list[tuple[Tensor, Tensor]]:
        """The logits and last hidden states of each text's last context position and queries, piece by piece."""
        features = [self.model.context_features(text.states, to_device(text.tokens, self.device)) for text in texts]
        contexts = rows_linear(self.model.fuse, torch.cat(features)).split([len(text.states) for text in texts])
        rows = []
        for text, context in zip(texts, contexts, strict=True):
            inputs = torch.cat([context, context[-1:] + text.queries])
            rows.append(ContextRows(inputs, text.kv_cache, text.past_length, len(text.queries) + 1))
        return self.context_layers.run_together(rows)
