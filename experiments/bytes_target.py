"""Train a small byte-level transformer on a text such as enwik8: a target whose tokens are bytes.

    python experiments/bytes_target.py --text enwik8.xz --work runs/bytes --out bytes
    saltus generate -m bytes --raw "The history of "

It has EvaByte's vocabulary, 64 special tokens and then the 256 bytes, and Llama's layers. The last hundredth of the
text is held out. The same command continues an interrupted run. For heads, let it write texts of its own:

    saltus collect text -m bytes --prompts runs/bytes/prompts.jsonl -t 0 -t 0.7 --out teacher
    saltus train mtpc --recipe bytes-heads -m bytes --teacher teacher --set circuit=ff --out ff

`runs/bytes/held_out.jsonl` holds prompts from held-out text, for experiments/heads.py.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from saltus.loading import byte_tokenizers
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.loop.training_loop import Schedule, print_progress, train

SPECIAL = 64  # special tokens before the bytes
BOS, EOS = 1, 2
HELD_OUT = 0.01  # of the text, its end
PROMPT = 160  # bytes of a prompt
HELD_OUT_PROMPTS = 100  # prompts from held-out text


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte b is token 64 + b."""
    specials = ["<pad>", "<bos>", "<eos>", *(f"<special {number}>" for number in range(3, SPECIAL))]
    return byte_tokenizers.byte_tokenizer(specials, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")


def read(file: Path, count: int | None = None) -> np.ndarray:
    """The tokens of the first `count` bytes of a file, `.xz` or plain."""
    opener: Callable[..., Any] = lzma.open if file.suffix == ".xz" else open
    with opener(file, "rb") as source:
        data = np.frombuffer(source.read(-1 if count is None else count), np.uint8)
    return data.astype(np.int64) + SPECIAL


class ByteTask(nn.Module):
    """A model that learns to predict each byte from those before it. A module, for the keys of its checkpoints."""

    def __init__(
        self, model: LlamaForCausalLM, tokens: np.ndarray, batch: int, length: int, seed: int, half: bool = False
    ) -> None:
        super().__init__()
        self.model, self.half = model, half
        border = int(len(tokens) * (1 - HELD_OUT))
        self.tokens, self.held_out = torch.from_numpy(tokens[:border]), torch.from_numpy(tokens[border:])
        self.batch, self.length, self.seed = batch, length, seed

    @property
    def matrices(self) -> list[Tensor]:
        """The layers' weights, for Muon."""
        return [weight for weight in self.model.model.layers.parameters() if weight.ndim == 2]

    def loss(self, step: int) -> Tensor:
        starts = seeded_generator(self.seed, "texts", step).integers(len(self.tokens) - self.length, size=self.batch)
        return self._nats(torch.stack([self.tokens[start : start + self.length + 1] for start in starts]))

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Bits of a byte in held-out text, with at least half of a text as context."""
        self.model.eval()
        count = min(64, len(self.held_out) // self.length)
        nats = [self._nats(part[None], self.length // 2) for part in self.held_out[: count * self.length].chunk(count)]
        self.model.train()
        return {"bits": float(torch.stack(nats).mean()) / math.log(2)}

    def _nats(self, texts: Tensor, first: int = 0) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.model(input_ids=texts[:, :-1], use_cache=False).logits.float()
        return F.cross_entropy(logits[:, first:].flatten(0, 1), texts[:, 1 + first :].flatten())


def new_model(hidden: int, layers: int, length: int, seed: int) -> LlamaForCausalLM:
    """An untrained model; its attention has heads of 64."""
    config = LlamaConfig(
        vocab_size=SPECIAL + 256, hidden_size=hidden, intermediate_size=int(hidden * 8 / 3) // 32 * 32,
        num_hidden_layers=layers, num_attention_heads=max(hidden // 64, 1), max_position_embeddings=4 * length,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(seeded_generator(seed, name).normal(0, 0.02, tuple(weight.shape))))
    return model


def write_prompts(tokens: np.ndarray, count: int, seed: int, file: Path) -> None:
    """Excerpts that begin at the start of a line, as prompts for a teacher."""
    text = (tokens - SPECIAL).astype(np.uint8).tobytes()
    with file.open("w", encoding="utf-8") as out:
        for start in seeded_generator(seed, "prompts").integers(max(len(text) - 4 * PROMPT, 1), size=count):
            begin = text.find(b"\n", start) + 1
            excerpt = text[begin : begin + PROMPT].decode("utf-8", errors="ignore").strip()
            if excerpt:
                out.write(json.dumps({"source": "text", "prompt": excerpt}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="such as enwik8; .xz or plain")
    parser.add_argument("--work", type=Path, default=Path("runs/bytes"), help="checkpoint and prompts")
    parser.add_argument("--out", type=Path, default=Path("bytes"), help="the model, for saltus generate -m")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16, help="texts of a step")
    parser.add_argument("--length", type=int, default=256, help="bytes of a text")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--half", action="store_true", help="compute in bfloat16: twice as fast with AVX512-BF16")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--bytes", type=int, help="of the text to read; all where none is given")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokens = read(options.text, options.bytes)
    if len(tokens) * HELD_OUT < 2 * options.length:
        sys.exit(f"{options.text} has {len(tokens):,} bytes, too few to hold some out; take a longer text")
    options.work.mkdir(parents=True, exist_ok=True)
    model = new_model(options.hidden, options.layers, options.length, options.seed)
    task = ByteTask(model, tokens, options.batch, options.length, options.seed, options.half)
    schedule = Schedule(options.steps, options.rate, checkpoint_steps=options.every, optimizer="muon")
    settings = {
        name: getattr(options, name) for name in ("batch", "length", "hidden", "layers", "bytes", "seed", "half")
    }

    try:
        train(task, task.loss, schedule, options.work / "checkpoint.pt", settings, print_progress, task.evaluate)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")
    model.save_pretrained(options.out)
    byte_tokenizer().save_pretrained(options.out)
    border = len(task.tokens)
    write_prompts(tokens[:border], options.prompts, options.seed, options.work / "prompts.jsonl")
    write_prompts(tokens[border:], HELD_OUT_PROMPTS, options.seed, options.work / "held_out.jsonl")
    print(f"written: {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
