"""The taxi experiments, tiny: data, tables, and runs that are killed."""

import csv
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from forked_python import FOR_COMMANDS, forked_python

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))

import taxi_data  # noqa: E402
import taxi_ptp  # noqa: E402
from taxi_training import Laboratory, Run, Scale  # noqa: E402

TINY = Scale(
    steps=6, teacher_steps=6, batch=8, chunk=20, hidden=16, layers=1, heads=2, pool=64, test=50, every=2
)  # fmt: skip


def laboratory(work: Path) -> Laboratory:
    return Laboratory(taxi_data.synthetic(6000), TINY, work)


def test_rides_become_tokens_in_the_order_of_time(tmp_path):
    generator = np.random.default_rng(0)
    places = np.array([[40.70, -74.00], [40.80, -73.95], [40.65, -73.78], [42.0, -73.9]])
    with gzip.open(tmp_path / "centres.csv.gz", "wt", newline="") as file:
        table = csv.writer(file)
        table.writerow(["pickup_latitude", "pickup_longitude"])
        table.writerows(places[generator.integers(4, size=400)] + generator.normal(0, 1e-3, (400, 2)))
    rows = [(f"4/{day}/2014 0:{minute:02d}:00", *places[(day + minute) % 4], "B02512")
            for minute in range(9, -1, -1) for day in range(30, 0, -1)]  # fmt: skip
    with zipfile.ZipFile(tmp_path / "rides.zip", "w") as archive:
        lines = ["Date/Time,Lat,Lon,Base", *(",".join(map(str, row)) for row in rows)]
        archive.writestr("rides.csv", "\n".join(lines) + "\n")
    points = taxi_data.read_centres(tmp_path / "centres.csv.gz")
    assert (points[:, 0] < 41).all(), "places outside the city are left out"
    centres = taxi_data.k_means(points, 3, seed=0)
    np.testing.assert_allclose(np.sort(centres[:, 0]), [40.65, 40.70, 40.80], atol=1e-3)
    found, days = taxi_data.read_rides(tmp_path / "rides.zip", seed=0)
    expected = [places[(day + minute) % 4] for day in range(1, 31) for minute in range(10) if (day + minute) % 4 < 3]
    np.testing.assert_allclose(found, np.array(expected) * [1, taxi_data.SHRINK])
    assert (np.diff(days) >= 0).all()


def test_counts_know_more_of_a_drifting_stream_than_the_unigram_law():
    stream = taxi_data.synthetic(60_000, drift=0.8)
    unigram, last, inside = taxi_data.baselines(stream, 50).values()
    assert 5 < last < unigram < 25
    assert 5 < inside < unigram


def test_counts_are_those_of_the_tokens_before():
    pieces, prior = np.array([[0, 1, 1, 0, 1, 0]]), np.array([0.5, 0.5])
    of = taxi_data._counted
    assert of(pieces, prior, 2.0, 0) == pytest.approx(np.prod([2 / 5, 3 / 5, 2 / 5]) ** (-1 / 3))
    assert of(pieces, prior, 2.0, 3) == pytest.approx(np.prod([1 / 2, 1 / 3, 2 / 4]) ** (-1 / 3))


def test_a_stream_shorter_than_a_chunk_is_refused():
    with pytest.raises(ValueError, match="take shorter chunks"):
        taxi_data.chunks(np.zeros(9), 10, 1)


@pytest.mark.parametrize("name", taxi_ptp.TABLES)
def test_every_table_is_made(name, tmp_path, monkeypatch):
    monkeypatch.setattr(taxi_ptp, "DRAFTS", taxi_ptp.DRAFTS[:-1])  # a million take time
    rows = list(taxi_ptp.table(name, laboratory(tmp_path), Run("one-hot", "ce", window=4)))
    json.dumps([row.__dict__ for row in rows])
    values = [row.measured.get("correct", row.measured.get("perplexity")) for row in rows]
    assert all(value is not None and np.isfinite(value) for value in values)
    assert len(rows) == {"teacher": 1, "methods": 4, "losses": 22, "embeddings": 22, "places": 8, "drafts": 7,
                         "windows": 9, "inverse": 5}[name]  # fmt: skip


