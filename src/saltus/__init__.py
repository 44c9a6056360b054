"""Let language models write several tokens per network call without changing what they write."""

from saltus.engine import Chunk, Engine, Generation, Statistics, Stream, load

__version__ = "0.1.0.dev0"
__all__ = ["Chunk", "Engine", "Generation", "Statistics", "Stream", "load"]
