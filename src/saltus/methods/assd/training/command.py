"""Train a small any-subset model, on stories or on code: it fills holes anywhere (saltus infill).

    saltus train assd -- --text stories.txt --text tales.csv --out my-stories
    saltus infill -m my-stories "Once upon a time there was a [[3]] who [[…]]. They lived happily."

    saltus train assd -- --code /usr/lib/python3.12 --length 320 --batch 8 --out my-code
    saltus infill -m my-code --file program.py

`--text` is a plain text with <|endoftext|> or empty lines between its stories, or a table (.csv) with columns
document_id and text, a sentence a row. `--code` is a folder, whose Python functions are the texts (without tests and
installed packages), or a file of JSON lines with a program each (`code`, and its description, `text`), as MBPP is. A
hundredth of the texts is held out. The same command continues an interrupted run.

Tokens are byte-level pieces, and the end of a line is a token of its own: every text can be restored exactly, and a
missing line is a hole between two tokens. White space in stories becomes single spaces. `blank` tokens may follow the
text of a hole, so that the model learns to end a hole of unknown length by itself.

`--from` starts with the weights of such a model or of an XLNet, which keeps its own tokens and has no blanks.
`--weights q8_0` stores the model in half the bytes: its matrices go to a GGUF file, beside the tokenizer.
`--xlnet` makes an XLNet instead, the paper's architecture: it has no blanks, so its holes have a given length, and no
KV cache. `--left-to-right` trains a causal model of the same size on the same texts, to compare with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, XLNetConfig, XLNetLMHeadModel

from saltus.engine.checkpoints import fills_holes, load_model, load_tokenizer
from saltus.loading.gguf_storage import remove_gguf, require_packable, store_as_gguf
from saltus.loading.packing import PACKINGS
from saltus.methods.assd.network import ANY_SUBSET
from saltus.methods.assd.training import infill_texts
from saltus.methods.assd.training.any_subset import (
    HOLE_SPREADS,
    AnySubsetTrainingTask,
    HoleSettings,
    XlnetTrainingTask,
)
from saltus.methods.assd.training.pairwise_correction import PairwiseCorrectionTrainingTask
from saltus.training.data.packed_forward import pack_causal, packed_logits
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.loop.processes import Processes, join_processes
from saltus.training.loop.training_loop import Schedule, print_progress
from saltus.training.run import train_task
from saltus.training.training_task import TrainingTask

HELD_OUT = 0.01  # fraction of the texts
UNTRAINED_OPTIONS = ("work", "out", "every", "weights")  # that do not change what is trained


@dataclass(eq=False)
class LeftToRightTrainingTask(AnySubsetTrainingTask):
    """A causal model on the same texts, to compare with."""

    def hole_logits(
        self, tokens: Int[Tensor, "batch padded"], ranks: Int[Tensor, "batch padded"], num_unknown: int = 0
    ) -> tuple[Float[Tensor, "tokens vocab"], Int[Tensor, "tokens"]]:
        """Logits of all tokens but the first, and the tokens."""
        is_token = ranks[:, 1:] >= 0
        with self._autocast():
            logits = packed_logits(self.model, pack_causal(tokens[:, :-1]), is_token.flatten().nonzero()[:, 0])
        return logits.float(), tokens[:, 1:][is_token]

    def evaluate(self) -> dict[str, float]:
        """Bits of a token."""
        return {"bits": super().evaluate()["bits at 20%"]}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="saltus train assd --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, action="append", default=[], help="of stories")
    add("--code", type=Path, action="append", default=[], help="a folder of Python programs, or .jsonl")
    add("--work", type=Path, help="checkpoints; default: a folder beside the model")
    add("--out", type=Path, default=Path("my-stories"), help="the model, for saltus infill -m")
    add("--weights", choices=["bf16", *PACKINGS], default="bf16", help="how they are stored: plain or packed by GGUF")
    add("--steps", type=int, default=3000)
    add("--batch", type=int, default=16, help="texts of a step")
    add("--length", type=int, default=192, help="tokens of a text")
    add("--vocabulary", type=int, default=4096)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=6)
    add("--rate", type=float, help="learning rate; default 0.003, or 0.0001 with --from")
    add("--from", dest="begin", type=Path, help="a folder: an XLNet, or a model of this command")
    add("--spread", choices=list(HOLE_SPREADS), default="wide", help="fraction of a text that is holes")
    add("--spans", type=float, default=0.5, help="fraction of the texts whose holes are spans")
    add("--order", choices=["lattice", "any"], default="lattice", help="in which holes are decided")
    add("--xlnet", action="store_true", help="an XLNet from scratch, for holes of given lengths")
    add("--left-to-right", action="store_true", help="a causal model, to compare with")
    add("--links", type=int, default=800, help="steps for the pairwise correction of drafts, after the model")
    add("--half", action="store_true", help="compute in bfloat16: twice as fast with AVX512-BF16")
    add("--every", type=int, default=100, help="steps between checkpoints")
    add("--seed", type=int, default=0)
    return parser


Meter = Callable[[int, str], AbstractContextManager[Callable[[int, str], None]]]
"""Of a number of steps and a name: entering gives a function that shows how many are done, with a text."""


def _no_meter(total: int, name: str) -> AbstractContextManager[Callable[[int, str], None]]:
    return nullcontext(lambda done, words: None)


def main(arguments: Sequence[str] | None = None, meter: Meter = _no_meter) -> None:
    """Train by these command-line arguments. Errors: ValueError; KeyboardInterrupt with a message."""
    options = _parser().parse_args(arguments)
    if sum(map(bool, (options.left_to_right, options.begin, options.xlnet))) > 1:
        raise ValueError("give one of --from, --xlnet and --left-to-right: each says what the model is")
    with join_processes() as processes:
        _train_and_save(options, processes, meter if processes.is_main else _no_meter)


def _train_and_save(options: argparse.Namespace, processes: Processes, meter: Meter) -> None:
    texts = _read_texts(options)
    model, tokenizer = _load_model(options.begin) if options.begin else _new_model(options, texts)
    if options.weights != "bf16":
        require_packable(model.config.to_dict())
    task = _make_task(options, model, tokenizer, texts, processes)
    settings = {key: str(value) for key, value in vars(options).items() if key not in UNTRAINED_OPTIONS}
    optimizer, rate = ("adamw", 1e-4) if options.begin else ("adamw" if options.xlnet else "muon", 3e-3)
    work = options.work or options.out.with_name(options.out.name + "-work")
    work.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(
        options.steps,
        options.rate or rate,
        checkpoint_steps=options.every,
        optimizer=optimizer,
        muon_bfloat16=options.half,
    )
    tasks: list[TrainingTask] = [task]
    with meter(schedule.steps, "training") as show:
        _train(task, schedule, work / "checkpoint.pt", settings, show)
    if type(task) is AnySubsetTrainingTask and options.links:
        correction = PairwiseCorrectionTrainingTask(task)
        correction.processes = processes
        _print(processes, f"pairwise correction, in {options.links:,} steps")
        with meter(options.links, "pairwise correction") as show:
            _train(
                correction,
                Schedule(options.links, 1e-2, checkpoint_steps=options.every),
                work / "links.pt",
                settings,
                show,
            )
        tasks.append(correction)
    if processes.is_main:
        for one in tasks:
            one.save(options.out, {})
        remove_gguf(options.out)
        if options.weights != "bf16":
            store_as_gguf(options.out, options.weights)
    _print(processes, f"written: {options.out}")
    processes.wait()


def _print(processes: Processes, line: str) -> None:
    if processes.is_main:
        print(line, file=sys.stderr)


def _train(
    task: TrainingTask,
    schedule: Schedule,
    checkpoint_path: Path,
    settings: dict[str, Any],
    show: Callable[[int, str], None],
) -> None:
    on_checkpoint = print_progress if task.processes.is_main else lambda progress: None
    try:
        train_task(
            task, schedule, checkpoint_path, settings, on_checkpoint, lambda step, loss: show(step, f"loss {loss:.3f}")
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on from the last checkpoint") from None


def _read_texts(options: argparse.Namespace) -> list[str]:
    """All texts, in random order."""
    texts = [story for file in options.text for story in infill_texts.read_stories(file)]
    texts += dict.fromkeys(one for source in options.code for one in infill_texts.read_programs(source))
    if len(texts) < 200:
        raise ValueError(f"only {len(texts)} stories or functions; give longer texts, by --text or --code")
    return [texts[index] for index in seeded_generator(options.seed, "texts").permutation(len(texts))]


def _new_model(options: argparse.Namespace, texts: Sequence[str]) -> tuple[Any, Any]:
    """An untrained model, and a tokenizer made of the texts."""
    tokenizer = infill_texts.train_tokenizer(texts, options.vocabulary)
    model = _new_xlnet(options, len(tokenizer)) if options.xlnet else _new_llama(options, len(tokenizer))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                generator = seeded_generator(options.seed, name)
                weight.copy_(torch.from_numpy(generator.normal(0, 0.02, tuple(weight.shape))))
    return model, tokenizer


def _new_llama(options: argparse.Namespace, vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=options.hidden, intermediate_size=int(options.hidden * 8 / 3) // 32 * 32,
        num_hidden_layers=options.layers, num_attention_heads=max(options.hidden // 64, 1),
        max_position_embeddings=4 * options.length, bos_token_id=infill_texts.BOS, eos_token_id=infill_texts.EOS,
        pad_token_id=infill_texts.PAD, tie_word_embeddings=True,
    )  # fmt: skip
    if not options.left_to_right:
        setattr(config, ANY_SUBSET, {"mask": infill_texts.MASK, "blank": infill_texts.BLANK})
    return LlamaForCausalLM(config)


def _new_xlnet(options: argparse.Namespace, vocabulary: int) -> XLNetLMHeadModel:
    config = XLNetConfig(
        vocab_size=vocabulary, d_model=options.hidden, d_inner=4 * options.hidden, n_layer=options.layers,
        n_head=max(options.hidden // 64, 1), dropout=0.0, bos_token_id=infill_texts.BOS, eos_token_id=infill_texts.EOS,
        pad_token_id=infill_texts.PAD,
    )  # fmt: skip
    return XLNetLMHeadModel(config)


def _load_model(folder: Path) -> tuple[Any, Any]:
    """A trained model, in float32, and its tokenizer. Errors: ValueError for a causal model."""
    model = load_model(str(folder), folder, torch.float32)
    if not fills_holes(model):
        raise ValueError(f"{folder} holds a causal model; start with an XLNet or an any-subset model")
    return model, load_tokenizer(folder)


def _make_task(
    options: argparse.Namespace, model: Any, tokenizer: Any, texts: Sequence[str], processes: Processes
) -> AnySubsetTrainingTask:
    """The task on these texts, of which the first ones are held out. Errors: ValueError for texts too short."""
    start, end = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    num_held_out = max(int(len(texts) * HELD_OUT), 1)

    def tokenize(some: Sequence[str]) -> list[np.ndarray]:
        ids = tokenizer(some, add_special_tokens=False).input_ids
        return [part for one in ids for part in infill_texts.split_tokens([*start, *one, *end], options.length)]

    _print(processes, f"making tokens of {len(texts):,} texts")
    training, held_out = tokenize(texts[num_held_out:]), tokenize(texts[:num_held_out])
    if not (training and held_out):
        raise ValueError(f"no text that is held out has {infill_texts.MIN_TOKENS} tokens; give longer texts")
    mean = sum(map(len, training)) / len(training)
    _print(processes, f"{len(training):,} texts of {mean:.0f} tokens, {len(held_out):,} held out")
    newline = None
    if options.code and infill_texts.NEWLINE_PIECE in tokenizer.get_vocab():
        newline = tokenizer.convert_tokens_to_ids(infill_texts.NEWLINE_PIECE)
    blank = (getattr(model.config, ANY_SUBSET, None) or {}).get("blank")
    holes = HoleSettings(
        options.spread, span_probability=options.spans, order=options.order, blank_token=blank, newline_token=newline
    )
    kind = XlnetTrainingTask if model.config.model_type == "xlnet" else AnySubsetTrainingTask
    if options.left_to_right:
        kind = LeftToRightTrainingTask
    task = kind(model, training, held_out, options.steps, options.batch, holes, options.half, options.seed, tokenizer)
    task.processes = processes
    return task
