"""Programs that a model wrote are confined: each planted misdeed is ended, is told apart, and leaves nothing behind."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import pytest

from saltus.evaluation.sandbox.run_program import DEFAULT_GUARDS, GradedProgram, ProgramResult, run_tests
from saltus.evaluation.sandbox.start_process import ENVIRONMENT, LAUNCHER, bubblewrap_command

pytestmark = pytest.mark.skipif(os.name != "posix", reason="programs are confined on Linux and macOS")
FILTERED = sys.platform.startswith("linux") and platform.machine() in ("x86_64", "aarch64")
needs_filter = pytest.mark.skipif(not FILTERED, reason="no filter of system calls on this system")

BUBBLEWRAP = bool(bubblewrap_command(str(Path(numpy.__file__).parent.parent)))
needs_bubblewrap = pytest.mark.skipif(not BUBBLEWRAP, reason="no bubblewrap that works")

GOOD = {
    "plain": "assert sum(range(10)) == 45",
    "caught": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass",
    "library": "import collections, dataclasses, decimal, hashlib, itertools, json, math, random, re, typing, unittest",
    "pickle": "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    "assert pickle.loads(pickle.dumps(A())) == A()",
    "threads": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(8) as pool:\n    assert sum(pool.map(abs, range(-50, 50))) == 2500",
    "endless daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(999,), daemon=True).start()",
    "asyncio": "import asyncio\nasync def three():\n    await asyncio.sleep(0.001)\n    return 3\n"
    "assert asyncio.run(three()) == 3",
    "numpy": "import numpy\nassert (numpy.ones((50, 50)) @ numpy.ones((50, 50))).sum() == 50**3",
    "script part": "if __name__ == '__main__':\n    input()",
    "reads": "import os\nassert open(os.__file__).read() and os.listdir() == []",
}

BAD = {  # program, reason
    "wrong": ("assert 1 == 2, 'no'", "AssertionError: no"),
    "no message": ("assert False", "AssertionError"),
    "syntax": ("def f(:", "SyntaxError: invalid syntax"),
    "named passed": ("class passed(Exception):\n    pass\nraise passed", "passed"),
    "text of the error fails": ("class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E", "E"),
    "recursion": ("def f():\n    f()\nf()", "RecursionError: maximum recursion depth"),
    "input": ("input()", "EOFError"),
    "memory": ("x = []\nwhile True:\n    x.append(bytes(10**7))", "used more than 512 MB"),
    "_exit": ("import os\nos._exit(0)", "left early"),
    "_exit in a thread": (
        "import os, threading, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(99)",
        "left early",
    ),
    "sys.exit": ("import sys\nsys.exit(0)", "left early"),
    "SystemExit": ("raise SystemExit", "left early"),
    "exit in finally": ("try:\n    1 / 0\nfinally:\n    exit(0)", "left early"),
    "exit in try": ("try:\n    quit()\nfinally:\n    print('passed')", "left early"),
    "crash": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
    "prints passed": ("print('passed +', flush=True)\nimport os\nos._exit(0)", "left early"),
    "endless": ("while True:\n    pass", "took more than 0.6 s"),
    "endless and stubborn": (
        "import signal\nfor s in (2, 15, 14):\n    signal.signal(s, signal.SIG_IGN)\n"
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        "took more than 0.6 s",
    ),
    "sleeps": ("import time\ntime.sleep(999)", "took more than 0.6 s"),
    "prints without end": ("while True:\n    print('a' * 10**6)", "took more than 0.6 s"),
}

# None would do harm were a guard to fail: signals are of number 0, forks are few, addresses are invalid.
MISDEEDS = {  # program that goes on whatever it catches, reason of the hook
    "fork": ("import os\nos.fork()", "tried to fork"),
    "fork bomb": ("import os\nfor _ in range(4):\n    os.fork()", "tried to fork"),
    "multiprocessing": ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "tried to fork"),
    "subprocess": ("import subprocess\nsubprocess.run(['sleep', '1'])", "tried to start a process"),
    "system": ("import os\nos.system('sleep 1')", "tried to start a process"),
    "exec": ("import os\nos.execv('/bin/true', ['true'])", "tried to start a process"),
    "socket": ("import socket\nsocket.socket()", "tried to open a socket"),
    "connection": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')", "tried to open a socket"),
    "C fork": ("import ctypes\nctypes.CDLL(None).fork()", "tried to call C"),
    "C socket": ("import ctypes\nctypes.CDLL(None).socket(2, 1, 0)", "tried to call C"),
    "write here": ("open('here', 'w').write('x')", "tried to write a file"),
    "write outside": ("open({outside!r}, 'w').write('x')", "tried to write a file"),
    "append": ("open({outside!r}, 'a').write('x')", "tried to write a file"),
    "truncate on reading": ("import os\nos.open({outside!r}, os.O_RDONLY | os.O_TRUNC)", "tried to write a file"),
    "remove": ("import os\nos.remove({outside!r})", "tried to remove a file"),
    "rename": ("import os\nos.rename({outside!r}, {outside!r} + '.old')", "tried to rename a file"),
    "remove a tree": ("import shutil\nshutil.rmtree({folder!r})", "tried to write a file"),
    "mode": ("import os\nos.chmod({outside!r}, 0o777)", "tried to write a file"),
    "link": ("import os\nos.symlink('/etc', {outside!r} + '.link')", "tried to write a file"),
    "folder": ("import os\nos.mkdir('new')", "tried to make a folder"),
    "temporary file": ("import tempfile\ntempfile.NamedTemporaryFile(delete=False)", "tried to write a file"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 0)", "tried to signal another process"),
    "kill the group": ("import os\nos.killpg({pid}, 0)", "tried to signal other processes"),
    "raise its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9**9, 9**9))",
        "tried to change its limits",
    ),
}

CALLS = {  # through ctypes: function and arguments
    "vfork": "vfork()",
    "C kill": "kill({pid}, 0)",
    "kill everything": "kill(-1, 0)",
    "C limits": "prlimit(0, 4, ctypes.create_string_buffer(16), None)",
    "ptrace": "ptrace(0, 0, 0, 0)",
    "C unlink": "unlink({outside!r}.encode())",
    "C open": "open({outside!r}.encode(), os.O_RDWR)",
    "memory file": "memfd_create(b'x', 0)",
    "named pipe": "mkfifo(b'x', 0o600)",
    "shared memory": "shmget(1234, 4096, 0o1600)",
    "namespace": "unshare(0x10000000)",
    "niceness": "setpriority(0, 0, 19)",
    "bad memory": "madvise(1, 4096, 100)",
    "listening": "socketpair(2, 1, 0, ctypes.create_string_buffer(8))",
}

REFUSED = {  # calls that a program may outlive, and that must have had no effect: -1 each
    "owner of signals": "fcntl(0, 8, {pid})",  # F_SETOWN
    "input into a terminal": "ioctl(0, 0x5412, b'x')",  # TIOCSTI
    "session": "setsid()",
    "death signal": "prctl(1, 0, 0, 0, 0)",
    "inotify": "inotify_init()",
    "lock": "flock(0, 2)",
}


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After each test: no folder of a program, no process of a launcher that we started."""
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    yield
    assert list(folders.iterdir()) == []
    deadline = time.monotonic() + 5
    while BUBBLEWRAP and launched() and time.monotonic() < deadline:
        time.sleep(0.01)  # what runs in bubblewrap ends just after it
    assert launched() == []


