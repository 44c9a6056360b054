"""The text of Step 3.7 Flash, which is Step 3.5 Flash: Transformers has no class for that either."""

from typing import Any, ClassVar

from transformers import GenerationMixin, Step3p7TextConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.integrations.moe import use_experts_implementation
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7PreTrainedModel, Step3p7TextModel

from saltus.models.text_parts.causal_text import CausalText


@use_experts_implementation
class Step3p5Experts(Step3p7Experts):
    """Transformers' experts, whose products may be computed in other ways, as those of other models."""


class Step3p5Decoder(Step3p7TextModel):
    """Transformers' layers with these experts."""

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        layers: Any = self.layers
        for layer in layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts = Step3p5Experts(config, layer.mlp.experts.limit)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class Step3p5ForCausalLM(CausalText, Step3p7PreTrainedModel, GenerationMixin):
    """See CausalText. Its weights have the names of the whole model's text part, but for where this lies in it."""

    config: Step3p7TextConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    layers_class: ClassVar[Any] = Step3p5Decoder


register_checkpoint_conversion_mapping(
    Step3p5ForCausalLM.__name__,
    [
        each
        for each in get_checkpoint_conversion_mapping("step3p7") or ()
        if not any(target.startswith("model.") for target in each.target_patterns)
    ],
)
