"""A Python that has imported torch: `[*forked_python("torch"), "-c", code]` is a command, and runs in a fork of it.

To import torch takes seconds in each process that starts afresh. The command passes its arguments, environment and
streams to a server, which forks; signals are passed on, and the exit status comes back. Only packages of others are
imported beforehand, and those must not read from the environment what a test changes there.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FOR_COMMANDS = ("torch", "transformers.models.llama.modeling_llama")  # what `saltus` imports for a model
FOR_WORKERS = "saltus.training.data.collection_workers", "saltus.server.learning"
PASSED_ON = (signal.SIGINT, signal.SIGTERM)


@cache
def forked_python(*modules: str) -> list[str]:
    """The command, for `-c` and code or for a program's path; where there are no such forks it is Python's own."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    place = Path(tempfile.mkdtemp(prefix="fork")) / "server"
    command = [sys.executable, __file__, "--serve", str(place), *modules]
    # Triton's own functions are interpreted or not as they were when it was imported: in forks they can be compiled
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)  # it ends with its input
    atexit.register(server.kill)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return [sys.executable, "-S", "-E", __file__, str(place)]


def saltus_command(first: str = "pass") -> list[str]:
    """`saltus`, after a statement."""
    return [*forked_python(*FOR_COMMANDS), "-c", f"{first}; from saltus.cli import main; main()"]


@cache
def forked_workers() -> Any:
    """A context of multiprocessing: processes get what spawned ones get, but are forks of one that has imported all."""
    from multiprocessing import forkserver, get_context  # each command starts this file

    context = get_context("forkserver")
    context.set_forkserver_preload([*FOR_COMMANDS, *FOR_WORKERS])
    forkserver.ensure_running()
    vars(forkserver._forkserver)["ensure_running"] = lambda: None  # what asks whether it runs fails in our own forks
    return context


def serve(place: str, modules: list[str]) -> None:
    """Fork for each connection, until the input ends."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # so that forks share the pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        print("ready", flush=True)
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(connection)
                os._exit(0)
            connection.close()


def supervise(connection: socket.socket) -> None:
    """Fork once more, pass signals on, and return the exit status; whoever kills the command kills the program, too."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    given = b""
    while len(given) < int.from_bytes(length):
        given += connection.recv(1 << 20)
    if not (process := os.fork()):
        connection.close()
        run(json.loads(given), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(process)
    while ended not in select.select([connection, ended], [], [])[0]:
        number = connection.recv(1)
        os.kill(process, number[0] if number else signal.SIGKILL)
        if not number:
            return
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.sendall(status.to_bytes(4, signed=True))


def run(given: dict, streams: list[int]) -> None:
    """Become the program."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(given["folder"])
    os.environ.clear()
    os.environ.update(given["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    sys.stderr.reconfigure(errors="backslashreplace")
    program, *arguments = given["arguments"]
    code = arguments.pop(0) if program == "-c" else ""
    sys.argv[:] = [program, *arguments]
    sys.path[0] = "" if program == "-c" else str(Path(program).parent)
    status = 0
    try:
        if program == "-c":
            sys.modules["__main__"] = ModuleType("__main__")
            exec(code, sys.modules["__main__"].__dict__)
        else:
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        status = status or 120
    os._exit(status)


def ask(place: str, arguments: list[str]) -> None:
    """What the command does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        given = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
        content = json.dumps(given).encode()
        socket.send_fds(connection, [len(content).to_bytes(8)], [0, 1, 2])
        connection.sendall(content)
        status = int.from_bytes(connection.recv(4), signed=True)
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        ask(sys.argv[1], sys.argv[2:])
