"""The serve command."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from saltus.cli import options as o
from saltus.loading.time_limit import answer_within

LEARN_SHARE = 0.08
DEFAULT_KV_CACHE = "4GB"
MIN_KV_CACHE_BYTES = 10**6
RESOLVE_SECONDS = 5.0  # that name servers have for the address of --host
DEFAULT_CONTEXT = 32768  # tokens, for models that name no limit and whose memory does not grow with a text
_server_option = partial(o.in_panel, o.SERVER_PANEL)


@o.with_options(omit=("rule",))  # under `reject` a text would depend on how it is drafted
def serve(
    *,
    model_options: o.ModelOptions,
    method_options: o.MethodOptions,
    host: Annotated[str, _server_option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, _server_option("--port", "-p", metavar="PORT", min=0, max=65535, help="Where to listen; 0: any.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        _server_option(
            "--api-key",
            metavar="KEY",
            help=f"Requests need such a key; may be repeated. One key may also stand in {o.KEY_VARIABLE}.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _server_option(
            "--allowed-host",
            metavar="NAME",
            help="Another name of this server in requests, where there is no key; may be repeated. *: any.",
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        _server_option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="Another site whose pages may use this server, such as https://chat.example; may be repeated."
            " *: any (CORS).",
        ),
    ] = None,
    ssl_certfile: Annotated[
        str | None, _server_option("--ssl-certfile", metavar="FILE", help="Speak HTTPS with this certificate (PEM).")
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        _server_option("--ssl-keyfile", metavar="FILE", help="The certificate's key, unless it is in the same file."),
    ] = None,
    served_model_name: Annotated[
        str | None,
        _server_option("--served-model-name", metavar="NAME", help="The model's name in requests. Default: --model."),
    ] = None,
    max_num_seqs: Annotated[
        int, _server_option("--max-num-seqs", metavar="N", min=1, help="Texts decoded at once.")
    ] = 16,
    max_queue: Annotated[
        int, _server_option("--max-queue", metavar="N", min=0, help="Texts that wait; beyond them answers are 429.")
    ] = 256,
    max_model_len: Annotated[
        int | None,
        _server_option("--max-model-len", metavar="N", min=1, help="Tokens of a prompt and its answer, at most."),
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str,
        _server_option(
            "--kv-cache-memory-bytes", metavar="SIZE", help="For the keys and values of texts, such as 8GB."
        ),
    ] = DEFAULT_KV_CACHE,
    ngram_cache: Annotated[
        str | None,
        _server_option(
            "--ngram-cache", metavar="SIZE", help="Memory for earlier answers, such as 64MB, that `lookup` drafts from."
        ),
    ] = None,
    learn: Annotated[
        bool,
        _server_option("--learn", help="Train the drafter of `ptp` on the texts that are served. No text changes."),
    ] = False,
    learn_share: Annotated[
        float | None,
        _server_option(
            "--learn-share",
            metavar="X",
            help="With --learn: share of the time that training may take while texts are decoded. Default:"
            f" {LEARN_SHARE}; 0: idle time only.",
        ),
    ] = None,
    learn_reset: Annotated[
        bool, _server_option("--learn-reset", help="With --learn: forget what was learned in earlier runs.")
    ] = False,
    learn_across_keys: Annotated[
        bool, _server_option("--learn-across-keys", help="With --learn: one drafter from the texts of all API keys.")
    ] = False,
    shutdown_timeout: Annotated[
        float,
        _server_option(
            "--shutdown-timeout", metavar="SECONDS", min=0.0, help="How long texts may go on after Ctrl-C or SIGTERM."
        ),
    ] = 60.0,
    log_requests: Annotated[
        bool, _server_option("--log-requests", help="Log the bodies of requests, prompts included.")
    ] = False,
    ray: Annotated[
        bool, _server_option("--ray", help="Put replicas of the server behind Ray Serve, in its cluster or here.")
    ] = False,
    replicas: Annotated[int, _server_option("--replicas", metavar="N", min=1, help="With --ray: how many.")] = 1,
    replica_cpus: Annotated[
        float | None,
        _server_option(
            "--replica-cpus", metavar="N", min=0.1, help="With --ray: threads of each. Default: an equal share."
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's routes, Anthropic's and llama.cpp's.

    Texts of many clients are decoded in one batch, each exactly as if it were
    alone. Ctrl-C or SIGTERM lets what runs finish, a second one stops at once.

    [bold]Examples[/bold]

        saltus serve --port 8000

        curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
          -d '{"messages": [{"role": "user", "content": "Who?"}], "seed": 1}'

        saltus serve -m some-model-Q4_K_M.gguf --api-key secret --max-num-seqs 32

        saltus serve --learn --method ptp+lookup

        saltus serve --ray --replicas 2

    [bold]Routes[/bold]: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,
    /completion, /infill, /v1/models, /tokenize, /detokenize, /apply-template,
    /props, /slots, /health, /version, /load, /docs, /metrics (Prometheus, with
    vLLM's names).
    """
    try:
        from saltus.server.app import make_app
        from saltus.server.connections import Certificate, Server, server_config
        from saltus.server.guard import checked_keys
        from saltus.server.hosts import allowed_hosts, checked_origins
        from saltus.server.served_request import Limits
    except ImportError as error:
        raise ValueError(
            f"the server needs {error.name}, which is not installed; run: pip install '.[serve]' in the clone"
        ) from error
    from saltus.cli.answers import print_note

    keys = checked_keys(api_key or _keys_of_environment())
    if (replicas > 1 or replica_cpus is not None) and not ray:
        raise ValueError("--replicas and --replica-cpus need --ray")
    ngram_cache_bytes = _num_bytes("--ngram-cache", ngram_cache) if ngram_cache else 0
    limits = Limits(max_num_seqs, max_queue, _kv_cache_bytes(kv_cache_memory_bytes, model_options.device))
    if served_model_name == "":
        raise ValueError("--served-model-name is empty; give a name, or leave it out")
    if learn and ray:
        raise ValueError("--learn is for a single server; leave out --ray, or --learn")
    plan = _learning_plan(learn, learn_share, learn_reset, learn_across_keys, keys)
    origins = checked_origins(allowed_origin or ())
    if ssl_certfile is None and ssl_keyfile is not None:
        raise ValueError("--ssl-keyfile needs --ssl-certfile")
    if ssl_certfile is not None and ray:
        raise ValueError("--ssl-certfile is for a single server; leave out --ray, or put a proxy before it")
    certificate = None if ssl_certfile is None else Certificate(ssl_certfile, ssl_keyfile)
    name = served_model_name or model_options.model
    new_service = partial(
        _new_service, model_options, method_options, name, limits, max_model_len, ngram_cache_bytes, plan
    )

    def app(service: Any) -> Any:
        return make_app(service, keys, log_requests, allowed_hosts(host, allowed_host or ()), origins)

    _check_address(host, port, held_by_ray=ray)  # before a model is loaded
    if ray:
        from saltus.server.replicas import Replicas

        gpus = 1.0 if _uses_gpu(model_options.device) else 0.0
        each = Replicas(replicas, limits.max_texts, shutdown_timeout, replica_cpus, gpus)
        _serve_replicas(lambda: app(new_service()), each, model_options.model, host, port)
        return
    service = new_service()
    what = f"{model_options.model} with {service.engine.method}"
    server = Server(
        server_config(app(service), host, port, limits.max_texts, shutdown_timeout, certificate),
        lambda own_port: print_note(f"{what} on http{'s' if certificate else ''}://{host}:{own_port}/v1"),
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn sends itself the signal again when it has stopped
        server.run()
    if not server.started:
        raise typer.Exit(3)


def _learning_plan(learn: bool, share: float | None, reset: bool, across_keys: bool, keys: Sequence[str]) -> Any:
    """What --learn and its options ask for; None without it. Errors: ValueError for options of it alone."""
    if not learn:
        if share is not None or reset or across_keys:
            raise ValueError("--learn-share, --learn-reset and --learn-across-keys need --learn")
        return None
    from saltus.server.learning import LearningPlan, group_of

    return LearningPlan(LEARN_SHARE if share is None else share, group_of(keys, across_keys), reset)


def _serve_replicas(make_app: Callable[[], Any], replicas: Any, model: str, host: str, port: int) -> None:
    """Put replicas behind Ray Serve until a signal comes, and let what runs finish."""
    from saltus.cli.answers import print_note
    from saltus.server.replicas import start_replicas, stop_replicas, wait_for_signal

    start_replicas(make_app, replicas, host, port)
    print_note(f"{replicas.count} replicas of {model} on http://{host}:{port}/v1")
    wait_for_signal()
    print_note("finishing what runs")
    stop_replicas()


def _new_service(
    model_options: o.ModelOptions,
    method_options: o.MethodOptions,
    name: str,
    limits: Any,
    max_model_len: int | None,
    ngram_cache_bytes: int,
    plan: Any,
) -> Any:
    """The service of a loaded model, in this process or in that of a replica."""
    from saltus.cli.open_engine import open_with_options
    from saltus.server.allocator import return_freed_buffers
    from saltus.server.log_lines import LogLines
    from saltus.server.service import Service

    return_freed_buffers()
    engine, _ = open_with_options(model_options, method_options, o.SamplingOptions())
    engine.generate("Are you there?", max_new_tokens=8)  # what is loaded late is loaded before the first request
    limits = _within_gpu_memory(limits, engine.network)
    if max_model_len is not None:
        _limit_context_to(engine, max_model_len)
    learner = None if plan is None else _new_learner(engine, plan)
    service = Service(engine, name, limits, ngram_cache_bytes, learner)
    # nothing would be decoded any more
    service.engine_thread.on_failure = lambda: os.kill(os.getpid(), signal.SIGTERM)
    if max_model_len is None:
        _limit_context(engine, service.engine_thread.longest_text)
    logging.basicConfig(format="%(message)s", handlers=[LogLines()])
    logging.getLogger("saltus.server").setLevel(logging.INFO)
    return service


def _within_gpu_memory(limits: Any, network: Any) -> Any:
    """The limits, with no more memory than a GPU has room for beside the weights, and a line if that is less."""
    from saltus.cli.answers import print_note
    from saltus.models.cuda.kv_pages import gpu_bytes_for_texts

    runner = getattr(network, "fixed_shape_runner", None)
    if runner is None or network.device.type != "cuda":
        return limits
    most = gpu_bytes_for_texts(runner.pool, network.device)
    if most >= limits.max_cached_bytes:
        return limits
    print_note(f"keys and values have at most {most / 1e9:.1f} GB, half of what the GPU has beside the weights")
    return dataclasses.replace(limits, max_cached_bytes=most)


def _limit_context_to(engine: Any, most: int) -> None:
    """Let texts have as many tokens as --max-model-len says, or the model's limit, with a line, if that is less."""
    from saltus.cli.answers import print_note

    if (context := engine.target.context_length) is not None and most > context:
        print_note(
            f"--max-model-len is {most:,}, but {engine.target.name} reads at most {context:,}; that is the limit"
        )
    engine.limit_context(most)


def _limit_context(engine: Any, fitting: int) -> None:
    """Let texts have as many tokens as fit into the memory: longer ones, as those without max_tokens, are refused."""
    from saltus.cli.answers import print_note

    context, why = engine.target.context_length, "which fit into --kv-cache-memory-bytes"
    if context is not None and context <= fitting:
        return
    if context is None and fitting > DEFAULT_CONTEXT:
        fitting, why = DEFAULT_CONTEXT, "since the model names no limit; more by --max-model-len"
    engine.limit_context(fitting)
    print_note(f"prompt and answer have at most {fitting:,} tokens, {why}")


def _kv_cache_bytes(size: str, device: str) -> int:
    """The bytes of --kv-cache-memory-bytes. Errors: ValueError for a size that no text fits into, or no machine has."""
    from saltus.engine.tuned_settings import memory_bytes

    wanted = _num_bytes("--kv-cache-memory-bytes", size)
    if wanted < MIN_KV_CACHE_BYTES:
        raise ValueError(f"--kv-cache-memory-bytes is {size!r}, but must be 1MB or more")
    default = _num_bytes("", DEFAULT_KV_CACHE)  # which small machines have, too: they serve short texts
    machine = max(memory_bytes() or wanted, default)
    if wanted > machine and not _uses_gpu(device):
        raise ValueError(f"--kv-cache-memory-bytes is {size}, but this machine has {machine / 1e9:.0f} GB; lower it")
    return wanted


def _check_address(host: str, port: int, held_by_ray: bool) -> None:
    """Raise ValueError for an address where nothing can listen. Ray may hold the port already, for earlier replicas."""
    try:
        family, kind, protocol, _, address = _resolved(host, 0 if held_by_ray else port)
        with socket.socket(family, kind, protocol) as tried:
            if os.name == "posix":  # a port that was left a moment ago is free
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        raise ValueError(
            f"the server cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from None


def _resolved(host: str, port: int) -> Any:
    """What `socket.getaddrinfo` finds first. Errors: OSError, also where name servers do not answer."""
    try:
        return answer_within(RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0])
    except UnicodeError:
        raise OSError(errno.EINVAL, "that is no name of a machine") from None
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, f"name servers did not answer within {RESOLVE_SECONDS:g} s") from None


def _keys_of_environment() -> Sequence[str]:
    """The key in the variable, if it is set. Errors: ValueError for an empty one."""
    key = os.environ.get(o.KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError(f"{o.KEY_VARIABLE} is set, but has no key; unset it, or give one")
    return () if key is None else (key,)


def _new_learner(engine: Any, plan: Any) -> Any:
    from saltus.cli.answers import print_note
    from saltus.server.learning import Learner

    learner = Learner(engine, plan)
    print_note(f"the drafter learns from these texts; what it learns is kept in {learner.drafters.folder}")
    return learner


def _uses_gpu(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _num_bytes(option: str, size: str) -> int:
    """The bytes of an option's size such as 64MB, or ValueError."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Z]*)\s*", size.upper())
    if match is None or match[2] not in units:
        raise ValueError(f"{option} is {size!r}, but must be a size such as 64MB")
    return int(float(match[1]) * units[match[2]])
