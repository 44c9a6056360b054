"""A checkpoint: a network with its tokenizer, end tokens and context length."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from saltus.core.sampling import Sampling
from saltus.core.value_types import about_setting
from saltus.engine.target_network import make_network
from saltus.engine.text_bounds import require_fits
from saltus.kernels.packed_blocks import ARITHMETICS
from saltus.loading.fetching import first_line
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.loading.load_model import WEIGHTS, has_tokenizer_files, load_model, load_tokenizer, silence_transformers
from saltus.loading.metadata import ADAPTER_CONFIG_FILE, METADATA_FILE, read_metadata
from saltus.loading.packing import PACKINGS
from saltus.loading.peft_adapters import adapted_model, is_peft_adapter, merge_adapter
from saltus.loading.progress import ProgressCallback
from saltus.loading.sources import resolve
from saltus.methods.assd.network import ANY_SUBSET, AnySubsetNetwork, load_pairwise_correction
from saltus.methods.assd.xlnet import XlnetNetwork
from saltus.methods.shared.adapter_files import load_adapter
from saltus.models.causal import CausalNetwork
from saltus.models.protocols import TargetNetwork
from saltus.models.resized_vocabulary import embedding_rows

SCALED_ROPE_TYPES = ("linear", "dynamic", "yarn")  # whose configurations may give the length before the scaling
NO_TOKENIZER_FILES = "there are no files of one, such as tokenizer.json"
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A network and what belongs to it."""

    name: str
    network: TargetNetwork
    tokenizer: Any
    end_tokens: frozenset[int]  # tokens that end a text
    context_length: int | None  # in tokens; None if unknown

    @property
    def num_token_ids(self) -> int:
        """Ids below this can be read and written: the rows of the embeddings, more or fewer than the tokenizer's."""
        return embedding_rows(self.network.model) or len(self.tokenizer)

    def check_tokens(self, tokens: Sequence[int], what: str) -> None:
        """Raise ValueError of one line if the model has no embedding of a token, as of one that was added later."""
        limit = self.num_token_ids
        if (wrong := next((token for token in tokens if not 0 <= token < limit), None)) is not None:
            text = self.tokenizer.convert_ids_to_tokens(wrong) if 0 <= wrong < len(self.tokenizer) else None
            named = f"token {wrong}" + (f" ({text})" if text else "")
            raise ValueError(f"{named} of {what} has no embedding in {self.name}, which has {limit:,}; leave it out")

    def require_fits(self, what: str, *texts: str) -> None:
        """Raise PromptTooLongError if the texts together are longer than anything that fits into the context."""
        require_fits(texts, self.tokenizer, self.context_length, self.name, what)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError of one line if a token that the model does not have is forced, banned or biased."""
        with about_setting("logit_bias"):
            self.check_tokens([token for token, _ in sampling.logit_bias], "logit_bias")
        for name in ("forced_at_index", "banned_at_index"):
            with about_setting(name):
                self.check_tokens([token for _, token in getattr(sampling, name)], name)


def load_checkpoint(
    name_or_path: str,
    device: str = "auto",
    dtype: str = "auto",
    exact: bool = True,
    progress: ProgressCallback | None = None,
    max_draft_tokens: int = 16,
    weights: str = "file",
    arithmetic: str = "auto",
) -> Checkpoint:
    """A causal model by short name, folder, GGUF file or hub id, for trees of `max_draft_tokens`. Errors: ValueError.

    `weights` stay as the checkpoint stores them ("file"), are expanded to bfloat16 where they are packed ("bf16"), or
    are packed by one of GGUF's quantisers ("q8_0", "q4_1", …), which makes another model of it.
    Packed weights multiply activations of 8 bits ("int8", the default) or in bfloat16 ("bf16").
    The folder of an adapter of `saltus train` loads its target with the adapter attached, and that of a LoRA adapter of
    PEFT its base model with the adapter merged into the weights.
    """
    device = resolve_device(device)
    if device != "cpu":
        _require_working_gpu(device)
    _check_choice("dtype", dtype, DTYPES)
    _check_choice("weights", weights, WEIGHTS)
    _check_choice("arithmetic", arithmetic, ("auto", *ARITHMETICS))
    place = Path(name_or_path).expanduser()
    is_adapter = all((place / file).is_file() for file in (ADAPTER_CONFIG_FILE, METADATA_FILE))
    adapter = place if is_adapter else None
    base = name_or_path if adapter is None else read_metadata(adapter, "adapter").target_name
    folder = resolve(base, progress=progress)
    peft = place if is_peft_adapter(place) else None
    with silence_transformers():
        if peft is not None and weights in PACKINGS:
            raise ValueError(
                f"weights are packed as {weights} before an adapter is merged into them; leave out weights"
            )
        kept = weights if peft is None else "bf16"  # nothing can be added to packed weights
        model = load_model(name_or_path, folder, DTYPES[dtype], device, kept, exact and peft is None, arithmetic)
        if peft is not None:
            merge_adapter(model, peft, str(adapted_model(peft)))
        tokenizer = _load_tokenizer(name_or_path, peft if peft is not None and has_tokenizer_files(peft) else folder)
    place_in_huge_pages(model)
    network = make_network(model, name_or_path, exact, max_draft_tokens)
    if isinstance(network, AnySubsetNetwork | XlnetNetwork):
        network.pairwise_correction = load_pairwise_correction(folder, *model.get_output_embeddings().weight.shape)
    if adapter is not None:
        if not isinstance(network, CausalNetwork) or not network.accepts_drafters:
            raise ValueError(f"{base} fills holes anywhere, but adapters are for causal models; load it without")
        network.attach_adapter(load_adapter(adapter, model, base))
    return Checkpoint(name_or_path, network, tokenizer, end_tokens_of(model, tokenizer), context_length_of(model))


def _load_tokenizer(name: str, folder: Path) -> Any:
    """The tokenizer of the model of this name. Errors: ValueError that says what is missing."""
    try:
        tokenizer = load_tokenizer(folder)
        if not tokenizer("a").input_ids and not has_tokenizer_files(folder):
            raise ValueError(NO_TOKENIZER_FILES)
        return tokenizer
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer of {name} needs Python code from {folder}, which saltus never runs; put a"
                " tokenizer.json there, and take auto_map out of tokenizer_config.json"
            ) from error
        why = first_line(error) if has_tokenizer_files(folder) else NO_TOKENIZER_FILES
        raise ValueError(
            f"{name} has no tokenizer that loads ({why}); put its tokenizer files into {folder}"
        ) from error


def fills_holes(model: Any) -> bool:
    """True if the model fills holes anywhere, so that its network is not causal."""
    return bool(getattr(model.config, ANY_SUBSET, None)) or model.config.model_type == "xlnet"


def require_same_vocabulary(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raise ValueError unless both have the same vocabulary."""
    if not has_same_vocabulary(target, drafter):
        raise ValueError(
            f"{drafter.name} has another vocabulary than {target.name} and can draft for it under the rule match and as"
            " small_model alone; choose a smaller model of the same family"
        )


