"""How the tests run: environment, options, which tests are left out. Their fixtures are in tiny_models.py."""

import atexit
import gc
import logging
import os
import signal
import ssl
import sys
from functools import cache

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: one kernel thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if sys.dont_write_bytecode:  # each test process would compile every module again
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest

import type_checks
import wide_frame

gc.disable()  # until all is imported and collected
hypothesis.settings.register_profile("saltus", deadline=None)  # machines are busy; nothing is timed in tests
hypothesis.settings.load_profile("saltus")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="the first case of every test that is not slow, without type checks"
    )
    parser.addoption("--no-external", action="store_true", help="leave out what drives programs of others")


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would its children
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        gc.enable()
        return  # xdist's controller runs no test: its workers need not wait until it has imported torch
    import torch
    import typer.testing

    if not torch.cuda.is_available():  # kernels in Triton are interpreted
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.cuda.manual_seed_all = lambda seed: None  # each would be kept with its stack, for devices to come
    for device in (torch.mtia, torch.xpu):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    typer.testing._get_command = cache(typer.testing._get_command)  # the commands do not change
    config.pluginmanager.import_plugin("tiny_models")
    wide_frame.install(config)
    config.pluginmanager.register(type_checks)
    os.fsync = os.fstat  # no test cuts the power; a descriptor that is none is still an error
    ssl.create_default_context = cache(ssl.create_default_context)  # httpx makes one for each request, in 40 ms
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton_interpreter

        triton_interpreter.install()
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]:
        logging.getLogger(name).propagate = True  # pytest visits each one that does not, in every phase of every test


def markers_of(item: pytest.Item) -> set[str]:
    """The names of its markers; its keywords have the names of folders, too, in which a clone may lie."""
    return {marker.name for marker in item.iter_markers()}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("quick"):
        type_checks.choose(items)
    else:
        seen: set[str] = set()
        kept, dropped = [], []
        for item in items:
            name = item.nodeid.partition("[")[0]
            fast = name not in seen and not {"slow", "model", "gpu", "external"} & markers_of(item)
            (kept if fast else dropped).append(item)
            seen.add(name)
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    if config.getoption("no_external"):
        config.hook.pytest_deselected(items=[item for item in items if "external" in markers_of(item)])
        items[:] = [item for item in items if "external" not in markers_of(item)]
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in markers_of(item):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what is imported: a million objects, a quarter of a second each time."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(5000, 10, 20)  # most objects of a test end with it, and are in no cycle
    atexit.register(gc.unfreeze)
