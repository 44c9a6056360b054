"""Training of heads."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from saltus.core.value_types import require_at_least
from saltus.methods.mtpc.heads import HeadShape
from saltus.methods.mtpc.training.heads import HeadsTrainingTask
from saltus.training.objective import CachedStateObjective


@dataclass(frozen=True)
class HeadsSettings:
    """Heads: the joint distribution of the next tokens, from the target's last hidden state."""

    circuit: Literal["ff", "cp", "hmm", "btree"] = "btree"
    window: int = 8  # positions of the joint distribution
    rank: int = 8  # states of each latent; ff has one
    subspace_dim: int = 16  # of the subspace in which components differ
    untied_unembedding: bool = False  # one unembedding for every position and component; for small vocabularies
    embeds_last_token: bool = True  # conditioned on the text's last token; else this token is position 0 of the window
    contextual: bool = True  # sum weights depend on the text
    homogeneous: bool = False  # all steps of a circuit share one table
    self_transition_init: float = 6.0  # initial logit for a latent to have its parent's state; 0: no preference
    layers: int = 0  # the target's last layers, which heads apply once more, adapted
    lora_rank: int = 16  # of their adapters
    vocabulary: int = 8192  # the most frequent tokens, which are drafted

    def __post_init__(self) -> None:
        require_at_least(self, "heads' ", vocabulary=1)
        assert self._shape(1)  # it raises errors for its settings now

    def _shape(self, hidden: int) -> HeadShape:
        shared = {field.name for field in fields(self)} & {field.name for field in fields(HeadShape)}
        return HeadShape(hidden, **{name: getattr(self, name) for name in shared})

    def shape(self, target: Any) -> HeadShape:
        """The shape for a Hugging Face model. Errors: ValueError for more layers than it has."""
        config = target.config.get_text_config()
        if not 0 <= self.layers < config.num_hidden_layers:
            count = config.num_hidden_layers
            raise ValueError(f"heads adapt {self.layers} layers, but the model has {count}; take fewer")
        hidden_state_layers = (config.num_hidden_layers - self.layers,) if self.layers else ()
        return replace(self._shape(config.hidden_size), hidden_state_layers=hidden_state_layers)


class HeadsObjective(CachedStateObjective):
    """Heads, on the target's last hidden states."""

    method, settings_type, task = "mtpc", HeadsSettings, HeadsTrainingTask


OBJECTIVES = {"heads": HeadsObjective()}
