"""Take turns: which text is next to get a place in the batch, which one gives way, and how much memory it may fill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from saltus.engine.scheduled_request import AnyScheduled, ScheduledRequest

FREE_TEXTS = 2  # of a client, and of a request, that may fill the memory up to their limits below
SHARE_OF_REQUEST, SHARE_OF_MORE = 7 / 8, 3 / 4  # of the memory: for texts of another request, and for more of one


@dataclass(frozen=True)
class Shares:
    """How many of some texts each client has, and each of its requests."""

    clients: Counter[str]
    requests: Counter[int]

    @classmethod
    def among(cls, requests: Sequence[ScheduledRequest]) -> Shares:
        """The shares of those who have these texts."""
        return cls(
            Counter(scheduled.client for scheduled in requests),
            Counter(scheduled.request_number for scheduled in requests),
        )

    def of(self, scheduled: ScheduledRequest) -> tuple[int, int]:
        """How many texts the request's client has, and how many its request has."""
        return self.clients[scheduled.client], self.requests[scheduled.request_number]

    def gain(self, newcomer: ScheduledRequest, running: ScheduledRequest) -> bool:
        """True if the shares are more equal when the newcomer has the place of the running text."""
        if running.client != newcomer.client:
            return self.clients[running.client] - self.clients[newcomer.client] > 1
        return self.requests[running.request_number] - self.requests[newcomer.request_number] > 1


def next_in_turn(waiting: Sequence[AnyScheduled], running: Sequence[AnyScheduled]) -> AnyScheduled | None:
    """A text of the client that has the fewest running ones, then of its request with the fewest; else the first."""
    return min(waiting, key=Shares.among(running).of) if waiting else None


def giving_way(running: Sequence[AnyScheduled], newcomer: AnyScheduled) -> AnyScheduled | None:
    """The newest text of the client, and of its request, that has the most; None if all have their equal shares."""
    shares = Shares.among(running)
    return max(
        (scheduled for scheduled in reversed(running) if shares.gain(newcomer, scheduled)), key=shares.of, default=None
    )


def memory_limit(scheduled: ScheduledRequest, admitted: Sequence[ScheduledRequest], max_bytes: int) -> int:
    """The memory that the admitted texts and this one may take together, so that others need not wait for all of it."""
    of_client, of_request = Shares.among(admitted).of(scheduled)
    if of_client < FREE_TEXTS:
        return max_bytes
    return int(max_bytes * (SHARE_OF_REQUEST if of_request < FREE_TEXTS else SHARE_OF_MORE))
