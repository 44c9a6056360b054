"""Wait for an answer of the network no longer than some seconds, whatever holds the call up."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def answer_within(seconds: float, ask: Callable[[], Any]) -> Any:
    """The answer, or TimeoutError: a name server or a retry may hold a call far longer than its own timeout."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()  # nothing can interrupt it
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(str(error) or f"no answer within {seconds:g} seconds") from None
