"""Join the processes that torchrun or `accelerate launch` started, and print one line where several fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from saltus.cli.errors import BAD_INPUT, INTERRUPTED


def shards_weights(asked: bool) -> bool:
    """True with --shard, or with `accelerate launch --use_fsdp`. Errors: ValueError for its first version."""
    from saltus.training.loop.processes import launched_processes

    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    if by_launcher and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError("accelerate was told to use the first FSDP; give it --fsdp_version 2")
    return (asked or by_launcher) and launched_processes() > 1


@contextmanager
def join_launched_processes(device: str) -> Iterator[Any]:
    """While open, the processes are connected. If several fail, the first of them prints; the main one, at Ctrl-C."""
    from saltus.training.loop.processes import join_processes

    with join_processes(device) as processes:
        try:
            yield processes
        except KeyboardInterrupt:
            processes.is_first_to_fail()  # so that others, which lose this one, print nothing
            if processes.is_main:
                raise
            raise SystemExit(INTERRUPTED) from None
        except Exception:
            if processes.is_first_to_fail():
                raise
            raise SystemExit(BAD_INPUT) from None
