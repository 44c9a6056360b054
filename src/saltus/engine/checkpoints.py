"""Load a checkpoint with its tokenizer, and check that Saltus's attention gives the same logits as its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.core.sampling import Sampling
from saltus.kernels.packed_weight import ARITHMETICS, Arithmetic, uses_integers
from saltus.loading.byte_tokenizers import evabyte_tokenizer
from saltus.loading.evabyte_files import is_evabyte, load_evabyte
from saltus.loading.fetching import SourceError, first_line
from saltus.loading.gguf_weights import load_gguf_model
from saltus.loading.huge_pages import place_in_huge_pages
from saltus.loading.metadata import ADAPTER_CONFIG_FILE, METADATA_FILE, read_metadata
from saltus.loading.model_folders import (
    INDEX_FILE,
    check_number_of_weights,
    check_size,
    foreign_quantization,
    integer_weight,
    text_part,
)
from saltus.loading.packing import PACKINGS, pack_model
from saltus.loading.peft_adapters import adapted_model, is_peft_adapter, merge_adapter
from saltus.loading.progress import ProgressCallback
from saltus.loading.quantised_weights import find_quantised
from saltus.loading.sources import resolve
from saltus.methods.assd.network import ANY_SUBSET, AnySubsetNetwork, load_pairwise_correction
from saltus.methods.assd.xlnet import XlnetNetwork
from saltus.methods.shared.adapter_files import load_adapter
from saltus.models.architectures import describe_decoder, ignored_setting, why_not_described
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.native_decoder import supports_native_decoder
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.cuda.placement import move_to_gpu
from saltus.models.evabyte import EvaByteNetwork
from saltus.models.evabyte_decoder import EvaByteDecoder
from saltus.models.packed_decoder import PackedDecoder
from saltus.models.packed_experts import PACKED_EXPERTS, expert_stacks, experts_implementation
from saltus.models.protocols import TargetNetwork
from saltus.models.recurrent_layers import OTHER_KEYS, kinds_of_layers, recurrent_layer_types
from saltus.models.resized_vocabulary import embedding_rows

MAX_OTHER_TEXTS = 3  # on which mixtures of experts are checked where the first one differs
WEIGHTS = ("file", "bf16", *PACKINGS)  # as stored, packed ones expanded to bfloat16, or packed by GGUF's quantisers
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tiktoken.model", "tekken.json",
)  # fmt: skip
SCALED_ROPE_TYPES = ("linear", "dynamic", "yarn")  # whose configurations may give the length before the scaling
DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ValueError of one line if a token that the model does not have is forced or banned somewhere."""
        for name in ("forced_at_index", "banned_at_index"):
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
    device, kind = resolve_device(device), _checked_choice("dtype", dtype, DTYPES)
    _checked_choice("weights", weights, dict.fromkeys(WEIGHTS))
    _checked_choice("arithmetic", arithmetic, dict.fromkeys(("auto", *ARITHMETICS)))
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
        model = load_model(name_or_path, folder, kind, device, kept, exact and peft is None, arithmetic)
        if peft is not None:
            merge_adapter(model, peft, str(adapted_model(peft)))
        place = folder if peft is None or not has_tokenizer_files(peft) else peft
        try:
            tokenizer = load_tokenizer(place)
            if not tokenizer("a").input_ids and not has_tokenizer_files(place):
                raise ValueError("there are no files of one, such as tokenizer.json")
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise ValueError(
                    f"the tokenizer of {name_or_path} needs Python code from {folder}, which saltus never runs; put a"
                    " tokenizer.json there, and take auto_map out of tokenizer_config.json"
                ) from error
            raise ValueError(
                f"{name_or_path} has no tokenizer that loads ({first_line(error)}); put its tokenizer files"
                f" into {place}"
            ) from error
    place_in_huge_pages(model)
    network = make_network(model, name_or_path, exact, max_draft_tokens)
    if isinstance(network, AnySubsetNetwork | XlnetNetwork):
        network.pairwise_correction = load_pairwise_correction(folder, *model.get_output_embeddings().weight.shape)
    if adapter is not None:
        if not isinstance(network, CausalNetwork) or not network.accepts_drafters:
            raise ValueError(f"{base} fills holes anywhere, but adapters are for causal models; load it without")
        network.attach_adapter(load_adapter(adapter, model, base))
    return Checkpoint(name_or_path, network, tokenizer, end_tokens_of(model, tokenizer), context_length_of(model))


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


# beside a weight, they say that it is quantised
SCALE_NAMES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_packed", "qweight", "qzeros")


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
        raise ValueError(
            f"{name} does not load as a causal language model ({first_line(error)}); choose one that does"
        ) from error
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
    return model


def _quantised_by(method: str) -> str:
    return f"weights quantised by {method}, which do not load here; take the original model, or a GGUF file of it"


def _require_finite_weights(model: Any, name: str) -> None:
    """Raise ValueError for weights that are not numbers, which no other type would mend."""
    for key, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(f"{name} has weights that are NaN or infinite, such as {key}; fetch or train it again")