def launched() -> list[str]:
    """Command lines of launchers that this process started, and of what they may have forked."""
    if not sys.platform.startswith("linux"):
        return []
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode().split("\0")
        except OSError:  # has ended
            continue
        if str(LAUNCHER) in words and str(os.getpid()) in words:
            lines.append(" ".join(words))
    return lines


def run(program: str, guards: str = DEFAULT_GUARDS, seconds: float = 20.0, memory_mb: int = 1024) -> ProgramResult:
    """The program, whose tests ask for nothing."""
    return run_tests(GradedProgram(program, ""), seconds=seconds, memory_mb=memory_mb, guards=guards)


def stubborn(program: str) -> str:
    """The program, going on whatever is raised."""
    inner = "".join(f"    {line}\n" for line in program.splitlines())
    return f"try:\n{inner}except BaseException:\n    pass\n"


@pytest.mark.parametrize("program", GOOD.values(), ids=GOOD)
@pytest.mark.parametrize("guards", ["filter+hook", "hook"])
def test_a_good_program_passes(program: str, guards: str) -> None:
    if guards == "hook" and "hread" in program and sys.platform.startswith("linux"):
        pytest.skip("without the filter Linux lets it start neither processes nor threads")
    verdict = run(program, guards)
    assert verdict.passed
    assert verdict.reason == "passed"


@pytest.mark.parametrize(("program", "why"), BAD.values(), ids=BAD)
def test_a_program_that_does_not_reach_its_end_fails_with_the_reason(program: str, why: str) -> None:
    seconds = 0.6 if why.startswith("took") else 20.0
    verdict = run(program, seconds=seconds, memory_mb=512)
    assert not verdict.passed
    assert verdict.reason.startswith(why)


