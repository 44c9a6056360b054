"""Muse Glimmer's text as a causal model: Transformers has it only as a part of its model of images and text."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, MuseGlimmerTextConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerPreTrainedModel,
    MuseGlimmerRMSNorm,
    MuseGlimmerTextModel,
)


class MuseGlimmerDecoder(MuseGlimmerTextModel):
    """Transformers' layers, with the norm of embeddings outside of them, so that queries of drafters have it, too."""

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.embed_tokens: Any = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.embed_norm = MuseGlimmerRMSNorm(eps=config.rms_norm_eps, with_scale=False)
        self.post_init()

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Any = None, inputs_embeds: Any = None, **settings: Any
    ) -> Any:
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=self.embed_norm(embeddings), **settings)


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    """The layers and their output layer, whose logits are scaled and capped as those of the whole model."""

    config: MuseGlimmerTextConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, logits_to_keep: int | Tensor = 0, **settings: Any) -> Any:
        outputs = self.model(input_ids, **settings)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept]) * self.config.output_multiplier
        if cap := self.config.final_logit_softcapping:
            logits = torch.tanh(logits / cap) * cap
        others = {name: found for name, found in outputs.items() if name != "last_hidden_state"}
        return CausalLMOutputWithPast(logits=logits, **others)
