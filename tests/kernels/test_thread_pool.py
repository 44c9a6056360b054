"""The kernels' thread pool has no data race, by ThreadSanitizer, and loses no piece of a job."""

import shutil
import subprocess
from pathlib import Path

import pytest

import saltus.kernels.native

COMPILER = shutil.which("gcc") or shutil.which("clang")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_callers_that_share_the_pool_race_for_nothing(tmp_path: Path) -> None:
    program = tmp_path / "pool"
    headers = Path(saltus.kernels.native.__file__).parent
    command = [str(COMPILER), "-O2", "-g", "-pthread", "-fsanitize=thread", f"-I{headers}", "-o", str(program)]
    units = Path(__file__).with_name("shared_jobs.c"), headers / "thread_pool.c"
    compiled = subprocess.run([*command, *map(str, units)], capture_output=True)
    if compiled.returncode:
        pytest.skip("the compiler has no ThreadSanitizer")
    fixed_addresses = ["setarch", "-R"] if shutil.which("setarch") else []  # it refuses some random layouts
    ran = subprocess.run([*fixed_addresses, str(program)], capture_output=True, text=True)
    if "unexpected memory mapping" in ran.stderr or "failed to set personality" in ran.stderr:
        pytest.skip("ThreadSanitizer does not run with this system's memory layout")
    assert "data race" not in ran.stderr
    assert ran.returncode == 0, ran.stderr
