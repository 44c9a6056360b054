"""Several replicas of the server behind one address, on one machine or a cluster, by Ray Serve."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DRAIN_SECONDS = 60.0  # that a replica has for the texts that run when it is stopped


@dataclass(frozen=True)
class Replicas:
    """How many replicas, and what each of them may use."""

    count: int
    max_requests: int  # of one replica at once; more wait in Ray's proxy
    cpus: float = 1.0  # that Ray reserves for a replica
    gpus: float = 0.0


def start_replicas(make_app: Callable[[], Any], replicas: Replicas, host: str, port: int) -> None:
    """Start the replicas in the cluster that this machine belongs to, else on this machine, and wait until they answer.

    `make_app` is called in the process of each replica; Saltus has to be installed on all machines. Errors: ValueError
    of one line.
    """
    ray, serve = _imported()

    def build() -> Any:  # Ray wants a function of Python's own
        return make_app()

    ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
    available = ray.cluster_resources()
    for name, each in (("CPU", replicas.cpus), ("GPU", replicas.gpus)):
        if each * replicas.count > available.get(name, 0.0):
            raise ValueError(
                f"{replicas.count} replicas need {each * replicas.count:g} {name}, but the cluster has"
                f" {available.get(name, 0.0):g}; ask for fewer, or add machines (ray start --address=…)"
            )
    serve.start(http_options={"host": host, "port": port})
    deployment = serve.deployment(serve.ingress(build)()).options(
        name="saltus",
        num_replicas=replicas.count,
        max_ongoing_requests=replicas.max_requests,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )
    serve.run(deployment.bind(), name="saltus")


def stop_replicas() -> None:
    """Let what runs finish, and stop the replicas."""
    _, serve = _imported()
    serve.shutdown()


def wait_for_signal() -> None:
    """Until Ctrl-C or SIGTERM."""
    stopped = threading.Event()
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda *_: stopped.set())
    stopped.wait()


def _imported() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError(
            f"replicas need {error.name}, which is not installed; run: pip install 'saltus[serve,serve-ray]'"
        ) from error
    return ray, serve
