"""Run one program inside limits that it cannot lift, and report on a pipe how it ended (started by run_program.py).

This file gets a token and the program on stdin, and imports only the standard library. Three independent guards
confine the program: resource limits (memory, seconds, files), a seccomp filter of system calls (Linux on x86-64 and
aarch64), and a hook on Python's audit events. The hook gives readable reasons, and is the only guard against writing
and networking on other systems, where a malicious program could circumvent it.

There are two roles: a program is "tested", and its "tests" are another process, joined by a socket; only that one gets
the token with which it reports that the program passed.
"""

import json
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

WRITES_FILE = "tried to write a file"
STARTS_PROCESS = "tried to start a process"
OPENS_SOCKET = "tried to open a socket"
ACCESSES_LAUNCHER = "tried to reach into its launcher"
READABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo")
PROGRAM_LOST = b"?"  # what the tests report if the program's process has ended
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _by_name(names: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, listed in names.items() for name in listed.split()}


REASONS_BY_MODULE = _by_name(
    {  # for all events of a module but those named below
        OPENS_SOCKET: "socket urllib http ftplib smtplib imaplib poplib telnetlib nntplib",
        STARTS_PROCESS: "subprocess pty webbrowser",
        WRITES_FILE: "shutil tempfile",
        "tried to call C through ctypes": "ctypes",
        "tried to change its limits": "resource",
        "tried to write to the system's log": "syslog",
    }
)
REASONS_BY_EVENT = _by_name(
    {
        "tried to fork": "os.fork os.forkpty",
        STARTS_PROCESS: "os.exec os.posix_spawn os.spawn os.system os.startfile",
        "tried to signal other processes": "os.killpg",
        "tried to remove a file": "os.remove",
        "tried to remove a folder": "os.rmdir",
        "tried to make a folder": "os.mkdir",
        "tried to rename a file": "os.rename",
        WRITES_FILE: "os.link os.symlink os.truncate os.utime os.chmod os.chown os.chflags os.setxattr os.removexattr",
        "tried to lock a file": "os.lockf fcntl.flock fcntl.lockf",
        ACCESSES_LAUNCHER: (
            "sqlite3.enable_load_extension sqlite3.load_extension gc.get_objects gc.get_referrers "
            "gc.get_referents sys.settrace sys.remote_exec sys._current_frames sys._current_exceptions"
        ),
    }
)


