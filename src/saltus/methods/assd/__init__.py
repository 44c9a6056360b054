"""ASSD: the drafter, any-subset networks, and their training."""
