"""Copy between the host and a GPU with as few waits as there can be."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copies in the memory of the host, by one wait for the device."""
    if tensors[0].device.type != "cuda":
        return list(tensors)
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device, for whose copy to a GPU the host does not wait; torch keeps pinned memory until then."""
    host = torch.from_numpy(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def answers(device: torch.device) -> bool:
    """False for a GPU after an error that every later call of this process returns, too, such as an illegal address."""
    if device.type == "cuda":
        try:
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError:
            return False
    return True
