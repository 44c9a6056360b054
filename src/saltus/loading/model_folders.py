"""Check that a folder holds a model with all of its weights."""

import json
import re
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from saltus.loading.fetching import SourceError, first_line
from saltus.loading.same_layers import same_layers

WEIGHT_FILE_PATTERNS = (
    re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
    re.compile(r"[^/]+\.safetensors"),
)
HEADS_FILE = re.compile(r"(model[-_])?mtp\.safetensors")  # of heads for multi-token prediction; indices may omit it
LAYER_COUNT = re.compile(r"(num_|n_)?((hidden|encoder|decoder)_)?layers?")  # keys of configurations
KINDS_OF_LAYERS = re.compile(r"layer_types|layers_block_type|block_types|mlp_layer_types")  # one for each layer
MIN_LAYER_BYTES = 100  # of a layer in a pickled file
LAYERS_OF_TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {  # that have no class of their own, and what they fix
    # Of texts alone, positions in several dimensions are one.
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), ("qwen2", {})),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": ("qwen3_moe", {}),
    "glm4v_text": ("glm4", {"attention_bias": True}),
    "glm_ocr_text": ("glm4", {"attention_bias": False}),
    "glm4v_moe_text": ("glm4_moe", {"use_qk_norm": False}),
    "hunyuan_vl_text": ("hunyuan_v1_dense", {}),
    **dict.fromkeys(("granite4_vision_text", "granite_docling_text"), ("granite", {})),
    "paddleocr_vl_text": ("llama", {}),
}
OWN_CLASSES = {  # that no mapping of causal models lists: Transformers', or ours of its layers
    "mistral4": ("transformers", "Mistral4ForCausalLM"),
    "mistral_large4_text": ("saltus.models.text_parts.mistral_large4", "MistralLarge4ForCausalLM"),
    "muse_glimmer_text": ("saltus.models.text_parts.muse_glimmer", "MuseGlimmerForCausalLM"),
    "glm5_next_text": ("saltus.models.text_parts.glm5_next", "Glm5NextForCausalLM"),
    "step3p5": ("saltus.models.text_parts.step3p5", "Step3p5ForCausalLM"),
}
TEXT_PART_NAMES = {  # in models that read more than text, by pattern
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.text_model\.": "model.",  # Idefics 3, SmolVLM
    r"^thinker\.(?:model\.)?(?:language_model\.)?(?=(?:embed_tokens|layers|norm)\.)": "model.",  # Qwen's Omni
    r"^thinker\.lm_head\.": "lm_head.",
}
MAX_WEIGHTS_PER_BYTE = 8  # of quantised files
MAX_OTHER_WEIGHTS = 1 << 26  # that a model computes, such as masks and angles
MODELOPT_FILE = "hf_quant_config.json"  # how NVIDIA's ModelOpt quantised the weights
INDEX_FILE = "gguf.json"  # beside config.json: the weights are in a GGUF file, and where
MANIFEST = "source.json"  # of a folder in the cache: where it is from, and the digests of its files
PAIRWISE_CORRECTION_FILE = "pairwise.safetensors"  # beside the weights of an any-subset model
MASK_FILE = "mask_embedding.pt"  # of some DFlash drafters: what queries start with, if no token's embedding
SIDE_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken"}  # of settings and tokenizers
LFS_POINTER = b"version https://git-lfs"


