"""Inverse training, and students that draft better than independent prediction."""

import numpy as np
import pytest
import torch

import ptp_lab
from ptp_lab import (
    SkippedTokens,
    Student,
    distillation_loss,
    draft_window,
    num_correct,
    prepend_start_position,
    sample_window_starts,
)
from saltus.training import losses
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.uniform_intervals import pick_tokens, uniform_intervals
from saltus.training.data.window_packing import gather_windows, pack_windows, query_uniforms
from saltus.training.loop.training_loop import Schedule, train
from saltus.training.losses import DistillationSettings

VOCAB, WINDOW = 4, 4
STEPS = torch.tensor([[0.0, 0.7, 0.3, 0.0]]) + 1e-6  # from a token to the next ones, round a ring
FIRST = torch.tensor([0.4, 0.3, 0.2, 0.1])  # no ties: where two are near, their order in Pick hangs on a hair


def student(hidden: int = 32, seed: int = 1, spread: float = 0.0) -> Student:
    """A small one; `spread` makes its distributions differ from position to position, as if it were trained."""
    made = Student(VOCAB, 24, hidden=hidden, layers=2, heads=2, seed=seed)
    with torch.no_grad():
        for name, weight in made.named_parameters() if spread else ():
            weight.add_(torch.from_numpy(seeded_generator(2, name).normal(0, spread, tuple(weight.shape))))
    return made.eval()


def ring(tokens: torch.Tensor) -> torch.Tensor:
    """The teacher's logits after each token; the last row is that of a text's first token."""
    chain = torch.stack([*(STEPS[0].roll(token) for token in range(VOCAB)), FIRST])
    return chain[tokens].log()


def written(uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's texts, and their logits."""
    token, tokens, distributions = torch.full((len(uniforms),), VOCAB), [], []
    for k in range(uniforms.shape[1]):
        distributions.append(ring(token))
        token = pick_tokens(uniforms[:, k], distributions[-1])
        tokens.append(token)
    return torch.stack(tokens, 1), torch.stack(distributions, 1)


def batch(rows: int = 3, windows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    texts = torch.from_numpy(seeded_generator(3, "texts").integers(VOCAB, size=(rows, 20)))
    return texts, sample_window_starts(rows, 20, windows, WINDOW, seeded_generator(5, "splits"))


def test_inverted_uniforms_make_the_student_write_the_text():
    network, (texts, splits) = student(spread=0.3), batch()
    uniforms, counted = ptp_lab.infer_uniforms(network, texts, splits, WINDOW, seeded_generator(6, "place"))
    assert counted.all()
    distributions = network(pack_windows(texts, splits, query_uniforms(uniforms, "categorical")))
    assert torch.equal(pick_tokens(uniforms, distributions), gather_windows(texts, splits, WINDOW))
    assert distributions.softmax(-1).std(dim=(0, 1, 2)).max() > 0.05, (
        "the distributions differ, or the test shows nothing"
    )


@pytest.mark.parametrize("window", [2, 3, 8])
def test_a_student_that_verifies_itself_writes_the_same_text_with_any_window(window):
    network, uniforms = student(spread=0.3), torch.from_numpy(seeded_generator(7, "u").random(18))
    context = torch.tensor([[network.start_token, 2, 0]])
    plain, calls = ptp_lab.self_speculative_decode(network, context, uniforms, 1)
    assert (len(plain), calls) == (18, 36)
    text, calls = ptp_lab.self_speculative_decode(network, context, uniforms, window)
    assert torch.equal(text, plain)
    assert calls <= 36


def test_verifier_logits_use_one_auxiliary_at_a_time():
    network, (texts, _) = student(spread=0.3), batch()
    together = ptp_lab.verifier_logits(network, texts, 5)
    assert together.shape == (3, 16, VOCAB)
    for k in range(5, 21):
        alone = network(pack_windows(texts[:, :k], torch.full((3, 1), k), torch.full((3, 1, 1), torch.nan)))
        torch.testing.assert_close(together[:, k - 5], alone[:, 0, 0], atol=1e-5, rtol=0)


def independent(uniforms: torch.Tensor) -> torch.Tensor:
    """The best that independent prediction can do on the ring: the picks from its exact marginals, enumerated."""
    distribution, marginals = FIRST.double().numpy(), []
    for _ in range(uniforms.shape[1]):
        marginals.append(torch.from_numpy(distribution).log())
        distribution = sum(distribution[token] * np.roll(STEPS[0].double().numpy(), token) for token in range(VOCAB))
    return pick_tokens(uniforms, torch.stack(marginals).expand(len(uniforms), -1, -1))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "loss"), [("one-hot", "ce"), ("categorical", "kl")])
def test_a_student_given_the_uniforms_beats_the_best_independent_prediction(form, loss, tmp_path):
    network, objective, skipped = student(), DistillationSettings(form, loss, WINDOW), SkippedTokens()

    def taught(step: int) -> torch.Tensor:
        generator = seeded_generator(0, "step", step)
        texts, distributions = written(torch.from_numpy(generator.random((64, WINDOW))))
        intervals, distributions = prepend_start_position(uniform_intervals(distributions, texts), distributions)
        splits = torch.ones(64, 1, dtype=torch.int64)
        return distillation_loss(
            network, network.prepend_start_token(texts), intervals, splits, objective, generator, skipped, distributions
        )

    train(network, taught, Schedule(250, 4e-3, warmup_steps=20, checkpoint_steps=250), tmp_path / "run.pt", {})
    uniforms = torch.from_numpy(seeded_generator(9, "test").random((2000, WINDOW)))
    texts, _ = written(uniforms)
    drafts = draft_window(network, torch.full((2000, 1), network.start_token), uniforms, form)
    baseline = num_correct(independent(uniforms), texts).double().mean()
    assert 1.0 < baseline < 2.0
    assert num_correct(drafts, texts).double().mean() > 1.5 * baseline
    assert skipped.num_skipped == 0


@pytest.mark.slow
def test_inverse_training_reaches_the_entropy_of_the_data(tmp_path):
    network, skipped = student(), SkippedTokens()
    texts, _ = written(torch.from_numpy(seeded_generator(1, "data").random((4000, 12))))

    def taught(step: int) -> torch.Tensor:
        generator = seeded_generator(0, "step", step)
        rows = network.prepend_start_token(texts[torch.from_numpy(generator.integers(len(texts), size=48))])
        splits = sample_window_starts(len(rows), rows.shape[1], 3, WINDOW, generator)
        return ptp_lab.inverse_loss(network, rows, splits, WINDOW, generator, skipped)

    train(network, taught, Schedule(200, 4e-3, warmup_steps=20, checkpoint_steps=200), tmp_path / "run.pt", {})
    held = network.prepend_start_token(written(torch.from_numpy(seeded_generator(2, "data").random((500, 12))))[0])
    last = 13 - WINDOW  # where the last window of a text begins
    nats = losses.cross_entropy(ptp_lab.verifier_logits(network, held[:, :last], 2), held[:, 2 : last + 1]).mean()
    entropy = float(-(STEPS * STEPS.log()).sum())
    assert entropy < nats + 0.02
    assert nats < entropy + 0.05
