"""Every kernel for GPUs compiles, for much and for little shared memory: the interpreter takes what Triton refuses."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from forked_python import FOR_COMMANDS, forked_python
from kept_builds import kept_builds
from saltus.kernels import native

TESTS = Path(__file__).parents[1]


@pytest.fixture
def cache() -> Path:
    """Where Triton keeps binaries, by their source, its own version and the compiler's."""
    return kept_builds("triton")


def printed_by(cache: Path, script: str, *arguments: str) -> list[str]:
    """The lines of a script, which compiles where other tests interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*forked_python(*FOR_COMMANDS), TESTS / script, *arguments], env=environment | {"TRITON_CACHE_DIR": str(cache)},
        timeout=1200, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def compiled(cache: Path, *arguments: str) -> set[tuple[str, ...]]:
    """The kernels that the script compiles, each after its capability."""
    return {tuple(line.split()[:2]) for line in printed_by(cache, "compiled_kernels.py", *arguments)}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # minutes of the compiler
@pytest.mark.skipif(native.load_kernels() is None, reason="packed weights need compiled kernels")
def test_every_kernel_compiles(cache):
    assert {name for _, name in compiled(cache, "90")} == {
        "_linear", "_gate_and_up", "_activate", "_packed_linear", "_add_and_norm", "_rotate_and_store", "_attend_split",
        "_combine", "_greatest", "_race", "_best", "_sort_pairs", "_expert_linear",
        "_packed_expert_linear", "_route", "_sum_experts", "_normalize_features", "_draft_inputs", "_convolve",
        "_keep_window", "_recur", "_keep_nodes", "_gate_outputs", "_gate_heads", "_norm_columns", "_rotate_latent",
        "_per_head_linear", "_predict", "_correct", "_match", "_average", "_cut_off", "_select",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_large_tiles_compile_for_others_and_products_multiply_alike_whatever_the_rows(cache):
    """Ada has little shared memory, Blackwell matrix instructions of its own."""
    others, largest = ("89", "100", "120"), ("_linear", "_packed_linear", "_per_head_linear", "_attend_split")
    assert compiled(cache, "--widest", *others) >= set(itertools.product(others, largest))


@pytest.mark.slow
def test_kernels_of_a_call_compile_side_by_side_and_do_not_run(tmp_path):
    """One binary of each that picks, wherever its arguments lie; of products one for each width of a tile."""
    compiled = [f"{name} beside others" for name in ("_best", "_greatest", "_linear", "_linear", "_race")]
    error = "'types.SimpleNamespace' object has no attribute 'utils'"
    assert printed_by(tmp_path, "compiled_together.py") == [*compiled, error]
