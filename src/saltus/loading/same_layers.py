"""Models that Transformers has no class for, whose layers and names of weights are those of one that it has."""

from __future__ import annotations

from typing import Any

SAME_LAYERS = {"mimo": "qwen2", "xverse": "llama", "minicpm": "granite"}  # of texts alone, by types of models
OF_THE_CODE = {"model_type", "architectures", "auto_map"}  # what a configuration says of the folder's own code


def same_layers(given: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """A type that Transformers knows and its settings, for a configuration as it is in a folder; None for others.

    Errors: ValueError for settings that change the layers.
    """
    own = given.get("model_type", "")
    if not isinstance(own, str) or own not in SAME_LAYERS:
        return None
    settings = {name: value for name, value in given.items() if name not in OF_THE_CODE}
    if own == "minicpm":
        settings |= _multipliers(given)
    return SAME_LAYERS[own], settings


def _multipliers(given: dict[str, Any]) -> dict[str, Any]:
    """Granite's, for the settings of MiniCPM 1, 2 and 4 (Hu et al. 2024), which are 1 where nothing is said."""
    if given.get("num_experts"):
        raise ValueError("MiniCPM with experts is not supported")
    if given.get("sparse_config"):
        raise ValueError("MiniCPM that attends to chosen blocks (sparse_config) is not supported")
    hidden, layers = given["hidden_size"], given["num_hidden_layers"]
    return {
        "tie_word_embeddings": given.get("tie_word_embeddings", True),
        "attention_multiplier": (hidden // given["num_attention_heads"]) ** -0.5,
        "embedding_multiplier": given.get("scale_emb", 1),
        "residual_multiplier": given.get("scale_depth", 1) / layers**0.5,
        "logits_scaling": hidden / given.get("dim_model_base", 1),
    }
