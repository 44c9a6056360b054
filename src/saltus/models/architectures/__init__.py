"""One file for each `model_type` whose decoder runs on our kernels: it describes the decoder of a configuration.

A file has `CLASSES`, the names of the Transformers classes that it is for, and `describe(config)`, which returns a
DecoderDescription or raises NotDescribed.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from saltus.models.decoder_description import DecoderDescription, NotDescribed


@lru_cache
def find_architecture(model_type: str) -> ModuleType | None:
    """The file of a model type, None if there is none."""
    name = f"{__name__}.{model_type}"
    return import_module(name) if model_type.isidentifier() and find_spec(name) is not None else None


def describe_decoder(model: Any) -> DecoderDescription | None:
    """What the decoder of a causal model computes; None if no file describes it."""
    config = model.config.get_text_config()
    found = find_architecture(config.model_type)
    try:
        return None if found is None else found.describe(config)
    except NotDescribed:
        return None
