"""Baselines that decode the same prompts in the same run: Transformers' generate, and servers of OpenAI's protocol."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPException
from itertools import pairwise
from typing import Any
from uuid import uuid4

import torch
from transformers import set_seed
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from saltus.engine.engine import Engine
from saltus.engine.text_bounds import PromptTooLongError
from saltus.evaluation.benchmarks.llama_cpp_baseline import LLAMA_CPP, LlamaCppBaseline
from saltus.evaluation.benchmarks.systems_under_test import (
    BenchmarkRequest,
    MeasuredAnswer,
    TimedCall,
    split_text_by_call,
)
from saltus.integrations.openai_endpoint import EndpointError, OpenAIEndpoint, connect_endpoint
from saltus.loading.load_model import load_model, silence_transformers
from saltus.loading.sources import resolve

BEYOND_CONTEXT = re.compile(  # what servers say of a text that is too long: vLLM, SGLang, llama.cpp, TGI, Saltus
    r"context[ _](length|size|window)|max(imum)?[ _](model|context|total|input)[ _](len|length|size|tokens)"
    r"|max_new_tokens` must be",
    re.IGNORECASE,
)
BASELINES = ("transformers", "transformers-lookup", "transformers-assistant", LLAMA_CPP)


class _TokenCounter(BaseStreamer):
    """A streamer that counts the tokens of each step of `generate`."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


@dataclass
class TransformersBaseline:
    """`model.generate` of Transformers with settings for one decoding strategy, in the engine's dtype."""

    name: str
    engine: Engine
    load_model: Callable[[str], Any]  # a model of Transformers' by name
    generate_kwargs: Callable[[], dict[str, Any]] = dict
    kind: str = "baseline"

    def generate(self, request: BenchmarkRequest) -> Any:
        sampling, model = request.sampling, self.load_model(self.engine.target.name)
        prompt = torch.tensor([request.prompt_tokens], device=model.device)
        settings: dict[str, Any] = {"do_sample": not sampling.greedy, "max_new_tokens": request.max_new_tokens}
        if not sampling.greedy:
            settings |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            set_seed(request.seed)
        if request.ignore_eos:
            settings["min_new_tokens"] = request.max_new_tokens
        if request.stop:
            # as `stop_strings` it would reach the assistant's own `generate`, which has no tokenizer
            stop = StopStringCriteria(self.engine.tokenizer, list(request.stop))
            settings["stopping_criteria"] = StoppingCriteriaList([stop])
        counts, begun, widths = _TokenCounter(), [], []

        def seen(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            begun.append(time.perf_counter())
            widths.append(ids.shape[1])

        hook = model.register_forward_pre_hook(seen, with_kwargs=True)
        try:
            ids = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=counts, repetition_penalty=1.0,
                eos_token_id=sorted(self.engine.target.end_tokens),
                pad_token_id=min(self.engine.target.end_tokens, default=0),
                **settings, **self.generate_kwargs(),
            )  # fmt: skip
        finally:
            hook.remove()
        tokens = ids[0, prompt.shape[1] :].tolist()  # waits for the device
        return tokens, counts.counts[1:], [*begun, time.perf_counter()], widths

    def to_answer(self, request: BenchmarkRequest, output: Any) -> MeasuredAnswer:
        tokens, given, clock, widths = output
        seconds = [end - begin for begin, end in pairwise(clock)]
        reported = len(given) == len(widths) and sum(given) == len(tokens)
        reads = [min(width, len(request.prompt_tokens)) if number == 0 else 1 for number, width in enumerate(widths)]
        nodes = [width - read for width, read in zip(widths, reads, strict=True)]
        calls = [TimedCall(*call) for call in zip(given, nodes, seconds, reads, strict=False)]
        unchecked = reported and any(call.decided > call.nodes + 1 for call in calls)
        stopped = tokens and (tokens[-1] in self.engine.target.end_tokens or len(tokens) < request.max_new_tokens)
        return MeasuredAnswer(
            tokens, split_text_by_call(self.engine, tokens, given if reported else [len(tokens)]),
            "stop" if stopped else "length", calls if reported else None, seconds[0] if seconds else 0.0,
            problems=["more tokens than checked"] if unchecked else [],
        )  # fmt: skip


def baselines_under_test(
    names: list[str], engine: Engine, assistant: str | None
) -> list[TransformersBaseline | LlamaCppBaseline]:
    """The baselines of these names, in their order. Errors: ValueError for one that cannot be had."""
    check_baselines(names, assistant)
    ours = iter(transformers_baselines([name for name in names if name != LLAMA_CPP], engine, assistant))
    return [LlamaCppBaseline(engine) if name == LLAMA_CPP else next(ours) for name in names]


def transformers_baselines(names: list[str], engine: Engine, assistant: str | None) -> list[TransformersBaseline]:
    """Transformers baselines; they share one model, loaded on first use from the engine's folder in its dtype."""
    ours = engine.network.model

    @lru_cache
    def load(name: str, role: str = "model") -> Any:  # an assistant is another object, so that calls are reported apart
        with silence_transformers():
            model = load_model(name, resolve(name), ours.dtype, weights="bf16")
        model.generation_config.update(temperature=None, top_p=None, top_k=None)  # ours are given with each prompt
        return model.to(ours.device).eval()

    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "transformers": dict,
        "transformers-lookup": lambda: {"prompt_lookup_num_tokens": 10},
        "transformers-assistant": lambda: {"assistant_model": load(str(assistant), "assistant")},
    }
    return [TransformersBaseline(name, engine, load, ways[name]) for name in names]