def make_network(model: Any, name: str, exact: bool = True, max_draft_tokens: int = 16) -> TargetNetwork:
    """The network of a model. A causal one is checked on a small tree: both attentions must give the same logits.

    A sibling node between text and branch exposes attention that ignores the tree mask. Near-ties of a router, which
    rounding decides, are rare enough that one of a few texts has none that matters. Errors: ValueError.
    """
    if isinstance(model, EvaByteDecoder):
        return EvaByteNetwork(model, exact)
    if getattr(model.config, ANY_SUBSET, None):
        return AnySubsetNetwork(model, exact)
    if isinstance(model, PackedDecoder):
        return CausalNetwork(model, exact, FixedShapeSettings.for_max_draft_tokens(max_draft_tokens))
    if model.config.model_type == "xlnet":
        return XlnetNetwork(model, exact)
    why = _why_no_layers(model)
    if why is None:
        with torch.inference_mode(), silence_transformers():
            try:
                expected = _logits_of_a_branch(model, 0)
                network = CausalNetwork(model, exact, FixedShapeSettings.for_max_draft_tokens(max_draft_tokens))
                kv_cache = network.new_kv_cache()
                computed = _logits_in_a_tree(network, 0, kv_cache)
                # rounding alone: of float32, of bfloat16, of activations in 8 bits; what a sibling does is about 1
                bound = 0.01 if model.dtype == torch.float32 else 0.6 if uses_integers(model) else 0.2
                differs, text = _differ(expected, computed, bound), 0
                may_tie = model.dtype != torch.float32 and any(map(expert_stacks, model.modules()))
                while differs and may_tie and text < MAX_OTHER_TEXTS:
                    text += 1  # another expert was taken at a tie perhaps; what is wrong differs in every text
                    computed = _logits_in_a_tree(network, text, network.new_kv_cache())
                    differs = _differ(_logits_of_a_branch(model, text), computed, bound)
            except Exception as error:
                why = first_line(error)
            else:
                if not expected.isfinite().all():
                    _require_finite_weights(model, name)
                if kv_cache.keys is None:
                    why = "its attention does not go through Transformers' AttentionInterface"
                elif differs:
                    why = "a tree of tokens gets other logits than its branches get alone"
                else:
                    network.kv_bytes_per_token = kv_cache.bytes_per_token
                    return network
    raise ValueError(f"{name} ({type(model).__name__}) cannot be served: {why}; choose a model with plain attention")


def _tree_tokens(vocab: int, number: int) -> tuple[list[int], list[int]]:
    """A text, and a tree after it: a sibling, then a branch of two tokens. There is one for each number."""
    return [(7 * i + 3 + 29 * number) % vocab for i in range(6)], [(11 * i + 5 + 29 * number) % vocab for i in range(3)]


def _logits_of_a_branch(model: Any, number: int) -> Tensor:
    """The logits after a text and each token of the branch, by the model's own forward."""
    text, (_, *branch) = _tree_tokens(model.get_output_embeddings().weight.shape[0], number)
    whole = torch.tensor([text + branch], device=model.device)
    return model(whole, use_cache=False).logits[0, len(text) - 1 :]


def _logits_in_a_tree(network: CausalNetwork, number: int, kv_cache: Any) -> Tensor:
    """The same by the network, in a tree with a sibling."""
    text, nodes = _tree_tokens(network.model.get_output_embeddings().weight.shape[0], number)
    inputs = ForwardInputs(continuation(text, 3), tuple(nodes), (-1, -1, 1))
    return network.forward([inputs], [kv_cache])[0].logits[[0, 2, 3]]


def _differ(expected: Tensor, computed: Tensor, bound: float) -> bool:
    """True for finite logits whose difference is more than this part of their spread."""
    expected, computed = expected.float(), computed.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return bool(expected.isfinite().all() and (computed - expected).norm() > bound * spread)


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


def fills_holes(model: Any) -> bool:
    """True if the model fills holes anywhere, so that its network is not causal."""
    return bool(getattr(model.config, ANY_SUBSET, None)) or model.config.model_type == "xlnet"


def require_same_vocabulary(target: Checkpoint, drafter: Checkpoint) -> None:
    """Raise ValueError unless both have the same vocabulary, but for the places that no text has a token for."""
    first, second = (_used_tokens(each.tokenizer) for each in (target, drafter))
    if first != second:
        raise ValueError(
            f"{drafter.name} has another vocabulary than {target.name} and cannot draft for it;"
            " choose a smaller model of the same family"
        )


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


def _why_no_layers(model: Any) -> str | None:
    """Why layers cannot be had, such as Transformers' own that keep a state and read no tree. None: they can."""
    if setting := ignored_setting(model):
        return f"this version of Transformers ignores its {setting}, and texts would be wrong"
    if describe_decoder(model) is None and (others := sorted(kinds_of_layers(model) & OTHER_KEYS)):
        return f"its {others[0]} layers attend to other keys than those of the text"
    kinds = recurrent_layer_types(model)
    if not kinds or supports_native_decoder(model):
        return None
    state = f"it keeps a state in {kinds[0]} layers"
    if (what := why_not_described(model)) is not None:
        return f"{state}, and our kernels do not compute {what}"
    return state if describe_decoder(model) is None else f"{state}, which only compiled kernels on a CPU can read"


def resolve_device(name: str) -> str:
    """The device that a name stands for: auto is a GPU if there is one. Errors: ValueError."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, number = name.partition(":")
    _checked_choice("device", kind, {"auto": 0, "cpu": 0, "cuda": 0})
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device; use device='cpu' or a CUDA build of torch")
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if colon and not (number.isdecimal() and int(number) < count):
        known = ", ".join(f"cuda:{each}" for each in range(count)) or kind
        raise ValueError(f"device is {name!r}, but torch does not have that; use {known}")
    return name


def _checked_choice(option: str, value: str, choices: dict[str, Any]) -> Any:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}, but must be one of {', '.join(choices)}")
    return choices[value]


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
