"""Draft from a joint distribution of the next tokens: a probabilistic circuit over the target's last hidden state."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from saltus.core.canvas import Canvas
from saltus.core.forward import ForwardInputs
from saltus.core.noise import Noise
from saltus.core.protocols import Drafter, DraftGenerator
from saltus.core.rules import Rule, match, reject
from saltus.core.sampling import Sampling
from saltus.core.value_types import require_at_least
from saltus.methods.mtpc.drawn_window import can_draw_window, draft_drawn_window
from saltus.methods.shared.autoregressive import draft_autoregressively
from saltus.methods.shared.draft_tree import DraftOutputs, chooser, likely_paths
from saltus.methods.shared.hidden_state_drafter import HiddenStateDrafter
from saltus.methods.shared.query_chains import with_query_chains

SOURCE = "mtpc"


@dataclass(frozen=True)
class Mtpc:
    """Multi-token prediction with probabilistic circuits (MtPC, Grivas et al. 2025): one target call a step.

    The verification call computes the hidden state before the token that the verifier adds itself. That token is
    kept, and the circuit is conditioned on it. (The paper's shortcut drops the token, which changes the distribution
    when sampling.) Under `match` the likeliest paths are offered, or those that the text's own random numbers favour,
    each token given those before it. Under `reject` a chain is sampled, and the rule gets its distributions.
    """

    model: str = "auto"  # a folder of `saltus train mtpc`; auto: heads shipped for the target, or its own (EvaByte)
    num_draft_tokens: int = 16  # of a path, at most; never more than the heads' window
    top_k: int = 3  # tokens offered after each path, at most
    min_probability: float = 0.1  # under `reject`, stop where the product of the drafts' probabilities falls below this
    draw: str = "tokens"  # under `reject`: tokens one by one, or the window at once, in a stage for each level

    def __post_init__(self) -> None:
        require_at_least(self, "mtpc: ", num_draft_tokens=1, top_k=1)
        if not 0 <= self.min_probability < 1:
            raise ValueError(f"mtpc: min_probability is {self.min_probability}, but must lie in [0, 1)")
        if self.draw not in ("tokens", "window"):
            raise ValueError(f"mtpc: draw is {self.draw!r}, but must be tokens or window")

    @property
    def draft_models(self) -> dict[str, str]:
        return {"mtpc": f"heads:{self.model}"}

    def drafter(self, noise: Noise, sampling: Sampling, rule: Rule) -> Drafter:
        at_once = self.draw == "window" and rule is reject and can_draw_window(sampling)

        def draft(canvas: Canvas, hidden_states: Tensor, num_draft_tokens: int) -> DraftGenerator:
            inputs = ForwardInputs(canvas, network_name="mtpc", hidden_states=hidden_states)
            limits = num_draft_tokens, self.min_probability
            if at_once:
                return (yield from draft_drawn_window(inputs, *limits, noise, sampling, SOURCE))
            outputs = None
            if rule is match:
                outputs = yield with_query_chains(inputs, [(-1, [math.nan] * num_draft_tokens)], sampling.temperature)
                if isinstance(outputs, DraftOutputs) and outputs.predictions is not None:
                    choose = chooser(self.top_k, sampling, rule, noise, canvas.open_positions)
                    return likely_paths(outputs.predictions, canvas.decided_prefix[-2:].tolist(), choose, SOURCE)
            drafts = draft_autoregressively(inputs, *limits, noise, sampling, rule, SOURCE, outputs)
            return (yield from drafts)

        return HiddenStateDrafter(self.num_draft_tokens, draft)
