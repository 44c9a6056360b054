"""Gemma 4 that reads pictures without an encoder (12B): Gemma 4's layers, without experts and per-layer embeddings."""

from saltus.models.architectures import gemma4_text

CLASSES = {"Gemma4UnifiedForCausalLM"}
describe = gemma4_text.describe
