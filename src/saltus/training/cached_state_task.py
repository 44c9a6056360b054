"""What the tasks on cached hidden states share: the drafted vocabulary, the target's own distributions, files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from saltus.core.picking import Coupling
from saltus.loading.metadata import Kind
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.shared.drafter_files import save_drafter
from saltus.models.output_layer import LogitScaling, logit_scaling
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.window_dataset import WindowDataset, WindowSettings
from saltus.training.training_task import WindowTrainingTask

IGNORED_TOKEN = -100  # in place of a token that is not drafted, or that does not exist


@dataclass(eq=False)
class CachedStateTask(WindowTrainingTask):
    """A small module for the `vocabulary_size` most frequent tokens, or all, trained on a target's hidden states.

    Errors: ValueError for states of another target or of other layers.
    """

    kind: ClassVar[Kind]  # of its files

    target: Any  # of Hugging Face
    corpus: HiddenStateCorpus
    shape: Any  # of the settings, see CachedStateObjective
    vocabulary_size: int = 8192  # 0: all of the target's
    window_settings: WindowSettings = field(default_factory=WindowSettings)
    target_name: str = "its target"
    initial_module: Any = None  # trained further, in place of a new one
    held_out: np.ndarray | None = None  # see WindowDataset
    logit_scaling: LogitScaling | None = None  # None: the target's
    module: Any = field(init=False)
    window_dataset: WindowDataset = field(init=False)
    draft_indices: Int[Tensor, "vocab"] = field(init=False)  # of tokens in the draft vocabulary

    def __post_init__(self) -> None:
        self._check_corpus()
        self.scale_logits = self.logit_scaling or logit_scaling(self.target)
        self.window_dataset = WindowDataset(
            self.corpus, self.window_settings, self.shape.window,
            own_temperature_only=self.learns_distributions(self.corpus.coupling),
            held_out=self.held_out,
        )  # fmt: skip
        if self.initial_module is not None:
            self._set_module(self.initial_module)
            return
        size = len(self.target.get_output_embeddings().weight)
        tokens = most_frequent_tokens(self.corpus, self.vocabulary_size) if self.vocabulary_size else torch.arange(size)
        self._set_module(self._new_module(tokens))

    @classmethod
    def learns_distributions(cls, coupling: Coupling) -> bool:
        """True if texts are targets at their own temperature only: without uniforms, tokens are samples at that one."""
        return False

    def _check_corpus(self) -> None:
        if self.corpus.target_fingerprint != model_fingerprint(self.target):
            raise ValueError(f"these are states of another model than {self.target_name}; collect them anew")

    @property
    def _device(self) -> torch.device:
        return self.target.device

    @abstractmethod
    def _new_module(self, draft_tokens: Int[Tensor, "draft"]) -> nn.Module:
        """An untrained module for these tokens."""

    @classmethod
    @abstractmethod
    def load_initial(cls, folder: Path, target: Any, target_name: str, shape: Any) -> Any:
        """A saved module with which training for this shape can start. Errors: ValueError if it does not fit."""

    def _set_module(self, module: Any) -> None:
        tokens = module.tokens
        tokens = tokens.cpu()  # as the corpus is
        self.draft_indices = torch.full((int(max(self.corpus.tokens.max(), tokens.max())) + 1,), IGNORED_TOKEN)
        self.draft_indices[tokens] = torch.arange(len(tokens))
        self.module = module.to(self.target.device)

    def save(self, folder: Path, card: Mapping[str, Any]) -> None:
        """A folder for `saltus.methods.shared.drafter_files`."""
        save_drafter(self.kind, self.module, folder, self.target_name, self.target, card)


def most_frequent_tokens(corpus: HiddenStateCorpus, count: int) -> Int[Tensor, "draft"]:
    """The ids of the most frequent tokens, ascending; tokens that never occur are left out."""
    counts = torch.bincount(corpus.tokens)
    return counts.argsort(descending=True)[: min(count, int((counts > 0).sum()))].sort().values
