"""Cached states of teacher texts equal the target's own, for texts of any length."""

from pathlib import Path

import numpy as np
import torch

from architectures import tiny
from saltus.models.causal import CausalNetwork
from saltus.training.data.hidden_states import Sample, ShardedRows, collect_hidden_states, load_hidden_states
from saltus.training.data.uniform_intervals import uniform_intervals


def sample(length: int, seed: int = 0) -> Sample:
    text = np.random.default_rng(seed).integers(3, 90, 7 + length).tolist()
    return Sample(text[:7], text[7:], 0.7)


@torch.inference_mode()
def test_states_and_intervals_of_a_long_text_are_the_targets_own(tmp_path):
    """Longer than one call."""
    model = tiny("Llama")
    network = CausalNetwork(model)
    network.add_hidden_state_layers((1,))
    long = sample(300)
    list(collect_hidden_states(network, [long, sample(20, seed=1)], tmp_path, (0.7, 1.0)))
    found = load_hidden_states(tmp_path)
    tokens = torch.tensor([[*long.prompt, *long.completion]])
    model = tiny("Llama")  # by its own attention
    own = model(tokens, output_hidden_states=True, use_cache=False)
    last = model.get_decoder()(tokens).last_hidden_state[0]
    expected = torch.cat([own.hidden_states[1][0], last], -1)[:-1]
    kept = found.hidden_states[torch.arange(len(expected))].float()
    assert (kept - expected).norm() < 0.01 * expected.norm()
    for place, temperature in enumerate((0.7, 1.0)):
        right = uniform_intervals(own.logits[0, 6:-1], torch.tensor(long.completion), temperature)
        assert torch.allclose(found.uniform_intervals[place, 7:307, 0], right.low, atol=1e-5)
        assert torch.allclose(found.uniform_intervals[place, 7:307, 1], right.high, atol=1e-5)
    assert found.text_table.tolist() == [[0, 7, 307, 700], [307, 7, 27, 700]]


def test_shards_of_an_earlier_run_with_more_texts_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("saltus.training.data.hidden_states.TEXTS_PER_SHARD", 2)
    network, texts = CausalNetwork(tiny("Llama")), [sample(5, seed=seed) for seed in range(6)]
    list(collect_hidden_states(network, texts, tmp_path))
    list(collect_hidden_states(network, texts[:4], tmp_path))
    assert len(load_hidden_states(tmp_path, 4).text_table) == 4
    assert len(load_hidden_states(tmp_path).text_table) == 6


def test_pieces_make_no_difference(tmp_path, monkeypatch):
    network = CausalNetwork(tiny("Llama"))
    texts = [sample(length, seed=length) for length in (1, 2, 5, 6, 11, 30)]
    list(collect_hidden_states(network, texts, tmp_path / "whole"))
    monkeypatch.setattr("saltus.training.data.hidden_states.TOKENS_PER_CALL", 5)
    list(collect_hidden_states(network, texts, tmp_path / "pieces"))
    whole, pieces = (load_hidden_states(tmp_path / name) for name in ("whole", "pieces"))
    every = torch.arange(len(whole.hidden_states))
    assert torch.equal(whole.hidden_states[every], pieces.hidden_states[every])
    assert torch.equal(whole.uniform_intervals, pieces.uniform_intervals)


def test_features_stay_in_their_files_and_are_found_there(tmp_path, monkeypatch):
    network = CausalNetwork(tiny("Llama"))
    texts = [sample(length, seed=length) for length in (3, 9, 4, 12, 7)]
    list(collect_hidden_states(network, texts, tmp_path / "one"))
    monkeypatch.setattr("saltus.training.data.hidden_states.TEXTS_PER_SHARD", 2)
    list(collect_hidden_states(network, texts, tmp_path / "many"))
    one, many = (load_hidden_states(tmp_path / name) for name in ("one", "many"))
    assert isinstance(many.hidden_states, ShardedRows)
    assert len(many.hidden_states.parts) == 3
    assert len(many.hidden_states) == len(one.hidden_states) == len(one.tokens)
    inputs = torch.from_numpy(np.random.default_rng(0).integers(len(one.tokens), size=(4, 11)))
    assert torch.equal(many.hidden_states[inputs], one.hidden_states[inputs])
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert str(tmp_path / "many" / "00002.safetensors") in mapped.read_text()
