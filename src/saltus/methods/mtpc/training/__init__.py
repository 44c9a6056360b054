"""Training of heads (MtPC)."""
