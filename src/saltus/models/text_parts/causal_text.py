"""Put an output layer after the layers of a text part."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast


class CausalText:
    """What is the same for all: beside it a class has Transformers' `PreTrainedModel` of its family.

    Logits are scaled and capped as those of the whole model, where its configuration says so.
    """

    layers_class: ClassVar[Any]
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        self.model = self.layers_class(config)
        self.lm_head = nn.Linear(config.hidden_size, self.model.embed_tokens.num_embeddings, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: Any = None, logits_to_keep: int | Tensor = 0, **settings: Any) -> Any:
        """See Transformers' causal models."""
        outputs = self.model(input_ids, **settings)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept]) * getattr(self.config, "output_multiplier", 1.0)
        if cap := getattr(self.config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        others = {name: found for name, found in outputs.items() if name != "last_hidden_state"}
        return CausalLMOutputWithPast(logits=logits, **others)
