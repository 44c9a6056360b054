"""Of models that read images, too, the text part alone is loaded: the same logits on our kernels, no other weights."""

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import set_seed

from architectures import ARCHITECTURES, LLAMA_LIKE, VOCAB, chain, read, text
from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.load_model import load_model
from saltus.models.causal import CausalNetwork

TEXT = {
    **LLAMA_LIKE,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
EYE = {"hidden_size": 32, "intermediate_size": 32}
PATCHES = {**EYE, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
BLOCKS = {**EYE, "depth": 1, "num_heads": 2, "out_hidden_size": LLAMA_LIKE["hidden_size"]}
THREE_DIMENSIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
WHOLE = {
    "Gemma3": ("Gemma3ForCausalLM", {**TEXT, "head_dim": 16}, PATCHES, {"mm_tokens_per_image": 4}),
    "Mistral3": ("MistralForCausalLM", {**TEXT, "model_type": "mistral"}, {**PATCHES, "model_type": "pixtral"}, {}),
    "Mistral3 with text of Mistral4": (
        "Mistral4ForCausalLM", {**TEXT, **ARCHITECTURES["Mistral4"], "model_type": "mistral4"},
        {**PATCHES, "model_type": "pixtral"}, {},
    ),
    "SmolVLM": ("LlamaForCausalLM", {**TEXT, "model_type": "llama", "pad_token_id": 2}, PATCHES, {}),
    "Qwen3VL": ("Qwen3ForCausalLM", {**TEXT, "head_dim": 16}, BLOCKS, {}),
    "Qwen2_5_VL": ("Qwen2ForCausalLM", {**TEXT, "rope_parameters": THREE_DIMENSIONS}, BLOCKS, {}),
    "MuseGlimmer": (
        "MuseGlimmerForCausalLM", {**TEXT, **ARCHITECTURES["MuseGlimmer"]},
        {**EYE, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"out_hidden_size": 128, "projector_hidden_size": 32},
    ),
    "Qwen3VLMoe": (
        "Qwen3MoeForCausalLM",
        {**TEXT, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}, BLOCKS, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_part_of_a_model_has_the_logits_of_the_whole(name, tmp_path):
    (of_text, settings, vision, more), kind = WHOLE[name], name.split()[0]
    set_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=settings, vision_config=vision, **more)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    model, tokens = load_model(name, tmp_path), text(30)
    assert type(model).__name__ == of_text
    with torch.inference_mode():
        expected = whole(input_ids=torch.from_numpy(tokens[None])).logits[0].float()
    ours = chain(CausalNetwork(model), tokens).float()
    assert (ours - expected).norm() < 1e-5 * expected.norm()


def test_the_text_part_of_tied_embeddings_is_packed_with_its_output_layer(tmp_path):
    _, settings, vision, more = WHOLE["Gemma3"]
    text_settings = {**settings, "hidden_size": 96}
    config = transformers.Gemma3Config(text_config=text_settings, vision_config=vision, **more)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = load_model("Gemma3", tmp_path, weights="q8_0")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head.weight, PackedWeight) == (native.load_kernels() is not None)
    network, tokens = CausalNetwork(model), text(20)
    assert torch.equal(chain(network, tokens)[-1], read(network, tokens)[0])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.Glm4vConfig, "no causal language model for the text part of glm4v"),
        (transformers.T5Config, "no causal language model of the type t5"),
    ],
)
def test_a_model_whose_text_part_has_no_class_is_refused_in_a_line(config, said, tmp_path):
    config().save_pretrained(tmp_path)
    save_file({f"{number}": torch.zeros(1) for number in range(50)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said) as error:
        load_model("whole", tmp_path)
    assert "\n" not in str(error.value)
    assert "choose one that does" in str(error.value)
