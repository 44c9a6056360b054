"""Draft with Gemma 4's assistants, whose layers have queries alone: they attend to the target's keys and values.

A row holds the embedding of the last token beside the state before it, first the target's and then the assistant's own
output. All drafts of a call stand at the position of the last decided token and see the text before it, so that their
order is in the states alone. The drafts of a call are the likeliest chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.packed_weight import select_rows
from saltus.methods.published.gpu_assistant import GPUAssistant
from saltus.methods.shared.context_rows import select_hidden_states
from saltus.methods.shared.draft_tree import DraftOutputs
from saltus.methods.shared.published_files import CONFIG_FILE, check_weights, read_config, read_weights, refuse
from saltus.methods.shared.query_predictions import QueryPredictor
from saltus.methods.shared.timed_outputs import timed_outputs
from saltus.models.architectures import describe_decoder
from saltus.models.cpu.torch_decoder import rotated
from saltus.models.memory_use import layer_sizes
from saltus.models.packed_decoder import check_layer_count
from saltus.models.protocols import KeepsKeysAndValues, TargetNetwork

TYPES = {"gemma4_assistant", "gemma4_unified_assistant"}
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
UNLIKELY = -1e4  # the logit of a token whose cluster is not looked at


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published assistant of Gemma 4."""
    return config.get("model_type") in TYPES


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> AssistantNetwork:
    """The assistant for this target. Errors: ValueError of one line."""
    runner = getattr(target, "fixed_shape_runner", None)
    readable, assistant = isinstance(target, KeepsKeysAndValues) and target.keeps_keys_and_values, None
    if readable:
        assistant = _load(folder, target.model, target_name)
        readable = runner is None or GPUAssistant.supports(assistant)
    if assistant is None or not readable:
        raise ValueError(
            f"{folder} reads the keys and values of {target_name}, which it can on the CPU and where our kernels run"
            " both on a GPU, and not inside other engines; take another drafter"
        )
    return AssistantNetwork(assistant, target, None if runner is None else GPUAssistant(assistant, runner))


@dataclass(frozen=True)
class AssistantShape:
    """What decoding asks of every drafter's shape."""

    hidden_state_layers: tuple[int, ...] = ()  # the last states alone are read
    reads_uniforms: bool = False


