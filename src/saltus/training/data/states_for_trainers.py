"""Collect the target's hidden states of texts for other trainers, a file for each text, in the format of `FORMATS`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.shared.context_rows import select_hidden_states
from saltus.training.data.hidden_states import Sample
from saltus.training.data.state_formats import FORMATS
from saltus.training.data.state_formats.state_format import StateFormat, TextStates, loss_mask
from saltus.training.loop.checkpoint import write_atomically, write_json

METADATA_FILE = "states.json"
MIN_COMPLETION = 2  # tokens: SpecForge refuses texts with fewer
BYTES_PER_FILE = 4096  # for names and the rest of a disk block
DFLASH_LAYERS = 5


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer, as vLLM and SGLang take them for EAGLE-3 (Li et al. 2025)."""
    return 2, num_layers // 2, num_layers - 3


def dflash_layers(num_layers: int) -> tuple[int, ...]:
    """Five layers at equal distances, as the authors of DFlash take them for five draft layers (Chen et al. 2026)."""
    return tuple(1 + round(1 + place * (num_layers - 4) / (DFLASH_LAYERS - 1)) for place in range(DFLASH_LAYERS))


LAYER_CHOICES: dict[str, Callable[[int], tuple[int, ...]]] = {"eagle3": eagle3_layers, "dflash": dflash_layers}


def parse_layers(text: str) -> Callable[[int], tuple[int, ...]]:
    """The layers for a model of so many layers, from a name of `LAYER_CHOICES` or from numbers such as 2,15,27.

    Errors: ValueError for another text.
    """
    if text in LAYER_CHOICES:
        return LAYER_CHOICES[text]
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"--layers {text}: give {' or '.join(LAYER_CHOICES)}, or numbers of layers such as 2,15,27"
        ) from None
    return lambda num_layers: numbers


def check_layers(layers: Sequence[int], num_layers: int, model_name: str) -> None:
    """Raise ValueError for layers that a model lacks, or that are named twice."""
    if len(set(layers)) < len(layers) or not all(0 < layer < num_layers for layer in layers):
        raise ValueError(
            f"{model_name} has {num_layers} layers, and the chosen ones are {', '.join(map(str, layers))};"
            f" give --layers with different numbers from 1 to {num_layers - 1}"
        )


@dataclass(frozen=True)
class StateCollection:
    """The states to collect: texts, the trainer that will read them, and the layers whose states it reads."""

    texts: Sequence[Sample]
    trainer: str  # a name in FORMATS
    layers: tuple[int, ...]  # states after so many layers

    @property
    def format(self) -> StateFormat:
        return FORMATS[self.trainer]

    def metadata(self, network: Any, model_name: str) -> dict[str, Any]:
        """What the states of a folder have in common."""
        return {
            "format": self.trainer,
            "model": model_name,
            "fingerprint": model_fingerprint(network.model),
            "dtype": str(network.model.dtype).removeprefix("torch."),
            "layers": list(self.layers),
        }

    def num_bytes(self, numbers: Sequence[int], hidden: int) -> int:
        """The disk space that the files of these texts need, about."""
        row = (len(self.layers) + 1) * hidden * torch.bfloat16.itemsize + 2 * torch.int64.itemsize
        return sum(len(self.texts[number].tokens) * row + BYTES_PER_FILE for number in numbers)


def prepare_folder(folder: Path, plan: StateCollection, metadata: dict[str, Any], hidden: int) -> list[int]:
    """Write the folder's metadata; returns the numbers of the texts whose files are missing.

    Errors: ValueError where it holds other states or a damaged file, or where the disk is too small.
    """
    known = folder / METADATA_FILE
    if known.exists():
        begun = _read_metadata(known)
        if differs := next((name for name in metadata if name != "model" and begun.get(name) != metadata[name]), None):
            raise ValueError(
                f"{folder} holds states of {begun['model']} with {differs} {begun.get(differs)}, not"
                f" {metadata[differs]}; collect into another folder"
            )
    missing = [number for number, sample in enumerate(plan.texts) if not _is_there(folder, plan, number, sample)]
    needed, free = plan.num_bytes(missing, hidden), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"the states need {needed / 1e6:,.1f} MB, and the disk of {folder} has {free / 1e6:,.1f} MB left;"
            " give a --limit of texts, a smaller --max-length, fewer --layers, or a folder on another disk"
        )
    write_json(known, metadata)
    return missing


def _read_metadata(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); delete it and collect again") from None


def _is_there(folder: Path, plan: StateCollection, number: int, sample: Sample) -> bool:
    """Whether a text has its file. Errors: ValueError for a damaged one, or one of another text."""
    file = folder / plan.format.file_name(number)
    if not file.exists():
        return False
    try:
        tokens = plan.format.read_tokens(file)
    except Exception as error:
        raise ValueError(f"{file} is damaged ({type(error).__name__}); delete it and collect again") from None
    if tokens != sample.tokens:
        raise ValueError(f"{file} holds states of another text; collect into another folder")
    return True


def collect_states(network: Any, plan: StateCollection, missing: Sequence[int], folder: Path) -> Iterator[int]:
    """Write the files of the missing texts, then what the trainer reads beside them. Yields the tokens of each text.

    Errors: ValueError for states that are not finite, or layers that the model lacks.
    """
    network.add_hidden_state_layers((*plan.layers, *_last_layer(network, plan)))
    for number in missing:
        states = read_states(network, plan, plan.texts[number])
        write_atomically(
            folder / plan.format.file_name(number), lambda out, states=states: plan.format.write(states, out)
        )
        yield len(states.tokens)
    plan.format.finish(folder, plan.texts)


def _last_layer(network: Any, plan: StateCollection) -> tuple[int, ...]:
    return () if plan.format.last_norm else (network.model.config.get_text_config().num_hidden_layers,)


@torch.inference_mode()
def read_states(network: Any, plan: StateCollection, sample: Sample) -> TextStates:
    """The states of one text, in bfloat16. Errors: ValueError where they are not finite."""
    inputs = ForwardInputs(continuation(sample.tokens, 0), output_hidden_states=True)
    states = network.forward([inputs], [network.new_kv_cache()])[0].hidden_states
    wanted = (*plan.layers, *(_last_layer(network, plan) or (None,)))
    states = select_hidden_states(states, network.hidden_state_layers, wanted).cpu().bfloat16()
    if not bool(states.isfinite().all()):
        raise ValueError("the model's states of a text are not finite numbers; load it with --dtype float32")
    by_layer = states.unflatten(-1, (len(wanted), -1))
    return TextStates(
        torch.tensor(sample.tokens), torch.tensor(loss_mask(sample)), by_layer[:, :-1].contiguous(),
        by_layer[:, -1].contiguous(),
    )  # fmt: skip