def test_many_sets_of_positions_are_drawn_in_parts(monkeypatch):
    run = Run("one-hot", "ce", window=3)
    at_once = [taxi_ptp._central(1000, run, row) for row in range(20)]
    monkeypatch.setattr(taxi_ptp, "DRAWN", 64)
    for row, places in enumerate(at_once):
        torch.testing.assert_close(taxi_ptp._central(1000, run, row), places, rtol=0, atol=0)


def test_a_student_that_is_the_teacher_is_always_right_at_first():
    """One token without context: the law is the teacher's own, so C-PTP can be made exact by hand."""
    work = laboratory(Path(os.devnull).parent / "nowhere")
    teacher = work.student(0)
    work.teacher = lambda seed: (teacher, {})
    run = Run("categorical", "kl", window=1)
    with torch.no_grad():  # a query at position 1 that is given none stands for the start at position 0
        teacher.none.copy_(teacher.body.wte.weight[teacher.start_token])
        teacher.body.wpe.weight[1].copy_(teacher.body.wpe.weight[0])
        for layer in teacher.body.h:
            layer.attn.c_proj.weight.zero_()
    assert taxi_ptp.measure(work, run, teacher)["correct"] == 1.0


KILLED = TINY.__dict__ | {"steps": 12, "every": 4}
COMMAND = [str(EXPERIMENTS / "taxi_ptp.py"), "methods", "--window", "4"]
COMMAND += [f"--{name.replace('_', '-')}={value}" for name, value in KILLED.items()]


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(tmp_path):
    def run(name: str) -> list[str]:
        places = "--work", str(tmp_path / name), "--out", str(tmp_path / f"{name}.json")
        return [*forked_python(*FOR_COMMANDS), *COMMAND, *places]

    def weights(name: str) -> dict[str, dict]:
        return {path.name: torch.load(path, weights_only=True) for path in (tmp_path / name).glob("*.pt")}

    subprocess.run(run("whole"), check=True, capture_output=True)
    for checkpoints in (1, 3):  # so many further, then killed
        process = subprocess.Popen(run("killed"), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert process.stderr is not None
        assert all(process.stderr.readline() for _ in range(checkpoints)), "it was killed before its end"
        time.sleep(0.002 * checkpoints)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    subprocess.run(run("killed"), check=True, capture_output=True)
    assert {name: state["curve"] for name, state in weights("killed").items()} == {
        name: state["curve"] for name, state in weights("whole").items()
    }
    measured = [json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("whole", "killed")]
    assert [row["measured"]["correct"] for row in measured[0]] == [row["measured"]["correct"] for row in measured[1]]


def test_windows_grow_to_their_length_and_runs_without_growth_keep_their_names(tmp_path):
    run = Run("categorical", "kl", window=64, grow=0.5)
    lengths = [run.objective(step / 100).window for step in range(100)]
    assert lengths[0] == 8
    assert lengths == sorted(lengths)
    assert lengths[49] < 64 == lengths[50] == lengths[-1]
    assert lengths[25] == pytest.approx(8 * 8**0.5, abs=1)
    assert Run("categorical", "kl", window=64).name + "-0.5" == run.name
    assert Run("categorical", "kl", window=64).objective(0.0).window == 64
    laboratory(tmp_path).trained(Run("one-hot", "ce", window=12, grow=0.5))


def test_tables_are_means_over_seeds_with_their_spread(tmp_path):
    import taxi_tables

    for seed, correct in ((0, 4.0), (1, 5.0)):
        rows = [
            {"table": "methods", "run": {"form": "one-hot", "window": 16}, "measured": {"correct": correct}},
            {"table": "inverse", "run": {"model": "unigram"}, "measured": {"perplexity": 19.0}},
        ]
        (tmp_path / f"{seed}.json").write_text(json.dumps({"rows": rows if not seed else rows[:1]}))
    found = taxi_tables.group_rows(taxi_tables.read(sorted(tmp_path.glob("*.json"))))
    (methods, sixteen), table = next(iter(found.items()))
    assert (methods, sixteen) == ("methods", 16)
    assert "| O-PTP | 4.50 ± 0.71 (2 seeds) |" in taxi_tables.markdown(methods, sixteen, table)
    assert "| unigram | 19.00 |" in taxi_tables.markdown("inverse", 0, found["inverse", 0])
