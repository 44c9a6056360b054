"""Train a small any-subset model on stories, from scratch: it fills holes anywhere (saltus infill).

    saltus train assd --recipe recipes/assd_stories.py -- --text stories.txt --text tales.csv --out my-stories
    saltus infill -m my-stories "Once upon a time there was a [[3]] who [[…]]. They lived happily."

`--text` is a plain text, its stories parted by <|endoftext|> or empty lines, or a table (.csv) with columns document_id
and text, a sentence a row. A hundredth of the stories is held out. A run that was killed goes on where it was when the
same command is given again.

Tokens are byte-level pieces, so that any text comes back as it was; of the stories white space is made single spaces.
Some texts have `blank` tokens in a place: so the model learns that a hole may be longer than what fills it, and can end
one of unknown length by itself.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from saltus.networks.any_subset import ANY_SUBSET
from saltus.training.any_subset import AnySubsetCourse, Holes
from saltus.training.draws import draws
from saltus.training.loop import Progress, Schedule, train

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<blank>"]
PAD, BOS, EOS, MASK, BLANK = range(len(SPECIAL))
HELD_OUT = 0.01
SENTENCES = 12  # of a table that make a story, at most
BLANKS = 0.3  # share of the texts that have blanks
MOST = 24  # of them behind a piece


def stories(file: Path) -> list[str]:
    """Of a text or a table."""
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8") as source:
            told: dict[str, list[str]] = {}
            for row in csv.DictReader(source):
                told.setdefault(row["document_id"], []).append(row["text"].strip())
        return [
            " ".join(rows[start : start + SENTENCES])
            for rows in told.values()
            for start in range(0, len(rows), SENTENCES)
        ]
    parts = re.split(r"<\|endoftext\|>|\n\s*\n", file.read_text(encoding="utf-8", errors="ignore"))
    return [" ".join(part.split()) for part in parts if len(part.split()) >= 8]


def tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level pieces, the frequent ones of these texts."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", mask_token="<mask>"
    )


def cut(tokens: list[int], length: int) -> list[list[int]]:
    """A story in texts of `length` tokens, the first behind <bos>, the last before <eos>."""
    whole = [BOS, *tokens, EOS]
    return [whole[start : start + length] for start in range(0, len(whole), length) if len(whole) - start >= 16]


def laid(text: list[int], length: int, generator: np.random.Generator) -> list[int]:
    """A text as a row of exactly `length` tokens; some have blanks in a place, as a hole does that was too long."""
    room = length - len(text)
    if room > 1 and generator.random() < BLANKS:
        count = int(generator.integers(1, min(MOST, room) + 1))
        place = int(generator.integers(1, len(text)))
        text = [*text[:place], *[BLANK] * count, *text[place:]]
    return [*text, *[PAD] * (length - len(text))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/stories"), help="checkpoint")
    parser.add_argument("--out", type=Path, default=Path("my-stories"), help="the model, for saltus infill -m")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--spread", choices=["narrow", "wide"], default="wide", help="shares of a text that are holes")
    parser.add_argument("--order", choices=["lattice", "any"], default="lattice", help="in which holes are decided")
    parser.add_argument("--half", action="store_true", help="multiply in bfloat16")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    told = [story for file in chosen.text for story in stories(file)]
    if len(told) < 200:
        sys.exit(f"only {len(told)} stories; give longer texts")
    words = tokenizer(told, chosen.vocabulary)
    generator = draws(chosen.seed, "texts")
    told = [told[place] for place in generator.permutation(len(told))]
    border = max(int(len(told) * HELD_OUT), 1)
    rows = [
        torch.tensor([laid(part, chosen.length, generator) for one in ids for part in cut(one, chosen.length)])
        for ids in (words(told[border:]).input_ids, words(told[:border]).input_ids)
    ]
    if not (len(rows[0]) and len(rows[1])):
        sys.exit("no story that is held out has 16 tokens; give longer texts")
    print(f"{len(rows[0]):,} texts of {chosen.length} tokens, {len(rows[1]):,} held out", file=sys.stderr)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=chosen.hidden, intermediate_size=int(chosen.hidden * 8 / 3) // 32 * 32,
        num_hidden_layers=chosen.layers, num_attention_heads=max(chosen.hidden // 64, 1),
        max_position_embeddings=4 * chosen.length, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        tie_word_embeddings=True,
    )  # fmt: skip
    setattr(config, ANY_SUBSET, {"mask": MASK, "blank": BLANK})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(draws(chosen.seed, name).normal(0, 0.02, tuple(weight.shape))))
    holes = Holes(chosen.spread, order=chosen.order)
    course = AnySubsetCourse(model, rows[0], rows[1], chosen.steps, chosen.batch, holes, chosen.half, chosen.seed)
    settings = {key: str(value) for key, value in vars(chosen).items() if key not in ("work", "out", "every")}
    schedule = Schedule(chosen.steps, chosen.rate, every=chosen.every, optimiser="muon")

    def report(now: Progress) -> None:
        found = ", ".join(f"{name} {value:.2f}" for name, value in now.found.items())
        print(
            f"step {now.step:,} of {now.steps:,}: loss {now.loss:.3f}, {found};"
            f" {now.seconds / 60:.1f} min, {now.left / 60:.1f} left",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    chosen.work.mkdir(parents=True, exist_ok=True)
    try:
        train(course.module, course.loss, schedule, chosen.work / "checkpoint.pt", settings, report, course.report)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")
    model.to(torch.bfloat16)
    model.save_pretrained(chosen.out)
    words.save_pretrained(chosen.out)
    print(f"written: {chosen.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
