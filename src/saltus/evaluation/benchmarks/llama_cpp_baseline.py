"""llama.cpp as a baseline, through llama-cpp-python: it decodes the same GGUF file with the same number of threads."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from saltus.engine.engine import Engine
from saltus.evaluation.benchmarks.lm_eval_requests import EndCondition
from saltus.evaluation.benchmarks.systems_under_test import (
    BenchmarkRequest,
    MeasuredAnswer,
    TimedCall,
    split_text_by_call,
)
from saltus.loading.gguf_index import read_gguf_index
from saltus.loading.model_folders import INDEX_FILE
from saltus.loading.sources import resolve

LLAMA_CPP = "llama-cpp"
MIN_CONTEXT = 512  # tokens; llama.cpp reserves memory for all that a context may have


def llama_cpp_is_installed() -> bool:
    """True if llama-cpp-python can be imported."""
    return "llama_cpp" in sys.modules or find_spec("llama_cpp") is not None


def reads_gguf(engine: Engine) -> bool:
    """True if the model comes from a GGUF file, which llama.cpp reads, too."""
    return (resolve(engine.target.name) / INDEX_FILE).is_file()


@dataclass
class LlamaCppBaseline:
    """`llama_cpp.Llama`, token by token. Errors: ValueError if it is not installed, or the model is no GGUF file."""

    engine: Engine
    name: str = LLAMA_CPP
    kind: str = "baseline"
    llama: Any = field(init=False, default=None)  # loaded on first use, and anew where a text needs more context
    context: int = field(init=False, default=0)  # tokens

    def __post_init__(self) -> None:
        if not llama_cpp_is_installed():
            raise ValueError('baseline llama-cpp needs llama-cpp-python: pip install ".[llama-cpp]" in the clone')
        if not reads_gguf(self.engine):
            raise ValueError(f"baseline llama-cpp decodes GGUF files, and {self.engine.target.name} is none; name one")
        self.file = read_gguf_index(resolve(self.engine.target.name)).files[0]

    def prepare(self, request: BenchmarkRequest) -> None:
        """Reserve what this text may need: a power of two, or the model's context if that is less."""
        known = self.engine.target.context_length
        needed = len(request.prompt_tokens) + request.max_new_tokens
        needed = needed if known is None else min(needed, known)
        if needed <= self.context:
            return
        from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

        size = max(MIN_CONTEXT, 1 << (needed - 1).bit_length())
        self.context, threads = size if known is None else min(size, known), torch.get_num_threads()
        self.llama = None  # its memory is free before the next is reserved
        self.llama = Llama(
            str(self.file), n_ctx=self.context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=0,
            verbose=False,
        )  # fmt: skip
        for _ in zip(range(2), self.llama.generate(list(request.prompt_tokens[:8])), strict=False):
            pass  # so that no first call is measured

    def generate(self, request: BenchmarkRequest) -> Any:
        self.prepare(request)
        llama, sampling = self.llama, request.sampling
        length = self._length(request)
        llama.reset()  # every system reads its prompts itself
        llama.set_seed(request.seed)
        clock = [time.perf_counter()]
        ends = frozenset() if request.ignore_eos else self.engine.target.end_tokens
        ended = EndCondition(self.engine.tokenizer, ends, request.stop)
        made = llama.generate(
            list(request.prompt_tokens), temp=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
            min_p=0.0, typical_p=1.0, repeat_penalty=1.0,
        )  # fmt: skip
        for token in made:
            clock.append(time.perf_counter())
            if ended(token) or len(ended.tokens) == length:
                break
        return ended.tokens, clock

    def _length(self, request: BenchmarkRequest) -> int:
        """How many tokens the answer has, at most: a text ends where the context does."""
        return min(request.max_new_tokens, self.context - len(request.prompt_tokens))

    def to_answer(self, request: BenchmarkRequest, output: Any) -> MeasuredAnswer:
        tokens, clock = output
        seconds = [end - begin for begin, end in pairwise(clock)]
        reads = [len(request.prompt_tokens), *[1] * (len(tokens) - 1)]
        calls = [TimedCall(1, 0, each, read) for each, read in zip(seconds, reads, strict=False)]
        stopped = len(tokens) < self._length(request) or tokens[-1] in self.engine.target.end_tokens
        pieces = split_text_by_call(self.engine, tokens, [1] * len(tokens))
        return MeasuredAnswer(tokens, pieces, "stop" if stopped else "length", calls, seconds[0] if seconds else 0.0)
