"""Training of a head for multi-token prediction."""
