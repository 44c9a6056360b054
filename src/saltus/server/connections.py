"""Serve an app over connections that have limits: how many there are, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("saltus")
server_log = logging.getLogger("saltus.server")

MAX_HEAD_BYTES = 16 * 2**10  # of a request's line and headers
SPARE_CONNECTIONS = 240  # besides those whose requests run or wait
SPARE_DESCRIPTORS = 256  # for files, and for the backlog
BACKLOG = 128  # connections that are accepted at once, before others have made room for them
CHECK_SECONDS = 15.0  # a connection that is found waiting twice in a row is closed
CHECK_SECONDS_AT_THE_END = 2.0  # when the server has been told to stop


@dataclass(frozen=True)
class Certificate:
    """Files in PEM, with which the server speaks HTTPS."""

    certificate: str
    key: str | None = None  # None: in the same file

    def __post_init__(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password=lambda: "")
        except OSError as error:
            raise ValueError(
                f"--ssl-certfile and --ssl-keyfile are no certificate and key in PEM, without a password ({error})"
            ) from None


def server_config(
    app: Any,
    host: str = "127.0.0.1",
    port: int = 0,
    max_requests: int = 272,
    shutdown_seconds: float = 60.0,
    certificate: Certificate | None = None,
) -> uvicorn.Config:
    """How to serve an app: within limits, and with logs that are left to Python's root logger.

    The parser is h11, also where a faster one is installed, since that has no limit on heads.
    """
    wanted = max_requests + SPARE_CONNECTIONS
    descriptors = _num_descriptors(wanted + SPARE_DESCRIPTORS)
    if descriptors < wanted + SPARE_DESCRIPTORS:
        log.warning(
            "the system lets this process have %d files and connections, so that clients may be let go early; raise the"
            " limit (ulimit -n %d)",
            descriptors, wanted + SPARE_DESCRIPTORS,
        )  # fmt: skip
    connections = min(wanted, max(descriptors - SPARE_DESCRIPTORS, descriptors // 2))
    return uvicorn.Config(
        app, host=host, port=port, http=LimitedConnection, ws="none", h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        limit_concurrency=connections + BACKLOG,
        backlog=BACKLOG, timeout_graceful_shutdown=math.ceil(shutdown_seconds), log_config=None, log_level="warning",
        access_log=False,
        ssl_certfile=certificate and certificate.certificate, ssl_keyfile=certificate and certificate.key,
    )  # fmt: skip


class Server(uvicorn.Server):
    """uvicorn's server, which tells its port once it listens, and ends at once at a second signal."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[int], None]) -> None:
        super().__init__(config)
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:  # else nobody could use the address
            self.on_start(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # uvicorn goes on waiting for streams after a second SIGTERM
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        server_log.info(
            "%s: the server stops when what runs has finished, in %d s at the latest; a second signal stops it at once",
            signal.Signals(sig).name, self.config.timeout_graceful_shutdown,
        )  # fmt: skip
        super().handle_exit(sig, frame)


def _num_descriptors(wanted: int) -> int:
    """How many files and connections this process may have, after asking the system for as many as are wanted."""
    try:
        import resource
    except ImportError:  # another system than Unix
        return 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(soft, wanted)
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (ValueError, OSError):  # macOS has a limit of its own
        return soft
    return raised


class LimitedConnection(H11Protocol):
    """A connection that is closed if its client neither asks nor reads, or where others need its place."""

    unwritten = math.inf  # bytes that were not sent at the last check
    waiting_since: Any = None  # the request that had been answered at the last check, or the connection itself
    next_check: asyncio.TimerHandle | None = None
    stopping = False

    def connection_made(self, transport: Any) -> None:  # uvloop's are not asyncio's
        super().connection_made(transport)
        self.made = self.loop.time()
        self._make_room()
        self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.next_check is not None:
            self.next_check.cancel()

    def data_received(self, data: bytes) -> None:
        cycle, before = self.cycle, 0 if self.cycle is None else len(self.cycle.body)
        super().data_received(data)
        if cycle is None or cycle is not self.cycle or cycle.response_complete or not cycle.more_body:
            return
        if len(data) > MAX_HEAD_BYTES and len(cycle.body) - before < len(data) // 2:
            self.transport.abort()  # a body in chunks of a few bytes, which take seconds to be parsed

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unwritten = math.inf

    def shutdown(self) -> None:
        super().shutdown()
        self.stopping = True
        self._check_later()

    @property
    def incomplete(self) -> bool:
        """No request of the client is here as a whole and not answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _make_room(self) -> None:
        """Where there are too many connections, close the one that has kept us waiting longest."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency - BACKLOG:
            return
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, LimitedConnection) and connection is not self
        ]
        waiting = [
            connection for connection in others if connection.incomplete and not connection.transport.is_closing()
        ]
        if waiting:
            min(waiting, key=lambda connection: connection.made).transport.abort()
        elif len(self.connections) > self.limit_concurrency:  # up to there they are answered
            self.transport.abort()

    def _check_later(self) -> None:
        if self.next_check is not None:
            self.next_check.cancel()
        seconds = CHECK_SECONDS_AT_THE_END if self.stopping else CHECK_SECONDS
        self.next_check = self.loop.call_later(seconds, self._check)

    def _check(self) -> None:
        """Close the connection if the client has done nothing since the last check, where it is its turn."""
        answered = self.cycle is None or self.cycle.response_complete
        left = self.transport.get_write_buffer_size()
        writing = left > 0 and (answered or self.flow.write_paused or self.transport.is_closing())
        waiting = not left and (answered or (self.stopping and self.incomplete))
        since = (self.cycle or self) if waiting else None
        if (writing and left >= self.unwritten) or (since is not None and since is self.waiting_since):
            self.transport.abort()
            return
        self.unwritten, self.waiting_since = left if writing else math.inf, since
        self._check_later()
