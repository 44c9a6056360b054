"""What draft networks run in."""

from contextlib import contextmanager

import torch

from saltus.core.forward import ForwardOutputs
from saltus.methods.shared.timed_outputs import timed_outputs


def test_a_pass_on_another_gpu_has_it_as_the_current_one_where_kernels_are_launched(monkeypatch):
    current = []

    @contextmanager
    def device(given):
        current.append(given)
        yield
        current.pop()

    def run():
        assert current == [torch.device("cuda:1")]
        return [ForwardOutputs(torch.zeros(0, 4))]

    monkeypatch.setattr(torch.cuda, "device", device)
    (outputs,) = timed_outputs(run, torch.device("cuda:1"))
    assert outputs.seconds > 0
    assert not current
