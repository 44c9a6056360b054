"""One file for each `model_type` whose decoder runs on our kernels, or that llama.cpp writes.

A file has `CLASSES`, the names of the Transformers classes that it is for, and `describe(config)`, which returns a
DecoderDescription or raises NotDescribed: then the layers of Transformers run. If llama.cpp writes such models, it has
`GGUF`, a GgufArchitecture, or a tuple of them where llama.cpp has several.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from saltus.models.decoder_description import DecoderDescription, NotDescribed
from saltus.models.gguf_architecture import GgufArchitecture


@lru_cache
def find_architecture(model_type: str) -> ModuleType | None:
    """The file of a model type, None if there is none."""
    name = f"{__name__}.{model_type}"
    return import_module(name) if model_type.isidentifier() and find_spec(name) is not None else None


def describe_decoder(model: Any) -> DecoderDescription | None:
    """What the decoder of a causal model computes; None if no file describes it."""
    found = _description(model)
    return None if isinstance(found, NotDescribed) else found


def why_not_described(model: Any) -> str | None:
    """What the file of a decoder cannot describe, in words; None if it describes it, or there is no file."""
    found = _description(model)
    return str(found) if isinstance(found, NotDescribed) else None


def ignored_setting(model: Any) -> str | None:
    """A setting of a model's configuration that neither its file nor Transformers reads; None if there is none."""
    found = _description(model)
    setting = found.setting if isinstance(found, NotDescribed) else ""
    return setting if setting and not hasattr(type(model.config.get_text_config()), setting) else None


def _description(model: Any) -> DecoderDescription | NotDescribed | None:
    config = model.config.get_text_config()
    found = find_architecture(config.model_type)
    try:
        return None if found is None else found.describe(config)
    except NotDescribed as error:
        return error


@lru_cache
def gguf_architectures() -> dict[str, GgufArchitecture]:
    """What GGUF files have of each architecture, by its name there."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    return {architecture.name: architecture for module in modules for architecture in gguf_of(module)}


def gguf_of(module: ModuleType) -> tuple[GgufArchitecture, ...]:
    """What GGUF files have of the architecture of a file here; nothing if llama.cpp does not write it."""
    found = getattr(module, "GGUF", ())
    return found if isinstance(found, tuple) else (found,)
