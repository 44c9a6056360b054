"""Embed a uniform, so that a network can read which token the dice will choose."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

SIZE = 32  # features of a uniform
KINDS = ("bits", "fl", "th", "ar", "bits+nn", "fl+nn", "th+nn", "ar+nn")


class Auxiliary(nn.Module):
    """u → features → a linear map, or a small network where the kind ends in +nn (PTP, Eq. 14 and Table 5).

    `bits`: the 32 IEEE-754 bits of float32(u), highest first. `fl`: u itself. `th`: 1{u ≤ i/n}. `ar`: 1{u · 2^(i−1)
    mod 1 ≤ ½}, the digits of arithmetic coding. With `told` the temperature is embedded too: whether it is zero, so
    that u carries nothing, and its value. All maps start at zero, so that training begins at the network without u.
    """

    def __init__(self, hidden: int, kind: str = "bits", told: bool = False) -> None:
        if kind not in KINDS:
            raise ValueError(f"the embedding of uniforms is {kind!r}, but must be one of {', '.join(KINDS)}")
        super().__init__()
        self.kind, self.told = kind, told
        size = 1 if kind.startswith("fl") else SIZE
        self.map: nn.Module = nn.Linear(size, hidden)
        last = self.map
        if kind.endswith("+nn"):
            last = nn.Linear(hidden, hidden)
            self.map = nn.Sequential(self.map, nn.GELU(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        if told:
            self.temperature = nn.Linear(2, hidden, bias=False)
            nn.init.zeros_(self.temperature.weight)

    def forward(self, u: Float[Tensor, "*shape"], temperature: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape _"]:
        """Uniforms in [0, 1), float64 or float32, and the temperature that each is picked at; 0 is greedy.

        NaN is no uniform at all: its features are zero.
        """
        weight = next(self.map.parameters())
        embedded = self.map(features(u, self.kind.removesuffix("+nn")).to(weight.dtype))
        if self.told:
            told = torch.stack([(temperature == 0).to(weight.dtype), temperature.to(weight.dtype)], -1)
            embedded = embedded + self.temperature(told)
        return embedded


def features(u: Float[Tensor, "*shape"], kind: str) -> Float[Tensor, "*shape size"]:
    """What the map reads of uniforms, float32; zeros for NaN."""
    return torch.where(u.isnan()[..., None], 0.0, _features(u.nan_to_num(), kind))


def _features(u: Tensor, kind: str) -> Tensor:
    if kind == "bits":
        words = u.detach().cpu().float().contiguous().numpy().view(np.uint32)
        bits = (words[..., None] >> np.arange(31, -1, -1, dtype=np.uint32)) & 1
        return torch.from_numpy(bits.astype(np.float32)).to(u.device)
    u = u.double()[..., None]
    if kind == "fl":
        return u.float()
    steps = torch.arange(1, SIZE + 1, dtype=torch.float64, device=u.device)
    if kind == "th":
        return (u <= steps / SIZE).float()
    return ((u * 2 ** (steps - 1)) % 1 <= 0.5).float()
