"""MtPC: the drafter, its heads, and their training."""
