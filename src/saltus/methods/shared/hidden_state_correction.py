"""Correct a drafter's predictions by the two tokens before each: one pass predicts all positions, and none knows the
tokens that are drafted before it.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

RMS_EPSILON = 1e-6


def rms_normalized(x: Tensor) -> Tensor:
    """x divided by its root mean square; each row rounds alike in every call."""
    wide = x.float()
    return (wide / ((wide * wide).mean(-1, keepdim=True) + RMS_EPSILON).sqrt()).to(x.dtype)


class TokenCorrectionModel(nn.Module):
    """h + C·(SiLU(A·e(left) + B·e(second left) + G·h) − SiLU(G·h)), for the last hidden state h of a query.

    e is the target's embedding of a token, divided by its root mean square. A token that is not known yet contributes
    nothing, so with none of them h stays as it is: the predictions of a single pass. C is zero at first.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(hidden, width, bias=False)
        self.second_left = nn.Linear(hidden, width, bias=False)
        self.state = nn.Linear(hidden, width, bias=False)
        self.output = nn.Linear(width, hidden, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(
        self,
        hidden: Float[Tensor, "*rows hidden"],
        left: Float[Tensor, "*rows hidden"],
        second_left: Float[Tensor, "*rows hidden"],
    ) -> Float[Tensor, "*rows hidden"]:
        """The corrected hidden states; `left` and `second_left` are normalised embeddings, zeros where unknown."""
        of_state = self.state(hidden)
        with_tokens = functional.silu(of_state + self.left(left) + self.second_left(second_left))
        return hidden + self.output(with_tokens - functional.silu(of_state))

    def after_tokens(
        self,
        hidden: Float[Tensor, "*queries hidden"],
        left: Int[Tensor, "*query_inputs"],
        second_left: Int[Tensor, "*query_inputs"],
        embeddings: Tensor,
    ) -> Float[Tensor, "*queries hidden"]:
        """The hidden states of queries, corrected by the two tokens before each; −1 is a token not known yet."""
        embedded = (
            rms_normalized(functional.embedding(tokens.clamp_min(0), embeddings).to(hidden.dtype))
            * (tokens >= 0)[..., None]
            for tokens in (left, second_left)
        )
        return self(hidden, *embedded)
