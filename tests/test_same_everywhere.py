"""With 8-bit activations a text, its logits and its KV cache are the same on every build of the kernels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q

import saltus
from saltus import native
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.networks.loading.checkpoints import load_checkpoint
from test_gguf import tiny, write
from test_packed import INSTRUCTION_SETS

FORMATS = [Q.Q4_1, Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.Q5_0]


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


@pytest.mark.slow
@pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_every_build_gives_the_same_bits(architecture, tmp_path, monkeypatch):
    file = tmp_path / "tiny.gguf"
    write(tiny(architecture), file, FORMATS)
    expected = digest(file)
    try:
        for march, needed in INSTRUCTION_SETS.items():
            if needed not in native._processor_features():
                continue
            flags = [f"-march={march}" if flag == "-march=native" else flag for flag in native.COMPILER_FLAGS]
            monkeypatch.setattr(native, "COMPILER_FLAGS", flags)
            native.load_kernels.cache_clear()
            assert digest(file) == expected, march
            monkeypatch.undo()
    finally:
        native.load_kernels.cache_clear()