def main() -> None:
    """Confine this process, run the program, report how it ended, and exit without running more of its code."""
    report, parent, seconds, megabytes, channel = (int(word) for word in sys.argv[1:6])
    role, guards, place = sys.argv[6:9]
    token, _, program = sys.stdin.buffer.read().partition(b"\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv[:] = ["program"]
    sys.path.append(place)  # where numpy is
    with suppress(ImportError):
        import ctypes  # noqa: F401  numpy imports it, and to do so calls C: done before anything watches
    import builtins

    for name in ("exit", "quit"):  # as site would
        setattr(builtins, name, sys.exit)
    remote_objects = load_neighbour("remote_objects")
    module = type(sys)("program")  # not __main__: as in HumanEval, code for scripts only is not run
    sys.modules["program"] = sys.modules["__main__"] = module

    write, leave = os.write, os._exit

    def end(why: str) -> None:
        write(report, b"-" + why.encode("utf-8", "replace"))
        leave(1)

    def lose() -> NoReturn:
        if role == "tests":
            write(report, PROGRAM_LOST)
        leave(0)

    lower_limits(AS=megabytes << 20, CPU=seconds + 2, FSIZE=0, NOFILE=64, CORE=0, MEMLOCK=0, MSGQUEUE=0, RTPRIO=0)
    parent = 1 if "bubblewrap" in guards else parent  # bubblewrap's own process, which dies with our parent
    if not ("filter" in guards and install_seccomp_filter(parent)):
        lower_limits(NPROC=0)  # on Linux this also counts threads: without the filter allow neither
    if "hook" in guards:
        install_audit_hook(end)
    del end
    write(report, b"!")  # ready: from here on the program's seconds count
    namespace = vars(module)
    if role == "tested":
        outcome = execute(lambda: run_source(program, namespace), megabytes)
        if outcome == b"+":
            remote_objects.Peer(channel, lose, namespace).serve()
        write(report, outcome)
    else:
        peer = remote_objects.Peer(channel, lose)
        write(report, token + execute(lambda: run_tests(program, namespace, peer, remote_objects), megabytes))
    leave(0)


def load_neighbour(name: str) -> Any:
    """A module of this folder that imports only the standard library; programs do not find it by name."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    module = __import__(name)
    del sys.path[0], sys.modules[name]
    return module


def execute(run: Callable[[], None], megabytes: int) -> bytes:
    """Run; "+" if that came to its end, else "-" and the reason."""
    try:
        run()
    except SystemExit:
        return b"-left early"
    except MemoryError:
        return f"-used more than {megabytes:,} MB".encode()
    except BaseException as error:
        return b"-" + describe_exception(error)
    return b"+"


def run_source(program: bytes, namespace: dict) -> None:
    """Run a program."""
    exec(compile(program.decode("utf-8", "surrogatepass"), "program", "exec", dont_inherit=True), namespace)


def run_tests(given: bytes, namespace: dict, peer: Any, remote_objects: ModuleType) -> None:
    """Run the tests of a program that another process runs."""
    task = json.loads(given)
    tests = compile(task["tests"], "tests", "exec", dont_inherit=True)
    namespace.update(remote_objects.names_for_tests(peer, tests, task["functions"], task["modules"]))
    exec(tests, namespace)


def describe_exception(error: BaseException) -> bytes:
    """An exception as a line of at most 200 characters; its __str__ is the program's code and may fail, too."""
    name = type(error).__name__
    try:
        message = str(error)
    except BaseException:
        message = ""
    line = " ".join(f"{name}: {message[:400]}".split()) if message else name
    return line[:200].encode("utf-8", "replace")


def lower_limits(**limits: int) -> None:
    """Lower soft and hard resource limits; limits that the system lacks, or that are lower, stay.

    The parent measures wall time; the limit of CPU time ends a program whose parent is gone.
    """
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with suppress(OSError, ValueError):  # macOS has a limit of memory, but cannot always set it
                resource.setrlimit(kind, (value, value))


def install_seccomp_filter(parent_pid: int) -> bool:
    """Install the seccomp filter, and die with the parent; False if the system has no such filter."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    steps = load_neighbour("seccomp_filter").build_filter(os.uname().machine, os.getpid())
    if steps is None:
        return False

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))  # struct sock_fprog

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    end_with_parent, dumpable, no_new_privileges, seccomp, by_filter = 1, 4, 38, 22, 2
    prctl(end_with_parent, signal.SIGKILL, 0, 0, 0)
    prctl(dumpable, 0, 0, 0, 0)  # a program of the same user cannot read its tests in their process's memory
    if os.getppid() != parent_pid:
        os._exit(1)
    program = Program(len(steps) // 8, steps)
    prctl(no_new_privileges, 1, 0, 0, 0)
    return prctl(seccomp, by_filter, ctypes.addressof(program), 0, 0) == 0


def install_audit_hook(end_process: Callable[[str], None]) -> None:
    """End the process at the first audit event that is not allowed; no exception can be caught.

    What the hook calls is bound here, before the program runs: the program may replace builtins and functions of `os`.
    """
    itself, family, write_flags, readable = os.getpid(), 1, WRITE_FLAGS, READABLE_DEVICES
    exact, is_subclass, status, kind, starts = type, issubclass, os.stat, stat.S_IFMT, str.startswith
    text, part, byte_text, decode, failed = str, str.__getitem__, bytes, bytes.decode, (OSError, ValueError)
    everything, device_nodes = slice(None), (stat.S_IFCHR, stat.S_IFBLK)
    mounts = {os.stat(folder).st_dev for folder in ("/proc", "/dev", "/dev/shm") if os.path.isdir(folder)}
    mounts.discard(os.stat("/").st_dev)

    def opened(arguments: tuple) -> str | None:
        path, mode, flags = arguments
        if is_subclass(exact(path), byte_text):
            path = decode(path, "utf-8", "surrogateescape")
        elif not is_subclass(exact(path), text):
            return None
        path = part(path, everything)  # a str without methods of the program
        if flags & write_flags:
            return WRITES_FILE
        if mode is None and not starts(path, "/"):  # os.open, whose dir_fd is not among the arguments
            return "tried to open a file relative to a folder"
        if path in readable:
            return None
        hidden = starts(path, ("/dev/", "/proc/"))
        try:
            state = status(path)  # whatever links or .. the path has
            hidden = hidden or state.st_dev in mounts or kind(state.st_mode) in device_nodes
        except failed:
            pass
        return "tried to open a device" if hidden else None

    checks: dict[str, Callable[[tuple], str | None]] = {
        "open": opened,
        "os.kill": lambda arguments: None if arguments[0] == itself else "tried to signal another process",
        # of this family: asyncio's pair for itself
        "socket.__new__": lambda arguments: None if arguments[1] == family else OPENS_SOCKET,
        "sqlite3.connect": lambda arguments: None if arguments[0] == ":memory:" else WRITES_FILE,
        "sqlite3.connect/handle": lambda arguments: None,
    }
    events, modules, before_dot = dict(REASONS_BY_EVENT), dict(REASONS_BY_MODULE), str.partition

    def hook(event: str, arguments: tuple) -> None:
        check = checks.get(event)
        why = check(arguments) if check else events.get(event) or modules.get(before_dot(event, ".")[0])
        if why is not None:
            end_process(why)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
