"""Connections have limits: a client that sends or reads nothing holds up nobody, and is let go."""

# ruff: noqa: F811  fixtures

import logging
import os
import shutil
import socket
import subprocess
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from test_serving_faults import eventually, post, read

from saltus.server import connections
from saltus.server.connections import Certificate, LimitedConnection, server_config
from saltus.server.hosts import allowed_hosts, checked_origins, is_allowed
from saltus.server.log_lines import LogLines
from tiny_server import JSON, PROMPT, engine, server, serving  # noqa: F401


def connect(url: str, sent: bytes = b"") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    made = socket.create_connection((host, int(port)), timeout=20)
    made.sendall(sent)
    return made


@pytest.mark.parametrize(
    "head",
    [b"GET /health HTTP/1.1\r\nHost: " + b"a" * 2**23, b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 2**20, b"a" * 2**23],
    ids=["one header", "many headers", "no end"],
)
def test_a_head_has_a_limit(server, head):
    with connect(server[1]) as connection:
        try:
            connection.sendall(head)
            assert read(connection).startswith(b"HTTP/1.1 400")
        except ConnectionError:  # it was closed while we sent
            pass
    assert httpx.get(f"{server[1]}/health").status_code == 200


def test_a_body_in_tiny_chunks_is_not_read_to_its_end(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server[1], head) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"1\r\n \r\n" * 2**20)


def test_half_requests_leave_room_for_whole_ones(engine, monkeypatch):
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 8 - 272)
    with serving(engine) as (_, url):
        half = [connect(url, b"GET /health HTTP/1.1\r\nHost: loc") for _ in range(8)]
        half += [post(url, b'{"prompt":', 1000) for _ in range(20)]
        for _ in range(3):
            assert httpx.get(f"{url}/health").status_code == 200
        assert read(half[0]) == b""
        for connection in half:
            connection.close()


def test_a_client_that_sends_half_a_request_is_let_go(engine, monkeypatch):
    monkeypatch.setattr(connections, "CHECK_SECONDS", 0.05)
    with serving(engine) as (_, url), connect(url, b"GET /health HTTP/1.1\r\n") as half, connect(url) as idle:
        assert (read(half), read(idle)) == (b"", b"")


class FakeTransport:
    """Of a client that reads as much as it is told to."""

    def __init__(self) -> None:
        self.left, self.closing, self.aborted = 0, False, False

    def get_write_buffer_size(self) -> int:
        return self.left

    def get_extra_info(self, _):
        return None

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def write(self, _) -> None: ...

    pause_reading = resume_reading = close


@pytest.fixture
def connection():
    loop = SimpleNamespace(time=lambda: 0.0, call_later=lambda *_: SimpleNamespace(cancel=lambda: None))
    made = LimitedConnection(server_config(lambda: None), uvicorn.server.ServerState(), {}, loop)
    made.connection_made(FakeTransport())
    return made


def test_a_client_that_stops_reading_is_let_go_and_a_slow_one_is_not(connection):
    connection.cycle = SimpleNamespace(response_complete=False, more_body=False)  # its text is being written
    for _ in range(5):
        connection._check()
    connection.pause_writing()
    for left in (70_000, 60_000, 50_000):
        connection.transport.left = left
        connection._check()
    connection.resume_writing()
    connection.pause_writing()
    connection.transport.left = 70_000
    connection._check()
    assert not connection.transport.aborted
    connection._check()
    assert connection.transport.aborted


@pytest.mark.parametrize("closing", [False, True])
def test_an_answer_that_nobody_takes_is_let_go(connection, closing):
    connection.cycle = SimpleNamespace(response_complete=True, more_body=False)
    connection.transport.left, connection.transport.closing = 100, closing
    connection._check()
    assert not connection.transport.aborted
    connection._check()
    assert connection.transport.aborted


@pytest.mark.parametrize("stopping", [False, True])
def test_a_body_that_does_not_come_is_let_go_when_the_server_stops(connection, stopping):
    connection.cycle = SimpleNamespace(response_complete=False, more_body=True)
    if stopping:
        connection.shutdown()
    connection._check()
    connection._check()
    assert connection.transport.aborted == stopping


