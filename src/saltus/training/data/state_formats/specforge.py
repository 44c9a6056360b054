"""SpecForge's offline features: a file of torch.save for each text, in folders of 2,000.

Read in `prepare_hidden_states.py` and `runtime/data_plane/offline_reader.py` of SpecForge (2026-08). Its methods read
the same states by different names; a tensor that stands in a file under two names is stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from saltus.training.data.hidden_states import Sample
from saltus.training.data.state_formats.state_format import StateFormat, TextStates

TEXTS_PER_FOLDER = 2000


def _file_name(number: int) -> str:
    start = number - number % TEXTS_PER_FOLDER
    return f"rows_{start}-{start + TEXTS_PER_FOLDER}/data_{number}.ckpt"


def _write(states: TextStates, file: BinaryIO) -> None:
    layers, last = states.layer_states.flatten(1)[None], states.last_states[None]
    features = {
        "input_ids": states.tokens, "loss_mask": states.loss_mask,
        "aux_hidden_state": layers, "hidden_state": last,  # eagle3
        "hidden_states": layers, "target_last_hidden_states": last,  # dflash, domino and dspark
    }  # fmt: skip
    torch.save(features, file)


def _read_tokens(file: Path) -> list[int]:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)["input_ids"].tolist()


def _name_layers(layers: Sequence[int]) -> str:
    return f"its layer ids, which count from 0: {', '.join(str(layer - 1) for layer in layers)}"


def _finish(folder: Path, texts: Sequence[Sample]) -> None:
    """SpecForge counts tokens from the files of the texts."""


def _check_installed() -> None:
    """Nothing but torch is needed."""


SPECFORGE = StateFormat(True, _file_name, _write, _read_tokens, _finish, _name_layers, _check_installed)
