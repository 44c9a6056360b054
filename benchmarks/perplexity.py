"""Measure the perplexity of a text with packed weights by activations of 8 bits and in bfloat16.

    python benchmarks/perplexity.py wikitext-2_valid.txt --tokens 16384 --formats file q8_0 q4_k

The text is read in windows, whose first token is given: `<bos>`, where the tokenizer begins texts with it. `file` is
the model as it is stored; the other formats pack its expanded weights anew (q4_k by minimum and maximum, not by
llama.cpp's search).
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from tqdm import tqdm

from saltus.engine.checkpoints import Checkpoint, load_checkpoint
from saltus.engine.prompt_scores import PromptScores
from saltus.engine.target_network import make_network
from saltus.kernels.packed_blocks import Arithmetic
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.packing import quantized_blocks

Q = GGMLQuantizationType


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--formats", nargs="+", default=["file"], help="file, q4_k, or one of saltus --weights")
    asked = parser.parse_args()
    text = asked.text.read_text()
    print(f"{'format':8} {'bf16':>10} {'int8':>10} {'int8 / bf16':>12}")
    for format in asked.formats:
        bf16, int8 = (perplexity(asked, text, format, arithmetic) for arithmetic in ("bf16", "int8"))
        print(f"{format:8} {bf16:10.4f} {int8:10.4f} {int8 / bf16 - 1:+12.3%}", flush=True)


def perplexity(asked: argparse.Namespace, text: str, format: str, arithmetic: Arithmetic) -> float:
    """Of the first tokens of a text."""
    checkpoint = packed_checkpoint(asked.model, format, arithmetic)
    tokens = checkpoint.tokenizer(text[: 8 * asked.tokens], add_special_tokens=False).input_ids[: asked.tokens]
    begins_with = checkpoint.tokenizer("").input_ids
    losses: list[float] = []
    with torch.inference_mode():
        for start in tqdm(range(0, len(tokens), asked.window), f"{format} {arithmetic}", leave=False):
            scores = PromptScores([*begins_with, *tokens[start : start + asked.window]])
            cache = checkpoint.network.new_kv_cache()
            while scores.num_unscored:
                scores.score_chunk(checkpoint.network, cache, len(scores.tokens))
            losses += scores.log_probabilities
    return math.exp(-sum(losses) / len(losses))


def packed_checkpoint(name: str, format: str, arithmetic: Arithmetic) -> Checkpoint:
    """The model with its weights in a format; q5_0 where rows are no multiple of the 256 weights of a q4_k block."""
    if format == "file":
        return load_checkpoint(name, "cpu", arithmetic=arithmetic)
    checkpoint = load_checkpoint(name, "cpu", weights="bf16")
    model: Any = checkpoint.network.model
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            kind = Q.Q5_0 if format == "q4_k" and module.weight.shape[1] % 256 else Q[format.upper()]
            blocks = q4_k_blocks(module.weight) if kind is Q.Q4_K else quantized_blocks(module.weight, kind)
            packed = PackedWeight.from_blocks(blocks, kind, arithmetic)
            module.weight = nn.Parameter(packed, requires_grad=False)
    return replace(checkpoint, network=make_network(model, name))


def q4_k_blocks(weight: Tensor) -> Tensor:
    """A matrix [out, in] in Q4_K [out, bytes], scales and minimums from the extremes of 32 weights."""
    w = weight.detach().float().numpy().reshape(-1, 8, 32)
    minimum = np.maximum(-w.min(2), 0)
    scale = (w.max(2) + minimum) / 15
    whole, least = ((x.max(1, keepdims=True) / 63).astype(np.float16).astype(np.float32) for x in (scale, minimum))
    six, own = (np.rint(x / np.where(unit > 0, unit, 1)).clip(0, 63) for x, unit in ((scale, whole), (minimum, least)))
    step = (whole * six)[:, :, None]
    q = np.rint((w + (least * own)[:, :, None]) / np.where(step > 0, step, 1)).clip(0, 15).astype(np.uint8)
    six, own = six.astype(np.uint8), own.astype(np.uint8)
    packed = np.concatenate([
        whole.astype(np.float16).view(np.uint8), least.astype(np.float16).view(np.uint8),
        six[:, :4] | six[:, 4:] >> 4 << 6, own[:, :4] | own[:, 4:] >> 4 << 6, six[:, 4:] & 15 | own[:, 4:] << 4,
        (q[:, ::2] | q[:, 1::2] << 4).reshape(len(w), 128),
    ], 1)  # fmt: skip
    return torch.from_numpy(packed.reshape(len(weight), -1))


if __name__ == "__main__":
    main()
