"""Training of drafters that other engines load, too."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from saltus.methods.published.dflash_model import DFlashShape
from saltus.methods.published.training.dflash import DFlashTrainingTask
from saltus.models.memory_use import layer_sizes
from saltus.training.objective import CachedStateObjective, check_hidden_state_layers
from saltus.training.query_drafter_task import require_sizes
from saltus.training.settings import Recipe


@dataclass(frozen=True)
class DFlashSettings:
    """A small network of the architecture DFlash: masks read projected hidden states of the target."""

    layers: int = 2
    intermediate: int = 768
    hidden_state_layers: tuple[int, ...] = ()  # numbers of target layers whose states are inputs; one or more
    window: int = 6  # tokens of a draft
    vocabulary: int = 8192  # the most frequent tokens, which are drafted; 0: all of the target's
    mask_token: int | None = None  # whose embedding the queries start with; default: the last one
    correction: int = 0  # width of the correction of each draft by the two tokens before it; 0: none
    autocast: bool = False  # compute in bfloat16

    def __post_init__(self) -> None:
        require_sizes(self)
        if not self.hidden_state_layers:
            raise ValueError("the network dflash reads no states but those of hidden_state_layers; name some")

    def shape(self, target: Any) -> DFlashShape:
        """The shape for a Hugging Face model: heads of the target's size, in numbers that 2, 4 and 8 devices can share.

        Errors: ValueError for layers or tokens that it does not have.
        """
        check_hidden_state_layers(self.hidden_state_layers, target)
        config, embeddings = target.config.get_text_config(), target.get_input_embeddings().weight
        mask_token, count = self.mask_token, len(embeddings)
        if mask_token is None:
            mask_token = next(token for token in reversed(range(count)) if embeddings[torch.tensor([token])].any())
        if not 0 <= mask_token < count:
            raise ValueError(f"mask_token is {mask_token}, but the model has {count} tokens; take one of them")
        kv_heads, head_dim = layer_sizes(config)[0]
        query_heads, kv_heads = max(8, config.num_attention_heads // 8 * 8), 1 << (kv_heads - 1).bit_length()
        return DFlashShape(
            config.hidden_size, self.intermediate, self.hidden_state_layers, mask_token, self.layers, query_heads,
            math.gcd(query_heads, kv_heads), head_dim, self.window, correction=self.correction,
        )  # fmt: skip


class DFlashObjective(CachedStateObjective):
    """A drafter of the architecture DFlash, with which the method ptp drafts."""

    method, settings_type, task = "ptp", DFlashSettings, DFlashTrainingTask

    def validate(self, recipe: Recipe, keys: Collection[str]) -> None:
        super().validate(recipe, keys)
        if "distillation_weight" in keys:
            raise ValueError("the network dflash predicts nothing at context positions; leave distillation_weight out")


OBJECTIVES = {"dflash": DFlashObjective()}
