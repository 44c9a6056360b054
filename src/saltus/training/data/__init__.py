"""Datasets: texts that a model wrote, its hidden states, and the batches made of them."""
