"""Turns of clients and requests: nobody waits because another one asks for much, and all memory comes back."""

# ruff: noqa: F811  fixtures

import json
import queue

import httpx
import pytest
from test_serving_faults import calls_that_wait, eventually, post

from saltus.core.batch import SequenceState
from saltus.engine.scheduler import Scheduler
from saltus.engine.turns import giving_way, memory_limit, next_in_turn
from saltus.models.memory_use import kv_bytes_per_token
from saltus.server.engine_thread import EngineThread
from saltus.server.served_request import Limits, ServedRequest, serve_text
from tiny_server import PROMPT, alone, engine, serving  # noqa: F401

LONG_PROMPT = "the cat sat on the mat " * 12


@pytest.fixture
def jobs_of(engine):
    """Makes jobs from their clients and numbers of requests."""
    asked = engine.text_request("the", raw=True)

    def jobs(*owners: tuple[str, int]) -> list[ServedRequest]:
        return [serve_text(asked, "plain", print, client=client, request_number=number) for client, number in owners]

    return jobs


def test_the_next_text_is_of_the_client_and_of_the_request_with_fewest(jobs_of):
    running = jobs_of(("a", 1), ("a", 1), ("b", 2), ("b", 3), ("b", 3))
    a, b2, b3, c, later = waiting = jobs_of(("a", 1), ("b", 2), ("b", 3), ("c", 4), ("c", 5))
    order = []
    while (job := next_in_turn(waiting, running)) is not None:
        order.append(job)
        waiting.remove(job)
        running.append(job)
    assert order == [c, later, a, b2, b3]


def test_a_text_gives_way_until_the_shares_are_equal(jobs_of):
    running = jobs_of(("a", 1), ("a", 1), ("a", 2), ("a", 1), ("b", 3))
    c, b, a1, a4 = jobs_of(("c", 9), ("b", 3), ("a", 1), ("a", 4))
    assert giving_way(running, c) is running[3]  # the newest of the request with most texts
    assert giving_way(running, b) is running[3]
    assert giving_way(running, a1) is None
    assert giving_way(running, a4) is running[3]  # of the same client
    assert giving_way(jobs_of(("a", 1), ("b", 2)), c) is None


def test_more_texts_of_one_leave_memory_to_others(jobs_of):
    more, other, c = jobs_of(("a", 1), ("a", 2), ("c", 3))
    admitted = jobs_of(("a", 1), ("a", 1))
    assert [memory_limit(job, admitted, 800) for job in (more, other, c)] == [600, 700, 800]
    assert memory_limit(more, admitted[:1], 800) == 800


def rounds_until_answered(
    engine, attack: list[ServedRequest], limits: Limits, method: str = "plain"
) -> tuple[int, str]:
    """The calls that another client's text of one token waits for, which is submitted in a call; and this text."""
    engine_thread, rounds, answered = EngineThread(engine, limits), [0], queue.Queue()
    victim = serve_text(
        engine.text_request("the dog", raw=True, max_new_tokens=1, temperature=1.0), method,
        lambda part: answered.put((rounds[0], part)), client="victim",
    )  # fmt: skip
    call = engine_thread.scheduler._call

    def counted(jobs) -> None:
        rounds[0] += 1
        if rounds[0] == 3:
            engine_thread.submit(victim)
        call(jobs)

    engine_thread.scheduler._call = counted
    engine_thread.submit(*attack)
    engine_thread.start()
    try:
        found, part = answered.get(timeout=60)
        for job in attack:
            engine_thread.cancel(job)
        assert eventually(lambda: not engine_thread.num_open)
        assert engine_thread.scheduler.requests == []
        assert all(job.sequence is None for job in attack)
    finally:
        engine_thread.close()
    return found - 3, part.text


def attack_of(engine, prompts: list[str], tokens: int, method: str = "plain") -> list[ServedRequest]:
    requests = [engine.text_request(one, raw=True, max_new_tokens=tokens, ignore_eos=True) for one in prompts]
    return [serve_text(one, method, lambda part: None, client="attacker") for one in requests]


@pytest.mark.parametrize("prompts", [[PROMPT] * 30, [LONG_PROMPT + str(i) for i in range(9)]], ids=["n", "prompts"])
def test_a_request_for_many_texts_makes_no_other_client_wait(engine, prompts, monkeypatch):
    monkeypatch.setattr("saltus.server.engine_thread.PREFILL_CHUNK_TOKENS", 20)
    expected = alone(engine, "the dog", raw=True, max_new_tokens=1).text
    waited = rounds_until_answered(engine, attack_of(engine, prompts, 120), Limits(max_batch=4, max_queue=200))
    assert waited == (1, expected)


