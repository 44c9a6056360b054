"""Embed each position's uniform random number, which will pick its token."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

NUM_FEATURES = 32  # features of a uniform, of most kinds
FEATURES = ("bits", "scalar", "thermometer", "arithmetic", "interpolated")
SIZES = {"scalar": 1, "interpolated": 3}  # of features that are not NUM_FEATURES
KINDS = (*FEATURES, *(f"{name}+nn" for name in FEATURES))


class UniformEmbedding(nn.Module):
    """u → features → a linear map, or a small network where the kind ends in +nn (PTP, Eq. 14 and Table 5).

    `bits`: the 32 IEEE-754 bits of float32(u), highest first. `scalar` (the paper's FL): u itself. `thermometer` (TH):
    1{u ≤ i/n}. `arithmetic` (AR): 1{u · 2^(i−1) mod 1 ≤ ½}, the digits of arithmetic coding. `interpolated` (the
    paper's code): mixtures of three vectors, those for u = 0, ½ and 1. With `embeds_temperature` the temperature is
    embedded too: whether it is zero (then u has no effect), and its value. All maps start at zero, so training starts
    without u. `has_blank` adds a vector that an adapter reads in place of a token's embedding.
    """

    def __init__(
        self, hidden_size: int, kind: str = "bits", embeds_temperature: bool = False, has_blank: bool = False
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"the embedding of uniforms is {kind!r}, but must be one of {', '.join(KINDS)}")
        super().__init__()
        self.kind, self.embeds_temperature = kind, embeds_temperature
        size = SIZES.get(kind.removesuffix("+nn"), NUM_FEATURES)
        self.map: nn.Module = nn.Linear(size, hidden_size)
        last = self.map
        if kind.endswith("+nn"):
            last = nn.Linear(hidden_size, hidden_size)
            self.map = nn.Sequential(self.map, nn.GELU(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        if embeds_temperature:
            self.temperature = nn.Linear(2, hidden_size, bias=False)
            nn.init.zeros_(self.temperature.weight)
        self.blank = nn.Parameter(torch.zeros(hidden_size)) if has_blank else None

    def forward(self, u: Float[Tensor, "*shape"], temperature: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape _"]:
        """Uniforms in [0, 1), float64 or float32, and the temperature of each; 0 is greedy.

        NaN is no uniform: its features are zero.
        """
        weight = next(self.map.parameters())
        embedded = self.map(uniform_features(u, self.kind.removesuffix("+nn")).to(weight.dtype))
        if self.embeds_temperature:
            features = torch.stack([(temperature == 0).to(weight.dtype), temperature.to(weight.dtype)], -1)
            embedded = embedded + self.temperature(features)
        return embedded


def uniform_features(u: Float[Tensor, "*shape"], kind: str) -> Float[Tensor, "*shape size"]:
    """The features of uniforms, float32; zeros for NaN."""
    return torch.where(u.isnan()[..., None], 0.0, _encode_uniforms(u.nan_to_num(), kind))


def _encode_uniforms(u: Tensor, kind: str) -> Tensor:
    if kind == "bits" and u.device.type != "cpu":
        places = torch.arange(31, -1, -1, dtype=torch.int32, device=u.device)
        return (u.detach().float().contiguous().view(torch.int32)[..., None] >> places & 1).float()
    if kind == "bits":
        words = u.detach().float().contiguous().numpy().view(np.uint32)
        bits = (words[..., None] >> np.arange(31, -1, -1, dtype=np.uint32)) & 1
        return torch.from_numpy(bits.astype(np.float32))
    u = u.double()[..., None]
    if kind == "scalar":
        return u.float()
    if kind == "interpolated":
        knots = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64, device=u.device)
        return (1 - 2 * (u - knots).abs()).clamp_min(0).float()
    steps = torch.arange(1, NUM_FEATURES + 1, dtype=torch.float64, device=u.device)
    if kind == "thermometer":
        return (u <= steps / NUM_FEATURES).float()
    return ((u * 2 ** (steps - 1)) % 1 <= 0.5).float()