@pytest.mark.parametrize("guards", ["filter+hook", "filter+hook+bubblewrap"])
def test_no_variable_of_our_environment_reaches_a_program(guards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = f"import os\nassert set(os.environ) - {{'PWD', 'LC_CTYPE'}} == {set(ENVIRONMENT)}"  # PWD is bubblewrap's
    assert run(program, guards).reason == "passed"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
@pytest.mark.parametrize("opening", [
    "os.open('proc/self/mem', os.O_RDONLY, dir_fd=os.open('/', os.O_RDONLY))",
    "os.open('self/mem', os.O_RDONLY, dir_fd=os.open('/proc', os.O_RDONLY))",
    "[os.chdir('/'), open('proc/self/environ')]",
    "open('/usr/../proc/self/environ')",
    "open('/etc/mtab')",
    "os.open(pathlib.Path('/proc/self/mem'), os.O_RDONLY)",
    "open(Text('/proc/self/environ'))",
    "[setattr(os, 'stat', print), setattr(builtins, 'type', print), open('/usr/../proc/self/environ')]",
])  # fmt: skip
def test_no_process_is_read_through_its_files(opening: str) -> None:
    program = (
        "import builtins, os, pathlib\nclass Text(str):\n"
        f"    startswith = __getitem__ = __eq__ = lambda *_: False\n    __hash__ = str.__hash__\n{opening}"
    )
    assert run(stubborn(program), "hook").reason.startswith("tried to open a ")


@needs_bubblewrap
def test_bubblewrap_hides_what_python_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hidden")
    paths = [str(tmp_path / "secret"), "/proc/self/environ", "/etc/passwd", __file__]
    program = f"import os\nassert not any(map(os.path.exists, {paths}))"
    assert run(program).reason == "passed"
    assert not run(program, "filter+hook").passed


@pytest.mark.parametrize(("program", "why"), MISDEEDS.values(), ids=MISDEEDS)
@pytest.mark.parametrize("guards", ["filter+hook", "hook", pytest.param("filter", marks=needs_filter)])
def test_a_misdeed_ends_the_program_before_it_is_done(program: str, why: str, guards: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    mode = outside.stat().st_mode
    program = program.format(outside=str(outside), folder=str(tmp_path), pid=os.getpid())
    verdict = run(stubborn(program), guards)
    assert not verdict.passed
    assert verdict.reason.startswith(why if "hook" in guards else "made a forbidden system call")
    assert outside.read_text() == "kept"
    assert outside.stat().st_mode == mode
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "folders"}


@needs_filter
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_kernel_ends_what_goes_around_python(call: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    call = call.format(pid=os.getpid(), outside=str(outside))
    verdict = run(stubborn(f"import ctypes, os\nctypes.CDLL(None).{call}"), "filter")
    assert verdict.reason == "made a forbidden system call"
    assert outside.read_text() == "kept"


@needs_filter
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_other_calls_do_not_exist(call: str) -> None:
    program = f"import ctypes, os\nassert ctypes.CDLL(None).{call.format(pid=os.getpid())} == -1"
    assert run(program, "filter").passed


@needs_filter
def test_threads_without_end_are_counted() -> None:
    bomb = "import threading, time\nthreading.stack_size(32768)\nwhile True:\n"
    bomb += "    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    assert run(bomb, memory_mb=16384).reason == "started more than 256 threads"  # not out of memory before


def test_sets_are_in_the_same_order_each_time() -> None:
    program = "raise ValueError(list({'the', 'cat', 'sat', 'on', 'a', 'mat', 'and', 'purred'}))"
    assert run(program) == run(program)


def test_a_python_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ValueError, match="did not start within 1,024 MB; give programs more memory"):
        run("x = 1")


@pytest.mark.slow
@needs_filter
def test_a_program_dies_with_its_parent() -> None:
    code = (
        "from saltus.evaluation.sandbox.run_program import GradedProgram, run_tests;"
        "run_tests(GradedProgram('import time; time.sleep(99)', ''), seconds=99)"
    )
    environment = {**os.environ, "TMPDIR": tempfile.gettempdir()}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    children: list[int] = []
    while not children and parent.poll() is None:
        time.sleep(0.05)
        children = [
            int(file.parent.name)
            for file in Path("/proc").glob("[0-9]*/cmdline")
            if f"\0{parent.pid}\0" in _text(file) and str(LAUNCHER) in _text(file)
        ]
    time.sleep(0.5)  # the launcher asks for it in its first milliseconds
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}/cmdline").exists() and _text(Path(f"/proc/{child}/cmdline")) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert children
    for folder in Path(tempfile.gettempdir()).iterdir():  # nobody was left to remove it
        folder.rmdir()


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except OSError:
        return ""
