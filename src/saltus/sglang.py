"""SGLang's plug-in: the algorithm SALTUS, for `--speculative-algorithm SALTUS`."""

from saltus.integrations.sglang.plugin import register

__all__ = ["register"]
