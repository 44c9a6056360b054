"""Draft with the multi-token-prediction heads that a target's own checkpoint has."""
