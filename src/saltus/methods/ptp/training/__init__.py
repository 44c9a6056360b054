"""Training of drafters and of gated adapters (PTP)."""