def has_same_vocabulary(target: Checkpoint, drafter: Checkpoint) -> bool:
    """True if the vocabularies are the same, but for the places that no text has a token for."""
    first, second = (_used_tokens(each.tokenizer) for each in (target, drafter))
    return first == second


def _used_tokens(tokenizer: Any) -> dict[str, int]:
    """The vocabulary without what llama.cpp's converter fills it up with, to the rows of the embeddings."""
    return {token: number for token, number in tokenizer.get_vocab().items() if token != f"[PAD{number}]"}


def end_tokens_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """The end tokens that the generation config and the tokenizer name. Errors: ValueError for other than numbers."""
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    several = named if isinstance(named, list) else [named]
    ends = [token for token in [*several, tokenizer.eos_token_id] if token is not None]
    if wrong := [token for token in ends if type(token) is not int]:
        raise ValueError(f"the model's eos_token_id is {wrong[0]!r}, but must be a token's number; fetch it again")
    return frozenset(ends)


def context_length_of(model: Any) -> int | None:
    """The context length in tokens from the model's configuration; None if it has none.

    Positions that are scaled reach as far as they are scaled to, where the configuration does not say so itself.
    """
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    if not length or length < 1:  # XLNet's is −1
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in SCALED_ROPE_TYPES:
        return length
    unscaled = rope.get("original_max_position_embeddings") or length
    return max(length, int(unscaled * rope.get("factor", 1)))


def resolve_device(name: str) -> str:
    """The device that a name stands for: auto is a GPU if there is one. Errors: ValueError."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, number = name.partition(":")
    _check_choice("device", kind, ("auto", "cpu", "cuda"))
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is cuda, but torch finds no CUDA device; use device='cpu', or a CUDA build of torch and a driver"
            " that is new enough for it"
        )
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if colon and not (number.isdecimal() and int(number) < count):
        known = ", ".join(f"cuda:{each}" for each in range(count)) or kind
        raise ValueError(f"device is {name!r}, but torch does not have that; use {known}")
    return name


def _require_working_gpu(name: str) -> None:
    """Raise ValueError for a GPU that torch finds and cannot use: it is too old for it, or other programs have it."""
    try:
        torch.ones(1, device=name).add_(1).cpu()
    except Exception as error:  # RuntimeErrors mostly
        raise ValueError(
            f"torch cannot use the GPU {name} ({first_line(error)}); see nvidia-smi for programs that hold it, or take"
            " device='cpu' (--device cpu)"
        ) from error


def _check_choice(option: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}, but must be one of {', '.join(choices)}")
