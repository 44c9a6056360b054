"""A server that learns: the same texts before, during and after a replacement; whose texts teach, what is kept."""

import json
import logging
import os
import threading
import time
from dataclasses import replace

import httpx
import pytest
from test_cache_files import DAMAGES, full_disk
from typer.testing import CliRunner

import saltus
from forked_python import forked_workers
from saltus.cli.app import app
from saltus.methods.ptp.files import load_drafter
from saltus.methods.ptp.training.online import Evaluation, LearningProgress, LearningSettings
from saltus.server.learned_drafters import LearnedDrafters
from saltus.server.learning import Learner, LearningPlan, group_of
from saltus.server.learning_log import LearningLog
from saltus.server.served_request import Limits
from tiny_models import TEMPLATE
from tiny_server import PROMPT, alone, serving

SETTINGS = LearningSettings(evaluation_texts=4, evaluation_windows=6, windows=4, steps_per_text=6, rate=5e-3)
ALWAYS = replace(  # a drafter passes its evaluation, which comes soon, where it drafts other than the one before
    SETTINGS, margin=-1e9, evaluation_texts=2, evaluation_windows=24, windows=2, steps_between_evaluations=2
)


@pytest.fixture
def drafting(tiny_folder, tiny_drafter, tmp_path, monkeypatch) -> saltus.Engine:
    monkeypatch.setattr("saltus.server.learned_drafters.cache_folder", lambda: tmp_path / "cache")
    made = saltus.load(str(tiny_folder()), "ptp", options={"ptp": {"model": str(tiny_drafter())}}, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


def ask(url: str, seed: int, **more) -> str:
    body = {"model": "tiny", "prompt": f"{PROMPT} {seed % 5}", "max_tokens": 32, "seed": seed, "temperature": 0.7}
    return httpx.post(f"{url}/v1/completions", json=body | more, timeout=60).json()["choices"][0]["text"]


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.slow
def test_texts_are_the_same_before_during_and_after_a_replacement(drafting, caplog, monkeypatch):
    """Drafters pass their evaluations here, so that drafters are replaced while texts are decoded."""
    monkeypatch.setattr("saltus.server.learning.get_context", lambda method: forked_workers())
    monkeypatch.setattr("saltus.server.learning.LOG_SECONDS", 0.01)
    monkeypatch.setattr("saltus.server.learning_log.LOG_SECONDS", 0.01)
    monkeypatch.setattr("saltus.server.learning.NICENESS", os.nice(0))  # other tests have the cores for minutes
    caplog.set_level(logging.INFO, logger="saltus.server")
    settings = {"raw": True, "temperature": 0.7, "max_new_tokens": 32}
    expected = [alone(drafting, f"{PROMPT} {seed % 5}", seed=seed, **settings).text for seed in range(8)]
    first = drafting.decoder.setup("ptp").networks["ptp"]
    learner = Learner(drafting, LearningPlan(0.9, settings=ALWAYS))
    with serving(drafting, learner=learner) as (service, url):
        found: list[tuple[int, str]] = []

        def client(offset: int) -> None:
            while time.monotonic() < end and metric(url, "saltus:learning_replacements_total") < 2:
                for seed in range(offset, 8, 2):
                    found.append((seed, ask(url, seed)))

        end = time.monotonic() + 400  # two replacements can take two minutes on a busy machine
        threads = [threading.Thread(target=client, args=(offset,)) for offset in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert metric(url, "saltus:learning_replacements_total") >= 2
        assert metric(url, "saltus:learning_steps_total") > 0
        assert metric(url, 'saltus:learning_tokens_per_call{drafter="trained"') >= 1
        found += [(seed, ask(url, seed)) for seed in range(8)]
    latest = served = service.engine_thread.scheduler.networks["ptp"]
    while not service.engine_thread.replacements.empty():  # one may have come after the last call
        _, latest = service.engine_thread.replacements.get()
    assert {seed for seed, _ in found} == set(range(8))
    assert [text for _, text in found] == [expected[seed] for seed, _ in found]
    assert served is not first
    assert drafting.decoder.setup("ptp").networks["ptp"] is served
    lines = [json.loads(one.message) for one in caplog.records if "drafter_replaced" in one.message]
    assert len(lines) >= 2
    assert {"texts", "tokens_per_call"} <= set(lines[0])
    assert any('"event": "learning"' in one.message for one in caplog.records)
    kept = learner.drafters.latest()
    assert [folder.name for folder in kept.parent.glob("[0-9]*")] == [kept.name]
    again = load_drafter(kept, drafting.network.model, "tiny").state_dict()
    assert all((again[name] == weight).all() for name, weight in latest.model.state_dict().items()
               if "embed_tokens" not in name)  # fmt: skip


@pytest.mark.slow
def test_what_was_learned_is_loaded_at_the_next_start_unless_it_is_reset(drafting):
    learner = Learner(drafting, LearningPlan(0.25, settings=SETTINGS))
    first = learner.network
    weights = learner._first_message()["initial"]
    learner._save(weights, {"texts": 3})
    learner.close()
    again = Learner(drafting, LearningPlan(0.25, settings=SETTINGS))
    assert again.network is not first
    assert drafting.decoder.setup("ptp").networks["ptp"] is again.network
    again.close()
    other = Learner(drafting.copy_with(), LearningPlan(0.25, group="key another", settings=SETTINGS))
    assert other.drafters.latest() is None
    other.close()


def test_texts_of_several_keys_are_not_mixed_unless_that_is_allowed():
    assert group_of(["one"], False) == group_of(["one", "one"], False) != group_of(["two"], False)
    assert group_of([], False) == ""
    with pytest.raises(ValueError, match="--learn-across-keys"):
        group_of(["one", "two"], False)
    assert group_of(["one", "two"], True) == group_of(["two"], True)


def test_a_server_without_a_drafter_that_learns_says_so(tiny_folder):
    engine = saltus.load(str(tiny_folder()), "lookup", adaptive=False)
    with pytest.raises(ValueError, match=r"the method is lookup; serve with --method ptp\+lookup"):
        Learner(engine, LearningPlan(0.25))


def test_a_second_server_of_the_same_clients_does_not_learn(drafting):
    learner = Learner(drafting, LearningPlan(0.25))
    with pytest.raises(ValueError, match="another server learns"):
        Learner(drafting, LearningPlan(0.25))
    learner.close()
    Learner(drafting, LearningPlan(0.25)).close()


class _Load:
    """What the policy looks at of an engine thread."""

    def __init__(self, running: int, waiting: int = 0) -> None:
        self.num_running, self.num_waiting = running, waiting
        self.limits = Limits(max_batch=4)


class _Process:
    """A process that always has work, its slices, and the clock that they take time of."""

    def __init__(self) -> None:
        self.now, self.may_run, self.trained = 0.0, False, 0.0

    def pause(self, timeout: float) -> None:
        self.may_run = False

    def resume(self) -> None:
        self.may_run = True

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        assert self.may_run
        self.now += seconds
        self.trained += seconds


def trained_share(learner: Learner, load: _Load, monkeypatch) -> float:
    """The share of the time in which the process trains beside this load."""
    process = learner.slices = learner.between_pieces = _Process()
    monkeypatch.setattr("saltus.server.learning.time.perf_counter", lambda: process.now)
    learner.engine_thread = load
    for _ in range(1000):
        process.now += 0.01
        learner.called(0.01)
        assert not process.may_run
    return process.trained / process.now


@pytest.mark.parametrize("share", [0.0, 0.08, 0.5])
def test_training_has_its_share_of_the_time_beside_few_texts(drafting, monkeypatch, share):
    learner = Learner(drafting, LearningPlan(share))
    assert trained_share(learner, _Load(2), monkeypatch) == pytest.approx(share, abs=0.005)
    assert trained_share(learner, _Load(3), monkeypatch) == 0
    assert trained_share(learner, _Load(1, waiting=1), monkeypatch) == 0
    learner.idle()
    assert learner.slices.may_run
    learner.close()


def test_training_that_does_not_help_gets_less_time(drafting):
    learner, shares = Learner(drafting, LearningPlan(0.16)), []
    for passed in (False, False, False, False, True, False):
        learner._take(LearningProgress(evaluation=Evaluation(1.0, 1.1, passed)))
        shares.append(learner.share)
    assert shares == pytest.approx([0.08, 0.04, 0.02, 0.02, 0.16, 0.08])
    learner.close()


def test_the_log_says_now_and_then_how_far_it_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="saltus.server")
    now = 0.0
    monkeypatch.setattr("saltus.server.learning_log.time.monotonic", lambda: now)
    written = LearningLog(24, written=0.0)
    for seconds in range(0, 121, 20):
        now = float(seconds)
        evaluation = Evaluation(2.0, 1.96, False) if seconds == 80 else None
        written.record(LearningProgress(3, evaluation, None, texts=seconds, unevaluated=seconds % 24))
    lines = [json.loads(record.message) for record in caplog.records]
    shared = {"event": "learning", "needed": 24}
    assert lines == [
        {**shared, "texts": 60, "texts_for_evaluation": 12, "steps": 12, "evaluations": 0, "tokens_per_call": None},
        {**shared, "texts": 120, "texts_for_evaluation": 0, "steps": 21, "evaluations": 1,
         "tokens_per_call": {"before": 2.0, "after": 1.96}},
    ]  # fmt: skip


def command(*options: str) -> str:
    """What the command says to options that exclude each other, before it loads anything."""
    result = CliRunner().invoke(app, ["serve", "-m", "no-such-model", *options])
    return f"{result.output} {result.exception}"


def test_the_command_refuses_wrong_settings_before_it_loads_a_model():
    assert "need --learn" in command("--learn-share", "0.5")
    assert "from 0 to 0.9" in command("--learn", "--learn-share", "2")
    assert "leave out --ray" in command("--learn", "--ray")
    assert "--learn-across-keys" in command("--learn", "--api-key", "one", "--api-key", "two")
    assert "--learn-across-keys" not in command(
        "--learn", "--learn-across-keys", "--api-key", "one", "--api-key", "two"
    )


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_learned_drafter_that_was_damaged_is_forgotten_with_a_line(drafting, tiny_drafter, caplog, damage):
    target = drafting.model
    kept = LearnedDrafters(target, "tiny", b"first", "")
    model = load_drafter(tiny_drafter(), target, "tiny")
    for name in ("drafter.safetensors", "saltus.json", "source.json"):
        folder = kept.save(model, {})
        assert kept.latest() == folder
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
        assert kept.latest() is None
        [line] = [record.getMessage() for record in caplog.records]
        assert f"{name} is damaged" in line
        caplog.clear()
        assert kept.latest() is None
        assert list(kept.folder.iterdir()) == []


def test_a_full_disk_while_a_learned_drafter_is_saved_is_one_line(drafting, tiny_drafter, monkeypatch):
    target = drafting.model
    kept = LearnedDrafters(target, "tiny", b"first", "")
    before = kept.save(load_drafter(tiny_drafter(), target, "tiny"), {})
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ValueError, match=r"ran full while writing what was learned; free some space, .*SALTUS_CACHE"):
        kept.save(load_drafter(tiny_drafter(), target, "tiny"), {})
    assert kept.latest() == before
