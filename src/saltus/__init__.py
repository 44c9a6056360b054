"""Let language models write several tokens per network call without changing what they write."""

__version__ = "0.1.0.dev0"
