"""Packed windows: many in one forward have the logits that each has alone."""

import pytest
import torch

from ptp_lab import Student, sample_window_starts
from saltus.core.forward import NO_TOKEN
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.window_packing import (
    gather_windows,
    pack_windows,
    query_uniforms,
    valid_prefix,
)
from saltus.training.losses import cross_entropy

VOCAB, WINDOW = 7, 4


def student(kind: str = "bits") -> Student:
    """In float64, with weights so large that rows influence each other."""
    made = Student(VOCAB, 40, hidden=16, layers=2, heads=2, embedding=kind, seed=1).double()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(weight + torch.from_numpy(seeded_generator(2, name).normal(0, 0.2, tuple(weight.shape))))
    return made


def batch(rows: int = 3, windows: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    texts = torch.from_numpy(seeded_generator(3, "texts").integers(VOCAB, size=(rows, 20)))
    uniforms = torch.from_numpy(seeded_generator(4, "u").random((rows, windows, WINDOW)))
    return texts, sample_window_starts(rows, 20, windows, WINDOW, seeded_generator(5, "splits")), uniforms


@pytest.mark.parametrize("form", ["one-hot", "categorical", "independent"])
def test_packed_windows_have_the_losses_and_gradients_of_separate_forwards(form):
    network, (texts, splits, uniforms) = student(), batch()
    inputs, targets = query_uniforms(uniforms, form), gather_windows(texts, splits, WINDOW)
    packed = cross_entropy(network(pack_windows(texts, splits, inputs)), targets)
    packed.mean().backward()
    gradients = {name: weight.grad.clone() for name, weight in network.named_parameters() if weight.grad is not None}
    network.zero_grad()
    alone = torch.stack(
        [
            cross_entropy(
                network(pack_windows(texts[i : i + 1], splits[i : i + 1, w : w + 1], inputs[i : i + 1, w : w + 1])),
                targets[i : i + 1, w : w + 1],
            )
            for i in range(3)
            for w in range(5)
        ]
    )
    alone.mean().backward()
    torch.testing.assert_close(alone.reshape(packed.shape), packed)
    assert set(gradients) == {name for name, weight in network.named_parameters() if weight.grad is not None}
    for name, weight in network.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(weight.grad, gradients[name])


def test_a_query_attends_to_nothing_behind_it():
    network, (texts, splits, uniforms) = student(), batch(1, 1)
    before = network(pack_windows(texts, splits, uniforms))
    later = uniforms.clone()
    later[..., 2] = 1 - later[..., 2]
    other = texts.clone()
    other[:, int(splits) :] = (other[:, int(splits) :] + 1) % VOCAB
    after = network(pack_windows(other, splits, later))
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not torch.allclose(before[:, :, 2], after[:, :, 2])
    assert not torch.allclose(before[:, :, 3], after[:, :, 3])


def test_a_query_stands_at_the_position_of_the_token_it_predicts():
    texts, splits, uniforms = batch()
    packed = pack_windows(texts, splits, uniforms)
    assert torch.equal(packed.queries_by_window(packed.positions), splits[:, :, None] + torch.arange(WINDOW))
    assert (packed.queries_by_window(packed.tokens) == NO_TOKEN).all()
    assert torch.equal(packed.queries_by_window(packed.uniforms), uniforms)


def test_windows_start_everywhere_in_the_text():
    splits = sample_window_starts(2000, 20, 3, WINDOW, seeded_generator(0, "splits"), first=2)
    assert (splits.min(), splits.max()) == (2, 16)
    assert (splits.diff(dim=1) >= 0).all()
    assert len(splits.unique()) == 15


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="no room for a window of 4"):
        sample_window_starts(2, 4, 1, 4, seeded_generator(0, "splits"))


def test_a_categorical_query_has_the_uniform_before_its_own():
    uniforms = torch.tensor([[0.1, 0.2, 0.3]])
    assert torch.equal(query_uniforms(uniforms, "categorical")[:, 1:], uniforms[:, :-1])
    assert query_uniforms(uniforms, "categorical")[:, 0].isnan().all()
    assert query_uniforms(uniforms, "independent").isnan().all()


def test_tokens_behind_an_invalid_one_are_invalid():
    holds = torch.tensor([[True, True, False, True], [True, True, True, True]])
    assert valid_prefix(holds).tolist() == [[True, True, False, False], [True, True, True, True]]