@dataclass(frozen=True, eq=False)
class Assistant:
    """The weights of an assistant by their published names, and what it shares with its target."""

    config: Any  # a Gemma4TextConfig of Transformers
    weights: Mapping[str, Tensor]
    rotary: Any
    layers_of_target: Sequence[int]  # whose keys and values each layer reads
    embeddings: Tensor  # the target's
    embedding_scale: float
    tokens: Int[Tensor, "vocab"]
    clusters: Int[Tensor, "clusters tokens"] | None = None  # token ids; None: all logits are computed
    num_clusters: int = 0  # of a row that are looked at
    shape: AssistantShape = AssistantShape()
    correction: None = None

    def linear(self, name: str, x: Tensor) -> Tensor:
        """A linear layer, in which no row depends on the others."""
        return _linear(x, self.weights[f"{name}.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Gemma 4's norm, in float32."""
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.config.rms_norm_eps).to(x.dtype)

    def inputs(self, tokens: Int[Tensor, "rows"], states: Float[Tensor, "rows hidden"]) -> Tensor:
        """What the first layer reads of tokens and the states before them."""
        return self.linear("pre_projection", torch.cat([self.embedded(tokens), states], -1))

    def embedded(self, tokens: Int[Tensor, "rows"]) -> Float[Tensor, "rows hidden"]:
        """The target's embeddings of tokens."""
        rows = select_rows(self.embeddings, tokens).to(self.weights["pre_projection.weight"].dtype)
        return rows * float(torch.tensor(self.embedding_scale, dtype=rows.dtype))

    def rows(self, x: Float[Tensor, "rows width"], texts: Sequence[_Text]) -> Float[Tensor, "rows width"]:
        """The layers and the norm over one row of each text."""
        for number, kind in enumerate(self.config.layer_types):
            path = f"model.layers.{number}"
            attended = self._attend(number, kind, self.norm(f"{path}.input_layernorm", x), texts)
            x = x + self.norm(f"{path}.post_attention_layernorm", attended)
            inner = self.norm(f"{path}.pre_feedforward_layernorm", x)
            gate = F.gelu(self.linear(f"{path}.mlp.gate_proj", inner), approximate="tanh")
            inner = self.linear(f"{path}.mlp.down_proj", gate * self.linear(f"{path}.mlp.up_proj", inner))
            x = (x + self.norm(f"{path}.post_feedforward_layernorm", inner)) * self.weights[f"{path}.layer_scalar"]
        return self.norm("model.norm", x)

    def _attend(self, number: int, kind: str, x: Tensor, texts: Sequence[_Text]) -> Tensor:
        path, heads = f"model.layers.{number}.self_attn", self.config.num_attention_heads
        q = self.norm(f"{path}.q_norm", self.linear(f"{path}.q_proj", x).unflatten(-1, (heads, -1)))
        places = torch.tensor([[text.position for text in texts]], device=x.device)
        cos, sin = (part[0, :, None] for part in self.rotary(x, places, kind))
        q = rotated(q, cos, sin)
        seen = self.config.sliding_window + 1 if kind == "sliding_attention" else None
        out = []
        for row, text in zip(q, texts, strict=True):
            first = max(text.length - seen, 0) if seen is not None else 0
            pair = text.kv_cache.of_layer(self.layers_of_target[number])
            key, value = (part[None, :, first : text.length].to(x.dtype) for part in pair)
            found = F.scaled_dot_product_attention(row[None, :, None], key, value, scale=1.0, enable_gqa=True)
            out.append(found.flatten())
        return self.linear(f"{path}.o_proj", torch.stack(out))

    def logits(self, x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Of all tokens, or of those of the likeliest clusters; the others are UNLIKELY."""
        return self.logits_by(self.linear, x)

    def logits_by(self, linear: Callable[[str, Tensor], Tensor], x: Float[Tensor, "rows width"]) -> Tensor:
        """The same, with the linear layers of these names computed by `linear`, which may leave out last rows."""
        if self.clusters is None:
            return linear("lm_head", x)
        centroids = linear("masked_embedding.centroids", x)
        tokens = self.clusters[centroids.topk(self.num_clusters, -1).indices].flatten(1)
        logits = x.new_full((len(tokens), len(self.tokens)), UNLIKELY)
        weights = self.weights["lm_head.weight"][tokens]  # [rows, likely, width]
        return logits.scatter_(1, tokens, (weights @ x[: len(tokens), :, None])[..., 0])


@dataclass(frozen=True)
class _Text:
    """The keys and values of a text's decided tokens but the last, which is at `position`."""

    kv_cache: Any  # a KVCache, or pages on a GPU
    length: int
    position: int


@dataclass
class AssistantNetwork:
    """An assistant as a network, which reads the target's KV caches and has none of its own."""

    model: Assistant
    target: Any
    on_gpu: GPUAssistant | None = None  # over the target's pages
    reads_target_kv_cache: bool = field(default=True, init=False)
    max_unread: int = field(default=1, init=False)  # the state before the last decided token
    kv_bytes_per_token: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.predictor = QueryPredictor(self.model)

    def new_kv_cache(self) -> None:
        """None: `forward` gets the target's."""

    @torch.inference_mode()
    def forward(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        """Logits of each query given the likeliest tokens before it; row 0 repeats the first."""
        return timed_outputs(lambda: self._run(batch, kv_caches), self.target.device)

    def _run(self, batch: Sequence[ForwardInputs], kv_caches: Sequence[Any]) -> list[ForwardOutputs]:
        decided = [inputs.canvas.decided_prefix for inputs in batch]
        texts = [
            _Text(cache, self.target.num_tokens_in_cache(cache, tokens), len(tokens) - 1)
            for tokens, cache in zip(decided, kv_caches, strict=True)
        ]
        given = [inputs.hidden_states[-1:] for inputs in batch if inputs.hidden_states is not None]
        last = [select_hidden_states(row, self.target.layers_of(row), (None,)) for row in given]
        states = torch.cat(last).to(self.target.model.dtype)
        tokens, counts = [int(text[-1]) for text in decided], [max(len(inputs.uniforms), 1) for inputs in batch]
        if self.on_gpu is not None:
            chains = self.on_gpu.chains(tokens, states, kv_caches, [text.length for text in texts], counts)
        else:
            chains = self._chains(torch.tensor(tokens, device=states.device), states, texts, counts)
        return [self._outputs(inputs, *chain, sum(counts)) for inputs, chain in zip(batch, chains, strict=True)]

    def _chains(
        self, tokens: Int[Tensor, "texts"], states: Float[Tensor, "texts hidden"], texts: Sequence[_Text],
        counts: Sequence[int],
    ) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
        """For each text the logits and states of its drafts, token after likeliest token."""
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
        active = list(range(len(texts)))
        while active:
            outputs = self.model.rows(self.model.inputs(tokens, states), [texts[number] for number in active])
            logits = self.model.logits(outputs)
            for place, number in enumerate(active):
                found[number].append((logits[place], outputs[place]))
            kept = [place for place, number in enumerate(active) if len(found[number]) < counts[number]]
            active = [active[place] for place in kept]
            tokens = logits[kept].float().nan_to_num().argmax(-1)
            states = self.model.linear("post_projection", outputs[kept])
        chains = [[torch.stack(part) for part in zip(*rows, strict=True)] for rows in found]
        return [(logits, outputs) for logits, outputs in chains]

    def _outputs(self, inputs: ForwardInputs, logits: Tensor, states: Tensor, num_rows: int) -> DraftOutputs:
        queries = len(inputs.uniforms)
        predictions = self.predictor(logits[:queries], states[:queries])
        logits, states = (torch.cat([each[:1], each[:queries]]) for each in (logits, states))
        return DraftOutputs(logits, states, 0.0, 1, num_rows, predictions=predictions)


def _load(folder: Path, target: Any, target_name: str) -> Assistant:
    from transformers import AutoConfig  # seconds to import
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    given, weights = read_config(folder), read_weights(folder)
    check_layer_count((given.get("text_config") or {}).get("num_hidden_layers", 1), weights)
    whole = AutoConfig.for_model(**given)
    config: Any = whole.get_text_config()
    _check_target(folder, whole, target, target_name)
    refuse(
        folder, "an assistant of Gemma 4",
        {
            "biases of attention": config.attention_bias,
            f"the activation {config.hidden_activation}": config.hidden_activation != "gelu_pytorch_tanh",
        },
    )  # fmt: skip
    weights.setdefault("lm_head.weight", weights.get("model.embed_tokens.weight", torch.empty(0)))
    check_weights(folder, weights, _needed(whole), "an assistant of Gemma 4")
    layers = [_layer_of_target(target, kind) for kind in config.layer_types]
    clusters = _clusters(folder, whole, weights.pop(ORDERING)) if whole.use_ordered_embeddings else None
    device = target.device
    weights = {name: weight.to(device, target.dtype).contiguous() for name, weight in weights.items()}
    description = describe_decoder(target)
    return Assistant(
        config, weights, Gemma4TextRotaryEmbedding(config).to(device), layers,
        target.get_input_embeddings().weight.detach(), 1.0 if description is None else description.embedding_scale,
        torch.arange(config.vocab_size, device=device), None if clusters is None else clusters.to(device),
        whole.centroid_intermediate_top_k,
    )  # fmt: skip


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer; on the CPU no row depends on the others."""
    return linear(x, [weight], [None])[0] if x.device.type == "cpu" else F.linear(x, weight)


def _check_target(folder: Path, whole: Any, target: Any, target_name: str) -> None:
    """Raise ValueError for an assistant of other sizes than the target's."""
    config, of_target = whole.get_text_config(), target.config.get_text_config()
    wrong = ""
    if whole.backbone_hidden_size != of_target.hidden_size:
        wrong = f"states of {whole.backbone_hidden_size} numbers, and {target_name} has {of_target.hidden_size}"
    elif config.vocab_size != len(target.get_input_embeddings().weight):
        wrong = f"{config.vocab_size:,} tokens, and {target_name} has {len(target.get_input_embeddings().weight):,}"
    for number, (kind, sizes) in enumerate(zip(config.layer_types, layer_sizes(config), strict=True)):
        layer = _layer_of_target(target, kind)
        if layer is None:
            wrong = wrong or f"layers of {kind}, and {target_name} has none"
        elif (own := layer_sizes(of_target)[layer]) != sizes:
            wrong = wrong or f"key heads {_heads(sizes)} in layer {number}, and {target_name} has {_heads(own)}"
    if wrong:
        raise ValueError(f"the drafter in {folder} has {wrong}; take the model that it was trained for")


def _heads(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} × {sizes[1]}"


def _layer_of_target(target: Any, kind: str) -> Any:
    """The last of the target's layers of this kind that has keys of its own; None if there is none."""
    config = target.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return max((number for number, each in enumerate(kinds[:own]) if each == kind), default=None)


def _needed(whole: Any) -> dict[str, Tensor]:
    """The weights of an assistant by name, empty."""
    config = whole.get_text_config()
    width, wide, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width),
        "model.norm.weight": (width,), "pre_projection.weight": (width, 2 * whole.backbone_hidden_size),
        "post_projection.weight": (whole.backbone_hidden_size, width),
    }  # fmt: skip
    for number, (_, dim) in enumerate(layer_sizes(config)):
        path, queries = f"model.layers.{number}", config.num_attention_heads * dim
        around = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        sizes |= {f"{path}.{name}_layernorm.weight": (width,) for name in around}
        sizes |= {f"{path}.mlp.{name}_proj.weight": (wide, width) for name in ("gate", "up")}
        sizes |= {
            f"{path}.mlp.down_proj.weight": (width, wide), f"{path}.layer_scalar": (1,),
            f"{path}.self_attn.q_proj.weight": (queries, width), f"{path}.self_attn.q_norm.weight": (dim,),
            f"{path}.self_attn.o_proj.weight": (width, queries),
        }  # fmt: skip
    if whole.use_ordered_embeddings:
        sizes |= {CENTROIDS: (whole.num_centroids, width), ORDERING: (vocabulary,)}
    return {name: torch.empty(size, device="meta") for name, size in sizes.items()}


def _clusters(folder: Path, whole: Any, ordering: Tensor) -> Int[Tensor, "clusters tokens"]:
    """The tokens of each cluster. Errors: ValueError unless each token is in one, and all have as many."""
    count, used = whole.num_centroids, whole.centroid_intermediate_top_k
    if len(ordering) % count or not 1 <= used <= count:
        raise ValueError(
            f"{folder / CONFIG_FILE}: {len(ordering):,} tokens in {count:,} clusters, of which {used:,} are read;"
            " fetch the drafter again"
        )
    if not torch.equal(ordering.long().sort().values, torch.arange(len(ordering))):
        raise ValueError(f"{folder}: {ORDERING} does not hold each token once; fetch the drafter again")
    return ordering.long().view(count, -1)
