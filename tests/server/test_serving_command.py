"""The serve command: a context that fits the memory, and signals."""

# ruff: noqa: F811  fixtures

import logging
import re
import signal
import socket
import subprocess
import sys
import time
from threading import Event
from types import SimpleNamespace

import httpx
import pytest
import torch
import uvicorn
from typer.testing import CliRunner

from architectures import tiny
from forked_python import saltus_command
from saltus.cli.app import app
from saltus.cli.serve import _within_gpu_memory
from saltus.models.cuda.kv_pages import KVPagePool
from saltus.server.served_request import Limits
from tiny_models import byte_tokenizer
from tiny_server import unused_port  # noqa: F401


def test_texts_without_a_limit_fit_the_memory(tiny_folder, monkeypatch):
    apps = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: apps.append(server.config.app))
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    command = [
        "serve",
        "-m",
        str(tiny_folder(max_position_embeddings=65536)),
        "--method",
        "plain",
        "--kv-cache-memory-bytes",
    ]
    found = [CliRunner().invoke(app, [*command, memory]).output for memory in ("1MB", "4GB")]
    assert ["which fit into --kv-cache-memory-bytes" in " ".join(output.split()) for output in found] == [
        True,
        False,
    ], found
    assert len(apps) == 2
    assert not any("http://" in output for output in found), "nothing listens"


def test_a_model_that_names_no_limit_has_one(tmp_path, monkeypatch):
    """The state of Mamba-2 has one size, however long a text is."""
    apps, folder = [], tmp_path / "mamba"
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: apps.append(server.config.app))
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    model = tiny("Mamba2", vocab_size=300, eos_token_id=0, pad_token_id=1, bos_token_id=2)
    del model.config.max_position_embeddings
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    assert "max_position_embeddings" not in (folder / "config.json").read_text()
    command = ["serve", "-m", str(folder), "--method", "plain"]
    told = [CliRunner().invoke(app, [*command, *more]).output for more in ([], ["--max-model-len", "99"])]
    found = [" ".join(output.split()) for output in told]
    assert "at most 32,768 tokens, since the model names no limit; more by --max-model-len" in found[0]
    assert "at most" not in found[1]
    assert len(apps) == 2


def test_a_limit_beyond_the_model_s_draws_a_line(tiny_folder, monkeypatch):
    monkeypatch.setattr(uvicorn.Server, "run", lambda server: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    command = ["serve", "-m", str(tiny_folder()), "--method", "plain", "--max-model-len"]
    least, greatest = (" ".join(CliRunner().invoke(app, [*command, most]).output.split()) for most in ("99", "100000"))
    assert "--max-model-len is 100,000, but" in greatest
    assert "that is the limit" in greatest
    assert "--max-model-len" not in least


@pytest.mark.parametrize("variable", ["correct horse battery", " secret"])
def test_the_variable_holds_one_key(variable, tiny_folder, monkeypatch):
    given = []
    monkeypatch.setattr("saltus.server.guard.checked_keys", lambda keys: given.append(tuple(keys)) or sys.exit(5))
    CliRunner().invoke(app, ["serve", "-m", str(tiny_folder())], env={"SALTUS_API_KEY": variable})
    assert given == [(variable,)]


def test_an_address_in_use_is_refused_before_a_model_is_loaded():
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", "-m", "nowhere", "--port", str(port)])
    assert found.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in " ".join(found.output.split())
    assert "http://" not in found.output


@pytest.mark.parametrize("more", [[], ["--ray"]])
@pytest.mark.parametrize("host", ["nonexistent.invalid", "192.0.2.1", "a..b"])
def test_a_host_that_is_not_this_machine_is_refused_before_anything_starts(host, more):
    found = CliRunner().invoke(app, ["serve", "-m", "nowhere", "--host", host, *more])
    assert found.exit_code == 2
    assert f"cannot listen on {host}:8000" in " ".join(found.output.split())


def test_on_a_gpu_texts_have_no_more_memory_than_there_is(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 * 10**9, 8 * 10**9))
    pool, gpu = KVPagePool(1, 256, buffers=[torch.empty(10**6, dtype=torch.int8)]), torch.device("cuda", 0)
    network = SimpleNamespace(device=gpu, fixed_shape_runner=SimpleNamespace(pool=pool))
    assert _within_gpu_memory(Limits(8, max_cached_bytes=4 * 10**9), network) == Limits(
        8, max_cached_bytes=1_500_500_000
    )
    assert "at most 1.5 GB, half of what the GPU has" in capsys.readouterr().err
    assert _within_gpu_memory(Limits(max_cached_bytes=10**9), network) == Limits(max_cached_bytes=10**9)
    assert _within_gpu_memory(Limits(), SimpleNamespace(device=torch.device("cpu"))) == Limits()
    assert not capsys.readouterr().err


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch):
    answered = Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [answered.wait(60)])
    monkeypatch.setattr("saltus.cli.serve.RESOLVE_SECONDS", 0.01)
    found = CliRunner().invoke(app, ["serve", "-m", "nowhere", "--host", "somewhere.example"])
    answered.set()
    assert found.exit_code == 2
    assert "name servers did not answer within 0.01 s" in " ".join(found.output.split())


