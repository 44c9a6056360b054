"""Recognise a model by its shapes and a sample of its embeddings: the very model, or the same in another precision."""

from __future__ import annotations

import base64
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from saltus.kernels.packed_weight import PackedWeight

SAMPLED_NUMBERS = 64  # of each matrix, for `layers_digest`
SAMPLED_ROWS = 64
SAMPLED_COLUMNS = 64  # of each row, for `embedding_signs`
SIMILAR_SHARE = 0.8  # of equal signs; 4-bit quantisation keeps 94 %, and of other weights half agree


def model_fingerprint(model: Any) -> str:
    """The identity of a model in any dtype: a hash of its shapes and of the signs of a sample of its embeddings."""
    return blake2b(np.packbits(_signs(model)).tobytes() + _shapes(model), digest_size=16).hexdigest()


def layers_digest(model: Any) -> str | None:
    """A hash of a few numbers of each weight matrix, which a fine-tuned model does not share with its base.

    None for weights that are packed, distributed or in float16: only bfloat16 and float32 give the same.
    """
    digest = blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        if type(weight) not in (Tensor, Parameter) or weight.dtype not in (torch.bfloat16, torch.float32):
            return None
        numbers = weight.detach().flatten()[:: max(weight.numel() // SAMPLED_NUMBERS, 1)]
        digest.update(name.encode() + numbers.to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()


def vocabulary_digest(tokenizer: Any) -> str:
    """The identity of a tokenizer's vocabulary: a hash of its tokens and their ids."""
    return blake2b(repr(sorted(tokenizer.get_vocab().items())).encode(), digest_size=16).hexdigest()


def embedding_signs(model: Any) -> str:
    """A text by which `is_similar` recognises the model in other precisions: its shapes, and signs of embeddings."""
    signs = np.packbits(_signs(model)[:, :SAMPLED_COLUMNS])
    return f"{blake2b(_shapes(model), digest_size=8).hexdigest()}:{base64.b64encode(signs.tobytes()).decode()}"


def is_similar(first: str, second: str) -> bool:
    """True if two texts of `embedding_signs` are of models with the same shapes and similar embeddings."""
    (shapes, signs), (other_shapes, other_signs) = (text.split(":") for text in (first, second))
    if shapes != other_shapes or len(signs) != len(other_signs):
        return False
    bits = [np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8)) for text in (signs, other_signs)]
    return float((bits[0] == bits[1]).mean()) >= SIMILAR_SHARE


def _signs(model: Any) -> np.ndarray:
    """[rows, hidden]: True for the positive numbers of every n-th embedding."""
    weight = model.get_input_embeddings().weight
    step = max(len(weight) // SAMPLED_ROWS, 1)
    if isinstance(weight, PackedWeight):  # of which a slice would expand all rows
        sampled = weight.dequantize(torch.arange(0, len(weight), step))
    else:
        sampled = weight[::step].detach()
    return (sampled > 0).cpu().numpy()


def _shapes(model: Any) -> bytes:
    return repr([(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]).encode()
