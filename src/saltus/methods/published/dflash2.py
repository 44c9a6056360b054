"""Draft with DFlash's block, whose rows also read the rows before them, and choose among likely tokens (DFlash 2).

A convolution over the rows of a block stands before and after each attention and each feed-forward layer:
y[i] = Σₜ (base[t] + δ[i, t]) x[i − t], where δ comes from the input of the first of the two, and one number serves a
group of channels. A selector scores the likeliest tokens of each position after the token before it:
logit + ⟨A[before] ⊙ P h, B[token]⟩. The format is that of vLLM and z-lab, and that of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from saltus.kernels.batch_invariant_ops import BatchInvariantMode
from saltus.methods.published.dflash_files import all_settings, is_of_speculators, load_published, read_shape
from saltus.methods.published.dflash_model import DFlashModel
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.methods.shared.context_rows import ContextRows, plan_pass, run_in_passes
from saltus.methods.shared.decoder_rows import attend_rows, gated_mlp
from saltus.methods.shared.draft_tree import LikelyTokens, PositionPredictions
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.methods.shared.logit_correction import TableRows
from saltus.methods.shared.published_files import CONFIG_FILE, is_named, read_config
from saltus.methods.shared.query_predictions import rows_linear
from saltus.models.cpu.torch_decoder import normed
from saltus.models.packed_decoder import UninitializedLinear, check_sizes
from saltus.models.protocols import TargetNetwork

KIND = "a DFlash 2 drafter"
CONVOLUTIONS = ("attention_conv", "mlp_conv")
SELECTOR = "candidate_selector."


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published DFlash 2 drafter."""
    return is_named(config, "dflash2", ["DFlash2DraftModel"])


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> DFlashNetwork:
    """The drafter for this target. Errors: ValueError of one line."""
    config = read_config(folder)
    given = all_settings(config)
    if is_of_speculators(config):
        config = {"sliding_window_non_causal": True} | config
        given = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16} | given
    shape = read_shape(config, folder, KIND)
    names = "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    sizes: dict[str, Any] = {name: given.get(name) for name in names}
    check_sizes(**sizes)
    taps, group, rank, choices = sizes.values()
    if shape.hidden % group:
        raise ValueError(f"{folder / CONFIG_FILE}: groups of {group} do not divide {shape.hidden}; fetch it again")
    vocabulary = len(embeddings_of(target.model)[1])
    codebook = vocabulary, rank
    more: dict[str, tuple[int, ...]] = {
        SELECTOR + "predecessor_codebook": codebook, SELECTOR + "successor_codebook": codebook,
        SELECTOR + "hidden_projection.weight": (rank, shape.hidden),
    }  # fmt: skip
    for number in range(shape.layers):
        for name in CONVOLUTIONS:
            more[f"layers.{number}.{name}.base_kernel"] = 2, taps, shape.hidden
            more[f"layers.{number}.{name}.kernel_projection.weight"] = 2 * taps * (shape.hidden // group), shape.hidden
    model, weights, _ = load_published(folder, target.model, target_name, KIND, shape, more=more)
    if len(model.tokens) != vocabulary:
        raise ValueError(f"{folder} is {KIND} of a cut vocabulary, which Saltus does not support; take another one")
    scale = float(given.get("input_embedding_scale") or 1.0)
    selector = CandidateSelector(
        model, {name.removeprefix(SELECTOR): weight for name, weight in weights.items() if name.startswith(SELECTOR)},
        choices, float(given.get("output_multiplier") or 1.0), float(given.get("final_logit_softcapping") or 0.0),
    )  # fmt: skip
    layers = ConvolvedLayers(model, weights, group, scale)
    return DFlashNetwork(model, target, predictor=selector, context_layers=layers)


@dataclass(frozen=True)
class BlockConvolution:
    """The two convolutions around one layer, over the rows of blocks."""

    base: Float[Tensor, "sides taps hidden"]
    projection: Any  # a linear layer, whose outputs are [sides, taps, groups]
    group: int

    def before(self, x: Float[Tensor, "blocks rows hidden"]) -> tuple[Tensor, Tensor]:
        """What the layer reads, and the changes of the kernel that follows it."""
        taps, groups = self.base.shape[1], x.shape[-1] // self.group
        changes = rows_linear(self.projection, x.flatten(0, 1)).view(*x.shape[:2], 2, taps, groups)
        return self._convolved(x, changes[:, :, 0], 0), changes[:, :, 1]

    def after(self, x: Float[Tensor, "blocks rows hidden"], changes: Tensor) -> Tensor:
        """What the layer's output becomes."""
        return self._convolved(x, changes, 1)

    def _convolved(self, x: Tensor, changes: Tensor, side: int) -> Tensor:
        parts, base = x.unflatten(-1, (-1, self.group)), self.base[side].unflatten(-1, (-1, self.group))
        out = torch.zeros_like(parts)
        for tap in range(base.shape[0]):
            shifted = F.pad(parts[:, : parts.shape[1] - tap], (0, 0, 0, 0, tap, 0))
            out = out + (base[tap] + changes[:, :, tap, :, None]) * shifted
        return out.flatten(-2)


@dataclass
class ConvolvedLayers:
    """The layers of such a drafter over blocks, in torch."""

    drafter: DFlashModel
    weights: Mapping[str, Tensor]
    group: int
    input_scale: float
    convolutions: list[list[BlockConvolution]] = field(init=False)  # of each layer: attention's, feed-forward's

    def __post_init__(self) -> None:
        self.convolutions = []
        for number, layer in enumerate(self.drafter.decoder.model.layers):
            layer.self_attn.layer_idx = number
            pair = []
            for name in CONVOLUTIONS:
                weight = self.weights[f"layers.{number}.{name}.kernel_projection.weight"]
                with torch.device("meta"):
                    projection = UninitializedLinear(*reversed(weight.shape), bias=False)
                projection.weight = torch.nn.Parameter(weight, requires_grad=False)
                base = self.weights[f"layers.{number}.{name}.base_kernel"]
                pair.append(BlockConvolution(base, projection, self.group))
            self.convolutions.append(pair)

    @property
    def model(self) -> Any:
        """The decoder, whose configuration says what a text's keys and values take."""
        return self.drafter.decoder

    def run_together(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        """Logits and last hidden states of the rows of blocks of one size."""
        return run_in_passes(texts, self._run, self._run)

    def _run(self, texts: Sequence[ContextRows]) -> list[tuple[Tensor, Tensor]]:
        base, rows = self.drafter.decoder.model, texts[0].num_rows
        positions, call, _ = plan_pass(texts, len(base.layers))
        hidden = torch.stack([text.inputs for text in texts]) * self.input_scale
        with BatchInvariantMode() if hidden.device.type == "cpu" else nullcontext():
            found = base.rotary_emb(hidden, position_ids=positions[None].to(hidden.device))
            angles = found[0][0].to(hidden.device), found[1][0].to(hidden.device)
            for layer, span, (around_attention, around_mlp) in zip(
                base.layers, self.drafter.shape.layer_spans, self.convolutions, strict=True
            ):
                x, changes = around_attention.before(normed(layer.input_layernorm, hidden))
                x = attend_rows(layer.self_attn, x.flatten(0, 1), angles, call, span).unflatten(0, (-1, rows))
                hidden = hidden + around_attention.after(x, changes)
                x, changes = around_mlp.before(normed(layer.post_attention_layernorm, hidden))
                x = gated_mlp(layer.mlp, x.flatten(0, 1)).unflatten(0, (-1, rows))
                hidden = hidden + around_mlp.after(x, changes)
            states = normed(base.norm, hidden)
            logits = rows_linear(self.drafter.lm_head, states.flatten(0, 1)).unflatten(0, (-1, rows))
        return list(zip(logits, states, strict=True))


@dataclass
class CandidateSelector:
    """The predictions of a block: the likeliest tokens of each position, scored after the token before it."""

    model: DFlashModel
    weights: Mapping[str, Tensor]
    choices: int
    multiplier: float
    softcap: float

    def __post_init__(self) -> None:
        self.left = TableRows(self.weights["predecessor_codebook"])
        self.right = TableRows(self.weights["successor_codebook"])
        self.projection = self.weights["hidden_projection.weight"].float().cpu().numpy()

    def __call__(self, logits: Tensor, hidden_states: Tensor) -> PositionPredictions:
        values = logits.float().cpu() * self.multiplier
        if self.softcap > 0:
            values = torch.tanh(values / self.softcap) * self.softcap
        likely = [self._likely(row) for row in values]
        return PositionPredictions(likely, None, self, self.position_inputs(hidden_states), False)

    def _likely(self, row: Tensor) -> LikelyTokens:
        if not torch.isfinite(row).all():
            return LikelyTokens(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32), 0.0)
        columns = row.topk(min(self.choices, len(row))).indices.sort().values
        return LikelyTokens(columns.numpy(), (row[columns] - row.max()).numpy(), 0.0)

    def position_inputs(self, hidden_states: Tensor) -> np.ndarray:
        """P h of each position, [positions, rank]."""
        return hidden_states.float().cpu().numpy() @ self.projection.T

    def vector(self, position: np.ndarray, left: int, second_left: int | None) -> tuple[float, np.ndarray]:
        """The sharpness, which is 1, and the vector [rank] of one position."""
        return 1.0, self.left[left] * position
