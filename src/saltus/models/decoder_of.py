"""Find the layers of a causal model: all of it but the output layer."""

from typing import Any


def decoder_of(model: Any) -> Any:
    """The decoder, whose output are hidden states; `get_decoder` of Llama 4's text model returns the model itself."""
    decoder = model.get_decoder()
    return getattr(model, "model", decoder) if decoder is model else decoder
