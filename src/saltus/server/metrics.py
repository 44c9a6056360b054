"""What a server counts, under the names of vLLM, so that its dashboards work unchanged."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from saltus.engine.request import CallRecord
from saltus.server.engine_thread import EngineThread

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
MAX_POSITIONS = 64  # of draft tokens that are counted one by one


class ServerMetrics:
    """Counters, gauges and histograms of one server."""

    def __init__(self, model_name: str, engine_thread: EngineThread) -> None:
        self.registry = CollectorRegistry()
        disable_created_metrics()  # of this process: a time of creation for each series
        self.labels = {"model_name": model_name}

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *more], registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            made = Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=SECONDS)
            return made.labels(**self.labels)

        def gauge(name: str, text: str, read: object) -> None:
            made = Gauge(f"vllm:{name}", text, ["model_name"], registry=self.registry)
            made.labels(**self.labels).set_function(read)  # pyright: ignore[reportArgumentType]

        self._drafts = counter("spec_decode_num_drafts", "calls that verified drafts").labels(**self.labels)
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "draft tokens").labels(**self.labels)
        self._accepted = counter("spec_decode_num_accepted_tokens", "accepted draft tokens").labels(**self.labels)
        self._by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "accepted draft tokens by their place in a draft", "position"
        )
        self._prompt_tokens = counter("prompt_tokens", "tokens of prompts").labels(**self.labels)
        self._generated = counter("generation_tokens", "generated tokens").labels(**self.labels)
        self._prefix_queries = counter("prefix_cache_queries", "tokens of prompts").labels(**self.labels)
        self._prefix_hits = counter("prefix_cache_hits", "tokens of prompts found in the cache").labels(**self.labels)
        self._success = counter("request_success", "texts that were finished", "finished_reason")
        self._first_token = histogram("time_to_first_token_seconds", "seconds until a text's first token")
        self._between = histogram("inter_token_latency_seconds", "seconds between tokens of a text")
        self._whole = histogram("e2e_request_latency_seconds", "seconds of a text")
        gauge("num_requests_running", "texts in the batch", lambda: engine_thread.num_running)
        gauge("num_requests_waiting", "texts that wait", lambda: engine_thread.num_waiting)
        gauge(
            "kv_cache_usage_perc", "share of the memory for keys and values, 0 to 1", lambda: engine_thread.cache_usage
        )

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def timer(self) -> TextTimer:
        """For a text that is asked for now."""
        return TextTimer(self)

    def count_calls(self, calls: Sequence[CallRecord]) -> None:
        """Count what calls decided."""
        for call in calls:
            self._generated.inc(len(call.tokens))
            if call.num_draft_tokens:
                accepted = max(len(call.tokens) - call.num_padding_tokens - 1, 0)
                self._drafts.inc()
                self._draft_tokens.inc(call.num_draft_tokens)
                self._accepted.inc(accepted)
                for position in range(min(accepted, MAX_POSITIONS)):
                    self._by_position.labels(**self.labels, position=str(position)).inc()

    def count_prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that was read, and how much of it was in the prefix cache."""
        self._prompt_tokens.inc(tokens)
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(cached)


class TextTimer:
    """Times the tokens of one text."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics
        self.started = self.last = time.monotonic()
        self.first = True

    def record(self, calls: Sequence[CallRecord], finish_reason: str | None) -> None:
        """Record what arrived just now."""
        now, tokens = time.monotonic(), sum(len(call.tokens) for call in calls)
        metrics = self.metrics
        metrics.count_calls(calls)
        if tokens and self.first:
            metrics._first_token.observe(now - self.started)
            self.first = False
        elif tokens:
            for _ in range(tokens):
                metrics._between.observe((now - self.last) / tokens)
        if tokens:
            self.last = now
        if finish_reason is not None:
            metrics._whole.observe(now - self.started)
            metrics._success.labels(**metrics.labels, finished_reason=finish_reason).inc()
