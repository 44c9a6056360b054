"""Inverse training, and students that beat whatever predicts tokens independently."""

import numpy as np
import pytest
import torch

from saltus.training import inverse, losses
from saltus.training.distillation import Objective, correct, distil, draft
from saltus.training.draws import draws
from saltus.training.edges import Skipped, begun, edges, picks
from saltus.training.loop import Schedule, train
from saltus.training.student import Student
from saltus.training.windows import given, inside, pack, split_points

VOCAB, WINDOW = 4, 4
STEPS = torch.tensor([[0.0, 0.7, 0.3, 0.0]]) + 1e-6  # from a token to the next ones, round a ring
FIRST = torch.tensor([0.4, 0.3, 0.2, 0.1])  # no ties: where two are near, their order in Pick hangs on a hair


def student(hidden: int = 32, seed: int = 1, spread: float = 0.0) -> Student:
    """A small one; `spread` makes its laws differ from position to position, as if it were trained."""
    made = Student(VOCAB, 24, hidden=hidden, layers=2, heads=2, seed=seed)
    with torch.no_grad():
        for name, weight in made.named_parameters() if spread else ():
            weight.add_(torch.from_numpy(draws(2, name).normal(0, spread, tuple(weight.shape))))
    return made.eval()


def ring(tokens: torch.Tensor) -> torch.Tensor:
    """The teacher's law (logits) after each token; the last row is that of a text's first token."""
    chain = torch.stack([*(STEPS[0].roll(token) for token in range(VOCAB)), FIRST])
    return chain[tokens].log()


def written(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's texts, and their laws."""
    token, tokens, laws = torch.full((len(uniforms),), VOCAB), [], []
    for k in range(uniforms.shape[1]):
        laws.append(ring(token))
        token = picks(uniforms[:, k], laws[-1])
        tokens.append(token)
    return torch.stack(tokens, 1), torch.stack(laws, 1)


def batch(rows: int = 3, windows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    texts = torch.from_numpy(draws(3, "texts").integers(VOCAB, size=(rows, 20)))
    return texts, split_points(rows, 20, windows, WINDOW, draws(5, "splits"))


def test_inverted_uniforms_make_the_student_write_the_text():
    network, (texts, splits) = student(spread=0.3), batch()
    uniforms, counted = inverse.invert(network, texts, splits, WINDOW, draws(6, "place"))
    assert counted.all()
    laws = network(pack(texts, splits, given(uniforms, "categorical")))
    assert torch.equal(picks(uniforms, laws), inside(texts, splits, WINDOW))
    assert laws.softmax(-1).std(dim=(0, 1, 2)).max() > 0.05, "the laws differ, or the test says nothing"


@pytest.mark.parametrize("window", [2, 3, 8])
def test_a_student_that_verifies_itself_writes_the_same_text_with_any_window(window):
    network, uniforms = student(spread=0.3), torch.from_numpy(draws(7, "u").random(18))
    context = torch.tensor([[network.start, 2, 0]])
    plain, calls = inverse.write(network, context, uniforms, 1)
    assert (len(plain), calls) == (18, 36)
    text, calls = inverse.write(network, context, uniforms, window)
    assert torch.equal(text, plain)
    assert calls <= 36


def test_its_own_laws_use_one_auxiliary_at_a_time():
    network, (texts, _) = student(spread=0.3), batch()
    together = inverse.own_laws(network, texts, 5)
    assert together.shape == (3, 16, VOCAB)
    for k in range(5, 21):
        alone = network(pack(texts[:, :k], torch.full((3, 1), k), torch.full((3, 1, 1), torch.nan)))
        torch.testing.assert_close(together[:, k - 5], alone[:, 0, 0], atol=1e-5, rtol=0)


def independent(uniforms: torch.Tensor) -> torch.Tensor:
    """The best that independent prediction can do on the ring: the picks from its exact marginals, enumerated."""
    law, marginals = FIRST.double().numpy(), []
    for _ in range(uniforms.shape[1]):
        marginals.append(torch.from_numpy(law).log())
        law = sum(law[token] * np.roll(STEPS[0].double().numpy(), token) for token in range(VOCAB))
    return picks(uniforms, torch.stack(marginals).expand(len(uniforms), -1, -1))


@pytest.mark.parametrize(("form", "loss"), [("one-hot", "ce"), ("categorical", "kl")])
def test_a_student_given_the_uniforms_beats_the_best_independent_prediction(form, loss, tmp_path):
    network, objective, skipped = student(), Objective(form, loss, WINDOW), Skipped()

    def taught(step: int) -> torch.Tensor:
        generator = draws(0, "step", step)
        texts, laws = written(torch.from_numpy(generator.random((64, WINDOW))))
        borders, laws = begun(edges(laws, texts), laws)
        splits = torch.ones(64, 1, dtype=torch.int64)
        return distil(network, network.begun(texts), borders, splits, objective, generator, skipped, laws)

    train(network, taught, Schedule(250, 4e-3, warm_up=20, every=250), tmp_path / "run.pt", {})
    uniforms = torch.from_numpy(draws(9, "test").random((2000, WINDOW)))
    texts, _ = written(uniforms)
    drafts = draft(network, torch.full((2000, 1), network.start), uniforms, form)
    baseline = correct(independent(uniforms), texts).double().mean()
    assert 1.0 < baseline < 2.0
    assert correct(drafts, texts).double().mean() > 1.5 * baseline
    assert skipped.count == 0


def test_inverse_training_reaches_the_entropy_of_the_data(tmp_path):
    network, skipped = student(), Skipped()
    texts, _ = written(torch.from_numpy(draws(1, "data").random((4000, 12))))

    def taught(step: int) -> torch.Tensor:
        generator = draws(0, "step", step)
        rows = network.begun(texts[torch.from_numpy(generator.integers(len(texts), size=48))])
        splits = split_points(len(rows), rows.shape[1], 3, WINDOW, generator)
        return inverse.loss(network, rows, splits, WINDOW, generator, skipped)

    train(network, taught, Schedule(200, 4e-3, warm_up=20, every=200), tmp_path / "run.pt", {})
    held = network.begun(written(torch.from_numpy(draws(2, "data").random((500, 12))))[0])
    last = 13 - WINDOW  # where the last window of a text begins
    nats = losses.cross_entropy(inverse.own_laws(network, held[:, :last], 2), held[:, 2 : last + 1]).mean()
    entropy = float(-(STEPS * STEPS.log()).sum())
    assert entropy < nats + 0.02
    assert nats < entropy + 0.05
