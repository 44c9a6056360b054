"""With 8-bit activations a text, its logits and its KV cache are the same on every build of the kernels."""

import ctypes
import hashlib
import os
import shutil
import struct as struct_module
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from test_gguf import tiny, write

import gguf_models
import saltus
from kept_builds import kept_builds
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.checkpoints import load_checkpoint
from saltus.kernels import native
from saltus.kernels.native import processor
from saltus.kernels.packed_weight import PackedWeight
from saltus.models.cpu.attention import FROM_FIRST_SLOT
from saltus.models.cpu.native_decoder import DecoderCall
from tiny_models import EMULATED

FORMATS = [
    Q.Q4_1, Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.Q5_0, Q.MXFP4, Q.Q2_K, Q.IQ4_XS, Q.Q3_K, Q.IQ3_XXS, Q.IQ3_S, Q.IQ2_S, Q.IQ2_XXS
]  # fmt: skip


def digest(file: Path) -> list[bytes]:
    """The bits of logits, of keys and values, and the tokens of some texts."""
    network = load_checkpoint(str(file), "cpu").network
    text = np.random.default_rng(0).integers(2, 300, 75).tolist()
    cache = network.new_kv_cache()
    logits = network.forward([ForwardInputs(continuation(text, 8), (5, 6, 7), (-1, 0, -1))], [cache])[0].logits
    assert cache.keys is not None
    assert cache.values is not None
    bits = [x[..., :75, :].contiguous().view(torch.int16).numpy().tobytes() for x in (cache.keys, cache.values)]
    engine = saltus.load(str(file), "lookup", device="cpu")
    for temperature in (0.0, 0.9):
        tokens = engine.generate("one two one two", raw=True, max_new_tokens=24, temperature=temperature).tokens
        bits.append(repr(list(tokens)).encode())
    return [*bits, logits.contiguous().view(torch.int16).numpy().tobytes()]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3n", "deepseek2", "kimi-linear"])
def file_and_bits(request, tmp_path_factory):
    """A packed model, and what the kernels of this processor compute."""
    file = tmp_path_factory.mktemp("same") / "tiny.gguf"
    if request.param in gguf_models.CASES:
        case = gguf_models.CASES[request.param]
        gguf_models.write(gguf_models.tiny(case), case, file, [Q.Q8_0, Q.Q4_1, Q.Q5_0])
    else:
        write(tiny(request.param), file, FORMATS)
    return request.param, file, digest(file)


@pytest.mark.slow
@pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
def test_every_build_gives_the_same_bits(file_and_bits, instruction_set):
    name, file, expected = file_and_bits
    if name != "llama" and instruction_set in EMULATED:
        pytest.skip("tiles multiply alike in every model, and slowly where they are emulated")
    assert digest(file) == expected, instruction_set


@pytest.mark.parametrize(("name", "complaint"), [("sse9", "can be generic, sse4, avx2"), ("amx", "lacks amx_bf16")])
def test_an_instruction_set_that_there_is_not_is_refused(name, complaint, monkeypatch):
    monkeypatch.setenv("SALTUS_ISA", name)
    with pytest.raises(ValueError, match=complaint):
        processor.compiler_flags("flags: sse4_2 avx2")


# On Arm: a call is written down, made by an emulated processor, and compared


# What the compiler is told: with products of matrices of integers, of four integers, and without.
PLAIN_ARM = "armv8-a"
ARM = ["armv8.2-a+dotprod+i8mm", "armv8.2-a+dotprod+fp16", PLAIN_ARM]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")


def bytes_of(x: Any) -> tuple[int, bytes]:
    """The address and the bytes of a tensor, an array or a struct."""
    if isinstance(x, torch.Tensor):
        assert x.is_contiguous()
        return x.data_ptr(), ctypes.string_at(x.data_ptr(), x.nbytes)
    if isinstance(x, np.ndarray):
        return x.ctypes.data, x.tobytes()
    return ctypes.addressof(x), bytes(x)


