"""Speculative decoding that does not change the text."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saltus.core.sampling import Sampling
    from saltus.engine.engine import Engine
    from saltus.engine.grammar import Grammar
    from saltus.engine.infill_template import InfillLayout, InfillTemplate
    from saltus.engine.load import load
    from saltus.engine.request import CallRecord
    from saltus.engine.results import Chunk, Generation, Infilling, InfillStream, Statistics, Stream
    from saltus.engine.settings import Settings
    from saltus.integrations.transformers_generate import custom_generate
    from saltus.loading.fetching import SourceError

__version__ = "0.1.0.dev0"
__all__ = [
    "CallRecord",
    "Chunk",
    "Engine",
    "Generation",
    "Grammar",
    "InfillLayout",
    "InfillStream",
    "InfillTemplate",
    "Infilling",
    "Sampling",
    "Settings",
    "SourceError",
    "Statistics",
    "Stream",
    "custom_generate",
    "load",
]
_MODULES = {
    "Engine": "engine.engine",
    "load": "engine.load",
    "CallRecord": "engine.request",
    "Grammar": "engine.grammar",
    "InfillLayout": "engine.infill_template",
    "InfillTemplate": "engine.infill_template",
    "Sampling": "core.sampling",
    "Settings": "engine.settings",
    "SourceError": "loading.fetching",
    "custom_generate": "integrations.transformers_generate",
}


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *__all__]


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `saltus --help` does not wait for torch."""
    if name in __all__:
        return getattr(import_module(f"saltus.{_MODULES.get(name, 'engine.results')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
