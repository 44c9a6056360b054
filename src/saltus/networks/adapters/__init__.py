"""Adapters of the target: low-rank weights that act on query rows alone."""
