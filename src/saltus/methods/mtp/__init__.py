"""Draft with the multi-token-prediction heads of a target's own checkpoint, or trained for it."""
