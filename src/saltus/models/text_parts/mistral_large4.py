"""The text of Mistral Large 4."""

from typing import Any, ClassVar

from transformers import GenerationMixin, MistralLarge4TextConfig
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.mistral_large4.modeling_mistral_large4 import (
    MistralLarge4PreTrainedModel,
    MistralLarge4TextModel,
)

from saltus.models.text_parts.causal_text import CausalText


class MistralLarge4ForCausalLM(CausalText, MistralLarge4PreTrainedModel, GenerationMixin):
    """See CausalText."""

    config: MistralLarge4TextConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    layers_class: ClassVar[Any] = MistralLarge4TextModel


OUTSIDE_OF_LAYERS = {
    r"^tok_embeddings\.": "model.embed_tokens.", r"^lerope\.alpha": "model.rotary_emb.alpha",
    r"^layers\.": "model.layers.", r"^norm\.": "model.norm.", r"^output\.": "lm_head.",
}  # fmt: skip
WHOLE = get_checkpoint_conversion_mapping("mistral_large4") or []
IN_LAYERS = [each for each in WHOLE if isinstance(each, WeightRenaming) and not each.source_patterns[0].startswith("^")]
register_checkpoint_conversion_mapping(  # Transformers converts the layers' own names after these
    MistralLarge4ForCausalLM.__name__,
    [*(WeightRenaming(name, ours) for name, ours in OUTSIDE_OF_LAYERS.items()), *IN_LAYERS],
)
