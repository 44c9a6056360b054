"""Muse Glimmer's text."""

from typing import Any, ClassVar

from torch import nn
from transformers import GenerationMixin, MuseGlimmerTextConfig
from transformers.models.muse_glimmer.modeling_muse_glimmer import (
    MuseGlimmerPreTrainedModel,
    MuseGlimmerRMSNorm,
    MuseGlimmerTextModel,
)

from saltus.models.text_parts.causal_text import CausalText


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


class MuseGlimmerForCausalLM(CausalText, MuseGlimmerPreTrainedModel, GenerationMixin):
    """See CausalText."""

    config: MuseGlimmerTextConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    layers_class: ClassVar[Any] = MuseGlimmerDecoder
