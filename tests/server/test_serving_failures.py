"""Failures in the engine's thread: each ends one text, and where all end, all are answered."""

# ruff: noqa: F811  fixtures

import logging
import queue
import threading

import pytest
from test_serving_faults import decoded

from saltus.engine.grammar import Grammar
from saltus.engine.request import CallRecord
from saltus.server import engine_thread as threads
from saltus.server.constraint_time import (
    DRAFTING_SECONDS,
    MOST_SECONDS,
    SECONDS_PER_CALL,
    LimitedConstraint,
)
from saltus.server.engine_thread import EngineThread
from saltus.server.errors import ApiError
from saltus.server.served_request import Limits, ServedRequest, serve_text
from tiny_server import PROMPT, alone, engine  # noqa: F401

GUILTY = "a guilty text"


def job_of(engine, prompt: str = PROMPT, tokens: int = 8, deliver=lambda part: None) -> ServedRequest:
    return serve_text(engine.text_request(prompt, raw=True, max_new_tokens=tokens, ignore_eos=True), "plain", deliver)


def test_after_a_call_that_failed_the_texts_are_tried_alone_and_the_guilty_one_ends(engine, monkeypatch):
    forward, expected = engine.network.forward, alone(engine, PROMPT, raw=True).text
    guilty = engine.encode(GUILTY, raw=True)

    def of_innocent_texts(batch, kv_caches):
        for inputs in batch:
            if len(inputs.canvas.decided_prefix) > len(guilty) + 3:  # in the midst of it
                assert inputs.canvas.tokens[: len(guilty)].tolist() != guilty, "guilty"
        return forward(batch, kv_caches)

    monkeypatch.setattr(engine.network, "forward", of_innocent_texts)
    text, error, other = decoded(engine, [PROMPT, GUILTY, PROMPT])
    assert text == other == expected
    assert (error.status, error.message) == (500, "a call failed: guilty")


def test_a_failure_that_needs_two_texts_ends_neither(engine, monkeypatch):
    forward, expected = engine.network.forward, alone(engine, PROMPT, raw=True).text
    monkeypatch.setattr(
        engine.network, "forward", lambda batch, caches: forward(batch, caches) if len(batch) < 2 else 1 / 0
    )
    assert decoded(engine, [PROMPT, PROMPT]) == [expected] * 2


def test_a_tree_of_prefixes_that_fails_ends_no_text(engine, monkeypatch):
    monkeypatch.setattr("saltus.engine.prefix_tree.PrefixTree.put", lambda *_: 1 / 0)
    assert decoded(engine, [PROMPT, PROMPT]) == [alone(engine, PROMPT, raw=True).text] * 2


def test_a_client_that_cannot_be_answered_ends_its_own_text_only(engine):
    engine_thread, ended = EngineThread(engine, Limits()), queue.Queue()

    def gone(part) -> None:
        raise RuntimeError("Event loop is closed")

    def deliver(part) -> None:
        if part.finish_reason is not None:
            ended.put(part.finish_reason)

    engine_thread.submit(job_of(engine, deliver=gone), job_of(engine, deliver=deliver))
    engine_thread.start()
    try:
        assert ended.get(timeout=30) == "length"
        assert engine_thread.num_open == 0
    finally:
        engine_thread.close()


def test_a_text_that_cannot_be_written_down_ends_alone(engine):
    engine_thread, ended = EngineThread(engine, Limits()), queue.Queue()
    bad, good = job_of(engine, deliver=ended.put), job_of(engine, deliver=ended.put)
    bad.asked.output.release = lambda final: 1 / 0
    engine_thread.submit(bad, good)
    engine_thread.start()
    try:
        assert ended.get(timeout=30).message == "division by zero"
        while ended.get(timeout=30).finish_reason is None:
            pass
        assert engine_thread.num_open == 0
    finally:
        engine_thread.close()


def failing_engine_thread(engine, answers: list[ApiError], states: list[int]) -> tuple[EngineThread, threading.Event]:
    """An engine thread that fails with four texts, of which some run, pause and wait; the event says that it did."""
    engine_thread, failed = EngineThread(engine, Limits(max_batch=2)), threading.Event()
    engine_thread.on_failure = failed.set
    scheduler = engine_thread.scheduler
    call, step, turns = scheduler._call, scheduler.step, iter(range(3))

    def fail_in_the_third_turn() -> list[ServedRequest]:
        if next(turns) == 2:
            states.extend(map(len, (scheduler.running, scheduler.paused, scheduler.waiting)))
            raise ZeroDivisionError("a\nfault")
        return step()

    def deliver(part) -> None:
        if isinstance(part, ApiError):
            answers.append(part)

    def submitting(running) -> None:
        if engine_thread.num_open == 3:
            engine_thread.submit(job_of(engine, deliver=deliver))
        call(running)

    scheduler.step = fail_in_the_third_turn
    scheduler._call = submitting
    engine_thread.submit(*(job_of(engine, deliver=deliver) for _ in range(3)))
    engine_thread.start()
    return engine_thread, failed


