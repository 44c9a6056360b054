"""Folders of models that Transformers has no class for run as those with the same layers; their code is not."""

import json

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, LlamaConfig, LlamaForCausalLM

from saltus.loading.load_model import load_model
from saltus.loading.same_layers import same_layers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "initializer_range": 0.2,
}  # fmt: skip
SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8}
CASES = {
    "xverse": ({}, LlamaForCausalLM, LlamaConfig, {}),
    "minicpm": (SCALES, GraniteForCausalLM, GraniteConfig, {
        "attention_multiplier": 8**-0.5, "embedding_multiplier": 12.0, "residual_multiplier": 0.7,
        "logits_scaling": 4.0, "tie_word_embeddings": True}),  # as MiniCPM's code where the file is silent
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_a_folder_of_a_model_with_known_layers_has_their_logits(kind, tmp_path):
    settings, model_class, config_class, multipliers = CASES[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **multipliers)).eval()
    model.save_pretrained(tmp_path)
    code = {"auto_map": {"AutoModelForCausalLM": f"modeling_{kind}.Model", "AutoConfig": f"configuration_{kind}.C"}}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "architectures": ["Model"], **code, **SIZES, **settings})
    )
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(load_model("tiny", tmp_path, torch.float32)(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("setting", [{"num_experts": 8}, {"sparse_config": {"topk": 64}}])
def test_other_layers_of_minicpm_are_refused(setting):
    with pytest.raises(ValueError, match="not supported"):
        same_layers({"model_type": "minicpm", **SIZES, **setting})