def check_folder(folder: Path) -> None:
    """Raise SourceError unless the folder holds a configuration and whole weights."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        if ggufs := sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf"):
            raise SourceError(f"{folder} holds GGUF files; name the file, such as {ggufs[0]}")
        from saltus.loading.metadata import METADATA_FILE, OPTIONS  # which import torch

        kind = str(_json_object(folder / METADATA_FILE).get("kind"))
        if kind != "model" and (option := OPTIONS.get(kind)):
            raise SourceError(f"{folder} holds no model, but what drafts for one ({kind}); give it as {option}")
        inside = [*sorted(folder.glob("*/config.json")), *sorted(folder.glob("*/*/config.json"))]
        cure = f"there is one in {inside[0].parent}" if inside else "give a folder that save_pretrained wrote"
        raise SourceError(f"{folder} holds no model (config.json is missing): {cure}")
    needed = [file for file in folder.iterdir() if file.suffix in SIDE_SUFFIXES]
    needed += [] if (folder / INDEX_FILE).is_file() else weight_files(folder)
    for file in needed:
        if file.is_symlink() and not file.exists():
            raise SourceError(
                f"{file} is a link to {file.readlink()}, which is not there; copy the files themselves (cp -rL)"
            )
        if file.is_file():
            refuse_lfs_pointer(file)
    _check_generation_config(folder / "generation_config.json")
    if (folder / INDEX_FILE).is_file():
        return
    weights = weight_files(folder)
    if not weights:
        raise SourceError(
            f"{folder} has a config.json but no weights (*.safetensors or pytorch_model*.bin);"
            " copy them there, or save the model again with save_pretrained"
        )
    for file in weights:
        if not file.exists():
            raise SourceError(
                f"{folder} lacks {file.name}, which its index names; copy it there, or fetch the model again"
            )
        if file.suffix == ".safetensors":
            read_safetensors_header(file)


def _check_generation_config(file: Path) -> None:
    """Raise SourceError for a damaged one: Transformers would go on without the end tokens that it names."""
    try:
        whole = not file.is_file() or isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise SourceError(f"{file} is no JSON object; fetch it again, or remove it to end texts as config.json says")


def refuse_lfs_pointer(file: Path) -> None:
    """Raise SourceError for what git leaves in place of a large file that was not fetched."""
    with file.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise SourceError(f"{file} is a pointer of git-lfs, not the file itself; run git lfs pull in its folder")


def quantization_settings(folder: Path) -> dict[str, Any]:
    """What the configuration of a folder, or of its text part, says of its quantised weights; {} if it says nothing.

    Older exports of ModelOpt say it in a file of their own.
    """
    config = _json_object(folder / "config.json")
    text = config.get("text_config")
    given = config.get("quantization_config") or config.get("quantization")
    given = given or (text.get("quantization_config") if isinstance(text, dict) else None)
    if isinstance(given, dict):
        return given
    own = _json_object(folder / MODELOPT_FILE).get("quantization")
    return {**own, "quant_method": "modelopt"} if isinstance(own, dict) else {}


def _json_object(file: Path) -> dict[str, Any]:
    """What a file holds; {} if it is no JSON object."""
    try:
        return read_json_object(file)
    except (OSError, SourceError):
        return {}


def read_json_object(file: Path) -> dict[str, Any]:
    """What a file of a model holds. Errors: SourceError if it is no JSON object."""
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file} is not JSON ({first_line(error)}); fetch the model again") from None
    if not isinstance(found, dict):
        raise SourceError(f"{file} is no JSON object; fetch the model again")
    return found


def foreign_quantization(folder: Path) -> str | None:
    """How the weights of a folder are quantised, in words, if its configuration says so."""
    given = quantization_settings(folder)
    if not given:
        return None
    if not (method := given.get("quant_method")):
        return "MLX" if {"bits", "group_size"} & given.keys() else "another program"
    return repr(str(method).upper()).strip("'")  # a line, whatever the file says


def integer_weight(folder: Path) -> str | None:
    """The name of a matrix whose numbers are integers, which stand for others; None if there is none."""
    for file in weight_files(folder):
        for name, entry in read_safetensors_header(file)[0].items() if file.suffix == ".safetensors" else ():
            if name.endswith("weight") and str(entry.get("dtype")).startswith(("I", "U")) and len(entry["shape"]) > 1:
                return name
    return None


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, safetensors first; those that an index names even if they are missing.

    Files of heads alone come last where they are beside the others.
    """
    files = _files_of_the_model(folder)
    beside = sorted(file for file in folder.iterdir() if HEADS_FILE.fullmatch(file.name)) if files else []
    return files + [file for file in beside if file not in files]


def _files_of_the_model(folder: Path) -> list[Path]:
    for whole in ("model.safetensors", "pytorch_model.bin"):  # Transformers' order
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / f"{whole}.index.json").is_file():
            return [folder / name for name in _indexed_files(folder / f"{whole}.index.json")]
    for kind in WEIGHT_FILE_PATTERNS:
        if files := sorted(file for file in folder.iterdir() if kind.fullmatch(file.name)):
            return files
    return []


def _indexed_files(index: Path) -> list[str]:
    """The names of the files of an index. Errors: SourceError if it is damaged, or names a file of another folder."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} is damaged ({first_line(error)}); fetch the model again") from None
    if outside or not names:
        what = f"names {outside[0]!r}, which is not a file of its folder" if outside else "names no files"
        raise SourceError(f"{index} {what}; fetch the model again")
    return names


def check_size(folder: Path) -> None:
    """Raise SourceError for a config.json of more layers than its weights can be, before anything is made of it.

    Layers are counted by the tensors of safetensors files, and by the bytes of others.
    """
    layers = max(_layer_counts(read_json_object(folder / "config.json")), default=0)
    possible = 0
    for file in weight_files(folder):
        is_listed = file.suffix == ".safetensors"
        possible += len(read_safetensors_header(file)[0]) if is_listed else file.stat().st_size // MIN_LAYER_BYTES
    if layers > possible:
        raise SourceError(
            f"{folder / 'config.json'} says {layers:,} layers, which its weights cannot be; fetch the model again"
        )


def unknown_type(folder: Path, error: Exception) -> str | None:
    """What a model is and the cure, if Transformers' error says that it does not know the type of a folder."""
    from transformers import PreTrainedConfig, __version__

    if "does not recognize this architecture" not in str(error):
        return None
    kind = PreTrainedConfig.get_config_dict(folder)[0].get("model_type")
    unknown = f"of the type {kind}, which Transformers {__version__} does not know"
    return f"{unknown}; choose another model, or update Transformers"


