"""Drafters for vLLM, as custom proposer classes of its Model Runner V1."""
