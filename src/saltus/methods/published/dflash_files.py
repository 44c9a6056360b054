"""Read DFlash drafters, in the two formats in which they are published, and as Saltus trains them.

The format `speculators` is that of the library of this name, which vLLM reads: the layers' settings in a table of their
own, `aux_hidden_state_layer_ids`, and perhaps a cut vocabulary, with its rows of the output layer. The format `flat` is
that of the authors (z-lab), which SGLang reads, too: the layers' settings at the top level, and a table `dflash_config`
whose `target_layer_ids` are one less, since they count from the first layer's output. Weights have the same names.
Transformers' assistant of Muse Glimmer is the format `flat` without the table, with other names of two weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from saltus.kernels import native
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.loading.metadata import METADATA_FILE
from saltus.loading.model_folders import MASK_FILE
from saltus.methods.published.dflash_model import DFlashModel, DFlashShape
from saltus.methods.shared.drafter_files import check_weight_sizes, embeddings_of, read_drafter_files, with_weights
from saltus.methods.shared.published_files import (
    CONFIG_FILE,
    QWEN3_DEFAULTS,
    check_sizes,
    check_weights,
    drafted_tokens,
    is_same,
    layer_spans,
    place_like,
    read_config,
    read_weights,
    refuse,
    take_own_matrices,
)
from saltus.methods.shared.rotary import rope_parameters, unsupported_rope
from saltus.models.packed_decoder import check_layer_count

MUSE_GLIMMER = "muse_glimmer_assistant"  # a type of models
MUSE_GLIMMER_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
LAYERS_PREFIX = "decoder.model."  # of the module's names, which published ones lack


def load_dflash(folder: Path, target: Any, target_name: str, trainable: bool = False) -> DFlashModel:
    """A drafter for this target (a Hugging Face model), in its dtype; see `methods.ptp.files.load_drafter`.

    Errors: ValueError of one line.
    """
    load = _load_trained if (folder / METADATA_FILE).exists() else _load_published
    model = load(folder, target, target_name, trainable)
    place_in_huge_pages(model.own_modules())
    return model


def _load_trained(folder: Path, target: Any, target_name: str, trainable: bool) -> DFlashModel:
    """A drafter that Saltus trained."""
    settings, weights = read_drafter_files("drafter", folder, target, target_name)
    shape = DFlashShape(
        **{
            **settings,
            "hidden_state_layers": tuple(settings["hidden_state_layers"]),
            "spans": tuple(settings.get("spans", ())),
        }
    )
    check_layer_count(shape.layers, weights)
    make = partial(DFlashModel, shape, weights.pop("tokens").long(), *embeddings_of(target))
    check_weight_sizes(lambda: make(False), weights, folder)
    return with_weights("drafter", make(trainable), weights, folder, target)


def _load_published(folder: Path, target: Any, target_name: str, trainable: bool) -> DFlashModel:
    """A published drafter."""
    config = read_config(folder)
    return load_published(folder, target, target_name, "a DFlash drafter", read_shape(config, folder), trainable)[0]


def load_published(
    folder: Path,
    target: Any,
    target_name: str,
    kind: str,
    shape: DFlashShape,
    trainable: bool = False,
    more: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[DFlashModel, dict[str, Tensor], Tensor]:
    """A published drafter of this kind and shape, and its further weights, of the sizes `more`, in the target's dtype.

    Also the rows of the folder's output layer in the order of the model's tokens.

    The folder does not identify its target by its weights; for another one of these sizes it drafts badly
    and changes no text. Errors: ValueError of one line.
    """
    config = read_config(folder)
    named = ((name.removeprefix("model."), weight) for name, weight in read_weights(folder).items())
    weights = {MUSE_GLIMMER_NAMES.get(name, name): weight for name, weight in named}
    if shape.sinks and (trainable or native.kernel("decode", target.dtype, target.device) is None):
        raise ValueError(
            f"{folder} is {kind} with attention sinks, which only the compiled kernels on a CPU compute, and which are"
            " not trained; take another one"
        )
    given = all_settings(config)
    if not given.get("rope_is_neox_style", given.get("is_neox_style", True)):
        weights = _rotated_by_halves(weights, shape.head_dim)
    embeddings, unembedding = embeddings_of(target)
    check_layer_count(shape.layers, weights)
    check_sizes(folder, shape.hidden, config.get("target_hidden_size"), shape.hidden_state_layers, target, target_name)
    if type(shape.mask_token) is not int or not 0 <= shape.mask_token < len(embeddings):
        raise ValueError(
            f"the drafter in {folder} has the mask token {shape.mask_token}, and {target_name} has"
            f" {len(embeddings):,} tokens; take the model that it was trained for"
        )
    tokens, order = drafted_tokens(folder, weights, len(unembedding))
    embeddings, own_head = take_own_matrices(folder, weights, shape.hidden, len(tokens), target)
    model = DFlashModel(shape, tokens.to(target.device), embeddings, unembedding, trainable)
    if own_head is not None and not is_same(own_head[order], model.lm_head.weight):
        model.decoder.lm_head.weight = nn.Parameter(own_head[order].to(target.device), requires_grad=False)
    mask = _read_mask(folder)
    if mask is not None:
        model.mask = mask.to(target.device)
    others = _take_weights(model, weights, folder, kind, more or {})
    placed = place_like(model, target).eval()
    return placed, {name: weight.to(target.device, target.dtype) for name, weight in others.items()}, order


def _rotated_by_halves(weights: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Reorder heads that rotate neighbouring numbers: they rotate halves, as those of Qwen3, with the same scores."""
    order = torch.cat([torch.arange(0, head_dim, 2), torch.arange(1, head_dim, 2)])
    turned = (".q_proj.weight", ".k_proj.weight", ".q_norm.weight", ".k_norm.weight")
    return {
        name: weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)
        if name.endswith(turned) and len(weight) % head_dim == 0
        else weight
        for name, weight in weights.items()
    }


