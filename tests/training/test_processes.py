"""Training over processes: a run of two has the losses of a run of one, and their checkpoints are interchangeable."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import test_adapter_training
import test_head_training
import test_jacobi_training
import test_mtp_training
import test_train
import torch
from test_adapter_training import gradients
from test_cli import complaint, saltus_
from test_train import ADAPTER, HEADS, RECIPE, begin_earlier, scalars, training
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor

from architectures import tiny
from saltus.methods.assd.training.any_subset import AnySubsetTrainingTask
from saltus.methods.assd.training.holes import HoleSettings
from saltus.methods.assd.training.pairwise_correction import PairwiseCorrectionTrainingTask
from saltus.methods.ptp.network import DrafterShape
from saltus.methods.ptp.training.adapter import AdapterTrainingTask
from saltus.methods.ptp.training.drafter import DrafterTrainingTask
from saltus.methods.ptp.training.text_intervals import collect_uniform_intervals
from saltus.models.gated_lora import GatedLoraSettings
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.seeded_generator import ShareOfDraws, seeded_generator
from saltus.training.loop.processes import Processes, shards_weights
from saltus.training.training_task import TrainingTask
from tiny_models import tiny_llama

RECIPES = {"drafter": RECIPE, "adapter": ADAPTER, "heads": HEADS}
states, target = test_head_training.states, test_head_training.target  # fixtures
folder, teacher = test_train.folder, test_train.teacher


# Parts of a loss


@dataclass(frozen=True)
class OneOfTwo(Processes):
    """One of two processes that run one after the other: it records what it contributes, or knows the averages."""

    count: int = 2
    own: list[torch.Tensor] = field(default_factory=list)
    averages: list[torch.Tensor] | None = None

    def average(self, value: torch.Tensor) -> torch.Tensor:
        if self.averages is not None:
            return self.averages.pop(0)
        self.own.append(value.detach())
        return value.detach()

    def wait(self) -> None:
        pass


def parts(task: TrainingTask, step: int) -> list[torch.Tensor]:
    """The losses of two processes that share a step."""
    recorded: list[list[torch.Tensor]] = []
    for rank in (0, 1):
        task.processes = OneOfTwo(rank)
        task.loss(step)
        recorded.append(task.processes.own)
    found = []
    for rank in (0, 1):
        averages = [(one + other) / 2 for one, other in zip(*recorded, strict=True)]
        task.processes = OneOfTwo(rank, averages=averages)
        found.append(task.loss(step))
    task.processes = Processes()
    return found


def drafter_task(target, states, **changes) -> DrafterTrainingTask:
    settings = test_head_training.WindowSettings(batch_size=3, windows_per_text=5, validation_fraction=0.3)
    shape = DrafterShape(
        **{"hidden": 32, "intermediate": 48, "hidden_state_layers": (1,), "heads": 4, "kv_heads": 2} | changes
    )
    return DrafterTrainingTask(target, states, shape, vocabulary_size=40, window_settings=settings)


def last_of(states: HiddenStateCorpus) -> HiddenStateCorpus:
    """The corpus without the states of inner layers."""
    features: Any = states.hidden_states
    return replace(states, hidden_states=features[:, 32:], hidden_state_layers=())


def any_subset_task() -> AnySubsetTrainingTask:
    texts = [np.arange(4, 12 + i % 12) for i in range(40)]
    return AnySubsetTrainingTask(
        tiny_llama(any_subset={"mask": 2}), texts, texts[:4], 30, 5, HoleSettings(blank_token=3, warm_up_fraction=0.0)
    )


def adapter_task(tmp_path, **settings) -> AdapterTrainingTask:
    windows = replace(test_adapter_training.WINDOW_SETTINGS, batch_size=3)
    smooth = GatedLoraSettings(
        rank=4, alpha=4.0, embedding="thermometer"
    )  # of uniforms: rounding flips their last bits
    return test_adapter_training.make_task(tiny("Llama"), tmp_path, window_settings=windows, gating=smooth, **settings)


TASKS: dict[str, Callable[..., TrainingTask]] = {
    "drafter": lambda tmp, target, states: drafter_task(target, states),
    "drafter of distributions": lambda tmp, target, states: drafter_task(
        target, states, reads_uniforms=False, correction=8
    ),
    "heads": lambda tmp, target, states: test_head_training.task(target, states),
    "heads with the target's distributions": lambda tmp, target, states: test_head_training.task(
        target, states, distillation_weight=0.5, circuit="cp"
    ),
    "mtp head": lambda tmp, target, states: test_mtp_training.head_task(target, last_of(states)),
    "adapter": lambda tmp, target, states: adapter_task(tmp),
    "adapter of distributions": lambda tmp, target, states: adapter_task(tmp, form="categorical", loss="kl"),
    "adapter of its own windows": lambda tmp, target, states: adapter_task(tmp, student_windows=0.6, learned=0.05),
    "adapter of its own uniforms": lambda tmp, target, states: adapter_task(tmp, form="categorical", inverse=True),
    "adapter for jacobi": lambda tmp, target, states: test_jacobi_training.make_task(tiny("Llama")),
    "model for jacobi": lambda tmp, target, states: test_jacobi_training.make_task(tiny("Llama"), gated=False),
    "any subset": lambda tmp, target, states: any_subset_task(),
    "pairwise correction": lambda tmp, target, states: PairwiseCorrectionTrainingTask(any_subset_task(), rank=4),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_average_of_two_parts_is_the_loss_of_a_step_and_has_its_gradients(name, tmp_path, target, states):
    task = TASKS[name](tmp_path, target, states)
    for step in range(3):
        whole = task.loss(step)
        expected = gradients(task, whole)
        shared = parts(task, step)
        assert float(shared[0]) != float(shared[1])
        torch.testing.assert_close(sum(shared) / 2, whole, rtol=1e-5, atol=1e-6)
        found = gradients(task, sum(shared) / 2)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()) + 1e-9)


def test_every_text_belongs_to_one_process():
    for count in (1, 2, 3, 5):
        numbers = [one for rank in range(count) for one in range(7)[Processes(rank, count).share(7)]]
        assert sorted(numbers) == list(range(7))
    with pytest.raises(ValueError, match="a step has 2 texts, but 3 processes share it; start 2 processes, or"):
        Processes(0, 3).share(2)


def test_draws_of_a_part_are_those_of_the_whole():
    whole, part = seeded_generator(1, "x"), ShareOfDraws(seeded_generator(1, "x"), 5, slice(1, None, 2))
    for _ in range(2):
        assert np.array_equal(part.random((2, 3)), whole.random((5, 3))[1::2])
        assert np.array_equal(part.beta(0.5, 0.5, (2, 3)), whole.beta(0.5, 0.5, (5, 3))[1::2])


def test_two_processes_read_the_texts_of_one_and_of_a_sharded_model_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("saltus.training.data.hidden_states.TEXTS_PER_SHARD", 2)
    model, samples = tiny("Llama"), test_adapter_training.samples()
    assert [*collect_uniform_intervals(model, samples, tmp_path / "one")][-1] == len(samples)
    files = ["00000.safetensors", "00001.safetensors", "00002.safetensors"]
    for sharded, expected in ((False, (files[::2], files[1:2])), (True, (files, []))):
        for rank in (0, 1):
            folder = tmp_path / f"{sharded}-{rank}"
            done = collect_uniform_intervals(model, samples, folder, processes=OneOfTwo(rank), sharded=sharded)
            whole = sharded and rank == 0
            with nullcontext() if whole else pytest.raises(ValueError, match="all machines must share its disk"):
                list(done)  # here the processes share no disk
            found = sorted(folder.glob("*"))
            assert [file.name for file in found] == expected[rank]
            assert all(file.read_bytes() == (tmp_path / "one" / file.name).read_bytes() for file in found)


# Launched processes

LAUNCHER_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT


def work_in(room: Path, arguments: list[object]) -> None:
    """Run a command in a process of a launcher, and keep what it prints."""
    from typer.testing import CliRunner

    from saltus.cli.app import app

    jaxtyping.config.update("jaxtyping_disable", True)  # types are checked where one process does the same
    for one in LAUNCHER_SIGNALS:  # a forked process has the launcher's handlers
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = CliRunner().invoke(app, [str(each) for each in arguments], prog_name="saltus")
    (room / f"printed-{os.environ['RANK']}").write_text(f"{result.exit_code}\n{result.stderr}", encoding="utf-8")
    sys.exit(result.exit_code)


def launch(room: Path, *arguments: object, fails: bool = False) -> list[tuple[int, str]]:
    """Run a command in two processes by torch's launcher; the exit code of each, and what it printed."""
    room.mkdir(exist_ok=True)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", run_id=room.name, max_restarts=0, monitor_interval=0.05,
    )  # fmt: skip
    handlers = {one: signal.getsignal(one) for one in LAUNCHER_SIGNALS}
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ChildFailedError) if fails else nullcontext():
        patched.setattr(dynamic_rendezvous, "get_method_name", lambda: "")  # it looks for a method in all modules
        elastic_launch(config, work_in)(room, list(arguments))
    for one, handler in handlers.items():  # the launcher leaves its own
        signal.signal(one, handler)
    found = [room / f"printed-{rank}" for rank in (0, 1)]
    said = [file.read_text(encoding="utf-8").partition("\n") for file in found if file.exists()]
    return [(int(code), printed) for code, _, printed in said]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Callable[..., Path]:
    room = tmp_path_factory.mktemp("recipes")

    def write(kind: str) -> Path:
        (room / f"{kind}.toml").write_text(RECIPES[kind], encoding="utf-8")
        return room / f"{kind}.toml"

    return write


