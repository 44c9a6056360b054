"""Read and write DFlash drafters in the two formats in which they are published.

The format `speculators` is that of the library of this name, which vLLM reads: the layers' settings in a table of their
own, `aux_hidden_state_layer_ids`, and perhaps a cut vocabulary, with its rows of the output layer. The format `flat` is
that of the authors (z-lab), which SGLang reads, too: the layers' settings at the top level, and a table `dflash_config`
whose `target_layer_ids` are one less, since they count from the first layer's output. Weights have the same names.
Transformers' assistant of Muse Glimmer is the format `flat` without the table, with other names of two weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from saltus.kernels import native
from saltus.kernels.packed_weight import select_rows
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.loading.metadata import METADATA_FILE
from saltus.loading.model_folders import MASK_FILE
from saltus.methods.published.dflash_model import DFLASH, DFlashModel, DFlashShape
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

DFlashFormat = Literal["speculators", "flat"]
FORMATS: tuple[DFlashFormat, ...] = get_args(DFlashFormat)
WEIGHTS_FILE = "model.safetensors"
ARCHITECTURE = "DFlashDraftModel"
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
    given = config | (config.get("dflash_config") or {})
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


def read_shape(
    config: Mapping[str, Any], folder: Path, kind: str = "a DFlash drafter", from_anchor: bool = False
) -> DFlashShape:
    """The sizes of either format. Errors: ValueError for a missing key, or for what these drafters do not compute.

    With `from_anchor` drafters of this kind predict by the last token's row unless they say otherwise.
    """
    given = dict(config) | (config.get("dflash_config") or {})
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
    model: DFlashModel,
    weights: Mapping[str, Tensor],
    folder: Path,
    kind: str,
    more: Mapping[str, tuple[int, ...]],
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
