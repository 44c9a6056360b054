"""Pack the weights of a loaded model by GGUF's quantisers, one after the other; the blocks are kept in the cache."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import safe_open
from torch import Tensor, nn

from saltus.kernels import native
from saltus.kernels.packed_blocks import GROUP_OUTPUTS, Arithmetic, Format, blocks_shape, quantized_blocks
from saltus.kernels.packed_weight import PackedWeight, dequantize_blocks
from saltus.loading.model_folders import weight_files
from saltus.models.architectures import describe_decoder
from saltus.models.decoder_description import experts_of
from saltus.models.decoder_of import decoder_of
from saltus.models.packed_decoder import UninitializedLinear
from saltus.models.packed_experts import expert_stacks, has_transposed_stacks
from saltus.storage.cache_files import disk_errors, has_digest, new_file_with_digest
from saltus.storage.cache_folder import cache_folder

log = logging.getLogger("saltus")

PACKINGS = {name: GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}


@dataclass(frozen=True)
class Place:
    """Where a model has a matrix [out, in], or a stack of experts' matrices that may be [experts, in, out]."""

    module: Any
    attribute: str = "weight"

    @property
    def is_transposed(self) -> bool:
        """True for a stack [experts, in, out]."""
        return self.weight.ndim == 3 and has_transposed_stacks(self.module)

    @property
    def weight(self) -> Any:
        """As the model has it."""
        return getattr(self.module, self.attribute)

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., out, in]"""
        *stack, first, second = self.weight.shape
        return (*stack, second, first) if self.is_transposed else (*stack, first, second)

    def blocks(self, format: GGMLQuantizationType) -> Tensor:
        """Its numbers as GGUF's blocks."""
        return quantized_blocks(self.weight.mT if self.is_transposed else self.weight, format)

    def can_pack(self, block: int) -> bool:
        """True if rows are whole blocks, and each half of the outputs of experts begins with a group of 16."""
        *_, outputs, inputs = self.shape
        return inputs % block == 0 and (self.weight.ndim == 2 or outputs % (2 * GROUP_OUTPUTS) == 0)

    def replace(self, blocks: Tensor, format: GGMLQuantizationType, arithmetic: Arithmetic) -> None:
        """Put a packed weight of these blocks in the place; without compiled kernels the same numbers, expanded."""
        if native.load_kernels() is None:
            expanded = dequantize_blocks(blocks, format)
            weight = expanded.mT if self.is_transposed else expanded
        else:
            packed = PackedWeight.from_blocks(blocks, format, arithmetic)
            weight = packed.flipped() if self.is_transposed else packed
        setattr(self.module, self.attribute, nn.Parameter(weight, requires_grad=False))


def pack_model(model: Any, packing: str, folder: Path, arithmetic: Arithmetic = "bf16") -> None:
    """Pack the matrices of linear layers, embeddings and experts, [out, in] with `in` a multiple of 32.

    `folder` is where the model was loaded from. Matrices are replaced one after the other, so that the memory of each
    is free before the next is packed. Errors: ValueError for a model without such matrices, or if the blocks cannot be
    kept.
    """
    format = PACKINGS[packing]
    size = GGML_QUANT_SIZES[format][0]
    places = packable_places(model, size)
    if not places:
        raise ValueError(f"no weights of {folder} can be packed as {packing}; load it with the weights of its file")
    if left := [place for place in _stacks(model).values() if not place.can_pack(size)]:
        log.warning(
            "%s: %d matrices of experts stay as they are: their inputs and outputs, such as %s, are no multiples of 32",
            folder, len(left), " and ".join(map(str, left[0].shape[:0:-1])),
        )  # fmt: skip
    unembedding = model.get_output_embeddings()
    is_tied = unembedding is not None and unembedding.weight is model.get_input_embeddings().weight
    kept = _cached_blocks(folder, packing, places)
    if has_digest(kept):
        with safe_open(kept, "pt") as stored:
            for name, place in places.items():
                place.replace(stored.get_tensor(name), format, arithmetic)
    else:
        with disk_errors(cache_folder(), f"the {packing} weights of {folder}"), new_file_with_digest(kept) as made:
            shapes = {name: blocks_shape(place.shape, format) for name, place in places.items()}
            with _blocks_file(made, shapes) as write:
                for place in places.values():
                    blocks = place.blocks(format)
                    write(blocks)
                    place.replace(blocks, format, arithmetic)
    if unembedding is not None and is_tied:  # whatever the configuration says
        unembedding.weight = model.get_input_embeddings().weight


