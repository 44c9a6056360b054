"""The training loop: a killed run resumes with an identical outcome; foreign and damaged checkpoints are refused."""

import errno
import os
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIGINT, SIGKILL, SIGTERM, getsignal

import pytest
import torch

from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.loop.checkpoint import load_checkpoint, save_checkpoint
from saltus.training.loop.muon import Muon
from saltus.training.loop.training_loop import Schedule, TrainingProgress, make_optimizers, train

SCHEDULE = Schedule(30, 0.05, warmup_steps=5, checkpoint_steps=5)


class Line(torch.nn.Linear):
    @property
    def matrices(self) -> list[torch.Tensor]:
        return [self.weight]


def module() -> torch.nn.Linear:
    made = Line(3, 1)
    with torch.no_grad():
        made.weight.fill_(0.1)
        made.bias.zero_()
    return made


def losses(network: torch.nn.Linear, dies_at: int = -1):
    def loss(step: int) -> torch.Tensor:
        if step == dies_at:
            raise KeyboardInterrupt
        points = torch.from_numpy(seeded_generator(0, "points", step).normal(size=(8, 3))).float()
        return ((network(points) - points.sum(-1, keepdim=True)) ** 2).mean()

    return loss


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_interrupted_has_the_weights_and_losses_of_one_that_was_not(optimizer, tmp_path):
    schedule = replace(SCHEDULE, optimizer=optimizer)
    whole, path = module(), tmp_path / "interrupted.pt"
    expected = train(whole, losses(whole), schedule, tmp_path / "whole.pt", {})
    for dies_at in (3, 9, 10, 17, 29):
        begun = module()
        with pytest.raises(KeyboardInterrupt):
            train(begun, losses(begun, dies_at), schedule, path, {})
    resumed, reports = module(), []
    assert train(resumed, losses(resumed), schedule, path, {}, reports.append) == expected
    assert torch.equal(resumed.weight, whole.weight)
    assert [progress.step for progress in reports] == [30], "only the steps since the last checkpoint are lost"


def test_ctrl_c_and_sigterm_end_the_step_and_save_it(tmp_path, capfd):
    path, whole = tmp_path / "interrupted.pt", module()
    before = getsignal(SIGINT), getsignal(SIGTERM)
    expected = train(whole, losses(whole), SCHEDULE, tmp_path / "whole.pt", {})

    def pressing(network: torch.nn.Linear, at: int, times: int = 1, number: int = SIGINT):
        compute = losses(network)

        def loss(step: int) -> torch.Tensor:
            for _ in range(times if step == at else 0):
                assert getsignal(number) is not SIG_DFL, "it would end the tests"
                os.kill(os.getpid(), number)
            return compute(step)

        return loss

    for at, number in ((3, SIGINT), (4, SIGTERM), (16, SIGINT)):
        network = module()
        with pytest.raises(KeyboardInterrupt, match=f"at step {at + 1}, which is saved; the same command goes on"):
            train(network, pressing(network, at, number=number), SCHEDULE, path, {})
        again = "; Ctrl-C again stops at once" if number == SIGINT else ""
        assert capfd.readouterr().err == f"\nstopping after this step, which is saved{again}\n"
        assert load_checkpoint(path)["step"] == at + 1
    network = module()
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        train(network, pressing(network, 18, times=2), SCHEDULE, path, {})
    assert load_checkpoint(path)["step"] == 17, "a second one stops at once"
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        train(network, lambda step: pressing(network, step)(step) * torch.nan, SCHEDULE, path, {})
    assert load_checkpoint(path)["step"] == 17, "weights that are not finite are not saved"
    resumed = module()
    assert train(resumed, losses(resumed), SCHEDULE, path, {}) == expected
    assert torch.equal(resumed.weight, whole.weight)
    assert (getsignal(SIGINT), getsignal(SIGTERM)) == before


