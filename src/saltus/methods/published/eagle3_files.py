"""Read EAGLE-3 heads in the two formats in which they are published: that of speculators, and that of the authors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saltus.kernels.packed_weight import select_rows
from saltus.methods.published.eagle3 import Eagle3Model, Eagle3Shape
from saltus.methods.shared.published_files import (
    check_sizes,
    check_weights,
    drafted_tokens,
    is_same,
    read_config,
    read_weights,
    take_own_matrices,
)

EAGLE3 = "eagle3"
ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
LLAMA_DEFAULTS = {  # of Transformers' LlamaConfig: the format of speculators leaves them out
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


def is_eagle3_folder(folder: Path) -> bool:
    """True for a folder with a published EAGLE-3 head."""
    config = read_config(folder)
    known = ARCHITECTURES & set(config.get("architectures") or ())
    return config.get("speculators_model_type") == EAGLE3 or bool(known)


def load_eagle3(folder: Path, target: Any, target_name: str) -> Eagle3Model:
    """A published head for this target, in its dtype. Errors: ValueError of one line.

    The folder does not identify its target by its weights; for another one of these sizes it drafts badly and changes
    no text.
    """
    config, weights = read_config(folder), read_weights(folder)
    shape = _read_shape(config, folder, target)
    check_sizes(folder, shape.hidden, config.get("target_hidden_size"), shape.hidden_state_layers, target, target_name)
    embeddings, unembedding = (
        module.weight.detach() for module in (target.get_input_embeddings(), target.get_output_embeddings())
    )
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
    tokens, order = drafted_tokens(folder, weights, len(unembedding))
    own_embeddings, own_head = take_own_matrices(folder, weights, shape.hidden, len(embeddings), len(tokens))
    if own_embeddings is not None and not is_same(own_embeddings, embeddings):
        embeddings = own_embeddings.to(target.device, target.dtype)
    tokens = tokens.to(target.device)
    if own_head is not None:
        head = own_head[order].to(target.device, target.dtype)
    else:
        head = unembedding if len(tokens) == len(unembedding) else select_rows(unembedding, tokens)
    model = Eagle3Model(shape, tokens, embeddings, head)
    check_weights(folder, weights, model.state_dict(), "an EAGLE-3 head of one Llama layer")
    moved = {name: weight.to(target.device, target.dtype).contiguous() for name, weight in weights.items()}
    model.load_state_dict(moved, assign=True)
    return model.eval().requires_grad_(False)


def _read_shape(config: Mapping[str, Any], folder: Path, target: Any) -> Eagle3Shape:
    """The sizes of either format. Errors: ValueError for what such heads do not compute here."""
    layers = LLAMA_DEFAULTS | dict(config.get("transformer_layer_config", config))
    rope = layers.get("rope_parameters") or layers.get("rope_scaling") or {}
    kind, eagle_config = rope.get("rope_type", rope.get("type", "default")), config.get("eagle_config") or {}
    odd = {
        f"{layers['num_hidden_layers']} layers": layers["num_hidden_layers"] != 1,
        "biases of attention": layers.get("attention_bias"),
        f"rotary embeddings of the type {kind}": kind != "default",
        f"the activation {layers['hidden_act']}": layers["hidden_act"] != "silu",
        "normalised inputs of fc": config.get("norm_before_fc")
        or config.get("fc_norm")
        or eagle_config.get("norm_before_fc"),
        "no hidden states of several layers": not eagle_config.get("use_aux_hidden_state", True),
        "scaled logits": config.get("logit_scale", 1.0) != 1.0,
    }
    for what, is_there in odd.items():
        if is_there:
            raise ValueError(
                f"{folder} is an EAGLE-3 head with {what}, which Saltus does not support; take another one"
            )
    count = target.config.get_text_config().num_hidden_layers
    given = config.get("eagle_aux_hidden_state_layer_ids") or eagle_config.get("eagle_aux_hidden_state_layer_ids")
    heads = layers["num_attention_heads"]
    return Eagle3Shape(
        layers["hidden_size"], layers["intermediate_size"], tuple(given or (2, count // 2, count - 3)), heads,
        layers.get("num_key_value_heads") or heads, layers.get("head_dim") or layers["hidden_size"] // heads,
        float(rope.get("rope_theta", layers["rope_theta"])), layers["rms_norm_eps"],
        bool(config.get("norm_before_residual")), bool(config.get("norm_output")),
    )  # fmt: skip
