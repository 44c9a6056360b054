"""Run the target's last layers a second time with low-rank adapters of their own, for heads (MtPC, §4).

Verifier and heads share the layers below these, whose hidden states the verification call returns. The layers above
run on every token of the text again, with weights that differ by low-rank products (Hu et al. 2021).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from saltus.models.decoder_description import LLAMA_DECODERS
from saltus.models.gated_lora import GatedLoraSettings, LoraLayer, linear_layers
from saltus.models.packed_decoder import transformers_model


class UpperLayers(nn.Module):
    """The low-rank parts, zero at first; the layers are the target's own and are not trained."""

    def __init__(self, target: Any, layers: int, rank: int) -> None:
        super().__init__()
        self.target, settings = [target], GatedLoraSettings(rank, float(rank))  # in lists: not submodules
        self.model = [last_layers(target, layers)]
        self.model[0].set_attn_implementation("sdpa")  # for training: Saltus's attention needs a call
        self.sizes = linear_layers(self.model[0])
        self.lora_layers = [LoraLayer(*size, settings) for size in self.sizes.values()]
        self.parts = nn.ModuleList(self.lora_layers)
        for path, part in zip(self.sizes, self.lora_layers, strict=True):
            self.model[0].get_submodule(path).register_forward_hook(_add_lora_hook(part))

    def forward(self, inputs: Float[Tensor, "batch slots hidden"]) -> Float[Tensor, "batch slots hidden"]:
        """The last hidden states of texts, from those below these layers."""
        return self.model[0].model(inputs_embeds=inputs, use_cache=False).last_hidden_state

    @torch.no_grad()
    def merged(self) -> Any:
        """A model of these layers alone, with the low-rank parts in its weights."""
        model = last_layers(self.target[0], self.model[0].config.num_hidden_layers)
        for path, part in zip(self.sizes, self.lora_layers, strict=True):
            layer = model.get_submodule(path)
            weight = layer.weight.float() + part.scale * part.up.float() @ part.down.float()
            layer.weight = nn.Parameter(weight.to(layer.weight.dtype), requires_grad=False)
        return model


def last_layers(target: Any, layers: int) -> Any:
    """A model of the target's last layers, which shares its weights. Errors: ValueError where it cannot be made."""
    target = transformers_model(target)
    if type(target).__name__ not in LLAMA_DECODERS:
        raise ValueError(
            f"heads adapt the layers of {', '.join(sorted(LLAMA_DECODERS))} alone, not of {type(target).__name__};"
            " take layers=0"
        )
    if not 1 <= layers <= target.config.num_hidden_layers:
        raise ValueError(
            f"heads adapt {layers} layers, but the target has {target.config.num_hidden_layers}; take fewer"
        )
    model = copy.deepcopy(target, {id(tensor): tensor for tensor in (*target.parameters(), *target.buffers())})
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None) is not None:
        model.config.layer_types = model.config.layer_types[-layers:]
    model.model.layers = model.model.layers[-layers:]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    return model


def _add_lora_hook(part: LoraLayer) -> Callable[..., Tensor]:
    return lambda module, given, out: out + part(given[0]).to(out.dtype)