@pytest.mark.slow
def test_a_run_killed_at_any_moment_loses_only_the_steps_since_the_last_checkpoint(tmp_path):
    schedule, path = replace(SCHEDULE, steps=120, checkpoint_steps=2), tmp_path / "killed.pt"
    whole = module()
    expected = train(whole, losses(whole), schedule, tmp_path / "whole.pt", {})

    def run() -> None:
        network = module()
        train(network, losses(network), schedule, path, {})

    moments, patience, kills, reached = seeded_generator(0, "moments"), 0.01, 0, 0
    while reached < schedule.steps:
        child = get_context("fork").Process(target=run)
        child.start()
        child.join(float(moments.uniform(0, patience)))
        child.kill()
        child.join()
        kills += child.exitcode == -SIGKILL
        state = load_checkpoint(path)  # never damaged
        assert state is None or state["step"] >= reached, "no checkpoint is lost"
        if state is None or state["step"] == reached:
            patience *= 1.2  # as long as this machine needs for some steps
        reached = state["step"] if state else 0
    resumed = module()
    assert train(resumed, losses(resumed), schedule, path, {}) == expected
    assert torch.equal(resumed.weight, whole.weight)
    assert kills >= 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"step": 1})
    path.with_name("checkpoint.pt.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        save_checkpoint(path, {"step": 2, "weights": torch.zeros(100_000)})
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path], "what was begun takes no space"


@pytest.mark.parametrize("half", [False, True])
def test_muon_steps_are_orthogonal_whatever_the_gradients_sizes_and_as_large_as_adamws(half: bool):
    for shape in ((40, 24), (24, 40)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = (
            torch.from_numpy(seeded_generator(0, "gradient").normal(size=shape)).float()
            * torch.logspace(-1, 1, 40)[: shape[1]]
        )
        Muon([weight], lr=0.1, momentum=0.0, use_bfloat16=half).step()
        step = weight.detach() / 0.1
        expected = 0.2 * 40**0.5  # all singular values, so that entries are about 0.2
        assert torch.linalg.svdvals(step) / expected == pytest.approx(torch.ones(24), abs=0.35)
        assert float((step * weight.grad).sum()) < 0
        left, _, right = torch.linalg.svd(weight.grad, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(step.flatten(), -(left @ right).flatten(), 0) > 0.97


def test_muon_trains_matrices_alone_and_refuses_other_weights():
    lines = module()
    train_with = replace(SCHEDULE, optimizer="muon")
    assert [type(one).__name__ for one in make_optimizers(lines, train_with)] == ["AdamW", "Muon"]
    assert [type(one).__name__ for one in make_optimizers(torch.nn.Linear(3, 1), train_with)] == ["AdamW"]
    with pytest.raises(ValueError, match="two dimensions; leave the others to AdamW"):
        Muon([lines.bias], lr=0.1)


def test_a_finished_run_is_not_trained_again(tmp_path):
    first, again = module(), module()
    curve = train(first, losses(first), SCHEDULE, tmp_path / "run.pt", {})
    assert train(again, losses(again, dies_at=0), SCHEDULE, tmp_path / "run.pt", {}) == curve
    assert torch.equal(first.weight, again.weight)


def test_progress_has_the_time_left(tmp_path):
    reports: list[TrainingProgress] = []
    network = module()
    train(network, losses(network), SCHEDULE, tmp_path / "run.pt", {}, reports.append)
    assert [progress.step for progress in reports] == [5, 10, 15, 20, 25, 30]
    assert all(progress.seconds_left > 0 for progress in reports[:-1])
    assert reports[-1].seconds_left == 0


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    network = module()
    train(network, losses(network), SCHEDULE, tmp_path / "run.pt", {"form": "one-hot"})
    with pytest.raises(ValueError, match="other settings"):
        train(network, losses(network), SCHEDULE, tmp_path / "run.pt", {"form": "categorical"})
    with pytest.raises(ValueError, match="other settings"):
        train(network, losses(network), replace(SCHEDULE, learning_rate=0.1), tmp_path / "run.pt", {"form": "one-hot"})


@pytest.mark.parametrize("harm", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 100])
def test_a_damaged_checkpoint_is_refused(tmp_path, harm):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"weights": torch.zeros(1000)})
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match="delete it to begin anew"):
        load_checkpoint(path)


def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    save_checkpoint(path, {"step": 1})

    def torn(state, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path) == {"step": 1}


def test_a_run_whose_loss_is_not_finite_stops_without_a_checkpoint(tmp_path):
    network = module()
    with pytest.raises(ValueError, match="take a lower rate"):
        train(network, lambda step: network.weight.sum() * torch.nan, SCHEDULE, tmp_path / "run.pt", {})
    assert not (tmp_path / "run.pt").exists()
