"""Apply a low-rank adapter to chosen rows of a causal model; all other rows keep their bits (PTP, gated LoRA)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from saltus.core.forward import QueryStart
from saltus.core.noise import Noise
from saltus.core.value_types import require_at_least
from saltus.models.uniform_embedding import KINDS, UniformEmbedding

NOT_ADAPTED = (  # Hunyuan's router; the matrices of latent attention's heads; what chooses keys, without gradients
    ".gate.wg", ".kv_b_proj", ".indexer.wq_b", ".indexer.wk", ".indexer.weights_proj",
)  # fmt: skip


@dataclass(frozen=True)
class GatedLoraSettings:
    """The settings of a gated adapter, as in saltus.json."""

    rank: int = 64
    alpha: float = 64.0  # the low-rank part is multiplied by alpha / rank
    dropout: float = 0.0  # of the inputs of the low-rank part, in training
    targets: tuple[str, ...] = ()  # last names of the linear layers it acts on; empty: all but the unembedding
    embedding: str = "bits"  # of uniforms
    embeds_temperature: bool = True  # the temperature is embedded too
    window: int = 16  # queries of a chain in training, at most
    query_start: QueryStart = "blank"  # what the first query of a chain reads, and where it stands

    def __post_init__(self) -> None:
        require_at_least(self, "an adapter's ", rank=1, window=1)
        if not self.alpha > 0:
            raise ValueError(f"an adapter's alpha is {self.alpha}, but must be above 0; take its rank")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"an adapter's dropout is {self.dropout}, but must lie in [0, 1)")
        if self.embedding not in KINDS:
            raise ValueError(f"an adapter's embedding is {self.embedding!r}, but must be one of {', '.join(KINDS)}")
        if self.query_start not in get_args(QueryStart):
            known = ", ".join(get_args(QueryStart))
            raise ValueError(f"an adapter's query_start is {self.query_start!r}, but must be one of {known}")

    @property
    def scale(self) -> float:
        """The factor of the low-rank part: α / r."""
        return self.alpha / self.rank


EmbeddingInit = Literal["zeros", "normal"]
"""The weights of an untrained embedding of uniforms: zero, so that uniforms say nothing, or random numbers with the
standard deviation of the model's token embeddings."""


@dataclass(frozen=True)
class Gate:
    """The query rows of a batched call and their conditioning. Queries with a token also have its embedding."""

    rows: Int[Tensor, "gated"] | None  # None: all of the call's rows, in order
    uniforms: Float[Tensor, "gated"]  # NaN: no uniform
    temperatures: Float[Tensor, "gated"]
    has_token: Bool[Tensor, "gated"] | None = None  # None: no row has a token

    def embed(self, embedding: UniformEmbedding) -> Float[Tensor, "gated hidden"]:
        """The embedding of the conditioning of each row."""
        return embedding(self.uniforms, self.temperatures)

    def select(self, rows: Float[Tensor, "rows width"]) -> Float[Tensor, "gated width"]:
        """The rows that the adapter sees."""
        return rows if self.rows is None else rows[self.rows]

    def replace(
        self, rows: Float[Tensor, "rows width"], changed: Float[Tensor, "gated width"]
    ) -> Float[Tensor, "rows width"]:
        """Put the changed rows back; all others are copied."""
        return changed if self.rows is None else rows.index_copy(0, self.rows, changed)


