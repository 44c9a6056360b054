"""What the compiler is told about processors that no test runs on."""

import importlib
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from saltus.kernels import native
from saltus.kernels.native import processor


@pytest.fixture
def mac(monkeypatch, tmp_path):
    """A Mac as far as the compilation of the kernels sees: no /proc, and sysctl says what it knows of the processor."""

    def make(known: dict[str, str], machine: str) -> None:
        answers = "".join(f"{name}) echo '{value}';; " for name, value in known.items())
        program = tmp_path / "sysctl"
        program.write_text(f"#!/bin/sh\nshift\nfor each; do case $each in {answers}*) echo unknown >&2;; esac; done\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(processor, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError), raising=False)
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
        monkeypatch.setattr(platform, "machine", lambda: machine)

    yield make
    monkeypatch.undo()
    importlib.reload(processor)


def test_on_a_mac_kernels_are_compiled_for_its_processor(mac):
    """clang does not know -march=native there."""
    mac({"machdep.cpu.brand_string": "Apple M4 Pro"}, "arm64")
    importlib.reload(processor)
    features = processor.processor_features()
    assert processor.processor_name() == "Apple M4 Pro"
    assert "apple m4 pro" in features, "a folder that machines share has kernels for each"
    assert "-mcpu=native" in processor.compiler_flags(features)
    (lesser,) = processor.lesser_flags(features)
    assert not any(flag.startswith(("-march", "-mcpu")) for flag in lesser)
    assert not processor.request_amx(features)


def test_on_a_mac_of_intel_an_older_compiler_compiles_for_what_the_processor_has(mac):
    known = {
        "machdep.cpu.brand_string": "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz",
        "machdep.cpu.features": "FPU SSE SSE2 SSE4.1 SSE4.2 AVX1.0",
        "machdep.cpu.leaf7_features": "BMI1 AVX2",
    }
    mac(known, "x86_64")
    importlib.reload(processor)
    tried = [flags[-1] for flags in processor.lesser_flags(processor.processor_features())]
    assert tried == ["-march=x86-64-v3", "-march=x86-64-v2", "-march=x86-64"]


@pytest.mark.external
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("ziglang"), reason="no compiler for other systems (ziglang)")
@pytest.mark.parametrize("target", ["aarch64-macos", "x86_64-macos"])
def test_the_sources_compile_for_macs(target, tmp_path):
    units = Path(native.__file__).parent.glob("*.c")
    flags = [flag for flag in processor.COMPILER_FLAGS if flag not in (processor.NATIVE, "-O3")]
    for unit in units:
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-target",
            target,
            *flags,
            "-c",
            unit,
            "-o",
            tmp_path / "unit.o",
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[-2000:]
