"""Draft with DFlash's block, whose logits a small causal network corrects by the drafts before each position (XPress).

The network's rows are those of the block. Row k reads the token before its place, its own hidden state and the mean of
all: x[k] = W [D h[k]; G h̄; E token]. A mixer of each channel adds earlier rows, u[k] = x[k] + Σ_{j ≤ k} L[k, j] x[j], a
gated MLP follows, and the result times a readout is added to the logits. Engines approach its greedy block by parallel
passes; here each node of the draft tree has the exact correction of its own path. The formats are those of vLLM
(`Qwen3XPressModel`) and of speculators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from saltus.methods.published.block_predictor import BlockPredictor
from saltus.methods.published.dflash_files import all_settings, is_of_speculators, load_published, read_shape
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.methods.shared.draft_tree import LikelyTokens, PathLogits
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.methods.shared.logit_correction import TableRows
from saltus.methods.shared.published_files import is_named, read_config
from saltus.models.packed_decoder import check_sizes
from saltus.models.protocols import TargetNetwork

KIND = "an XPress drafter"
OWN_NAMES = {  # by those of speculators
    "token_embed.weight": "w1.weight", "down_h.weight": "down_h.weight", "down_g.weight": "down_g.weight",
    "in_proj.weight": "in_proj.weight", "mix_l": "mix.L", "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight", "mlp_down.weight": "mlp.down_proj.weight", "readout.weight": "w2.weight",
}  # fmt: skip


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published XPress drafter."""
    return is_named(config, "xpress", ["Qwen3XPressModel"])


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> DFlashNetwork:
    """The drafter for this target. Errors: ValueError of one line."""
    config = read_config(folder)
    given, of_speculators = all_settings(config), is_of_speculators(config)
    rank = given.get("xpress_rank", 256)
    check_sizes(xpress_rank=rank)
    if of_speculators:
        wide = rank * given.get("xpress_mlp_ratio", 2)
    else:
        wide, named = given.get("xpress_mlp_hidden", 512), given.get("xpress_block_size") or given.get("block_size")
        config = config | {"block_size": named or given.get("num_speculative_steps", 15) + 1}
    check_sizes(xpress_mlp_hidden=wide)
    shape = read_shape(config, folder, KIND)
    rows, vocabulary = shape.masks + 1, len(embeddings_of(target.model)[0])
    drafted = given.get("draft_vocab_size") or vocabulary
    sizes = {
        "token_embed.weight": (vocabulary, rank), "down_h.weight": (rank, shape.hidden),
        "down_g.weight": (rank, shape.hidden), "in_proj.weight": (rank, 3 * rank), "mix_l": (rank, rows, rows),
        "mlp_gate.weight": (wide, rank), "mlp_up.weight": (wide, rank), "mlp_down.weight": (rank, wide),
        "readout.weight": (drafted, rank),
    }  # fmt: skip
    names = {name: f"refiner_head.{name}" if of_speculators else f"xpress_head.{OWN_NAMES[name]}" for name in sizes}
    more = {names[name]: size for name, size in sizes.items()}
    model, weights, order = load_published(folder, target.model, target_name, KIND, shape, more=more)
    head = {name.removesuffix(".weight"): weights[published] for name, published in names.items()}
    head["readout"] = head["readout"][order]
    return DFlashNetwork(model, target, predictor=BlockPredictor(model), refiner=BlockRefiner(head, shape.from_anchor))


class BlockRefiner:
    """The corrections of one block after another; in float32, by NumPy."""

    def __init__(self, weights: Mapping[str, Tensor], from_anchor: bool) -> None:
        """`weights` have the names of speculators, without `.weight`. With `from_anchor` row 0 predicts, too."""
        self.embedded, self.readout = TableRows(weights["token_embed"]), TableRows(weights["readout"])
        self.numbers = {
            name: weight.float().cpu().numpy()
            for name, weight in weights.items()
            if name not in ("token_embed", "readout")
        }
        self.by_state, self.by_mean, self.by_token = np.split(self.numbers["in_proj"], 3, 1)
        self.from_anchor = from_anchor

    def __call__(self, likely: Sequence[LikelyTokens], states: Float[Tensor, "rows hidden"]) -> PathLogits:
        """What is added to the logits of a position's likely tokens after a path; `states` are those of all rows."""
        hidden = states.float().cpu().numpy()
        whole = _times(self.by_mean, _times(self.numbers["down_g"], hidden.mean(0)))
        fixed = [_times(self.by_state, _times(self.numbers["down_h"], row)) + whole for row in hidden]
        known: dict[tuple[int, int], np.ndarray] = {}  # x by row and token
        outputs: dict[int, np.ndarray] = {}  # rows of the readout by position

        def row(number: int, token: int) -> np.ndarray:
            if (number, token) not in known:
                known[number, token] = fixed[number] + _times(self.by_token, self.embedded[token])
            return known[number, token]

        def added(position: int, path: Sequence[int]) -> np.ndarray:
            last = position + (not self.from_anchor)
            tokens = path[-(last + 1) :]
            tokens = [tokens[0]] * (last + 1 - len(tokens)) + list(tokens)  # a text of one token
            rows = np.stack([row(number, token) for number, token in enumerate(tokens)])
            x = rows[-1] + np.einsum("rj,jr->r", self.numbers["mix_l"][:, last, : last + 1], rows)
            gate = _times(self.numbers["mlp_gate"], x)
            x = x + _times(self.numbers["mlp_down"], gate / (1 + np.exp(-gate)) * _times(self.numbers["mlp_up"], x))
            if position not in outputs:
                outputs[position] = self.readout[likely[position].columns]
            return _times(outputs[position], x)

        return added


def _times(matrix: Float[np.ndarray, "outs ins"], x: Float[np.ndarray, "ins"]) -> Float[np.ndarray, "outs"]:
    """Not by BLAS, whose threads would go on spinning beside those of the kernels."""
    return np.einsum("oi,i->o", matrix, x)
