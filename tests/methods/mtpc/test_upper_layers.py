"""Heads with layers of the target adapted for them: they begin as the target, and change nothing of what it writes."""

import pytest
import torch
from test_head_training import states, target, task  # noqa: F401

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.methods.mtpc.files import load_heads
from saltus.methods.mtpc.heads import HeadModel, HeadShape, new_head_model
from saltus.methods.mtpc.network import HeadNetwork
from saltus.methods.mtpc.upper_layers import last_layers
from saltus.methods.shared.drafter_files import save_drafter
from saltus.models.causal import CausalNetwork
from saltus.training.data.seeded_generator import seeded_generator
from tiny_models import tiny_llama

LAYERS = 4
TEXT = list(range(40, 72))
close = {"rtol": 1e-3, "atol": 1e-4}


@pytest.fixture(scope="module")
def network() -> CausalNetwork:
    made = CausalNetwork(tiny_llama(num_hidden_layers=LAYERS))
    made.add_hidden_state_layers((1, 2, 3))
    return made


def made_for(network: CausalNetwork, layers: int, learned: float = 0.0) -> HeadModel:
    shape = HeadShape(
        32, "cp", window=4, rank=2, subspace_dim=3, layers=layers, lora_rank=3, hidden_state_layers=(LAYERS - layers,)
    )
    model = new_head_model(shape, torch.arange(2, 290), network.model, seeded_generator(0, "heads"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight += torch.from_numpy(seeded_generator(1, name).normal(0, learned, tuple(weight.shape)))
    return model.eval()


def features_of(network: CausalNetwork, text: list[int]) -> torch.Tensor:
    inputs = ForwardInputs(continuation(text, 9), output_hidden_states=True)
    return network.forward([inputs], [network.new_kv_cache()])[0].hidden_states


def last_state(heads: HeadNetwork, features: torch.Tensor, pieces: list[int]) -> torch.Tensor:
    """The state that heads read in the end, shown the text in pieces."""
    kv_cache, state, shown = heads.new_kv_cache(), torch.empty(0), 0
    for end in pieces:
        decided = continuation(TEXT[: end + 1], 9).decided_prefix
        state, shown = heads._input_hidden_state(kv_cache, features[shown:end], decided), end
    return state


@pytest.mark.parametrize("layers", [1, 3])
def test_untrained_they_are_the_target(network, layers):
    features = features_of(network, TEXT)
    state = last_state(HeadNetwork(made_for(network, layers), network), features, [len(TEXT) - 1])
    torch.testing.assert_close(state, features[-2, -32:], **close)


@pytest.mark.parametrize("layers", [1, 3])
def test_trained_they_are_read_in_pieces_as_they_were_in_training(network, layers):
    model, features = made_for(network, layers, learned=0.1), features_of(network, TEXT)
    assert model.upper is not None
    tap = features[: len(TEXT) - 1, 32 * (LAYERS - layers - 1) :][:, :32]
    with torch.no_grad():
        expected = model.upper(tap[None])[0, -1]
    assert (expected - features[-2, -32:]).abs().max() > 0.1
    heads = HeadNetwork(model, network)
    for pieces in ([len(TEXT) - 1], [7, 8, 20, len(TEXT) - 1]):
        torch.testing.assert_close(last_state(heads, features, pieces), expected, **close)


def test_the_model_stays_as_it_was(network):
    before = {name: weight.clone() for name, weight in network.model.named_parameters()}
    layers = list(network.model.model.layers)
    merged = HeadNetwork(made_for(network, 2, learned=0.5), network)
    assert merged.context_layers is not None
    assert merged.context_layers.model.config.num_hidden_layers == 2
    assert list(network.model.model.layers) == layers
    assert network.model.config.num_hidden_layers == LAYERS
    assert all(torch.equal(weight, before[name]) for name, weight in network.model.named_parameters())


@pytest.mark.parametrize("rule", ["match", "reject"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(rule, temperature, tiny_folder, tmp_path):
    folder = tiny_folder(num_hidden_layers=LAYERS)
    own = saltus.load(str(folder), "plain", device="cpu").network
    model = made_for(own, 2, learned=0.02)
    save_drafter("heads", model, tmp_path, "tiny", own.model, {})
    back = load_heads(tmp_path, own.model, "tiny")
    assert back.shape == model.shape
    assert back.upper is not None
    options = {"mtpc": {"model": str(tmp_path), "min_probability": 0.0}}
    engine = saltus.load(str(folder), "mtpc", device="cpu", rule=rule, options=options, adaptive=False)
    settings = {"max_new_tokens": 24, "raw": True, "ignore_eos": True, "temperature": temperature, "seed": 3}
    drafted = engine.generate("the cat sat", **settings)
    assert len(drafted.tokens) == 24
    if rule == "match" or not temperature:
        assert drafted.tokens == engine.generate("the cat sat", method="plain", **settings).tokens


def test_what_is_of_low_rank_learns_and_the_layers_do_not(target, states):  # noqa: F811
    made = task(target, states, layers=1, lora_rank=2, hidden_state_layers=(1,))
    made.loss(0).backward()
    assert made.module.upper is not None
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in made.module.upper.parameters())
    assert all(weight.grad is None for weight in target.parameters())


def test_they_may_come_to_heads_that_had_none(target, states, tmp_path):  # noqa: F811
    task(target, states, circuit="cp").save(tmp_path, {})
    richer = task(target, states, circuit="btree", layers=1, lora_rank=2, hidden_state_layers=(1,))
    richer.initialize_from(tmp_path)
    assert richer.module.upper is not None
    richer.save(tmp_path / "richer", {})
    with pytest.raises(ValueError, match="cannot go on from"):
        task(target, states, circuit="btree").initialize_from(tmp_path / "richer")


def test_states_without_the_layer_below_are_refused(target, states):  # noqa: F811
    with pytest.raises(ValueError, match="without those after layer 0; collect them anew"):
        task(target, states, layers=2, hidden_state_layers=(0,))


def test_what_cannot_be_adapted_is_refused(network):
    with pytest.raises(ValueError, match="adapt 5 layers, but the target has 4"):
        last_layers(network.model, 5)
    with pytest.raises(ValueError, match="take layers=0"):
        last_layers(torch.nn.Linear(1, 1), 1)
    with pytest.raises(ValueError, match="layers is -1"):
        HeadShape(8, layers=-1)