def check_baselines(names: list[str], assistant: str | None) -> None:
    """Raise ValueError for an unknown baseline, or one without its assistant."""
    for name in names:
        if name not in BASELINES:
            raise ValueError(f"unknown baseline {name!r}; there are {', '.join(BASELINES)}, and servers by --endpoint")
    if "transformers-assistant" in names and not assistant:
        raise ValueError("transformers-assistant needs a small model of the same vocabulary: --assistant MODEL")


@dataclass
class OpenAIServerBaseline:
    """A server that speaks OpenAI's protocol, such as vLLM's or llama.cpp's; its calls are unknown."""

    url: str
    engine: Engine
    name: str = field(init=False)
    endpoint: OpenAIEndpoint = field(init=False)
    kind: str = "baseline"

    def __post_init__(self) -> None:
        self.endpoint = connect_endpoint(self.url, self.engine.tokenizer)
        self.name = f"endpoint:{self.endpoint.model.rstrip('/').rpartition('/')[2]}"

    def generate(self, request: BenchmarkRequest) -> Any:
        prompt = self.engine.tokenizer.decode(request.prompt_tokens)
        body = self.endpoint.completion_body(prompt, request.max_new_tokens, request.sampling, request.seed)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {"cache_prompt": False, "cache_salt": uuid4().hex}  # no prefix cache: llama.cpp; vLLM and SGLang
        if request.stop:
            body["stop"] = list(request.stop)
        if request.ignore_eos:
            body["ignore_eos"] = True
        started, first, pieces, usage, reason = time.perf_counter(), None, [], {}, None
        with self._post(body) as response:
            for event in self._events(response):
                for choice in event.get("choices") or ():
                    first = first or time.perf_counter()
                    pieces.append(choice.get("text") or "")
                    reason = choice.get("finish_reason") or reason
                usage |= event.get("usage") or {}
        if reason is None:
            raise self._broken("the stream ended without a finish_reason")
        count, length = usage.get("completion_tokens"), self._length(request)
        if reason == "length" and count is not None and count < length:
            raise PromptTooLongError(f"{self.name} ended after {count} of {length} tokens, by a limit of its own")
        return pieces, usage, reason, (first or time.perf_counter()) - started

    def _post(self, body: Mapping[str, Any]) -> Any:
        """The open response. Errors: PromptTooLongError for a text that the server's context does not hold."""
        try:
            return self.endpoint.post_completion(dict(body))
        except EndpointError as error:
            if error.status in (400, 413, 422) and BEYOND_CONTEXT.search(str(error)):
                raise PromptTooLongError(f"{self.name}: {error}") from None
            raise

    def _length(self, request: BenchmarkRequest) -> int:
        """How many tokens the answer has, at most, as the engine's own answers."""
        context = self.engine.target.context_length
        return min(request.max_new_tokens, (context or 1 << 62) - len(request.prompt_tokens))

    def _events(self, response: Any) -> Iterator[dict[str, Any]]:
        """The events of an answer. Errors: EndpointError if it breaks off."""
        try:
            for event in _server_sent_events(response):
                if error := event.get("error"):
                    raise self._broken(error.get("message") if isinstance(error, dict) else error)
                yield event
        except (OSError, HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise self._broken(error) from None

    def _broken(self, reason: object) -> EndpointError:
        text = " ".join(str(reason).split())
        return EndpointError(f"{self.url} broke off an answer ({text:.200}); with --out the same command goes on here")

    def to_answer(self, request: BenchmarkRequest, output: Any) -> MeasuredAnswer:
        pieces, usage, reason, first = output
        tokens = list(self.engine.tokenizer("".join(pieces), add_special_tokens=False).input_ids)
        count, cached = usage.get("completion_tokens"), (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        wrong = [] if count is not None else ["the server does not tell how many tokens it wrote"]
        if cached:
            wrong.append(f"the server had {cached} tokens of the prompt in its prefix cache; switch the cache off")
        return MeasuredAnswer(tokens, pieces, reason, None, first, new_tokens=count, problems=wrong)


def servers_under_test(urls: Sequence[str], engine: Engine) -> list[OpenAIServerBaseline]:
    """Servers by their models' names; where two serve the same model, with their addresses.

    Errors: ValueError for a server that does not answer, or is given twice.
    """
    servers = [OpenAIServerBaseline(url, engine) for url in urls]
    shared = Counter(server.name for server in servers)
    for server in servers:
        if shared[server.name] > 1:
            server.name += f"@{server.url.rstrip('/').removeprefix('http://').removeprefix('https://')}"
    return servers


def _server_sent_events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in response:
        name, _, data = line.decode().strip().partition(":")
        if name == "data" and data.strip() != "[DONE]":
            event = json.loads(data)
            yield event if isinstance(event, dict) else {}