@dataclass(frozen=True)
class StaticGate:
    """The same for calls of a fixed shape: the adapter evaluates all rows, and a mask chooses between its rows and the
    model's. All shapes and addresses are fixed, so CUDA graphs can hold it.
    """

    is_query: Bool[Tensor, "rows"]
    has_token: Bool[Tensor, "rows"]
    embeddings: Float[Tensor, "rows hidden"]  # of each query's conditioning; zeros elsewhere

    def embed(self, embedding: UniformEmbedding) -> Float[Tensor, "rows hidden"]:
        """The embeddings, which are computed already."""
        return self.embeddings

    def select(self, rows: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """All rows: the adapter evaluates each."""
        return rows

    def replace(
        self, rows: Float[Tensor, "rows width"], changed: Float[Tensor, "rows width"]
    ) -> Float[Tensor, "rows width"]:
        """The changed rows where they are queries, the others elsewhere."""
        return torch.where(self.is_query[:, None], changed, rows)


class LoraLayer(nn.Module):
    """s · B A of one linear layer (Hu et al. 2021); B starts at zero."""

    def __init__(self, inputs: int, outputs: int, settings: GatedLoraSettings) -> None:
        super().__init__()
        self.scale, self.dropout = settings.scale, settings.dropout
        self.down = nn.Parameter(torch.zeros(settings.rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, settings.rank))

    def forward(self, x: Float[Tensor, "*gated inputs"]) -> Float[Tensor, "*gated outputs"]:
        """s · B A x in the adapter's dtype, usually float32."""
        x = F.dropout(x.to(self.down.dtype), self.dropout, self.training)
        return F.linear(F.linear(x, self.down) * self.scale, self.up)


class Adapter(nn.Module):
    """The low-rank parts by the names of their layers, and the embedding of uniforms."""

    def __init__(self, sizes: dict[str, tuple[int, int]], hidden_size: int, settings: GatedLoraSettings) -> None:
        super().__init__()
        self.settings, self.sizes = settings, dict(sizes)  # (inputs, outputs) of each layer
        self.folder = ""  # that it was loaded from
        self.parts = nn.ModuleList(LoraLayer(*size, settings) for size in sizes.values())
        self.auxiliary = UniformEmbedding(
            hidden_size, settings.embedding, settings.embeds_temperature, settings.query_start == "last-token"
        )
        self._by_path = dict(zip(sizes, self.parts, strict=True))

    def lora_layer(self, path: str) -> LoraLayer | None:
        """The low-rank part of the layer of this name, None if there is none."""
        layer = self._by_path.get(path)
        assert layer is None or isinstance(layer, LoraLayer)
        return layer

    def copy_weights_from(self, other: Adapter) -> None:
        """Take over the weights of an adapter for the same layers, whatever their order."""
        self.auxiliary.load_state_dict(other.auxiliary.state_dict())
        for path, part in self._by_path.items():
            source = other.lora_layer(path)
            assert source is not None
            part.load_state_dict(source.state_dict())

    def embed_queries(
        self, gate: Gate | StaticGate, tokens: Float[Tensor, "gated hidden"] | None = None
    ) -> Float[Tensor, "gated hidden"]:
        """The input embeddings of queries: the conditioning is added to that of the query's token, or of none."""
        conditioning = gate.embed(self.auxiliary)
        blank = 0.0 if self.auxiliary.blank is None else self.auxiliary.blank
        if gate.has_token is None or tokens is None:
            return conditioning + blank
        return conditioning + torch.where(gate.has_token[:, None], tokens.to(conditioning.dtype), blank)

    def check_fits(self, model: Any) -> None:
        """Raise ValueError unless the model has every layer that this adapter was made for, in its size."""
        sizes = linear_layers(model)
        hidden = _token_embeddings(model, slice(0, 1)).shape[-1]
        wrong = next((path for path, size in self.sizes.items() if sizes.get(path) != size), None)
        if wrong is None and hidden != self.hidden_size:
            wrong = "its embedding"
        if wrong is not None:
            raise ValueError(
                f"the adapter does not fit {type(model).__name__}: {wrong} is missing there or has another size;"
                " load the model that it was trained for, or train it again"
            )

    @property
    def hidden_size(self) -> int:
        """The width of the model's hidden states."""
        return _output_layer(self.auxiliary).out_features


def new_adapter(
    model: Any,
    settings: GatedLoraSettings | None = None,
    seed: int = 0,
    reads_tokens: bool = False,
    embedding_init: EmbeddingInit = "zeros",
) -> Adapter:
    """An untrained adapter: B is zero, and the embedding of a query without a token is the mean of all embeddings.

    With `reads_tokens` its rows are token queries, whose input is at first their token's embedding alone.
    Errors: ValueError for targets that name no linear layer of the model.
    """
    settings = settings or GatedLoraSettings()
    if reads_tokens and settings.query_start != "blank":
        raise ValueError(
            f"token queries have a token each, so query_start={settings.query_start} means nothing; leave it out"
        )
    sizes = linear_layers(model, settings.targets)
    every = _token_embeddings(model, slice(None))
    adapter = Adapter(sizes, every.shape[-1], settings)
    with torch.no_grad():
        if not reads_tokens:
            blank, mean = adapter.auxiliary.blank, every.float().mean(0)
            (_output_layer(adapter.auxiliary).bias if blank is None else blank).copy_(mean)
        for name, weight in adapter.auxiliary.named_parameters():
            if name.startswith("map.0."):  # the first of two layers, the second of which is zero
                weight.copy_(0.2 * _normal(seed, f"adapter/{name}", weight.shape))
        if embedding_init == "normal":
            weight = _output_layer(adapter.auxiliary).weight
            weight.copy_(every.float().std().cpu() * _normal(seed, "adapter/embedding", weight.shape))
        for number, part in enumerate(adapter.parts):
            assert isinstance(part, LoraLayer)
            bound = part.down.shape[1] ** -0.5  # Kaiming's uniform, as PEFT starts it
            drawn = Noise(seed).uniforms(f"adapter/{number}", np.arange(part.down.numel()))
            part.down.copy_(torch.from_numpy((2 * drawn - 1) * bound).view(part.down.shape))
    return adapter.to(model.device)


def _normal(seed: int, stream: str, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers, float64."""
    drawn = torch.from_numpy(Noise(seed).uniforms(stream, np.arange(math.prod(shape))))
    return torch.special.ndtri(drawn.clamp_min(2.0**-54)).view(*shape)


def linear_layers(model: Any, targets: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a model's linear layers by their names: all but the unembedding, or the chosen ones.

    Layers of experts are left out, since their rows depend on the text, and what chooses experts or keys; the matrices
    of latent attention's heads, which kernels multiply queries by; and the few coefficients of AltUp.
    """
    unembedding, sizes = model.get_output_embeddings(), {}
    for path, module in model.named_modules():
        if module is unembedding or ".experts." in path or ".altup." in path or not _is_linear(module):
            continue
        if type(module).__name__.endswith("Router") or path.endswith(NOT_ADAPTED):
            continue
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        sizes[path] = (int(inputs), int(outputs))
    names = {path.rpartition(".")[2] for path in sizes}
    if unknown := sorted(set(targets) - names):
        raise ValueError(
            f"{type(model).__name__} has no linear layer {unknown[0]!r}; there are {', '.join(sorted(names))}"
        )
    return {path: size for path, size in sizes.items() if not targets or path.rpartition(".")[2] in targets}


@dataclass
class gated_adapter:
    """While open, the model's calls are gated: query rows get their embeddings and the low-rank parts.

    It supports gradients. Every other row keeps its bits: the layers' outputs are copied.
    """

    model: Any
    adapter: Adapter
    gate: Gate | StaticGate
    hooks: list[Any] = field(default_factory=list)

    def __enter__(self) -> None:
        embedding = self.model.get_input_embeddings()
        self.hooks = [
            embedding.register_forward_hook(
                lambda _, inputs, out: self._replace_gated_rows(out, self._query_embeddings)
            )
        ]
        for path in self.adapter.sizes:
            layer = self.model.get_submodule(path)
            self.hooks.append(layer.register_forward_hook(lambda _, x, out, path=path: self._add_lora(path, x[0], out)))

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()

    def _query_embeddings(self, tokens: Tensor) -> Tensor:
        return self.adapter.embed_queries(self.gate, tokens)

    def _add_lora(self, path: str, x: Tensor, out: Tensor) -> Tensor:
        part = self.adapter.lora_layer(path)
        assert part is not None
        low = part(self.gate.select(x.reshape(-1, x.shape[-1])))
        return self._replace_gated_rows(out, lambda before: before.to(low.dtype) + low)

    def _replace_gated_rows(self, out: Tensor, change) -> Tensor:
        flat = out.reshape(-1, out.shape[-1])
        changed = change(self.gate.select(flat)).to(out.dtype)
        return self.gate.replace(flat, changed).view(out.shape)


def _is_linear(module: nn.Module) -> bool:
    """True for a linear layer, also for GPT-2's, whose class is slow to import."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _token_embeddings(model: Any, tokens: slice) -> Tensor:
    """The inputs of the model's layers for some tokens."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        return embedding(torch.arange(embedding.weight.shape[0], device=embedding.weight.device)[tokens])


def _output_layer(auxiliary: UniformEmbedding) -> nn.Linear:
    """The last linear map of the embedding."""
    last = auxiliary.map[-1] if isinstance(auxiliary.map, nn.Sequential) else auxiliary.map
    assert isinstance(last, nn.Linear)
    return last
