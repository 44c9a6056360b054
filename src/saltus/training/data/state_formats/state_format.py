"""Describe how a trainer stores the hidden states of texts: a file for each text, and files beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxtyping import Float, Int
from torch import Tensor

from saltus.training.data.hidden_states import Sample


@dataclass(frozen=True)
class TextStates:
    """The tokens of a text and the target's state at each of them."""

    tokens: Int[Tensor, "length"]
    loss_mask: Int[Tensor, "length"]  # 1 for tokens of the completion, which are trained on, 0 for those of the prompt
    layer_states: Float[Tensor, "length layers hidden"]  # after so many layers
    last_states: Float[Tensor, "length hidden"]  # after all layers, see `StateFormat.last_norm`


@dataclass(frozen=True)
class StateFormat:
    """How a trainer stores states."""

    last_norm: bool  # whether the last states are those after the model's last norm, or its inputs
    file_name: Callable[[int], str]  # of the text of this number, in the folder
    write: Callable[[TextStates, BinaryIO], object]  # the file of a text
    read_tokens: Callable[[Path], list[int]]  # of a text's file. Errors: any for a damaged one
    finish: Callable[[Path, Sequence[Sample]], None]  # write what stands beside the files of these texts
    name_layers: Callable[[Sequence[int]], str]  # how the trainer is told the layers
    check_installed: Callable[[], None]  # Errors: ValueError where a package is missing that `finish` needs


def loss_mask(sample: Sample) -> list[int]:
    """1 for tokens of the completion, 0 for those of the prompt."""
    return [0] * len(sample.prompt) + [1] * len(sample.completion)