def write_call(file: Path, decoder: Any, made: DecoderCall, results: list[torch.Tensor]) -> None:
    """Write the memory that a call of a decoder reads and writes, as call_elsewhere.c reads it."""
    struct, (angles, tables, positions, call, attentions, *arrays, _) = made.struct, made.pointed_to
    layers = decoder.layers
    tokens = (ctypes.c_int64 * struct.embedding.count).from_address(struct.embedding.rows)
    masks = [mask for sequence in call.sequences for both in sequence.masks_by_span.values() for mask in both]
    masks += [FROM_FIRST_SLOT, *(sequence.tree_mask for sequence in call.sequences)]
    weights = [weight.rows if isinstance(weight, PackedWeight) else weight for weight in decoder.model.parameters()]
    buffers = [decoder.hidden, *layers.buffers.values(), *layers.weights.made, *made.hidden_states]
    plain = [
        *(table for cos, sin, _ in tables for table in (cos, sin)),
        positions,
        tokens,
        *arrays,
        *masks,
        *weights,
        *buffers,
    ]
    scanned = [struct, angles, attentions, layers.ops, *layers.structs]
    regions = {id(x): x for x in [*plain, *scanned, *results]}
    with file.open("wb") as out:
        out.write(struct_module.pack("<2q", ctypes.addressof(struct), len(regions)))
        for x in regions.values():
            address, content = bytes_of(x)
            kinds = any(x is one for one in scanned), any(x is one for one in results)
            out.write(struct_module.pack("<4q", address, len(content), *kinds) + content)


@pytest.fixture(params=ARM)
def arm_program(request, tmp_path) -> Path:
    """call_elsewhere.c for an Arm processor."""
    kernels = Path(native.__file__).parent
    units = Path(__file__).with_name("call_elsewhere.c"), *sorted(kernels.glob("*.c"))
    compiled = [compiled_for_arm(unit, kernels, request.param) for unit in units]
    run_compiler("-static", "-pthread", *compiled, "-lm", "-o", program := tmp_path / "call")
    return program


def compiled_for_arm(unit: Path, kernels: Path, architecture: str) -> Path:
    """A unit's object file. Those that ask for none of an architecture's instructions are compiled once for all."""
    text = preprocessed(unit, kernels, architecture)
    if text == preprocessed(unit, kernels, PLAIN_ARM):
        architecture = PLAIN_ARM
    few = unit.stem in ("kernels_f16", "kernels_f32")  # what is called of these needs no optimisation
    settings = [*arm_flags(architecture), *(["-O0"] if few else [])]
    made_of = hashlib.sha256(repr((run_compiler("--version"), settings)).encode() + text).hexdigest()
    kept = kept_builds("arm") / f"{unit.stem}-{made_of[:32]}.o"
    if not kept.exists():
        part = kept.with_suffix(f".{os.getpid()}.o")
        run_compiler(*settings, "-w", f"-I{kernels}", "-c", unit, "-o", part)
        part.replace(kept)
    return kept


@cache
def preprocessed(unit: Path, kernels: Path, architecture: str) -> bytes:
    """What the compiler reads of a unit."""
    return run_compiler(*arm_flags(architecture), f"-I{kernels}", "-E", "-P", unit)


def arm_flags(architecture: str) -> list[str]:
    return [f"-march={architecture}" if flag == processor.NATIVE else flag for flag in processor.COMPILER_FLAGS]


def run_compiler(*arguments: str | Path) -> bytes:
    done = subprocess.run([str(COMPILER), *map(str, arguments)], capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.external
@pytest.mark.slow
@pytest.mark.skipif(not (COMPILER and EMULATOR), reason="no cross compiler or emulator of Arm processors")
@pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
def test_a_call_on_an_arm_processor_gives_the_same_bits(arm_program, tmp_path):
    for architecture in ("llama", "qwen3"):
        write(tiny(architecture), tmp_path / "tiny.gguf", FORMATS)
        for length in (75, 1, 2):  # tiles of even and odd heights
            network = load_checkpoint(str(tmp_path / "tiny.gguf"), "cpu").network
            expected = write_down_a_call(network, length, tmp_path / "memory")
            found = subprocess.run(
                [str(EMULATOR), "-cpu", "max", str(arm_program), str(tmp_path / "memory")], capture_output=True
            )
            assert found.returncode == 0, found.stderr
            assert found.stdout == expected, length


def write_down_a_call(network: Any, length: int, file: Path) -> bytes:
    """Make a call of a tree after a text of a length, and write its memory to a file before; what it should give."""
    decoder, cache = network.native_decoder, network.new_kv_cache()
    made: list[DecoderCall] = []
    results: list[torch.Tensor] = []
    prepare, decode, decoder.prepared_call = decoder.prepare, decoder.decode, None

    def written_down(pointer: Any) -> int:
        results.extend([made[-1].logits, cache.keys, cache.values])
        write_call(file, decoder, made[-1], results)
        return decode(pointer)

    decoder.prepare = lambda *given, **named: made.append(prepare(*given, **named)) or made[-1]
    decoder.decode = written_down
    text = np.random.default_rng(0).integers(2, 300, length).tolist()
    network.forward([ForwardInputs(continuation(text, 8), (5, 6, 7), (-1, 0, -1))], [cache])
    return b"".join(content for _, content in map(bytes_of, results))