def is_of_speculators(config: Mapping[str, Any]) -> bool:
    """True for a config.json in the format `speculators`."""
    return "speculators_model_type" in config


def all_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json of either format: those at the top level, and those in its table."""
    return dict(config) | (config.get("dflash_config") or {})


def read_shape(
    config: Mapping[str, Any], folder: Path, kind: str = "a DFlash drafter", from_anchor: bool = False
) -> DFlashShape:
    """The sizes of either format. Errors: ValueError for a missing key, or for what these drafters do not compute.

    With `from_anchor` drafters of this kind predict by the last token's row unless they say otherwise.
    """
    given = all_settings(config)
    layers = QWEN3_DEFAULTS | dict(config.get("transformer_layer_config", config))
    rope = rope_parameters(layers)
    problem = unsupported_rope(rope, layers)
    refuse(
        folder, kind,
        {
            "biases of attention": layers.get("attention_bias"), problem: problem,
            f"the activation {layers['hidden_act']}": layers["hidden_act"] != "silu",
            f"attention of the kind {given.get('attention_mode')}": given.get("attention_mode", "gqa") != "gqa",
            "scaled logits": config.get("logit_scale", 1.0) != 1.0,
            "attention sinks in some layers": config.get("add_swa_attention_sink_bias"),
            "scaled values": given.get("attention_value_scale"),
            "norms of Gemma": given.get("use_gemma_norm"),
            "shifted labels": given.get("shift_label"),
            "no hidden states of the target": not given.get("use_aux_hidden_state", True),
        },
    )  # fmt: skip
    try:
        if "aux_hidden_state_layer_ids" in config:
            read = config["aux_hidden_state_layer_ids"]
        else:
            read = [layer + 1 for layer in given["target_layer_ids"]]
        mask_token, block = given["mask_token_id"], config.get("block_size")
        block = given["block_size"] if block is None else block
    except KeyError as error:
        raise ValueError(f"{folder / CONFIG_FILE} lacks {error}; fetch the drafter again") from None
    from_anchor = bool(given.get("sample_from_anchor", from_anchor))
    spans, causal, causal_windows = _read_attention(config, layers, folder)
    return DFlashShape(
        layers["hidden_size"], layers["intermediate_size"], tuple(read), mask_token, layers["num_hidden_layers"],
        layers["num_attention_heads"], layers["num_key_value_heads"], layers["head_dim"], block - (not from_anchor),
        rope["rope_theta"], layers["rms_norm_eps"], rope=None if rope["rope_type"] == "default" else rope,
        max_positions=layers.get("max_position_embeddings") or 1 << 20, spans=spans, causal=causal,
        causal_windows=causal_windows, from_anchor=from_anchor, sinks=bool(given.get("attention_sink_bias")),
    )  # fmt: skip


def _read_attention(
    config: Mapping[str, Any], layers: Mapping[str, Any], folder: Path
) -> tuple[tuple[int | None, ...], bool, bool]:
    """The sliding windows of the layers; and whether rows see no later rows of the block, there and elsewhere.

    Where a folder says nothing, blocks are causal in layers with a sliding window, and in no others, as in vLLM. Those
    of Muse Glimmer are not, and a row sees so many rows besides itself.
    """
    flat, kinds, count = config.get("dflash_config") or {}, layers.get("layer_types"), layers["num_hidden_layers"]
    named = "sliding_attention" in (kinds or ())
    if flat.get("use_swa") and not named:
        kinds = ["sliding_attention"] * count
    window = flat.get("swa_window_size", layers.get("sliding_window"))
    if is_muse := config.get("model_type") == MUSE_GLIMMER:
        kinds, window = kinds or ["sliding_attention"] * count, (window or 2048) + 1
    spans = layer_spans({"layer_types": kinds, "sliding_window": window}, count, folder)
    is_causal = [layers.get("is_causal"), flat.get("causal"), flat.get("causal_head")]
    if stated := [bool(each) for each in is_causal if each is not None]:
        return spans, stated[0], stated[0]
    return spans if any(spans) else (), False, named and not (is_muse or config.get("sliding_window_non_causal"))


def _read_mask(folder: Path) -> Tensor | None:
    if not (folder / MASK_FILE).is_file():
        return None
    state = torch.load(folder / MASK_FILE, map_location="cpu", weights_only=True)
    return (state["embedding"] if isinstance(state, dict) else state).flatten()


def _take_weights(
    model: DFlashModel, weights: Mapping[str, Tensor], folder: Path, kind: str, more: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Give a model its weights; returns the further ones. Errors: ValueError for missing, unknown or other ones."""
    names = {name.removeprefix(LAYERS_PREFIX): name for name in model.state_dict()}
    names = {
        name: module_name for name, module_name in names.items() if "embed_tokens" not in name and "lm_head" not in name
    }
    needed = {name: model.state_dict()[module_name] for name, module_name in names.items()}
    further = {name: torch.empty(size, device="meta") for name, size in more.items()}
    check_weights(folder, weights, needed | further, f"{kind} of Qwen3 layers")
    placed = {names[name]: weight.to(model.mask.device) for name, weight in weights.items() if name in names}
    model.load_state_dict(placed, strict=False, assign=True)
    return {name: weights[name] for name in more}
