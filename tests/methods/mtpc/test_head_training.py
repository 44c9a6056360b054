"""Training of heads: the loss of each valid token given those before it, discounted."""

from dataclasses import replace

import pytest
import torch

from architectures import tiny
from reference_circuits import token_losses
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.mtpc.heads import HeadShape
from saltus.methods.mtpc.training import circuit_likelihood
from saltus.methods.mtpc.training.heads import HeadsTrainingTask
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_dataset import WindowSettings
from tiny_models import tiny_llama

TEXTS, LENGTH, PROMPT = 6, 40, 12


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def states(target) -> HiddenStateCorpus:
    """Random states of random texts."""
    generator = seeded_generator(0, "states")
    count = TEXTS * LENGTH
    tokens = torch.from_numpy(generator.integers(2, 60, size=count))
    low = torch.from_numpy(generator.random((1, count, 1))) * 0.5
    features = torch.from_numpy(generator.normal(size=(count, 2 * 32))).bfloat16()  # of a tap, and the last
    texts = torch.tensor([[LENGTH * i, PROMPT, LENGTH, 1000 * (i % 2)] for i in range(TEXTS)]).numpy()
    return HiddenStateCorpus(
        tokens, features, torch.cat([low, low + 0.3], -1), texts, (1.0,), (1,), model_fingerprint(target)
    )


def task(target, states, **settings) -> HeadsTrainingTask:
    window_settings = WindowSettings(
        batch_size=3,
        windows_per_text=5,
        discount=0.8,
        validation_fraction=0.3,
        distillation_weight=settings.pop("distillation_weight", 0.0),
    )
    shape = HeadShape(**{"hidden": 32, "circuit": "btree", "window": 4, "rank": 3, "subspace_dim": 4} | settings)
    made = HeadsTrainingTask(target, states, shape, vocabulary_size=40, window_settings=window_settings)
    with torch.no_grad():
        for name, weight in made.module.named_parameters():
            weight += torch.from_numpy(seeded_generator(1, name).normal(0, 0.2, tuple(weight.shape)))
    return made


@pytest.mark.parametrize("told", [True, False], ids=["told", "known"])
@pytest.mark.parametrize("untied", [False, True], ids=["shared", "untied"])
@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
def test_the_loss_is_that_of_each_window_by_itself(target, states, circuit, told, untied):
    made = task(target, states, circuit=circuit, embeds_last_token=told, untied_unembedding=untied)
    batch = made.window_dataset.training_batch(3)
    structure, model = made.shape.circuit_structure, made.module
    total, weights = 0.0, 0.0
    for text in range(batch.window_starts.shape[0]):
        for window in range(batch.window_starts.shape[1]):
            last = int(batch.corpus_rows[text, batch.window_starts[text, window] - 1])
            assert int(states.tokens[last]) == int(batch.tokens[text, batch.window_starts[text, window] - 1])
            found = model(states.hidden_states[last - 1, 32:], states.tokens[last])
            distributions = torch.stack([model.log_probabilities(found, place) for place in range(4)])
            known = [] if told else [int(states.tokens[last])]
            leaves = torch.zeros(4, structure.rank)
            following = [*known, *batch.targets[text, window].tolist()][:4]
            counted = [bool(one) for one in batch.loss_mask[text, window]]
            end = 4
            for place, token in enumerate(following):
                spot = int(made.draft_indices[token])
                ahead = place - len(known)
                if ahead >= 0 and (spot < 0 or not counted[ahead]):
                    end = place
                    break
                leaves[place] = distributions[place, :, spot] if spot >= 0 else 0.0
            own = token_losses(structure, found.initial, found.transitions, leaves)
            for place in range(len(known), end):
                weight = 0.8 ** (place - len(known))
                total += weight * float(own[place])
                weights += weight
    assert float(made.loss(3)) == pytest.approx(total / weights, rel=1e-4)


def test_the_target_s_distributions_can_be_part_of_the_loss(target, states):
    """The cross-entropy with the target's own distribution over the drafted tokens."""
    made = task(target, states, circuit="ff", distillation_weight=1.0)
    batch = made.window_dataset.training_batch(0)
    last = int(batch.corpus_rows[0, batch.window_starts[0, 0] - 1])
    logits = states.hidden_states[last + 1, 32:].float() @ target.get_output_embeddings().weight[made.module.tokens].T
    torch.testing.assert_close(made._target_distribution(batch, 1)[0], logits.softmax(-1))
    assert float(made.loss(0)) > float(task(target, states, circuit="ff").loss(0))


def test_distributions_of_a_target_that_scales_its_logits_are_scaled(states):
    plain, scaled = (tiny("Granite", logits_scaling=scale, hidden_size=32) for scale in (1.0, 8.0))
    states = replace(states, target_fingerprint=model_fingerprint(scaled))
    made = task(scaled, states, circuit="ff", distillation_weight=1.0)
    batch = made.window_dataset.training_batch(0)
    found = made._target_distribution(batch, 1)
    made = task(
        plain, replace(states, target_fingerprint=model_fingerprint(plain)), circuit="ff", distillation_weight=1.0
    )
    flat = made._target_distribution(batch, 1)
    torch.testing.assert_close(found, (flat.log() / 8).softmax(-1))


def test_token_likelihoods_in_chunks_are_those_of_whole_distributions(monkeypatch):
    """Values and gradients, compared with whole distributions."""
    monkeypatch.setattr(
        "saltus.methods.mtpc.training.circuit_likelihood.LOGITS_PER_CHUNK", 100
    )  # two windows at a time
    generator = seeded_generator(3, "spoken")
    shared, codes, reach = (
        torch.from_numpy(generator.normal(size=size)).requires_grad_() for size in ((5, 11), (5, 4, 3), (3, 11))
    )
    tokens = torch.from_numpy(generator.integers(11, size=5))
    own = circuit_likelihood._TokenLogProbabilities.apply(shared, codes, reach, tokens)
    distribution = (shared[:, None] + codes @ reach).log_softmax(-1)
    torch.testing.assert_close(own, distribution[torch.arange(5), :, tokens])
    assert torch.autograd.gradcheck(
        lambda *x: circuit_likelihood._TokenLogProbabilities.apply(*x, tokens), (shared, codes, reach)
    )


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_gradients_reach_all_weights_and_training_lowers_the_loss(target, states, weight):
    made = task(target, states, circuit="hmm", distillation_weight=weight)
    made.loss(0).backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in made.module.parameters())
    optimiser = torch.optim.Adam(made.module.parameters(), lr=0.01)
    first = float(made.loss(0).detach())
    for _ in range(20):
        optimiser.zero_grad()
        made.loss(0).backward()
        optimiser.step()
    assert float(made.loss(0)) < first - 0.1


def test_states_of_another_model_are_refused(states):
    with pytest.raises(ValueError, match="states of another model than its target; collect them anew"):
        HeadsTrainingTask(tiny_llama(seed=4), states, HeadShape(32))


def test_texts_shorter_than_a_window_have_a_loss(target, states):
    short = states.text_table.copy()
    short[:, 2] = PROMPT + 3
    made = task(target, HiddenStateCorpus(**{**vars(states), "text_table": short}), window=8)
    assert made.loss(0).isfinite()
    assert made.evaluate().keys() == {"greedy", "sampled"}
