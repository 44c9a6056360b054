"""Losses: each has its minimum at the teacher's distribution."""

import pytest
import torch

from ptp_lab import masked_mean
from saltus.training import losses
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.losses import DistillationSettings

DISTRIBUTION = torch.tensor([0.5, 0.3, 0.15, 0.05])


def fitted(loss) -> torch.Tensor:
    """The distribution that minimizes the expected loss."""
    logits = torch.zeros(4, requires_grad=True)
    optimiser = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        value = loss(logits)
        value.backward()
        return value

    optimiser.step(closure)
    return logits.detach().softmax(-1)


def over_tokens(loss):
    """The expectation over tokens of the distribution."""
    return lambda logits: (DISTRIBUTION * loss(logits.expand(4, -1), torch.arange(4))).sum()


@pytest.mark.parametrize(
    "loss",
    [
        over_tokens(losses.cross_entropy),
        over_tokens(losses.binary_cross_entropy),
        lambda logits: losses.kl_divergence(DISTRIBUTION.log(), logits),
        lambda logits: losses.reverse_kl_divergence(DISTRIBUTION.log(), logits),
    ],
    ids=["cross-entropy", "binary cross-entropy", "KL", "reverse KL"],
)
def test_a_loss_has_its_minimum_at_the_distribution(loss):
    torch.testing.assert_close(fitted(loss), DISTRIBUTION, atol=2e-3, rtol=0)


def test_divergences_are_those_of_torch_and_zero_between_equals():
    teacher, student = (torch.from_numpy(seeded_generator(0, name).normal(size=(3, 5, 8))) for name in ("q", "p"))
    logs = [logits.log_softmax(-1) for logits in (teacher, student)]
    expected = torch.nn.functional.kl_div(logs[1], logs[0], reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(losses.kl_divergence(teacher, student), expected)
    torch.testing.assert_close(losses.reverse_kl_divergence(student, teacher), expected)
    assert losses.kl_divergence(teacher, teacher + 3).abs().max() < 1e-12


def test_a_certain_distribution_has_finite_losses_and_gradients():
    logits = torch.tensor([[80.0, 0.0, -80.0]], requires_grad=True)
    for token in range(3):
        value = losses.binary_cross_entropy(logits, torch.tensor([token])) + losses.cross_entropy(
            logits, torch.tensor([token])
        )
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert value.isfinite().all()
        assert gradient.isfinite().all()


def test_the_mean_is_over_masked_tokens():
    values = torch.tensor([1.0, 2.0, torch.inf])
    assert masked_mean(values, torch.tensor([True, True, False])) == 1.5
    assert masked_mean(values, torch.tensor([False, False, False])) == 0


def test_a_one_hot_student_has_no_divergence():
    with pytest.raises(ValueError, match="take ce or bce"):
        DistillationSettings("one-hot", "kl")
