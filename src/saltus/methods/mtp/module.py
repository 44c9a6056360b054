"""Hold one module of multi-token prediction: a projection before a model of one layer, of the target's own class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.packed_weight import select_rows
from saltus.loading.packing import pack_like
from saltus.methods.shared.context_layers import ContextLayers
from saltus.models.cpu.torch_decoder import normed
from saltus.models.decoder_of import decoder_of
from saltus.models.packed_decoder import PackedDecoder, RMSNorm


class MtpModule(nn.Module):
    """projection [embedding_norm(e); state_norm(h)], the layer, the norm and the output layer; weights on "meta".

    Embeddings, output layer and rotary embeddings are the target's, unless `load` gets others. Errors: ValueError for a
    target whose layers are named in another way.
    """

    tokens: Tensor | None = None  # ids of the tokens that it drafts, ascending; None: all

    def __init__(self, target: Any, has_experts: bool, state_first: bool, has_norm: bool) -> None:
        super().__init__()
        self.target, self.state_first, self.has_norm = [target], state_first, has_norm  # in a list: no submodule
        norm = getattr(decoder_of(target), name := _norm_name(target), None)
        if norm is None:
            raise ValueError(
                f"heads in checkpoints of {target.config.model_type} are not supported; take another method"
            )
        hidden = norm.weight.shape[0]
        with torch.device("meta"):
            self.projection = nn.Linear(2 * hidden, hidden, bias=False)
            self.embedding_norm, self.state_norm, last_norm = (_empty_copy(norm) for _ in range(3))
            model = _model_of_one_layer(target, has_experts)
        decoder = decoder_of(model)
        if hasattr(decoder, "rotary_emb"):
            decoder.rotary_emb = decoder_of(target).rotary_emb
        setattr(decoder, name, last_norm if has_norm else norm)
        model.set_input_embeddings(target.get_input_embeddings())
        model.set_output_embeddings(target.get_output_embeddings())
        self.model = model

    @property
    def embedding_shape(self) -> tuple[int, ...]:
        """Of embeddings and output layer."""
        return tuple(self.target[0].get_input_embeddings().weight.shape)

    @property
    def parts(self) -> dict[str, nn.Module]:
        """What has weights of its own, by the names of an MtpFamily's fields."""
        decoder = decoder_of(self.model)
        norm = {"norm": getattr(decoder, _norm_name(self.model))} if self.has_norm else {}
        norms = {"embedding_norm": self.embedding_norm, "state_norm": self.state_norm, **norm}
        layer = decoder.layers if has_parts_of_layers(self.model.config) else decoder.layers[0]
        return {"projection": self.projection, **norms, "layer": layer}

    def needed_weights(self) -> dict[str, Tensor]:
        """What a checkpoint must have, by part and rest of the name."""
        return {
            f"{part}.{name}": weight
            for part, module in self.parts.items()
            for name, weight in module.state_dict().items()
        }

    def load(
        self, weights: Mapping[str, Tensor], packs_like_target: bool, drafted: Int[Tensor, "draft"] | None = None
    ) -> None:
        """Take weights by the names of `needed_weights`, and perhaps `embeddings` and `head`, in the target's dtype.

        The output layer has the rows of the `drafted` tokens only, if these are given.
        """
        modules, target = self.parts, self.target[0]
        for name, weight in weights.items():
            part, _, rest = name.partition(".")
            moved = weight.to(target.device, target.dtype)
            if part == "embeddings":
                self.model.set_input_embeddings(nn.Embedding.from_pretrained(moved))
                continue
            if part == "head":
                self.model.set_output_embeddings(linear_of(moved))
                continue
            path, _, attribute = rest.rpartition(".")
            owner = modules[part].get_submodule(path)
            if moved.shape != (shape := getattr(owner, attribute).shape):  # the same numbers in order
                moved = moved.reshape(shape)
            if attribute in owner._buffers:
                owner._buffers[attribute] = weight.to(target.device)
            else:
                setattr(owner, attribute, nn.Parameter(moved.contiguous(), requires_grad=False))
        packed = [self.projection, modules["layer"]]
        if drafted is not None:
            self.tokens = drafted.to(target.device)
            rows = select_rows(target.get_output_embeddings().weight, self.tokens)
            self.model.set_output_embeddings(head := linear_of(rows.to(target.dtype)))
            packed.append(head)
        self.eval().requires_grad_(False)
        if packs_like_target:
            for part in packed:
                pack_like(part, target)
        self.layers = ContextLayers(self.model, by_gpu_kernels=True)

    def inputs(self, tokens: Int[Tensor, "rows"], states: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        """What the layer reads of tokens and the states before them."""
        embedding = self.model.get_input_embeddings()
        embedded = select_rows(embedding.weight, tokens.to(states.device)).to(states.dtype)
        parts = [_normed(self.embedding_norm, embedded), _normed(self.state_norm, states)]
        x = torch.cat(parts[::-1] if self.state_first else parts, -1)
        return linear(x, [self.projection.weight], [None])[0] if x.device.type == "cpu" else self.projection(x)


def has_parts_of_layers(config: Any) -> bool:
    """True if layers are mixers or MLPs alone (Nemotron), so that a head has several of them."""
    return hasattr(config, "mtp_layers_block_type")


def _norm_name(model: Any) -> str:
    """Of the last norm of a decoder."""
    return "norm_f" if has_parts_of_layers(model.config.get_text_config()) else "norm"


def linear_of(weight: Float[Tensor, "outputs hidden"]) -> nn.Linear:
    """A linear layer with this weight, which is not trained."""
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _normed(norm: Any, x: Tensor) -> Tensor:
    return normed(norm, x) if isinstance(norm, RMSNorm) else norm(x)


def _empty_copy(norm: Any) -> Any:
    """A norm of the same class and numbers, without weights."""
    made = copy.copy(norm)
    made._parameters = {
        name: nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        for name, weight in norm._parameters.items()
    }
    return made


def _model_of_one_layer(target: Any, has_experts: bool) -> Any:
    """A model of the target's class with one layer, or with the parts of one."""
    config = copy.deepcopy(target.config.get_text_config())
    if has_parts_of_layers(config):
        config.layers_block_type = config.mtp_layers_block_type
        return type(target)(config)
    attention, windows = _attention_type(config), getattr(config, "mtp_sliding_windows", None)
    if windows and attention == "sliding_attention":
        config.sliding_window = windows[0]
    settings = {
        "num_hidden_layers": 1, "layer_types": [attention], "indexer_types": ["full"],
        # by which models of the several types say that a layer has experts
        "mlp_layer_types": ["sparse" if has_experts else "dense"], "mlp_only_layers": [] if has_experts else [0],
        "first_k_dense_replace": 0 if has_experts else 1, "moe_layer_start_index": 0 if has_experts else 1,
        "decoder_sparse_step": 1,
    }  # fmt: skip
    for name, value in settings.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return PackedDecoder(config, target._make) if isinstance(target, PackedDecoder) else type(target)(config)


def _attention_type(config: Any) -> str:
    """Of a head's layer. K-EXAONE has it in `mtp_layer_types`, EXAONE before that as the type of its first layer."""
    if config.model_type == "mimo_v2_flash":
        return "sliding_attention"
    if types := getattr(config, "mtp_layer_types", None):
        return types[0]
    is_exaone = config.model_type == "exaone4" and getattr(config, "num_nextn_predict_layers", None)
    return config.layer_types[0] if is_exaone else "full_attention"
