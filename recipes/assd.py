"""Train a small any-subset model, on stories or on code: it fills holes anywhere (saltus infill).

    saltus train assd -- --text stories.txt --text tales.csv --out my-stories
    saltus infill -m my-stories "Once upon a time there was a [[3]] who [[…]]. They lived happily."

    saltus train assd -- --code /usr/lib/python3.12 --length 320 --batch 8 --out my-code
    saltus infill -m my-code --file program.py

`--text` is a plain text, its stories parted by <|endoftext|> or empty lines, or a table (.csv) with columns document_id
and text, a sentence a row. `--code` is a folder, whose Python functions are learned, one by one, but those of tests and
installed packages, or a file of lines in JSON with a program each (`code`, and what it is to do, `text`), as MBPP is. A
hundredth of the texts is held out. A run that was killed goes on where it was when the same command is given again.

Tokens are byte-level pieces, a line's end one of its own, so that any text comes back as it was, and a missing line is
a hole between two tokens; of the stories white space is made single spaces. Behind what fills a hole there may be
`blank` tokens: so the model learns that a hole may be longer, and can end one of unknown length by itself.

`--from` goes on from weights, of an XLNet, too, which keeps its own tokens and has no blanks.
`--left-to-right` trains a causal model of the same size on the same texts, to compare with.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import math
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from saltus.networks.loading.checkpoints import fills_holes
from saltus.networks.loading.model_folders import PAIRWISE_CORRECTION_FILE
from saltus.networks.models.any_subset import ANY_SUBSET, save_pairwise_correction
from saltus.training.data.packed_forward import pack_causal, packed_logits
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.loop.training_loop import Progress, Schedule, train
from saltus.training.tasks.any_subset import (
    HOLE_FRACTION_RANGES,
    AnySubsetTrainingTask,
    HoleSettings,
    XlnetTrainingTask,
)
from saltus.training.tasks.pairwise_correction import PairwiseCorrectionTrainingTask

SPECIAL = ["<pad>", "<bos>", "<eos>", "<mask>", "<blank>"]
PAD, BOS, EOS, MASK, BLANK = range(len(SPECIAL))
HELD_OUT = 0.01
SENTENCES = 12  # of a table that make a story, at most
LINE_END = "Ċ"  # how byte-level pieces write it
SHORTEST = 16  # tokens of a text
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages"}  # folders within one that is given


def stories(file: Path) -> list[str]:
    """Of a text or a table."""
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8") as source:
            told: dict[str, list[str]] = {}
            for row in csv.DictReader(source):
                told.setdefault(row["document_id"], []).append(" ".join(row["text"].split()))
        return [
            " ".join(rows[start : start + SENTENCES])
            for rows in told.values()
            for start in range(0, len(rows), SENTENCES)
        ]
    parts = re.split(r"<\|endoftext\|>|\n\s*\n", file.read_text(encoding="utf-8", errors="ignore"))
    return [" ".join(part.split()) for part in parts if len(part.split()) >= 8]


def programs(source: Path) -> Iterator[str]:
    """Of a file, each behind what it is to do, or a folder's functions."""
    if source.is_dir():
        yield from functions(source)
        return
    try:
        with source.open(encoding="utf-8") as lines:
            for row in map(json.loads, filter(str.strip, lines)):
                told = f'"""{row["text"]}"""\n' if row.get("text") else ""
                yield told + "\n".join(row["code"].expandtabs(4).splitlines()).rstrip() + "\n"
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        sys.exit(f"{source} holds no programs ({error}); give a folder, or lines of JSON with code and text")


def functions(folder: Path) -> Iterator[str]:
    """Of all Python files in a folder, those of three lines or more, each at the left margin; tests are left out."""
    for file in sorted(folder.rglob("*.py")):
        if LEFT_OUT & set(file.relative_to(folder).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            with warnings.catch_warnings(action="ignore"):  # of odd escapes in others' code
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        lines = source.split("\n")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 2:
                yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).rstrip() + "\n"


def tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level pieces, the frequent ones of these texts, which do not cross a line's end."""
    made = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), byte_level])
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", mask_token="<mask>"
    )


def fresh(chosen: argparse.Namespace, told: Sequence[str]) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A small model that has learned nothing, and the tokens of these texts."""
    words = tokenizer(told, chosen.vocabulary)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=chosen.hidden, intermediate_size=int(chosen.hidden * 8 / 3) // 32 * 32,
        num_hidden_layers=chosen.layers, num_attention_heads=max(chosen.hidden // 64, 1),
        max_position_embeddings=4 * chosen.length, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        tie_word_embeddings=True,
    )  # fmt: skip
    if not chosen.left_to_right:
        setattr(config, ANY_SUBSET, {"mask": MASK, "blank": BLANK})
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(seeded_generator(chosen.seed, name).normal(0, 0.02, tuple(weight.shape))))
    return model, words


def begun(folder: Path) -> tuple[Any, Any]:
    """A model that has learned something, in float32, and its tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not fills_holes(model):
        sys.exit(f"{folder} holds a model that writes from left to right; begin with an XLNet or an any-subset model")
    return model, AutoTokenizer.from_pretrained(folder)


def cut(tokens: list[int], length: int) -> list[np.ndarray]:
    """A story in equal texts of at most `length` tokens."""
    parts = np.array_split(np.array(tokens), math.ceil(len(tokens) / length))
    return [part for part in parts if len(part) >= SHORTEST]


