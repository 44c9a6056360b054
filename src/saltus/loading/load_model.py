"""Load a model and its tokenizer from the folder where `sources.resolve` found them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from saltus.kernels.packed_blocks import Arithmetic
from saltus.loading.byte_tokenizers import evabyte_tokenizer
from saltus.loading.evabyte_files import is_evabyte, load_evabyte
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_weights import load_gguf_model
from saltus.loading.model_folders import (
    INDEX_FILE,
    check_number_of_weights,
    check_size,
    foreign_quantization,
    integer_weight,
    text_part,
    unknown_type,
    weight_files,
)
from saltus.loading.packing import PACKINGS, pack_model
from saltus.loading.quantised_weights import find_quantised
from saltus.models.cuda.placement import move_to_gpu
from saltus.models.packed_experts import PACKED_EXPERTS, experts_implementation

WEIGHTS = ("file", "bf16", *PACKINGS)  # as stored, packed ones expanded to bfloat16, or packed by GGUF's quantisers
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "tekken.json",
)  # fmt: skip
# beside a weight, they say that it is quantised
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "qweight", "qzeros")


def load_model(
    name: str,
    folder: Path,
    dtype: Any = "auto",
    device: str = "cpu",
    weights: str = "file",
    own_classes: bool = False,
    arithmetic: str = "auto",
) -> Any:
    """The model of a folder that `resolve` found, of Transformers' class; with `own_classes` perhaps a PackedDecoder.

    EvaByte, which Transformers has no class for, is an EvaByteDecoder.
    Errors: ValueError if weights are missing, which Transformers would draw at random, or cannot be as `weights` says.
    """
    if weights in PACKINGS and dtype not in ("auto", torch.bfloat16):
        raise ValueError(f"weights packed as {weights} are for bfloat16; leave out weights or dtype")
    if (folder / INDEX_FILE).is_file():
        if weights in PACKINGS:
            raise ValueError(f"the weights of {name} are packed in a GGUF file; weights can be file or bf16")
        kind = torch.bfloat16 if dtype == "auto" else dtype
        made: Any = load_gguf_model(folder, kind, weights == "file", own_classes, _of_packed(arithmetic, device))
        if device != "cpu":
            made = move_to_gpu(made, device)
        made.checkpoint_folder = folder  # where heads for multi-token prediction are found
        return made
    check_size(folder)
    if weights in PACKINGS:
        dtype = torch.bfloat16
    if is_evabyte(folder):
        model: Any = load_evabyte(folder, dtype)
    else:
        packed = _of_packed(arithmetic, device) if weights == "file" else None
        model = _transformers_model(name, folder, dtype, packed, device != "cpu")
    if weights in PACKINGS:
        pack_model(model, weights, folder, _of_packed(arithmetic, device))
    model = (model if device == "cpu" else move_to_gpu(model, device)).eval()
    model.checkpoint_folder = folder
    if (experts := experts_implementation(model)) == PACKED_EXPERTS:
        model.set_experts_implementation(experts)
    return model


def _of_packed(arithmetic: str, device: str) -> Arithmetic:
    """How packed weights are multiplied, and arranged; those for a GPU are made from the arrangement for 8 bits."""
    return "bf16" if arithmetic == "bf16" and device == "cpu" else "int8"


def _transformers_model(
    name: str, folder: Path, dtype: Any, arithmetic: Arithmetic | None, for_gpu: bool = False
) -> Any:
    """The model of Transformers' class; quantised weights are packed for an `arithmetic` where they can be."""
    from transformers import AutoModelForCausalLM  # seconds to import

    check_number_of_weights(folder)
    quantised = find_quantised(folder)
    try:
        if quantised is not None:
            loaded: Any = quantised.load(name, torch.bfloat16 if dtype == "auto" else dtype, arithmetic, for_gpu)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False,
                **text_part(folder),
            )  # fmt: skip
    except SourceError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name} needs Python code from its folder, which saltus never runs; choose a model of an architecture"
                " that Transformers has"
            ) from error
        if quantised is None and (foreign := foreign_quantization(folder)):
            raise ValueError(f"{name} holds {_quantised_by(foreign)} ({first_line(error)})") from error
        raise ValueError(_why_it_does_not_load(name, folder, error)) from error
    model, found = loaded
    wrong = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if wrong and quantised is None and (foreign := foreign_quantization(folder)):
        raise ValueError(f"{name} holds {_quantised_by(foreign)}")
    scales = [key for key in found["unexpected_keys"] if key.endswith(SCALE_NAMES)]
    if quantised is None and (sign := next(iter(scales), None) or integer_weight(folder)):
        method = foreign_quantization(folder) or "another program"
        raise ValueError(f"{name} holds {_quantised_by(method)} (there is {sign})")
    if wrong:
        raise ValueError(
            f"{name} lacks {len(wrong)} of its weights or has them in other shapes, such as {wrong[0]};"
            " fetch or save it again, for a causal language model"
        )
    round_output_layer(model)
    return model


def round_output_layer(model: Any) -> None:
    """Give an output layer that Transformers keeps in float32 (Hunyuan 4) the dtype of the other layers."""
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight.dtype == torch.float32 != model.dtype:
        head.to(model.dtype)


def _why_it_does_not_load(name: str, folder: Path, error: Exception) -> str:
    """What Transformers' error means for a user, in a line with the cure."""
    if "no file named" in str(error) and (files := weight_files(folder)):
        return (
            f"{name} has weights in {files[0].name}, but neither a model.safetensors nor a model.safetensors.index.json"
            " that names the files of weights; copy that, too, or fetch the model again"
        )
    if (unknown := unknown_type(folder, error)) is not None:
        return f"{name} is {unknown}"
    why = f"{'KeyError: ' if isinstance(error, KeyError) else ''}{first_line(error)}"  # its message is the key alone
    return f"{name} does not load as a causal language model ({why}); choose one that does"


def _quantised_by(method: str) -> str:
    return f"weights quantised by {method}, which do not load here; take the original model, or a GGUF file of it"


def has_tokenizer_files(folder: Path) -> bool:
    """True if a folder has a vocabulary, in any form."""
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder."""
    if (folder / INDEX_FILE).is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    if is_evabyte(folder):
        return evabyte_tokenizer(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Disable Transformers' progress bars and warnings while open."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
