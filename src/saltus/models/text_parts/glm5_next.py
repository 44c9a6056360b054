"""The text of GLM-5.3 Flash."""

from typing import Any, ClassVar

from transformers import GenerationMixin
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel

from saltus.models.text_parts.causal_text import CausalText


class Glm5NextForCausalLM(CausalText, Glm5NextPreTrainedModel, GenerationMixin):
    """See CausalText."""

    config: Glm5NextTextConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    layers_class: ClassVar[Any] = Glm5NextTextModel