class LeftToRight(AnySubsetTrainingTask):
    """Say the next token of the same texts."""

    def hole_logits(
        self, tokens: torch.Tensor, ranks: torch.Tensor, num_unknown: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all tokens but the first, and the tokens."""
        real = ranks[:, 1:] >= 0
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            logits = packed_logits(self.model, pack_causal(tokens[:, :-1]), real.flatten().nonzero()[:, 0])
        return logits.float(), tokens[:, 1:][real]

    def evaluate(self) -> dict[str, float]:
        """Bits of a token."""
        return {"bits": super().evaluate()["bits at 20%"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, action="append", default=[], help="of stories")
    parser.add_argument("--code", type=Path, action="append", default=[], help="a folder of Python programs, or .jsonl")
    parser.add_argument("--work", type=Path, help="checkpoint; beside the model otherwise")
    parser.add_argument("--out", type=Path, default=Path("my-stories"), help="the model, for saltus infill -m")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=192, help="tokens of a text")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, help="of learning; 0.003, or 0.0001 from weights that are given")
    parser.add_argument("--from", dest="begin", type=Path, help="a folder: an XLNet, or a model trained by this")
    parser.add_argument(
        "--spread", choices=list(HOLE_FRACTION_RANGES), default="wide", help="shares of a text that are holes"
    )
    parser.add_argument("--spans", type=float, default=0.5, help="share of the texts whose holes are spans")
    parser.add_argument("--order", choices=["lattice", "any"], default="lattice", help="in which holes are decided")
    parser.add_argument("--left-to-right", action="store_true", help="a causal model, to compare with")
    parser.add_argument("--links", type=int, default=800, help="steps in which it learns to draft, behind the others")
    parser.add_argument("--half", action="store_true", help="multiply in bfloat16: twice as quick with AVX512-BF16")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    told = [story for file in chosen.text for story in stories(file)]
    told += dict.fromkeys(one for source in chosen.code for one in programs(source))
    if len(told) < 200:
        sys.exit(f"only {len(told)} stories or functions; give longer texts, by --text or --code")
    generator = seeded_generator(chosen.seed, "texts")
    told = [told[place] for place in generator.permutation(len(told))]
    if chosen.left_to_right and chosen.begin:
        sys.exit("--left-to-right begins from nothing; leave out --from")
    model, words = begun(chosen.begin) if chosen.begin else fresh(chosen, told)
    first, last = ([] if end is None else [end] for end in (words.bos_token_id, words.eos_token_id))
    border = max(int(len(told) * HELD_OUT), 1)
    learned, held_out = (
        [part for one in ids for part in cut([*first, *one, *last], chosen.length)]
        for ids in (words(part, add_special_tokens=False).input_ids for part in (told[border:], told[:border]))
    )
    if not (learned and held_out):
        sys.exit(f"no text that is held out has {SHORTEST} tokens; give longer texts")
    count = sum(map(len, learned))
    print(f"{len(learned):,} texts of {count / len(learned):.0f} tokens, {len(held_out):,} held out", file=sys.stderr)
    newline = words.convert_tokens_to_ids(LINE_END) if chosen.code and LINE_END in words.get_vocab() else None
    blank = (getattr(model.config, ANY_SUBSET, None) or {}).get("blank")
    holes = HoleSettings(
        chosen.spread, span_probability=chosen.spans, order=chosen.order, blank_token=blank, newline_token=newline
    )
    kind = (
        LeftToRight
        if chosen.left_to_right
        else XlnetTrainingTask
        if model.config.model_type == "xlnet"
        else AnySubsetTrainingTask
    )
    course = kind(model, learned, held_out, chosen.steps, chosen.batch, holes, chosen.half, chosen.seed)
    settings = {key: str(value) for key, value in vars(chosen).items() if key not in ("work", "out", "every")}
    optimiser, rate = ("adamw", 1e-4) if chosen.begin else ("muon", 3e-3)
    schedule = Schedule(chosen.steps, chosen.rate or rate, every=chosen.every, optimiser=optimiser, half=chosen.half)

    def report(now: Progress) -> None:
        found = ", ".join(f"{name} {value:.2f}" for name, value in now.metrics.items())
        print(
            f"step {now.step:,} of {now.steps:,}: loss {now.loss:.3f}, {found};"
            f" {now.seconds / 60:.1f} min, {now.seconds_left / 60:.1f} left",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    work = chosen.work or chosen.out.with_name(chosen.out.name + "-work")
    work.mkdir(parents=True, exist_ok=True)
    try:
        train(course.module, course.loss, schedule, work / "checkpoint.pt", settings, report, course.evaluate)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on from the last checkpoint")
    links = None
    if kind is AnySubsetTrainingTask and chosen.links:
        linked = PairwiseCorrectionTrainingTask(course)
        print(f"links, in {chosen.links:,} steps", file=sys.stderr)
        schedule = Schedule(chosen.links, 1e-2, every=chosen.every)
        try:
            train(linked.module, linked.loss, schedule, work / "links.pt", settings, report, linked.evaluate)
        except KeyboardInterrupt:
            sys.exit("interrupted; the same command goes on from the last checkpoint")
        links = linked.module.correction()
    model.to(torch.bfloat16)
    model.save_pretrained(chosen.out)
    words.save_pretrained(chosen.out)
    (chosen.out / PAIRWISE_CORRECTION_FILE).unlink(missing_ok=True)  # of what was there before
    if links is not None:
        save_pairwise_correction(links, chosen.out)
    print(f"written: {chosen.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
