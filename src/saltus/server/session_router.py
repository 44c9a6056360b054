"""Send the requests of one conversation to one replica, which has its prefix: a router for Ray Serve.

Ray's proxy routes requests before it reads their bodies, so it knows a conversation by a header. Ray's own router by
prompts (`PrefixCacheAffinityRouter`) works behind the ingress of ray.serve.llm only, and needs vLLM or SGLang.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica


class SessionRouter(ConsistentHashRouter):
    """Requests with a session id go by consistent hashing of it, all others to the less busy of two replicas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first; of the replicas of a rank the one with the fewest requests is taken."""
        if pending_request is not None and pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        first, number = next(self._turns), len(candidate_replicas)
        return [[candidate_replicas[(first + each) % number] for each in range(min(number, 2))]] if number else []
