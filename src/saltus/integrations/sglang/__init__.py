"""Speculative decoding with the rule `match` inside SGLang, as a plug-in algorithm."""
