"""What heads are taught: the law of each token given those before it, where it counts, discounted."""

import pytest
import torch

from conftest import tiny_llama
from saltus.networks.circuits import surprises
from saltus.networks.heads import HeadShape
from saltus.networks.trained_files import fingerprint
from saltus.training import spoken
from saltus.training.draws import draws
from saltus.training.heads import HeadsCourse
from saltus.training.lessons import Lessons
from saltus.training.states import States

TEXTS, LENGTH, PROMPT = 6, 40, 12


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def states(target) -> States:
    """Made up: whatever the target might have read."""
    dice = draws(0, "states")
    count = TEXTS * LENGTH
    tokens = torch.from_numpy(dice.integers(2, 60, size=count))
    low = torch.from_numpy(dice.random((1, count, 1))) * 0.5
    features = torch.from_numpy(dice.normal(size=(count, 2 * 32))).bfloat16()  # of a tap, and the last
    texts = torch.tensor([[LENGTH * i, PROMPT, LENGTH, 1000 * (i % 2)] for i in range(TEXTS)]).numpy()
    return States(tokens, features, torch.cat([low, low + 0.3], -1), texts, (1.0,), (1,), fingerprint(target))


def course(target, states, **settings) -> HeadsCourse:
    lessons = Lessons(texts=3, windows=5, discount=0.8, held_out=0.3, laws=settings.pop("laws", 0.0))
    shape = HeadShape(**{"hidden": 32, "circuit": "btree", "window": 4, "rank": 3, "directions": 4} | settings)
    made = HeadsCourse(target, states, shape, vocabulary=40, lessons=lessons)
    with torch.no_grad():
        for name, weight in made.module.named_parameters():
            weight += torch.from_numpy(draws(1, name).normal(0, 0.2, tuple(weight.shape)))
    return made


@pytest.mark.parametrize("told", [True, False], ids=["told", "known"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("circuit", ["ff", "cp", "hmm", "btree"])
def test_the_loss_is_that_of_each_window_by_itself(target, states, circuit, told, own):
    made = course(target, states, circuit=circuit, told=told, own=own)
    cut = made.curriculum.lesson(3)
    structure, model = made.shape.structure, made.module
    total, weights = 0.0, 0.0
    for text in range(cut.splits.shape[0]):
        for window in range(cut.splits.shape[1]):
            last = int(cut.rows[text, cut.splits[text, window] - 1])
            assert int(states.tokens[last]) == int(cut.tokens[text, cut.splits[text, window] - 1])
            found = model(states.features[last - 1, 32:], states.tokens[last])
            laws = torch.stack([model.laws(found, place) for place in range(4)])
            known = [] if told else [int(states.tokens[last])]
            leaves = torch.zeros(4, structure.rank)
            following = [*known, *cut.targets[text, window].tolist()][:4]
            counted = [bool(one) for one in cut.counted[text, window]]
            end = 4
            for place, token in enumerate(following):
                spot = int(made.places[token])
                ahead = place - len(known)
                if ahead >= 0 and (spot < 0 or not counted[ahead]):
                    end = place
                    break
                leaves[place] = laws[place, :, spot] if spot >= 0 else 0.0
            own = surprises(structure, found.start, found.steps, leaves)
            for place in range(len(known), end):
                weight = 0.8 ** (place - len(known))
                total += weight * float(own[place])
                weights += weight
    assert float(made.loss(3)) == pytest.approx(total / weights, rel=1e-4)


def test_the_target_s_laws_are_learned_where_they_are_wanted(target, states):
    """The cross-entropy with the target's own law, over the drafted tokens, is least where the two agree."""
    made = course(target, states, circuit="ff", laws=1.0)
    cut = made.curriculum.lesson(0)
    last = int(cut.rows[0, cut.splits[0, 0] - 1])
    logits = states.features[last + 1, 32:].float() @ target.get_output_embeddings().weight[made.module.tokens].T
    torch.testing.assert_close(made._teacher(cut, 1)[0], logits.softmax(-1))
    assert float(made.loss(0)) > float(course(target, states, circuit="ff").loss(0))


def test_what_states_say_of_a_token_is_that_of_their_laws_piece_by_piece(monkeypatch):
    """Values and gradients, against the laws themselves."""
    monkeypatch.setattr(spoken, "PIECE", 100)  # two windows at a time
    dice = draws(3, "spoken")
    shared, codes, reach = (
        torch.from_numpy(dice.normal(size=size)).requires_grad_() for size in ((5, 11), (5, 4, 3), (3, 11))
    )
    tokens = torch.from_numpy(dice.integers(11, size=5))
    own = spoken._Spoken.apply(shared, codes, reach, tokens)
    law = (shared[:, None] + codes @ reach).log_softmax(-1)
    torch.testing.assert_close(own, law[torch.arange(5), :, tokens])
    assert torch.autograd.gradcheck(lambda *x: spoken._Spoken.apply(*x, tokens), (shared, codes, reach))


@pytest.mark.parametrize("laws", [0.0, 0.5])
def test_gradients_reach_all_weights_and_training_lowers_the_loss(target, states, laws):
    made = course(target, states, circuit="hmm", laws=laws)
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
        HeadsCourse(tiny_llama(seed=4), states, HeadShape(32))


def test_texts_shorter_than_a_window_are_learned_from_as_far_as_they_go(target, states):
    short = states.texts.copy()
    short[:, 2] = PROMPT + 3
    made = course(target, States(**{**vars(states), "texts": short}), window=8)
    assert made.loss(0).isfinite()
    assert made.report().keys() == {"greedy", "sampled"}