def test_if_the_engines_thread_fails_all_are_answered_and_the_server_is_told(engine, caplog):
    answers, states = [], []
    with caplog.at_level(logging.CRITICAL):
        engine_thread, failed = failing_engine_thread(engine, answers, states)
        assert failed.wait(30)
    engine_thread.thread.join(30)
    assert states == [2, 1, 1]
    assert [answer.status for answer in answers] == [503] * 4
    assert engine_thread.num_open == 0
    (line,) = caplog.messages
    assert "ZeroDivisionError: a fault (" in line
    assert "\n" not in line
    with pytest.raises(ApiError, match="try another one"):
        engine_thread.submit(job_of(engine))


def test_a_thread_that_is_gone_gets_no_text(engine):
    engine_thread = EngineThread(engine, Limits())
    engine_thread._run = lambda: None
    engine_thread.thread = threading.Thread(target=engine_thread._run)
    engine_thread.start()
    engine_thread.thread.join()
    with pytest.raises(ApiError, match="try another one"):
        engine_thread.submit(job_of(engine))
    assert engine_thread.num_open == 0


def test_a_text_is_queued_before_a_server_that_closes_looks_for_the_last_time(engine):
    engine_thread, locked, answers = EngineThread(engine, Limits()), [], queue.Queue()

    class Watched(queue.SimpleQueue):
        def put(self, item, *given):
            locked.append(engine_thread.lock.locked())
            super().put(item, *given)

    engine_thread.incoming = Watched()
    engine_thread.submit(job_of(engine, deliver=answers.put))
    assert locked == [True]
    with engine_thread.lock:  # as while a text is submitted
        closing = threading.Thread(target=engine_thread.close)
        closing.start()
        closing.join(0.05)
        assert not engine_thread.closed
    closing.join(30)
    assert answers.get(timeout=30).status == 503


class _SlowConstraint:
    """All tokens are allowed, and each question takes some seconds of a clock."""

    def __init__(self, seconds: float):
        self.seconds, self.now, self.asked = seconds, 0.0, []

    def clock(self) -> float:
        return self.now

    def _ask(self, name, answer):
        self.now += self.seconds
        self.asked.append(name)
        return answer

    def allowed(self, text):
        return self._ask("allowed", None)

    def num_allowed(self, text, tokens):
        return self._ask("num_allowed", len(tokens))

    def fast_forward(self, text, max_tokens):
        return self._ask("forced", [5])


def limited(engine, seconds: float):
    slow = _SlowConstraint(seconds)
    request = engine.text_request("the", raw=True).request
    return slow, request, LimitedConstraint(slow, request, slow.clock)


def test_a_constraint_that_takes_long_stops_drafting_and_then_ends_its_text(engine):
    slow, request, constraint = limited(engine, 0.1)
    assert (constraint.fast_forward([], 4), constraint.num_allowed([], [1, 2])) == ([5], 2)
    for _ in range(round((MOST_SECONDS - DRAFTING_SECONDS) / 0.1)):
        constraint.allowed([])
    assert (constraint.fast_forward([], 4), constraint.num_allowed([], [1, 2])) == ((), 0)
    while constraint.allowance > 0:
        constraint.allowed([])
    with pytest.raises(ValueError, match="takes too long"):
        constraint.allowed([])
    assert len(slow.asked) <= MOST_SECONDS / 0.1 + 1
    request.calls += [CallRecord(0, (1,), 0, 0.0, 1)] * 1000
    assert constraint.fast_forward([], 4) == [5]  # calls give the time back, but no more than at first
    assert constraint.allowance <= MOST_SECONDS


def test_a_constraint_that_takes_as_long_as_calls_give_back_never_ends_its_text(engine):
    _, request, constraint = limited(engine, SECONDS_PER_CALL)
    for number in range(200):
        constraint.num_allowed([], [1])
        constraint.fast_forward([], 4)
        constraint.allowed([])
        request.calls.append(CallRecord(number, (1,), 0, 0.0, 1))


def test_a_grammar_that_takes_too_long_ends_its_own_text_only(engine, monkeypatch):
    slow = _SlowConstraint(0.5)
    monkeypatch.setattr(Grammar, "constraint", lambda *_: slow)
    monkeypatch.setattr(threads, "LimitedConstraint", lambda *given: LimitedConstraint(*given, slow.clock))
    engine_thread, ended = EngineThread(engine, Limits()), queue.Queue()

    def deliver_to(name: str):
        def deliver(part) -> None:
            if isinstance(part, ApiError) or part.finish_reason is not None:
                ended.put((name, part))

        return deliver

    request = engine.text_request(PROMPT, raw=True, max_new_tokens=40, grammar=Grammar.regex("a*"))
    engine_thread.submit(serve_text(request, "lookup", deliver_to("slow")), job_of(engine, deliver=deliver_to("other")))
    engine_thread.start()
    try:
        found = dict(ended.get(timeout=30) for _ in range(2))
    finally:
        engine_thread.close()
    assert (found["slow"].status, found["other"].finish_reason) == (400, "length")
    assert "takes too long" in found["slow"].message