@pytest.mark.parametrize(
    ("address", "host", "allowed"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("127.0.0.1", "app.localhost", True),
        ("127.0.0.1", "host.docker.internal:8000", True),
        ("127.0.0.1", "other.internal", False),
        ("127.0.0.1", "evil.example:8000", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "[::1", True),
        ("gpu.example", "GPU.example:80", True),
        ("0.0.0.0", "192.168.1.7:8000", True),
        ("0.0.0.0", socket.gethostname(), True),
        ("127.0.0.1", socket.gethostname(), False),
        ("0.0.0.0", "evil.example", False),
    ],
)
def test_requests_name_the_server_by_a_name_that_it_has(address, host, allowed):
    assert is_allowed(host, allowed_hosts(address)) == allowed
    assert is_allowed(host, allowed_hosts(address, ["*"]))
    assert is_allowed("other.example", allowed_hosts(address, ["other.example"]))


def test_a_page_of_a_name_that_points_here_gets_nothing(engine):
    with serving(engine, hosts=allowed_hosts("127.0.0.1")) as (_, url):
        for route in ("/", "/v1/models", "/metrics"):
            answer = httpx.get(url + route, headers={"host": "evil.example:8000"})
            assert answer.status_code == 403
            assert "--allowed-host" in answer.json()["error"]["message"]
    with serving(engine, api_keys=("secret",), hosts=allowed_hosts("127.0.0.1")) as (_, url):
        headers = {"host": "behind-a-proxy.example", "authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


def test_a_log_that_nobody_reads_stops_nobody_and_says_what_it_dropped():
    reader, writer = os.pipe()
    log, lines = logging.getLogger("a log"), LogLines(writer, max_lines=5)
    log.propagate, log.handlers = False, [lines]
    log.warning("a" * 2**20)  # more than a pipe holds
    assert eventually(lambda: lines.lines.empty())
    for number in range(50):
        log.warning(number)
    with os.fdopen(reader) as read_end:
        assert read_end.readline() == "a" * 2**20 + "\n"
        expected = ["45 lines were dropped: nobody read the log", *map(str, range(5))]
        assert [read_end.readline().strip() for _ in range(6)] == expected
    log.handlers = []


@pytest.mark.parametrize(
    ("soft", "hard", "limit"), [(256, 4096, 512), (256, 256, 128), (400, 400, 200), (4096, 4096, 512)]
)
def test_the_system_is_asked_for_enough_connections_and_few_are_shared(monkeypatch, caplog, soft, hard, limit):
    limits = [soft, hard]
    monkeypatch.setattr("resource.getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr("resource.setrlimit", lambda _, given: limits.__setitem__(slice(None), given))
    config = server_config(None)
    assert config.limit_concurrency == limit + connections.BACKLOG
    assert limits[0] == max(soft, min(hard, 768))
    assert any("ulimit -n 768" in message for message in caplog.messages) == (hard < 768)


def test_pages_of_the_sites_that_are_named_may_use_the_server(engine):
    with serving(engine, api_keys=("secret",), origins=["https://chat.example"]) as (_, url):
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://other.example", None)):
            preflight = httpx.options(f"{url}/v1/models", headers={"Origin": origin, **asks})
            answers = [httpx.get(f"{url}/v1/models", headers={"Origin": origin, **key})
                       for key in ({}, {"Authorization": "Bearer secret"})]  # fmt: skip
            assert [answer.status_code for answer in answers] == [401, 200]
            found = [one.headers.get("access-control-allow-origin") for one in (preflight, *answers)]
            assert found == [allowed] * 3
    assert checked_origins(["*", "http://localhost:3000"]) == ("*", "http://localhost:3000")
    for wrong in ("chat.example", "https://chat.example/", ""):
        with pytest.raises(ValueError, match="--allowed-origin"):
            checked_origins([wrong])


def test_a_certificate_makes_it_https(engine, tmp_path):
    files = [str(tmp_path / name) for name in ("certificate.pem", "key.pem")]
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost -days 2"
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    with serving(engine, certificate=Certificate(*files)) as (_, url):
        assert httpx.get(url.replace("http:", "https:") + "/health", verify=False).status_code == 200
    for wrong in ((files[0],), ("missing.pem",), (files[1], files[0])):
        with pytest.raises(ValueError, match="--ssl-certfile and --ssl-keyfile are no certificate"):
            Certificate(*wrong)
