"""Draft models: small networks that read the target's hidden states."""