def text_part(folder: Path) -> dict[str, Any]:
    """What `from_pretrained` needs to load the text part of a model that reads images or sounds, too, or a model that
    Transformers knows by another name; {} for others.

    Where Transformers has a class for the text part alone, its weights are found under the names that they have in the
    whole model; all others are left out. Errors: ValueError where it has no such class.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    given, _ = PreTrainedConfig.get_config_dict(folder)
    if same := same_layers(given):
        kind, settings = same
        return {"config": AutoConfig.for_model(kind, **settings)}
    whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text: Any = whole.get_text_config(decoder=True)
    whole = getattr(whole, "thinker_config", whole)  # of a model that speaks, too: the part that writes
    if alike := LAYERS_OF_TEXT_PARTS.get(text.model_type):
        kind, fixed = alike
        fields = {name: value for name, value in text.to_dict().items() if name not in ("model_type", "architectures")}
        rope = {name: value for name, value in fields["rope_parameters"].items() if not name.startswith("mrope")}
        dim = fields.get("head_dim") or text.hidden_size // text.num_attention_heads
        if kind.startswith("glm4"):
            rope.setdefault("partial_rotary_factor", 1.0)  # which is another number for models of texts alone
        if "use_bias" in fields:
            fields["attention_bias"] = fields["mlp_bias"] = fields["use_bias"]
        fields |= {"rope_parameters": rope, "head_dim": dim} | fixed
        text = AutoConfig.for_model(kind, **fields)
    list_causal_class(text)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(whole) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind, is_part = whole.model_type, text.model_type != whole.model_type
        part = f"for the text part of {kind}" if is_part else f"of the type {kind}"
        raise ValueError(f"Transformers has no causal language model {part}")
    if text is whole or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return {}
    text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", text.tie_word_embeddings)
    return {"config": text, "key_mapping": TEXT_PART_NAMES}


def text_name(name: str) -> str:
    """What a weight of a model that reads images or sounds, too, is called in its text part."""
    for pattern, replacement in TEXT_PART_NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def list_causal_class(config: Any) -> None:
    """Let AutoModelForCausalLM find the class of a configuration also if it is one of `OWN_CLASSES`."""
    if place := OWN_CLASSES.get(config.model_type):
        from transformers import AutoModelForCausalLM

        module, name = place
        AutoModelForCausalLM.register(type(config), getattr(import_module(module), name), exist_ok=True)


def check_number_of_weights(folder: Path) -> None:
    """Raise SourceError for a configuration of far more weights than the files hold.

    Transformers would draw the missing ones, however many. Its model is made without weights to count them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = text_part(folder).get("config") or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # said by who loads it
        return
    wanted = sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])
    size = sum(file.stat().st_size for file in weight_files(folder))
    if wanted > MAX_WEIGHTS_PER_BYTE * size + MAX_OTHER_WEIGHTS:
        raise SourceError(
            f"{folder / 'config.json'} says {wanted:,} weights, but its files have {size:,} bytes;"
            " fetch the model again"
        )


def _layer_counts(config: Any) -> Iterator[int]:
    """Every number of layers in a configuration, also of parts."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, int) and LAYER_COUNT.fullmatch(key):
            yield value
        if isinstance(value, list) and KINDS_OF_LAYERS.fullmatch(key):
            yield len(value)
        yield from _layer_counts(value)


def read_safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file lists, and where their bytes begin."""
    size = file.stat().st_size
    with file.open("rb") as bytes_in:
        prefix = bytes_in.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        try:
            header = json.loads(bytes_in.read(length)) if length < size else {}
            header.pop("__metadata__", None)
            expected = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        except (ValueError, AttributeError, TypeError, LookupError):
            raise SourceError(f"{file} is not a safetensors file, or a damaged one; copy or fetch it again") from None
    if size < expected:
        raise SourceError(f"{file} is cut short ({size:,} of {expected:,} bytes); copy or fetch it again")
    return header, 8 + length