def test_many_texts_leave_memory_to_a_text_of_another_client(engine):
    attack = attack_of(engine, [PROMPT] * 20, 100)
    waited, _ = rounds_until_answered(engine, attack, Limits(max_cached_bytes=memory_of(engine, *attack[:5])))
    assert waited == 1


def test_paused_texts_go_on_while_another_one_waits_for_memory(engine):
    running, paused, other = attack_of(engine, [PROMPT] * 2, 100) + attack_of(engine, [PROMPT], 200)
    other.client = "other"
    scheduler = Scheduler(engine.decoder, max_cached_bytes=memory_of(engine, running, paused, other) - 1)
    for job in (running, paused):
        job.sequence = SequenceState(call for call in ())
    scheduler.running, scheduler.paused, scheduler.waiting = [running], [paused], [other]
    scheduler._admit()
    assert (scheduler.running, scheduler.paused, scheduler.waiting) == ([running, paused], [], [other])


def memory_of(engine, *jobs: ServedRequest) -> int:
    """The memory of the keys and values of some texts."""
    return sum(job.num_tokens for job in jobs) * kv_bytes_per_token(engine.network)


def test_a_text_that_pauses_is_the_same(engine):
    ended: queue.Queue = queue.Queue()
    engine_thread = EngineThread(engine, Limits(max_batch=2))
    paused, expected = [], []

    def submit(prompt: str, client: str, count: int) -> None:
        def deliver(part) -> None:
            paused.extend(engine_thread.scheduler.paused)
            if part.finish_reason is not None:
                ended.put(part)

        requests = [
            engine.text_request(prompt, raw=True, max_new_tokens=8, temperature=1.0, seed=seed) for seed in range(count)
        ]
        jobs.extend(serve_text(one, "lookup", deliver, client=client) for one in requests)
        expected.extend(alone(engine, prompt, raw=True, max_new_tokens=8, seed=seed).tokens for seed in range(count))
        engine_thread.submit(*jobs[-count:])

    jobs: list[ServedRequest] = []
    submit(PROMPT, "a", 4)
    call, calls = engine_thread.scheduler._call, iter(range(10**6))
    others = {2: ("b", 1), 3: ("c", 2)}

    def with_others(running) -> None:
        if (number := next(calls)) in others:
            submit(PROMPT + " dog", *others[number])
        call(running)

    engine_thread.scheduler._call = with_others
    engine_thread.start()
    try:
        for _ in range(7):
            ended.get(timeout=60)
    finally:
        engine_thread.close()
    assert paused
    assert [job.request.tokens for job in jobs] == expected


def test_many_choices_over_http_delay_neither_a_short_request_nor_health(engine, monkeypatch):
    begun, permits = calls_that_wait(engine, monkeypatch)
    submitted, submit = [], EngineThread.submit
    monkeypatch.setattr(
        EngineThread, "submit", lambda thread, *served: (submitted.append(served), submit(thread, *served))
    )
    body = {"model": "tiny", "prompt": "the", "max_tokens": 400, "ignore_eos": True, "n": 20, "stream": True}
    short = {"model": "tiny", "prompt": "the dog", "max_tokens": 1}
    with serving(engine, Limits(max_batch=4)) as (service, url):
        try:
            attack = post(url, json.dumps(body).encode())
            permits.release(6)
            assert all(begun.acquire(timeout=20) for _ in range(7))
            other = post(url, json.dumps(short).encode())
            assert eventually(lambda: service.engine_thread.num_open == 21)
            assert httpx.get(url + "/health", timeout=5).status_code == 200
            permits.release(2)  # the call that runs, and the next one
            assert other.recv(65536).startswith(b"HTTP/1.1 200")
            attack.close()
            other.close()
            assert eventually(lambda: all(job.cancelled for job in submitted[0]))
            permits.release(2)  # and no more
            assert eventually(lambda: not service.engine_thread.num_open)
        finally:
            permits.release(10_000)


@pytest.mark.parametrize(("api_keys", "expected"), [(("one", "two"), ["one", "two"]), ((), ["127.0.0.1"] * 2)])
def test_clients_are_told_apart_by_their_keys_else_by_their_addresses(engine, monkeypatch, api_keys, expected):
    clients, submit = [], EngineThread.submit
    monkeypatch.setattr(
        EngineThread, "submit", lambda engine_thread, job: (clients.append(job.client), submit(engine_thread, job))
    )
    with serving(engine, api_keys=api_keys) as (_, url):
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(url + "/v1/completions", json={"prompt": "the", "max_tokens": 1}, headers=headers)
            assert answer.status_code == 200
    assert clients == expected
