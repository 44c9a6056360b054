"""Several replicas of the server behind one address, on one machine or a cluster, by Ray Serve."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAME = "saltus"  # of the application and of its deployment


@dataclass(frozen=True)
class Replicas:
    """How many replicas, and what each of them may use."""

    count: int
    max_requests: int  # of one replica at once; more wait in Ray's proxy
    drain_seconds: float  # that a replica has for the texts that run when it is stopped
    cpus: float | None = None  # of each, which are also its threads; None: an equal share of the cluster's
    gpus: float = 0.0


def start_replicas(make_app: Callable[[], Any], replicas: Replicas, host: str, port: int) -> None:
    """Start the replicas in the cluster that this machine belongs to, else on this machine, and wait until they answer.

    `make_app` is called in the process of each replica; Saltus has to be installed on all machines. Errors: ValueError
    of one line.
    """
    ray, serve = _imported()

    def build() -> Any:  # Ray wants a function of Python's own
        return make_app()

    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False, include_dashboard=False)
    except Exception as error:  # of no class of its own, where a node starts too slowly
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"Ray did not start: {reason} (is the machine overloaded?)") from error
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = replicas.cpus or equal_share([node.get("CPU", 0.0) for node in nodes], replicas.count)
    for name, each in (("CPU", cpus), ("GPU", replicas.gpus)):
        if each and sum(int(node.get(name, 0.0) / each) for node in nodes) < replicas.count:
            available = " + ".join(f"{node.get(name, 0.0):g}" for node in nodes)
            raise ValueError(
                f"{replicas.count} replicas with {each:g} {name} each do not fit the cluster, which has {available};"
                " ask for fewer, or add machines (ray start --address=…)"
            )
    deployment = serve.deployment(serve.ingress(build)()).options(
        name=NAME,
        num_replicas=replicas.count,
        max_ongoing_requests=replicas.max_requests,
        ray_actor_options={"num_cpus": cpus, "num_gpus": replicas.gpus},
        graceful_shutdown_timeout_s=replicas.drain_seconds,
        **_router_options(),
    )
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(deployment.bind(), name=NAME)
    except (ray.exceptions.RayError, RuntimeError) as error:
        raise ValueError(f"the replicas did not start: {_cause(error, serve)}") from error


def _router_options() -> dict[str, Any]:
    """How requests find their replica: by SessionRouter, or by Ray's default if this Ray cannot hash sessions."""
    try:
        from ray.serve.config import RequestRouterConfig

        from saltus.server.session_router import SessionRouter
    except ImportError:
        return {}
    router: Any = SessionRouter
    return {"request_router_config": RequestRouterConfig(request_router_class=router)}


def equal_share(cpus_of_nodes: list[float], count: int) -> float:
    """The most CPUs that each of `count` replicas can have if none is spread over nodes; at least 1."""
    whole = int(max(cpus_of_nodes, default=1))
    fitting = (each for each in range(whole, 1, -1) if sum(int(cpus / each) for cpus in cpus_of_nodes) >= count)
    return float(next(fitting, 1))


def _cause(error: Exception, serve: Any) -> str:
    """What a replica said when it failed, of one line: Ray hides it in a traceback in the deployment's state."""
    try:
        application = serve.status().applications[NAME]
        told = [deployment.message for deployment in application.deployments.values()]
    except Exception:  # Ray Serve itself is gone
        told = []
    raised = re.findall(r"^(?:\w+\.)*(\w*(?:Error|Exception): .+)$", "\n".join(told), re.MULTILINE)
    if raised:
        return raised[-1].removeprefix("ValueError: ")
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]} (is the machine overloaded?)"


def stop_replicas() -> None:
    """Let what runs finish, and stop the replicas."""
    _, serve = _imported()
    serve.shutdown()


def wait_for_signal() -> None:
    """Until Ctrl-C or SIGTERM; a second one ends the process."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _imported() -> tuple[Any, Any]:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError(
            f"replicas need {error.name}, which is not installed; run: pip install '.[serve,serve-ray]' in the clone"
        ) from error
    return ray, serve
