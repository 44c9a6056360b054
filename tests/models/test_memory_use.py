"""What is computed of a model's memory for keys and values is what its texts take."""

import pytest
import torch

from architectures import ARCHITECTURES, read, text, tiny
from saltus.engine.target_network import make_network
from saltus.models.memory_use import kv_bytes_per_token, text_bytes
from saltus.models.resized_vocabulary import ResizedVocabulary, with_vocabulary_of


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_token_takes_as_many_bytes_as_are_computed(name):
    """In buffers of layers that are alike, and in those of layers with other heads."""
    network = make_network(tiny(name).to(torch.bfloat16), "mine")
    kv_cache = network.new_kv_cache()
    read(network, text(3), kv_cache=kv_cache)
    buffers = [(kv_cache.keys, kv_cache.values), *kv_cache.odd_layers.values()]
    used = sum(buffer.nbytes // buffer.shape[-2] for pair in buffers for buffer in pair)
    assert kv_bytes_per_token(network) == used


@pytest.mark.parametrize("name", ["Mamba2", "Lfm2"])
def test_a_draft_model_that_was_padded_to_another_vocabulary_takes_as_many(name):
    target, network = (make_network(tiny(name, vocab_size=rows), "mine") for rows in (96, 128))
    padded = with_vocabulary_of(target, network)
    assert isinstance(padded, ResizedVocabulary)
    assert text_bytes(padded, 100) == text_bytes(network, 100) > 0
