"""Load a checkpoint of quantised weights, as its config.json says, into Transformers' class for the model.

Weights whose numbers a format of the kernels holds are packed, others are expanded, each when it is read.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saltus.kernels import native
from saltus.kernels.packed_blocks import Arithmetic
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.huge_pages import available_bytes
from saltus.loading.model_folders import quantization_settings, text_part, weight_files
from saltus.loading.quantised import find_method
from saltus.loading.quantised_numbers import FLOAT16_ROUNDING, ScaledFloats, ScaledIntegers

log = logging.getLogger("saltus")

OF_ACTIVATIONS = re.compile(  # and of keys and values, which are not quantised here
    r"(input|output|activation|act|prob|q|k|v|kv)_(scale|scale_inv|zero_point|global_scale)"
)
BYTES = {"F8_E4M3": 2, "F64": 2, "F32": 2, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # of a number as bfloat16, or kept
MEMORY_SHARE = 0.9  # of what is available, for weights
PLAIN = {"F64", "F32", "F16", "BF16"}  # dtypes of weights that are not quantised, in safetensors' words


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """A folder whose weights a file of `quantised` reads, with what its configuration says of them."""

    folder: Path
    method: ModuleType
    settings: Mapping[str, Any]

    @property
    def method_name(self) -> str:
        return str(self.settings["quant_method"])

    def weights(self, arithmetic: Arithmetic | None) -> dict[str, Any]:
        """Every weight by the name that a model has for it, also those that its class does not have; `[rows]` reads it.

        Quantised ones stay packed for an `arithmetic` where they can. Errors: SourceError for files of another kind.
        """
        return _Reading(self, arithmetic).weights()

    def load(
        self, name: str, dtype: torch.dtype, arithmetic: Arithmetic | None, for_gpu: bool = False
    ) -> tuple[Any, Any]:
        """The model of Transformers, and what it lacks (`output_loading_info`).

        With an `arithmetic` and in bfloat16, weights are packed where they and the kernels can, 8-bit floats for a GPU.
        Errors: SourceError.
        """
        from transformers import AutoConfig, GenerationConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        given = text_part(self.folder) or {"config": AutoConfig.from_pretrained(self.folder, trust_remote_code=False)}
        if hasattr(given["config"], "quantization_config"):
            del given["config"].quantization_config  # Transformers would replace layers
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(given["config"])]
        can_pack = dtype == torch.bfloat16 and native.load_kernels() is not None
        reading = _Reading(self, arithmetic if can_pack else None, for_gpu)
        model, found = kind.from_pretrained(
            None, state_dict=reading.weights(), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **given,
        )  # fmt: skip
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder, trust_remote_code=False)
        reading.report(name)
        return model, found


def find_quantised(folder: Path) -> QuantisedCheckpoint | None:
    """The checkpoint of a folder if its weights are quantised in a way that is read here."""
    settings = quantization_settings(folder)
    method = find_method(str(settings.get("quant_method")))
    return None if method is None else QuantisedCheckpoint(folder, method, settings)


@dataclass(frozen=True)
class _Weight:
    """Stands for a weight in a state dict; Transformers takes `[...]` of it when it sets it in the model."""

    read: Callable[[], Tensor]

    def __getitem__(self, rows: Any) -> Tensor:
        return self.read() if rows in (..., slice(None)) else self.read()[rows]


@dataclass
class _Reading:
    """Reads the weights of a checkpoint one by one, and counts what became of them."""

    checkpoint: QuantisedCheckpoint
    arithmetic: Arithmetic | None
    for_gpu: bool = False
    packed: int = 0
    expanded: Counter[str] = field(default_factory=Counter)  # by why they were not packed
    rounded: int = 0
    keeps_floats: bool = False  # of 8 bits on a CPU, where they take half of the memory, and few rows longer
    lock: threading.Lock = field(default_factory=threading.Lock)  # Transformers reads with threads, as do our kernels

    def weights(self) -> dict[str, Any]:
        """All weights by their names. Errors: SourceError for files of another kind."""
        places: dict[str, dict[str, Any]] = {}  # of each weight the files of its parts
        kinds: dict[str, str] = {}  # the dtypes of weights that are stored by their own names
        expanded_bytes = 0  # with 8-bit floats in bfloat16
        for file in weight_files(self.checkpoint.folder):
            if file.suffix != ".safetensors":
                raise SourceError(
                    f"{file} holds quantised weights, which are read from safetensors files only; save it so"
                )
            try:
                opened = safe_open(file, "pt")
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    layer, _, part = name.rpartition(".")
                    if not OF_ACTIVATIONS.fullmatch(part):
                        own = self.checkpoint.method.PARTS.get(part)
                        places.setdefault(name if own is None else f"{layer}.{own}", {})[part] = opened
                        if own is None:
                            stored = opened.get_slice(name)
                            kinds[name] = stored.get_dtype()
                            expanded_bytes += math.prod(stored.get_shape()) * BYTES.get(kinds[name], 1)
            except SafetensorError as error:
                raise SourceError(f"{file} is damaged ({first_line(error)}); fetch it again") from None
        self.keeps_floats = expanded_bytes > MEMORY_SHARE * available_bytes()
        for name, files in places.items():
            layer, _, own = name.rpartition(".")
            if len(files) == 1 and own not in files:  # such as AWQ's scales of activations, which change outputs
                raise self._refusal(f"{layer}.{next(iter(files))} belongs to no weight")
        return {
            name: files[name.rpartition(".")[2]].get_slice(name)
            if len(files) == 1 and kinds.get(name) in PLAIN
            else _Weight(lambda name=name, files=files: self._quantised(name, files))
            for name, files in places.items()
        }

    def _quantised(self, name: str, files: Mapping[str, Any]) -> Tensor:
        layer = name.rpartition(".")[0]
        with self.lock:
            try:
                parts = {part: file.get_tensor(f"{layer}.{part}") for part, file in files.items()}
                numbers = self.checkpoint.method.read(self.checkpoint.settings, name, parts)
            except (ValueError, SafetensorError) as error:
                raise self._refusal(f"{name} {first_line(error)}") from None
            return self._as_tensor(numbers)

    def _refusal(self, what: str) -> SourceError:
        method, folder = self.checkpoint.method_name, self.checkpoint.folder
        return SourceError(
            f"{folder} holds weights quantised by {method}, and {what}; take the original model, or a GGUF file of it"
        )

    def _as_tensor(self, numbers: Any) -> Tensor:
        if isinstance(numbers, Tensor):
            self.expanded["no packed format holds such numbers"] += 1
            return numbers
        is_float = isinstance(numbers, ScaledFloats)
        as_gpu_floats = is_float and self.for_gpu
        if is_float and not as_gpu_floats and not self.keeps_floats:
            why = "a CPU multiplies 8-bit floats more slowly, and memory has room"
        else:
            why = numbers.why_not_packed_on_gpu() if as_gpu_floats else numbers.why_not_packed()
        if self.arithmetic is None or why is not None:
            self.expanded[why or "as asked for"] += 1
            return numbers.expand()
        self.packed += 1
        if as_gpu_floats:
            return numbers.pack_for_gpu()
        self.rounded += isinstance(numbers, ScaledIntegers) and not numbers.is_exact()
        return numbers.pack(self.arithmetic)

    def report(self, name: str) -> None:
        """Say what takes more memory than the file, or is not the file's to the last bit."""
        if self.arithmetic is None:
            return
        method, total = self.checkpoint.method_name, self.packed + self.expanded.total()
        for why, count in self.expanded.items():
            log.warning("%s: %d of %d weights in %s are expanded to bfloat16: %s", name, count, total, method, why)
        if self.rounded:
            log.warning(
                "%s: the scales of %d of %d weights in %s are rounded to float16, by 1 part in %d at most",
                name, self.rounded, total, method, 1 / FLOAT16_ROUNDING,
            )  # fmt: skip
