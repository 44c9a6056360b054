"""Of models that read images, too, the text part alone is loaded: the same logits on our kernels, no other weights."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
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
SOUNDS = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16,
    "output_dim": 48, "max_source_positions": 20, "downsample_hidden_size": 16,
}  # fmt: skip
MIXTURE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
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
    "MistralLarge4": (
        "MistralLarge4ForCausalLM", {**TEXT, **ARCHITECTURES["MistralLarge4"], "model_type": "mistral_large4_text"},
        {**PATCHES, "model_type": "pixtral"}, {},
    ),
    "MuseGlimmer": (
        "MuseGlimmerForCausalLM", {**TEXT, **ARCHITECTURES["MuseGlimmer"]},
        {**EYE, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"out_hidden_size": 128, "projector_hidden_size": 32},
    ),
    "Step3p7": (
        "Step3p5ForCausalLM", {**TEXT, **ARCHITECTURES["Step3p7"]},
        {"hidden_size": 32, "layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}, {},
    ),
    "Glm5Next": (
        "Glm5NextForCausalLM", {**TEXT, **ARCHITECTURES["Glm5Next"], "pad_token_id": 2},
        {**PATCHES, "out_hidden_size": LLAMA_LIKE["hidden_size"]}, {},
    ),
    "Glm4v": ("Glm4ForCausalLM", {**TEXT, "rope_parameters": {**THREE_DIMENSIONS, "partial_rotary_factor": 0.5,
        "mrope_section": [1, 0, 1]}}, BLOCKS, {}),
    "GlmOcr": ("Glm4ForCausalLM", {**TEXT, "rope_parameters": {**THREE_DIMENSIONS, "mrope_section": [1, 2, 1]}},
        BLOCKS, {}),
    "PaddleOCRVL": (
        "LlamaForCausalLM", {**TEXT, "head_dim": 16, "use_bias": True, "rope_parameters": {
            **THREE_DIMENSIONS, "mrope_section": [2, 3, 3]}}, PATCHES, {},
    ),
    "Glm4vMoe": (
        "Glm4MoeForCausalLM", {**TEXT, **ARCHITECTURES["Glm4Moe"], "rope_parameters": {
            **THREE_DIMENSIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}, BLOCKS, {},
    ),
    "HunYuanVL": (
        "HunYuanDenseV1ForCausalLM", {**TEXT, "head_dim": 16, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0, "mrope_section": [2, 2, 2, 2]}},
        {**EYE, "num_hidden_layers": 1, "num_attention_heads": 2, "text_hidden_size": 48}, {},
    ),
    "Granite4Vision": (
        "GraniteForCausalLM", {**TEXT, **ARCHITECTURES["Granite"]},
        {**PATCHES, "hidden_size": 64, "model_type": "siglip_vision_model"},
        {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    ),
    "GraniteDocling": (
        "GraniteForCausalLM", {**TEXT, **ARCHITECTURES["Granite"], "pad_token_id": 2},
        {**PATCHES, "image_size": 64, "patch_size": 16, "out_hidden_size": 48, "deepstack_visual_indexes": [0]}, {},
    ),
    "Qwen2_5OmniThinker": (
        "Qwen2ForCausalLM", {**TEXT, "rope_parameters": THREE_DIMENSIONS}, BLOCKS, {"audio_config": SOUNDS},
    ),
    "Qwen3OmniMoeThinker": (
        "Qwen3MoeForCausalLM", {**TEXT, **MIXTURE, "norm_topk_prob": False}, BLOCKS, {"audio_config": SOUNDS},
    ),
    "Qwen3VLMoe": (
        "Qwen3MoeForCausalLM", {**TEXT, **MIXTURE}, BLOCKS, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_part_of_a_model_has_the_logits_of_the_whole(name, tmp_path):
    (of_text, settings, vision, more), kind = WHOLE[name], name.split()[0]
    set_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=settings, vision_config=vision, **more)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    if kind.endswith("Thinker"):  # published with the part that speaks
        spoken = getattr(transformers, f"{kind.removesuffix('Thinker')}Config")(thinker_config=config.to_dict())
        spoken.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        save_file({f"thinker.{key}": weight for key, weight in weights.items()}, tmp_path / "model.safetensors")
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
        (transformers.Ernie4_5_VLMoeConfig, "no causal language model for the text part of ernie4_5_vl_moe"),
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
