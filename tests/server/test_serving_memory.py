"""Memory that admission counts: keys and values of a text on the model and on its draft models."""

# ruff: noqa: F811  fixtures

import queue

import pytest

from saltus.core.batch import SequenceState, run_batch
from saltus.core.control.controller import Controller
from saltus.engine.scheduler import counting_generator
from saltus.models.memory_use import kv_bytes_per_token
from saltus.server.engine_thread import EngineThread
from saltus.server.errors import ApiError
from saltus.server.served_request import Limits, serve_text
from tiny_server import PROMPT, engine  # noqa: F401

TOKENS = 12


@pytest.mark.parametrize("method", ["plain", "small_model", "ptp", "mtpc"])
def test_a_token_takes_as_many_bytes_as_are_counted(engine, method):
    setup = engine.decoder.setup(method)
    request = engine.text_request(PROMPT, raw=True, max_new_tokens=TOKENS).request
    sequence = SequenceState(counting_generator(setup, request, Controller(adaptive=False)))
    for _ in run_batch([sequence], setup.networks):
        pass
    assert set(sequence.kv_caches) == set(setup.networks)
    for name, kv_cache in sequence.kv_caches.items():
        keys, values = (getattr(kv_cache, each, None) for each in ("keys", "values"))
        used = 0 if keys is None else (keys.nbytes + values.nbytes) // keys.shape[2]
        assert kv_bytes_per_token(setup.networks[name]) == used, name


def endings(engine, method: str, max_cached_bytes: int) -> tuple[int, list]:
    """How many of three texts run at once at most, and how each of them ends."""
    ended: queue.Queue = queue.Queue()
    engine_thread, running = EngineThread(engine, Limits(max_cached_bytes=max_cached_bytes)), [0]

    def deliver(part) -> None:
        running.append(engine_thread.num_running)
        if isinstance(part, ApiError) or part.finish_reason is not None:
            ended.put(part.message if isinstance(part, ApiError) else part.finish_reason)

    for _ in range(3):
        request = engine.text_request(PROMPT, raw=True, max_new_tokens=TOKENS, ignore_eos=True)
        engine_thread.submit(serve_text(request, method, deliver))
    engine_thread.start()
    try:
        return [ended.get(timeout=60) for _ in range(3)], max(running)
    finally:
        engine_thread.close()


def test_caches_of_draft_models_count_at_admission(engine):
    longest = len(engine.encode(PROMPT, raw=True)) + TOKENS
    for_two = 2 * longest * kv_bytes_per_token(engine.network)
    assert endings(engine, "plain", for_two) == (["length"] * 3, 2)
    assert endings(engine, "small_model", for_two) == (["length"] * 3, 1)  # a draft model as large as the target
    assert endings(engine, "small_model", 2 * for_two) == (["length"] * 3, 2)


def test_a_text_that_fits_only_without_its_draft_model_is_refused(engine):
    longest = len(engine.encode(PROMPT, raw=True)) + TOKENS
    for_one = longest * kv_bytes_per_token(engine.network)
    assert endings(engine, "plain", for_one)[0] == ["length"] * 3
    unloaded = engine.copy_with()  # its draft model is loaded when the first text is admitted
    (message, *_), _ = endings(unloaded, "small_model", for_one)
    assert "does not fit into the memory for keys and values" in message
    with pytest.raises(ApiError, match="does not fit"):
        endings(unloaded, "small_model", for_one)


def test_the_longest_text_of_a_server_leaves_room_for_its_draft_model(engine):
    limits, both = Limits(max_cached_bytes=10**6), engine.copy_with()
    both.method = "small_model"
    both.decoder.setup("small_model")
    assert 2 * EngineThread(both, limits).longest_text == EngineThread(engine, limits).longest_text
