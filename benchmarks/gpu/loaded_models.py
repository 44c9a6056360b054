"""Load what the stages measure: engines, models with random weights, prompts."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from random_models import SHAPES, random_model

import saltus
from saltus.cli.open_engine import parse_method_options
from saltus.engine.prompts import read_prompts_file
from saltus.evaluation.benchmarks.suites import load_tasks
from saltus.models.causal import CausalNetwork
from saltus.models.cuda.fixed_shape_calls import FixedShapeSettings
from saltus.models.cuda.placement import move_to_gpu

MAX_NODES = 31  # draft tokens of a call
Made = TypeVar("Made")
_kept: dict[Any, Any] = {}


def kept(key: Any, make: Callable[[], Made]) -> Made:
    """What was made for this key; only the last one is kept, so that large models do not pile up."""
    if key not in _kept:
        _kept.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _kept[key] = make()
    return _kept[key]


def split_name(model: str) -> tuple[str, str]:
    """The model or shape that a name such as 7B@q4_1 stands for, and how its weights are stored."""
    name, _, weights = model.partition("@")
    return name, weights or "bf16"


def is_shape(model: str) -> bool:
    """True for a shape with random weights."""
    return split_name(model)[0] in SHAPES


def load_engine(args: argparse.Namespace, model: str, dtype: str = "bfloat16", **settings: Any) -> saltus.Engine:
    """An engine for all methods, which may draft with what `--option` names."""
    named = dict.fromkeys(option.partition(".")[0] for option in args.option)
    options = parse_method_options(args.option, "+".join(named))
    name, weights = split_name(model)
    return saltus.load(
        name, "plain", device=args.device, dtype=dtype, weights=weights, tuned_settings=False, options=options,
        **settings,
    )  # fmt: skip


def load_network(args: argparse.Namespace, model: str, dtype: str = "bfloat16") -> Any:
    """The network of a model, or of a shape with random weights, all of which differ."""
    name, weights = split_name(model)
    if name not in SHAPES:
        return saltus.load(name, "plain", device=args.device, dtype=dtype, weights=weights).network
    kind = getattr(torch, dtype)
    if weights == "fp8" and args.device == "cpu":
        raise ValueError(f"{model} has 8-bit floats, which are multiplied on a GPU alone; take another format")
    if weights == "bf16":
        random = random_model(name, device=args.device, distinct_rows=None, dtype=kind)
    else:
        random = random_model(name, weights)
        random = random if args.device == "cpu" else move_to_gpu(random, args.device)
    return CausalNetwork(random, fixed_shape_settings=FixedShapeSettings.for_max_draft_tokens(MAX_NODES))


def read_prompts(file: Path | None, count: int) -> list[Any]:
    """So many prompts, of a file or of the suite `quick`; if there are fewer, they come again with a number before."""
    prompts = [task.prompt for task in load_tasks("quick")] if file is None else read_prompts_file(file)
    texts = [prompt.turns[0] if prompt.turns else list(prompt.messages) for prompt in prompts]
    again = [f"({number}) {texts[number % len(texts)]}" for number in range(len(texts), count)]
    return [*texts, *again][:count]


def wait(device: str) -> float:
    """The time when the device has done its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def require_graphs(runner: Any) -> None:
    """Raise ValueError where the calls of a network (its FixedShapeRunner, or None) are not replayed from graphs."""
    if runner is None or not runner.use_cuda_graphs:
        raise ValueError("calls of this model have no CUDA graphs on this device")
