"""Datasets: texts that a model wrote, its hidden states, and training batches."""