def test_replicas_may_listen_where_earlier_ones_do(monkeypatch):
    monkeypatch.setattr("saltus.server.replicas.start_replicas", lambda *_: sys.exit(5))
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        command = ["serve", "-m", "nowhere", "--ray", "--port", str(used.getsockname()[1])]
        assert CliRunner().invoke(app, command).exit_code == 5


@pytest.mark.slow
def test_the_address_is_said_when_the_server_listens_there(tiny_folder):
    command = [*saltus_command(), "serve", "-m", str(tiny_folder())]
    started = subprocess.Popen([*command, "--method", "plain", "--port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        while not (place := re.search(r"http://127\.0\.0\.1:(\d+)/v1", started.stderr.readline())):
            assert started.poll() is None
        assert httpx.get(f"http://127.0.0.1:{place[1]}/health").status_code == 200
    finally:
        started.kill()
        started.stderr.close()


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_starts_no_server(key):
    for arguments, variables in ((["--api-key", key], {}), ([], {"SALTUS_API_KEY": key})):
        found = CliRunner().invoke(app, ["serve", "-m", "nowhere", *arguments], env=variables)
        assert found.exit_code == 2
        assert "key" in " ".join(found.output.split())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "signals"), [(signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGINT, 2)], ids=str)
def test_a_signal_lets_what_runs_finish_and_a_second_one_stops(tiny_folder, unused_port, kind, signals):
    port = unused_port
    command = [*saltus_command(), "serve", "-m", str(tiny_folder())]
    url = f"http://127.0.0.1:{port}"
    tokens = 150 if signals == 1 else 1000  # of each of several choices, so that the answer takes a while, or seconds
    body = {"prompt": "the", "max_tokens": tokens, "n": 8, "ignore_eos": True, "stream": True, "speculative": False}
    started = subprocess.Popen([*command, "--method", "plain", "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        while "http://" not in started.stderr.readline():
            assert started.poll() is None
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            started.send_signal(kind)
            if signals == 1:
                assert [line for line in lines if line][-1] == "data: [DONE]"
            else:
                time.sleep(0.3)
                started.send_signal(kind)
                with pytest.raises(httpx.HTTPError):
                    list(lines)
        assert started.wait(20) in (0, -kind)
        assert f"{kind.name}: the server stops when what runs has finished" in started.stderr.read()
    finally:
        started.kill()
        started.stderr.close()


@pytest.mark.slow
def test_a_server_whose_engine_fails_answers_and_exits(tiny_folder, unused_port):
    fault = "from saltus.server.engine_thread import EngineThread; EngineThread._deliver = lambda *_: 1 / 0"
    command = [*saltus_command(fault), "serve", "-m", str(tiny_folder())]
    started = subprocess.Popen(
        [*command, "--method", "plain", "--port", str(unused_port)], stderr=subprocess.PIPE, text=True
    )
    try:
        while "http://" not in started.stderr.readline():
            assert started.poll() is None
        answer = httpx.post(f"http://127.0.0.1:{unused_port}/v1/completions", json={"prompt": "the"}, timeout=20)
        assert answer.status_code == 503
        assert started.wait(20) != 0
        lines = started.stderr.read().splitlines()
        assert sum("ZeroDivisionError" in line for line in lines) == 1
        assert not any("Traceback" in line for line in lines)
    finally:
        started.kill()
        started.stderr.close()
