"""Replicas behind Ray Serve: two of them, started and stopped by the command."""

# ruff: noqa: F811  fixtures

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import pytest

import saltus
from forked_python import saltus_command
from saltus.server import replicas
from saltus.server.replicas import equal_share
from tiny_server import unused_port  # noqa: F401


@pytest.mark.parametrize(
    ("cpus_of_nodes", "count", "expected"),
    [
        ([2.0], 2, 1.0),
        ([8.0], 2, 4.0),
        ([8.0, 8.0], 1, 8.0),
        ([8.0, 4.0], 2, 4.0),
        ([8.0, 3.0], 3, 3.0),
        ([1.0], 4, 1.0),
    ],
)
def test_replicas_have_an_equal_share_of_nodes_that_they_fit(cpus_of_nodes, count, expected):
    assert equal_share(cpus_of_nodes, count) == expected


@pytest.mark.slow
def test_after_one_signal_the_next_ends_the_process():
    code = """
import time
from saltus.server.replicas import wait_for_signal
print(1, flush=True)
wait_for_signal()
print(2, flush=True)
time.sleep(60)
"""
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        for expected in ("1", "2"):
            assert started.stdout.readline().strip() == expected
            time.sleep(0.3)
            started.send_signal(signal.SIGTERM)
        assert started.wait(20) == -signal.SIGTERM
    finally:
        started.kill()
        started.stdout.close()


def test_a_ray_that_does_not_start_is_one_line(monkeypatch):
    def init(**settings):
        raise Exception("The current node timed out during startup.\nMore.")  # as Ray raises it

    monkeypatch.setattr(replicas, "_imported", lambda: (SimpleNamespace(init=init), None))
    with pytest.raises(ValueError, match=r"^Ray did not start: The current node timed out during startup\. \(is the"):
        replicas.start_replicas(lambda: None, replicas.Replicas(1, 1, 1.0), "127.0.0.1", 0)


SERVE = "serve", "--ray", "--method", "lookup"


def command(*arguments: object) -> list[str]:
    program = [sys.executable, "-c", "from saltus.cli import main; main()"]
    return [*program, *SERVE, *map(str, arguments)]


def ask_in_session(url: str, session: str) -> int:
    """How many tokens of a prompt the replica of a session had read before."""
    asked = {"prompt": "a dog and a log and the mat", "max_tokens": 1}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=100, headers={"x-session-id": session})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.external
@pytest.mark.slow
def test_two_replicas_answer_as_one_and_stop_when_told(tiny_folder, unused_port, tmp_path):
    pytest.importorskip("ray.serve")
    psutil = pytest.importorskip("psutil")
    folder, url = str(tiny_folder()), f"http://127.0.0.1:{unused_port}"
    with open(tmp_path / "log", "w") as log:
        started = subprocess.Popen(
            command("-m", folder, "--replicas", 2, "--replica-cpus", 0.5, "--port", unused_port),
            stderr=log,
            stdout=log,
        )
    try:
        deadline = time.monotonic() + 150
        while "2 replicas" not in (tmp_path / "log").read_text():
            still = time.monotonic() < deadline and started.poll() is None
            assert still, (tmp_path / "log").read_text()
            time.sleep(0.5)
        started_by_ray = [
            one
            for one in psutil.Process(started.pid).children(recursive=True)
            if "ServeReplica" in " ".join(one.cmdline())
        ]
        assert len(started_by_ray) == 2

        def ask(seed: int) -> str:
            asked = {"prompt": "the cat", "max_tokens": 24, "temperature": 1.0, "seed": seed}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=100)
            return answer.json()["choices"][0]["text"]

        with ThreadPoolExecutor(12) as clients:
            texts = list(clients.map(ask, range(12)))
        alone = saltus.load(folder, "lookup")
        assert texts == [
            alone.generate("the cat", raw=True, max_new_tokens=24, temperature=1.0, seed=seed).text
            for seed in range(12)
        ]
        cached = {session: [ask_in_session(url, session) for _ in range(3)] for session in map(str, range(12))}
        firsts = [found[0] for found in cached.values()]
        assert firsts.count(0) == 2, cached  # each replica has read the prompt once
        assert all(min(found[1:]) > 0 for found in cached.values()), cached  # and no session has changed its replica
        asked = {"prompt": "the cat", "max_tokens": 12, "temperature": 1.0, "seed": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=100) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 2
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            code = started.wait(100)
        finally:
            started.kill()
    assert code == 0, (tmp_path / "log").read_text()


@pytest.mark.external
@pytest.mark.slow
def test_what_a_replica_lacks_is_said_in_one_line(unused_port):
    pytest.importorskip("ray.serve")
    arguments = "--port", str(unused_port), "-m", "no-such-model"
    found = subprocess.run([*saltus_command(), *SERVE, *arguments], capture_output=True, text=True, timeout=200)
    last = found.stderr.strip().splitlines()[-1]
    assert found.returncode != 0
    assert "the replicas did not start: " in last
    assert "no-such-model" in last
    assert "a fault of saltus" not in last


def test_more_replicas_than_the_cluster_has_processors_for_are_refused(monkeypatch):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False, "Resources": {"CPU": 900.0}}]
    ray = SimpleNamespace(init=lambda **_: None, nodes=lambda: nodes)
    monkeypatch.setattr(replicas, "_imported", lambda: (ray, None))
    wanted = replicas.Replicas(500, max_requests=1, drain_seconds=1.0)
    with pytest.raises(ValueError, match=r"^500 replicas with 1 CPU each do not fit the cluster, which has 4; ask"):
        replicas.start_replicas(lambda: None, wanted, "127.0.0.1", 0)