@pytest.fixture(scope="module")
def run_of_one(recipe, folder, teacher, tmp_path_factory) -> Callable[..., Path]:
    """The folder of a run of one process, which is made once for all tests."""
    made: dict[tuple[str, ...], Path] = {}

    def run(kind: str, *more: str) -> Path:
        if (kind, *more) not in made:
            work = tmp_path_factory.mktemp("one") / "work"
            saltus_(*command(kind, recipe, folder, teacher, work, *more))
            made[kind, *more] = work
        return made[kind, *more]

    return run


def losses(work: Path) -> list[float]:
    return [loss for _, loss in scalars(work)["loss"]]


def command(kind: str, recipe: Callable[..., Path], folder, teacher, work: Path, *more: object) -> list[object]:
    given = training(recipe(kind), folder, teacher, work, *more)
    return ["train", "mtpc", *given[2:]] if kind == "heads" else given


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [("drafter", ["--set", "optimizer=muon"]), ("adapter", []), ("adapter", ["--fsdp"]), ("heads", [])],
)
def test_two_processes_have_the_curve_of_one(kind, more, recipe, folder, teacher, tmp_path, run_of_one):
    one, two = run_of_one(kind, *[word for word in more if word != "--fsdp"]), tmp_path / "two"
    (code, printed), (other_code, nothing) = launch(
        tmp_path / "room", *command(kind, recipe, folder, teacher, two, *more)
    )
    assert (code, other_code, nothing) == (0, 0, "")
    assert printed.count("written: ") == 1
    assert losses(two) == pytest.approx(losses(one), abs=1e-4)
    evaluations = [torch.load(work / "checkpoint.pt")["evaluations"] for work in (one, two)]
    assert [row["greedy"] for row in evaluations[0]] == pytest.approx(
        [row["greedy"] for row in evaluations[1]], abs=0.1
    )
    assert {file.name for file in (one / kind).iterdir()} == {file.name for file in (two / kind).iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(
    first, recipe, folder, teacher, tmp_path, monkeypatch, run_of_one
):
    whole, work, loss = run_of_one("drafter"), tmp_path / "work", DrafterTrainingTask.loss
    given = command("drafter", recipe, folder, teacher, work)

    def interrupted(task: DrafterTrainingTask, step: int) -> torch.Tensor:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(task, step)

    with monkeypatch.context() as patched:
        patched.setattr(DrafterTrainingTask, "loss", interrupted)
        if first == 1:
            saltus_(*given, code=130)
        else:
            launch(tmp_path / "room", *given, fails=True)
    assert torch.load(work / "checkpoint.pt")["step"] == 7
    begin_earlier(work)
    if first == 1:
        launch(tmp_path / "room", *given)
    else:
        saltus_(*given)
    assert losses(work) == pytest.approx(losses(whole), abs=1e-4)


@pytest.mark.slow
def test_ctrl_c_in_one_process_ends_both_at_the_same_step_with_one_line(recipe, folder, teacher, tmp_path, monkeypatch):
    loss = DrafterTrainingTask.loss

    def interrupted(task: DrafterTrainingTask, step: int) -> torch.Tensor:
        if step == 6 and task.processes.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        assert step <= 6
        return loss(task, step)

    monkeypatch.setattr(DrafterTrainingTask, "loss", interrupted)
    said = launch(tmp_path / "room", *command("drafter", recipe, folder, teacher, tmp_path / "work"), fails=True)
    assert [code for code, _ in said] == [130, 130]
    assert said[0][1].endswith("interrupted at step 7, which is saved; the same command goes on from there\n")
    assert said[1][1] == ""


@pytest.mark.slow
def test_ctrl_c_while_texts_are_read_is_one_line_of_the_process_that_writes(
    recipe, folder, teacher, tmp_path, monkeypatch
):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr("saltus.methods.ptp.training.text_intervals._read_text", interrupted)
    launch(tmp_path / "room", *command("adapter", recipe, folder, teacher, tmp_path / "work"), fails=True)
    said = {file.name: file.read_text() for file in (tmp_path / "room").glob("printed-*")}
    kept = f"texts read so far are kept in {tmp_path / 'work' / 'intervals'}, the same command goes on"
    assert said["printed-0"] == f"130\nsaltus: interrupted; {kept}\n"
    assert "saltus:" not in said.get("printed-1", "")


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_other(recipe, folder, teacher, tmp_path, monkeypatch):
    loss = DrafterTrainingTask.loss

    def killed(task: DrafterTrainingTask, step: int) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which may notice before the other process
        if step == 5 and task.processes.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(task, step)

    monkeypatch.setattr(DrafterTrainingTask, "loss", killed)
    said = launch(tmp_path / "room", *command("drafter", recipe, folder, teacher, tmp_path / "work"), fails=True)
    ((code, printed),) = said  # of the other
    assert code == 2
    assert printed.endswith("saltus: another process was killed; the same command goes on from the last checkpoint\n")


@pytest.mark.slow
def test_an_error_in_one_process_ends_both_with_its_line(recipe, folder, teacher, tmp_path, monkeypatch):
    loss = DrafterTrainingTask.loss

    def failing(task: DrafterTrainingTask, step: int) -> torch.Tensor:
        if step == 5 and task.processes.rank == 1:
            raise ValueError("this process has no more memory")
        return loss(task, step)

    monkeypatch.setattr(DrafterTrainingTask, "loss", failing)
    launch(tmp_path / "room", *command("drafter", recipe, folder, teacher, tmp_path / "work"), fails=True)
    said = {file.name: file.read_text() for file in (tmp_path / "room").glob("printed-*")}
    assert said["printed-1"] == "2\nsaltus: this process has no more memory\n"
    assert "saltus:" not in said.get("printed-0", "")


@pytest.mark.slow
def test_a_sharded_model_has_half_of_its_layers_in_each_process(recipe, folder, teacher, tmp_path, monkeypatch):
    loss = AdapterTrainingTask.loss

    def checking(task: AdapterTrainingTask, step: int) -> torch.Tensor:
        found = loss(task, step)
        weights = dict(task.model.model.layers.named_parameters())
        assert all(isinstance(one, DTensor) for one in weights.values())
        assert all(2 * one.to_local().numel() == one.numel() for one in weights.values())
        assert not any(isinstance(one, DTensor) for one in task.module.parameters())
        return found

    monkeypatch.setattr(AdapterTrainingTask, "loss", checking)
    given = command("adapter", recipe, folder, teacher, tmp_path / "work", "--fsdp", "--set", "recompute=true")
    assert [code for code, _ in launch(tmp_path / "room", *given)] == [0, 0]


@pytest.mark.slow
def test_a_step_with_fewer_texts_than_processes_is_refused_in_one_line(recipe, folder, teacher, tmp_path):
    given = command("drafter", recipe, folder, teacher, tmp_path / "work", "--set", "batch_size=1")
    said = [printed for _, printed in launch(tmp_path / "room", *given, fails=True)]
    assert sum("a step has 1 texts, but 2 processes share it" in printed for printed in said) == 1


def test_weights_are_sharded_only_where_a_model_is_frozen(recipe, folder, teacher, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="start it with torchrun"):
        shards_weights(True)  # one process has nobody to share with
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert shards_weights(True)
    assert not shards_weights(False)
    said = complaint(*command("drafter", recipe, folder, teacher, tmp_path / "work", "--fsdp"))
    assert "a recipe of kind drafter trains on stored states; leave --fsdp out" in said
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="give it --fsdp_version 2"):
        shards_weights(False)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert shards_weights(False)
