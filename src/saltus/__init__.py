"""Let language models write several tokens per network call without changing what they write."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saltus.engine.engine import Chunk, Engine, Generation, Statistics, Stream, load
    from saltus.integrations.transformers_generate import custom_generate

__version__ = "0.1.0.dev0"
__all__ = ["Chunk", "Engine", "Generation", "Statistics", "Stream", "custom_generate", "load"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is first asked for: `saltus --help` need not wait for torch."""
    if name in __all__:
        module = "integrations.transformers_generate" if name == "custom_generate" else "engine.engine"
        return getattr(import_module(f"saltus.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
