"""Write DFlash drafters in the two formats in which they are published (see `dflash_files`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file

from saltus.kernels.packed_weight import select_rows
from saltus.loading.metadata import METADATA_FILE
from saltus.methods.published.dflash_files import LAYERS_PREFIX
from saltus.methods.published.dflash_model import DFLASH, DFlashModel, DFlashShape
from saltus.methods.shared.published_files import CONFIG_FILE, read_config

DFlashFormat = Literal["speculators", "flat"]
FORMATS: tuple[DFlashFormat, ...] = get_args(DFlashFormat)
WEIGHTS_FILE = "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"


def save_dflash(model: DFlashModel, format_name: DFlashFormat, folder: Path, target: Any, target_name: str) -> None:
    """Write a drafter in a published format; the tokens' correction is left out. An earlier drafter is replaced.

    The target, a Hugging Face model, gives its sizes, and the rows of its output layer for a cut vocabulary.
    Errors: ValueError for a drafter that has not the format's vocabulary, or for a folder with another model.
    """
    unembedding, shape = target.get_output_embeddings().weight.detach(), model.shape
    cut = len(model.tokens) < len(unembedding)
    if cut and format_name == "flat":
        raise ValueError(
            f"the format flat has the target's whole vocabulary, but the drafter has {len(model.tokens):,} of"
            f" {len(unembedding):,} tokens; train it with --set vocabulary=0, or take --to speculators"
        )
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name.removeprefix(LAYERS_PREFIX): weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in model.saved_weights().items()
        if not name.startswith(("correction.", "decoder.lm_head.", "decoder.model.embed_tokens."))
    }
    if cut:
        tokens = model.tokens.cpu()
        drafted = torch.zeros(len(unembedding), dtype=torch.bool)
        drafted[tokens] = True
        weights |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": drafted}
        weights["lm_head.weight"] = select_rows(unembedding, model.tokens).cpu().contiguous()
    save_file(weights, folder / WEIGHTS_FILE, {"format": "pt"})
    config = _speculators_config if format_name == "speculators" else _flat_config
    made = config(shape, len(model.tokens), target, target_name)
    (folder / CONFIG_FILE).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def check_free(folder: Path) -> None:
    """Errors: ValueError for a folder in which `save_dflash` would replace another model, or a result of training."""
    if (folder / CONFIG_FILE).exists():
        is_other = read_config(folder).get("architectures") != [ARCHITECTURE]
    else:
        is_other = (folder / METADATA_FILE).exists()
    if is_other:
        raise ValueError(f"{folder} holds another model, whose files would be replaced; name another folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")


def _layer_config(shape: DFlashShape, target: Any) -> dict[str, Any]:
    config = target.config.get_text_config()
    return {
        "model_type": "qwen3", **shape.decoder_config, "rope_theta": shape.rope_theta, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings, "attention_dropout": 0.0,
        "max_window_layers": shape.layers, "initializer_range": 0.02, "use_cache": True, "dtype": "bfloat16",
    }  # fmt: skip


def _speculators_config(shape: DFlashShape, vocabulary: int, target: Any, target_name: str) -> dict[str, Any]:
    """vLLM attends within a block in both directions only with `sliding_window_non_causal`, also in full layers."""
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": DFLASH,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": DFLASH,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy", "speculative_tokens": shape.window,
                    "accept_tolerance": 0.0, "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": list(target.config.architectures or ())},
        },
        "transformer_layer_config": _layer_config(shape, target),
        "draft_vocab_size": vocabulary,
        "block_size": shape.window + 1,
        "target_hidden_size": shape.hidden,
        "aux_hidden_state_layer_ids": list(shape.hidden_state_layers),
        "mask_token_id": shape.mask_token,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip


def _flat_config(shape: DFlashShape, vocabulary: int, target: Any, target_name: str) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        **_layer_config(shape, target),
        "block_size": shape.window + 1,
        "num_target_layers": target.config.get_text_config().num_hidden_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token,
            "target_layer_ids": [layer - 1 for layer in shape.hidden_state_layers],
        },
    }
