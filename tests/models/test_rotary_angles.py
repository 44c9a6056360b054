"""Rotary modules are asked for angles as all releases of Transformers allow."""

import torch
from transformers import LlamaConfig, Qwen3_5TextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from saltus.models.rotary_angles import angles_of_positions

SIZES = {"hidden_size": 64, "num_attention_heads": 1, "head_dim": 64}


def test_modules_with_sections_get_positions_of_each_and_others_one():
    shapes = []
    for module in (Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**SIZES)), LlamaRotaryEmbedding(LlamaConfig(**SIZES))):
        module.register_forward_pre_hook(
            lambda _, args, given: shapes.append(tuple(given["position_ids"].shape)), with_kwargs=True
        )
        cosines, sines = angles_of_positions(module, torch.zeros(1, 5, 64), torch.arange(5)[None])
        assert cosines.shape == sines.shape == (1, 5, cosines.shape[-1])
        assert torch.equal(cosines[0, 0], torch.ones_like(cosines[0, 0]))
    assert shapes == [(3, 1, 5), (1, 5)], "before Transformers 5.24, Qwen3.5's takes no others"