def pack_places(places: Iterable[Place], packing: str, arithmetic: Arithmetic) -> None:
    """Replace matrices by packed ones, where their rows are whole blocks; nothing is kept."""
    format = PACKINGS[packing]
    for place in places:
        if place.can_pack(GGML_QUANT_SIZES[format][0]):
            place.replace(place.blocks(format), format, arithmetic)


def pack_like(module: Any, model: Any) -> None:
    """Pack the matrices of a module that came with a model as `pack_model` has packed those of the model, if it has."""
    packed = [weight for weight in model.parameters() if isinstance(weight, PackedWeight)]
    names: dict[Format, str] = {format: name for name, format in PACKINGS.items()}
    if packed and (packing := names.get(packed[0].format)):
        places = packable_places(module, GGML_QUANT_SIZES[PACKINGS[packing]][0]).values()
        unpacked = [place for place in places if not isinstance(place.weight, PackedWeight)]
        pack_places(unpacked, packing, packed[0].arithmetic)


def packable_places(model: Any, block: int) -> dict[str, Place]:
    """Matrices of linear layers, embeddings and experts by name, each once; their inputs are multiples of `block`."""
    places, seen = {}, set()
    for name, place in chain(_layers(model), _stacks(model).items()):
        if place.can_pack(block) and place.weight not in seen:  # output layers may be tied to embeddings
            seen.add(place.weight)
            places[name] = place
    return places


def _layers(model: Any) -> Iterator[tuple[str, Place]]:
    routers = _routers(model)
    for name, layer in model.named_modules():
        # of embeddings also classes that multiply rows, such as Gemma's
        known = type(layer) in (nn.Linear, UninitializedLinear) or isinstance(layer, nn.Embedding)
        if known and layer not in routers:
            yield name, Place(layer)


def _routers(model: Any) -> set[Any]:
    """What chooses experts: as in GGUF files it keeps its numbers, which are few and decide much."""
    description = describe_decoder(model) if hasattr(model, "get_decoder") else None
    layers = () if description is None else description.layers
    mixtures = [experts for layer in layers if (experts := experts_of(layer)) is not None]
    return {decoder_of(model).get_submodule(experts.router) for experts in mixtures}


def _stacks(model: Any) -> dict[str, Place]:
    """Matrices of experts by name."""
    return {
        f"{name}.{attribute}": Place(module, attribute)
        for name, module in model.named_modules()
        for attribute in expert_stacks(module)
    }


@contextmanager
def _blocks_file(file: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[Callable[[Tensor], Any]]:
    """Writes a safetensors file of uint8 tensors of these shapes, in this order, each when it is given.

    The file begins with the length of its header, then the header in JSON (huggingface/safetensors, README).
    """
    ends = list(accumulate(map(math.prod, shapes.values()), initial=0))
    header = {
        name: {"dtype": "U8", "shape": shape, "data_offsets": offsets}
        for (name, shape), offsets in zip(shapes.items(), pairwise(ends), strict=True)
    }
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(written)) + written)
        yield lambda blocks: opened.write(blocks.numpy().data)


def _cached_blocks(folder: Path, packing: str, places: Mapping[str, Place]) -> Path:
    """The file for packed weights of a model folder, named by its weight files, their sizes and times, and matrices."""
    files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(folder)]
    matrices = [(name, tuple(place.shape)) for name, place in places.items()]
    digest = blake2b(repr((files, packing, matrices)).encode(), digest_size=12).hexdigest()
    return cache_folder() / "packed" / f"{digest}.safetensors"
