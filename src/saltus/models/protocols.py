"""What the packages above use of a target network, besides core's `Network`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from saltus.core.protocols import Network


@runtime_checkable
class TargetNetwork(Network, Protocol):
    """A network whose text can be decoded."""

    model: Any  # the Hugging Face model (PreTrainedModel), or a PackedDecoder, which has the same modules
    batch_invariant: bool  # False: rounding depends on the shapes of calls, and texts may differ by method
    any_subset: bool  # True: it fills holes that have text after them
    accepts_drafters: bool  # True: it satisfies DrafterHost

    @property
    def compute_path(self) -> Literal["native", "fixed shapes", "transformers", "torch"]:
        """What evaluates a call: our kernels ("native"), fixed shapes, Transformers' code, or torch."""
        ...

    @property
    def max_draft_tokens(self) -> int | None:
        """Draft tokens that a call may carry without changing the rounding of its rows; None: any number."""
        ...


@runtime_checkable
class FillsHoles(Protocol):
    """An any-subset target network."""

    blank_token: int | None  # the token that ends a hole of unknown length; None: the model has none


@runtime_checkable
class DrafterHost(Protocol):
    """A target network that returns hidden states to drafters and heads, and carries an adapter."""

    adapter: Any
    hidden_state_layers: tuple[int, ...]

    def attach_adapter(self, adapter: Any) -> None: ...

    def add_hidden_state_layers(self, layers: Sequence[int]) -> None: ...

    def layers_of(self, hidden_states: Tensor) -> tuple[int, ...]:
        """The layers whose states these are, besides the last: of an earlier call perhaps fewer than now."""
        ...


@runtime_checkable
class KeepsKeysAndValues(Protocol):
    """A target network whose keys and values a draft network can read (`ReadsTargetKVCache`)."""

    @property
    def keeps_keys_and_values(self) -> bool:
        """False for a model with states, and in pages of a GPU that other kernels than ours fill."""
        ...

    def num_tokens_in_cache(self, kv_cache: Any, tokens: Any) -> int:
        """How many of the decided `tokens` the cache has, at its beginning: all but the last ones.

        Those of the last call that were accepted are moved there, as the target's next call would.
        """
        ...


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A draft network that reads more of the target's hidden states at once than a drafter keeps by default."""

    max_unread: int
