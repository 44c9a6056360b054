"""Text parts of models that read pictures, as causal models: Transformers has them only inside of the whole models."""
