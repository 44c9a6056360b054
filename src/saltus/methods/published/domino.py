"""Draft with DFlash's block, whose logits a GRU over the tokens before each position corrects (Domino, 2605.29707).

The GRU reads the embeddings of the last decided token and of the drafts: s[k] = GRU(e[k], s[k − 1]) from s = 0. To the
logits of the k-th draft, whose last hidden state is h[k], it adds W₂ silu(W₁ [h[k]; s[k]]), but for the first
`pure_draft_prefix_len` drafts. Engines run it along one greedy block; here each node of the draft tree has the
correction of its own path. The formats are those of the authors and SpecForge (`projector_type` domino), and of
speculators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.packed_weight import select_rows
from saltus.methods.published.block_predictor import BlockPredictor
from saltus.methods.published.dflash_files import is_of_speculators, load_published, read_shape
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.methods.shared.draft_tree import LikelyTokens, PathLogits
from saltus.methods.shared.drafter_files import embeddings_of
from saltus.methods.shared.logit_correction import TableRows
from saltus.methods.shared.published_files import CONFIG_FILE, read_config
from saltus.models.packed_decoder import check_sizes
from saltus.models.protocols import TargetNetwork

KIND = "a Domino drafter"
SPECULATORS_DEFAULTS = {"gru_hidden_dim": 1024, "emb_dim": 256, "pure_draft_prefix_len": 1}


def recognises(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a published Domino drafter."""
    if kind := config.get("speculators_model_type"):
        return kind == "domino"
    flat = config.get("dflash_config")
    return isinstance(flat, dict) and flat.get("projector_type") == "domino"


def load_network(folder: Path, target: TargetNetwork, target_name: str) -> DFlashNetwork:
    """The drafter for this target. Errors: ValueError of one line."""
    config = read_config(folder)
    if is_of_speculators(config):
        given = SPECULATORS_DEFAULTS | config | {"emb_dim": config.get("logits_correction_emb_dim", 256)}
        at = "logits_correction."
    else:
        given, at = {"emb_dim": None, "gru_hidden_dim": None, "pure_draft_prefix_len": 0} | config["dflash_config"], ""
        shifted = {"shift_label": False, "sample_from_anchor": bool(given.get("shift_label"))}  # two names of one thing
        config = config | {"dflash_config": config["dflash_config"] | shifted}
    width, wide, prefix = given["emb_dim"], given["gru_hidden_dim"], given["pure_draft_prefix_len"]
    check_sizes(emb_dim=width, gru_hidden_dim=wide)
    if type(prefix) is not int or prefix < 0:
        raise ValueError(f"{folder / CONFIG_FILE}: pure_draft_prefix_len is {prefix!r}; fetch the drafter again")
    shape = read_shape(config, folder, KIND, from_anchor=True)
    drafted = given.get("draft_vocab_size") or len(embeddings_of(target.model)[0])
    more = {
        f"{at}prefix_gru.weight_ih_l0": (3 * wide, shape.hidden), f"{at}prefix_gru.weight_hh_l0": (3 * wide, wide),
        f"{at}embed_proj.0.weight": (width, shape.hidden + wide), f"{at}embed_proj.2.weight": (drafted, width),
    }  # fmt: skip
    model, weights, order = load_published(folder, target.model, target_name, KIND, shape, more=more)
    by_token, by_state, first, second = (weights[name].cpu() for name in more)
    by_hidden, of_state = first[:, : shape.hidden], first[:, shape.hidden :]
    head = PrefixHead(by_token, by_state, by_hidden, of_state, second[order.cpu()])
    refiner = PrefixRefiner(head, model.embeddings[0], prefix, shape.from_anchor)
    return DFlashNetwork(model, target, predictor=BlockPredictor(model), refiner=refiner)


@dataclass(frozen=True, eq=False)
class PrefixHead:
    """The weights of the correction, on the CPU."""

    gates_by_token: Float[Tensor, "gates hidden"]  # of the GRU: reset, update and new, one after the other
    gates_by_state: Float[Tensor, "gates state"]
    by_hidden: Float[Tensor, "width hidden"]
    by_state: Float[Tensor, "width state"]
    readout: Float[Tensor, "vocab width"]


class PrefixRefiner:
    """The corrections of one block after another: products by the kernels, the rest in float32."""

    def __init__(self, head: PrefixHead, embeddings: Tensor, prefix: int, from_anchor: bool) -> None:
        """The first `prefix` drafts are not corrected. With `from_anchor` row 0 predicts, too."""
        self.head, self.embeddings, self.prefix, self.from_anchor = head, embeddings, prefix, from_anchor
        self.by_hidden, self.by_state = head.by_hidden.contiguous(), head.by_state.contiguous()
        self.readout = TableRows(head.readout)

    def __call__(self, likely: Sequence[LikelyTokens], states: Float[Tensor, "rows hidden"]) -> PathLogits:
        """What is added to the logits of a position's likely tokens after a path; `states` are those of all rows."""
        fixed = _product(self.by_hidden, states.cpu())[not self.from_anchor :]
        known: dict[tuple[int, ...], np.ndarray] = {(): np.zeros(self.by_state.shape[1], dtype=np.float32)}
        outputs: dict[int, np.ndarray] = {}  # rows of the readout by position

        def state(tokens: tuple[int, ...]) -> np.ndarray:
            if tokens not in known:
                known[tokens] = self._next_state(tokens[-1], state(tokens[:-1]))
            return known[tokens]

        def added(position: int, path: Sequence[int]) -> np.ndarray:
            if position < self.prefix:
                return np.zeros(len(likely[position].columns), dtype=np.float32)
            x = fixed[position] + _row_product(self.by_state, state(tuple(path[-(position + 1) :])))
            if position not in outputs:
                outputs[position] = self.readout[likely[position].columns]
            return np.einsum("oi,i->o", outputs[position], x * _sigmoid(x))

        return added

    def _next_state(self, token: int, state: np.ndarray) -> np.ndarray:
        """The GRU's state after one more token."""
        row = select_rows(self.embeddings, torch.tensor([token], device=self.embeddings.device))
        read = np.split(_product(self.head.gates_by_token, row.cpu())[0], 3)
        kept = np.split(_row_product(self.head.gates_by_state, state), 3)
        reset, update = _sigmoid(read[0] + kept[0]), _sigmoid(read[1] + kept[1])
        return (1 - update) * np.tanh(read[2] + reset * kept[2]) + update * state


def _product(weight: Float[Tensor, "outs ins"], x: Float[Tensor, "rows ins"]) -> Float[np.ndarray, "rows outs"]:
    return linear(x.to(weight.dtype), [weight], [None])[0].float().numpy()


def _row_product(weight: Float[Tensor, "outs ins"], x: Float[np.ndarray, "ins"]) -> Float[np.ndarray, "outs"]:
    return _product(weight, torch.from_numpy(x)[None])[0]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
