"""Drafters for vLLM: `speculative_config={"method": "custom_class", "model": "saltus.vllm.Lookup", ...}`."""

from saltus.integrations.vllm.proposers import Lookup, Mtpc, Ptp

__all__ = ["Lookup", "Mtpc", "Ptp"]
