"""Teacher texts that a server of OpenAI's protocol writes: its texts, as tokens of the model that learns."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from saltus.engine.encoding import answer_end_token, tokens_after_prompt
from saltus.integrations.openai_endpoint import EndpointError, OpenAIEndpoint
from saltus.loading.model_identity import vocabulary_digest
from saltus.training.data.teacher_texts import CollectionPlan, save_shard, text_seed

MAX_ATTEMPTS = 8  # of a request, with pauses that add up to two minutes
LONGEST_PAUSE = 60.0  # seconds
SEEDS = 2**31  # servers take smaller ones


def endpoint_metadata(plan: CollectionPlan, endpoint: OpenAIEndpoint, model: str, tokenizer: Any) -> dict[str, Any]:
    """The metadata of a folder of texts that a server writes, for a model with this tokenizer."""
    served = {"model": model, "served": endpoint.model, "vocabulary": vocabulary_digest(tokenizer)}
    return {**served, **plan.settings_metadata()}


def collect_from_endpoint(
    endpoint: OpenAIEndpoint,
    tokenizer: Any,
    plan: CollectionPlan,
    shard_numbers: Sequence[int],
    folder: Path,
    concurrency: int,
) -> Generator[tuple[int, int]]:
    """Write shards with at most `concurrency` requests at a time; yields texts and tokens since the last yield.

    Errors: ValueError where the server refuses a request, or does not answer it after `MAX_ATTEMPTS`.
    """
    end = answer_end_token(tokenizer)
    for shard_number in shard_numbers:
        texts = plan.texts_of_shard(shard_number)
        completions: dict[int, list[int]] = {}
        requests = [_Request(endpoint, tokenizer, plan, number, temperature, end) for number, temperature in texts]
        for index, answer in _run_requests(requests, concurrency):
            completions[index] = requests[index].tokenize(answer)  # here, as tokenizers are for one thread
            yield 1, len(completions[index])
        rows = [
            {"source": plan.prompts[number].source, "temperature": temperature,
             "prompt": list(plan.prompts[number].prompt), "completion": completions[index]}
            for index, (number, temperature) in enumerate(texts)
        ]  # fmt: skip
        save_shard(folder / plan.shard_names[shard_number], rows)


@dataclass(frozen=True)
class _Answer:
    text: str
    has_ended: bool  # False: it was cut at its longest length


class _Request:
    """A text of a plan, asked of a server."""

    def __init__(
        self,
        endpoint: OpenAIEndpoint,
        tokenizer: Any,
        plan: CollectionPlan,
        prompt_number: int,
        temperature: float,
        end_token: int | None,
    ) -> None:
        self.endpoint, self.tokenizer, self.max_tokens = endpoint, tokenizer, plan.max_new_tokens
        self.end_token = end_token
        self.prompt_tokens = list(plan.prompts[prompt_number].prompt)
        self.prompt = tokenizer.decode(self.prompt_tokens)
        seed = text_seed(plan.seed, prompt_number) % SEEDS
        self.body = endpoint.completion_body(self.prompt, self.max_tokens, plan.sampling(temperature), seed)

    def answer(self, stopped: Event) -> _Answer:
        """The server's text. Errors: ValueError."""
        for attempt in count(1):
            try:
                return self._ask()
            except EndpointError as error:
                if not error.retryable:
                    raise
                pause = min(max(2.0 ** (attempt - 1), error.retry_after), LONGEST_PAUSE)
                if attempt >= MAX_ATTEMPTS or stopped.wait(pause):
                    raise ValueError(
                        f"{error}; {attempt} attempts failed, the same command writes the missing files"
                    ) from None
        raise AssertionError

    def _ask(self) -> _Answer:
        try:
            with self.endpoint.post_completion(self.body) as response:
                choice = json.load(response)["choices"][0]
                return _Answer(str(choice["text"]), choice.get("finish_reason") == "stop")
        except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{self.endpoint.url}/completions gives no text ({type(error).__name__}); has it that route?"
            ) from None
        except (OSError, HTTPException) as error:
            raise EndpointError(f"{self.endpoint.url} broke off in the middle of an answer ({error})") from None

    def tokenize(self, answer: _Answer) -> list[int]:
        """The tokens of an answer, the last one an end token if it has ended."""
        tokens = tokens_after_prompt(self.tokenizer, self.prompt_tokens, answer.text)
        end = self.end_token
        return (tokens + ([end] if answer.has_ended and end is not None else []))[: self.max_tokens]


def _run_requests(requests: Sequence[_Request], concurrency: int) -> Generator[tuple[int, _Answer]]:
    """The number and the answer of each request, as they come. Errors: ValueError, of the first that fails."""
    waiting: SimpleQueue[int] = SimpleQueue()
    done: SimpleQueue[tuple[int, _Answer | Exception]] = SimpleQueue()
    stopped = Event()
    for index in range(len(requests)):
        waiting.put(index)

    def work() -> None:
        while not stopped.is_set():
            try:
                index = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put((index, requests[index].answer(stopped)))
            except Exception as error:
                stopped.set()  # the others end, too
                done.put((index, error))

    for _ in range(min(concurrency, len(requests))):
        Thread(target=work, daemon=True).start()  # Ctrl-C does not wait for answers
    try:
        for _ in requests:
            index, answer = done.get()
            if isinstance(answer, Exception):
                raise answer
            yield index, answer
    finally:
        stopped.set()
