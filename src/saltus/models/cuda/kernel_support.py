"""Say whether our kernels for GPUs run on this machine."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import lru_cache

log = logging.getLogger("saltus")


def has_kernels() -> bool:
    """True where our kernels for GPUs run, unless SALTUS_KERNELS says that they are off."""
    return os.environ.get("SALTUS_KERNELS") != "off" and _kernels_run()


@lru_cache
def _kernels_run() -> bool:
    """True if Triton is there and compiles for the GPU, for which it needs a C compiler; a warning says what fails."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from saltus.models.cuda.launching import check_launch

        check_launch()
    except Exception as error:  # of many kinds, by what is missing
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        log.warning("our kernels for GPUs are off, since they do not run here: %s", reason)
        return False
    return True
