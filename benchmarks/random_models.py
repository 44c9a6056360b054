"""Make models of published shapes with random weights: a call costs what theirs costs, and no file is needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeLiteConfig,
    GptOssConfig,
    Lfm2MoeConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from saltus.kernels.packed_weight import PackedWeight
from saltus.models.cuda.packed_weight import GPUPackedWeight

SPAN = 128  # inputs that share a scale of 8-bit floats, as in DeepSeek V3 and Qwen3-FP8


def _sizes(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
    }  # fmt: skip


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SHAPES: dict[str, Callable[[], Any]] = {  # configurations by the name of a shape
    "0.6B": lambda: Qwen3Config(**_sizes(28, 1024, 3072, 16, 8, 151_936), head_dim=128, tie_word_embeddings=True),
    "1.7B": lambda: Qwen3Config(**_sizes(28, 2048, 6144, 16, 8, 151_936), head_dim=128, tie_word_embeddings=True),
    "7B": lambda: Qwen2Config(**_sizes(28, 3584, 18_944, 28, 4, 152_064), tie_word_embeddings=False),
    "8B": lambda: LlamaConfig(**_sizes(32, 4096, 14_336, 32, 8, 128_256), tie_word_embeddings=False),
    "30B-A3B": lambda: Qwen3MoeConfig(
        **_sizes(48, 2048, 6144, 32, 4, 151_936), **_EXPERTS, head_dim=128, tie_word_embeddings=False
    ),
    "9B-hybrid": Qwen3_5TextConfig,
    "20B-A4B": lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "30B-latent": lambda: Glm4MoeLiteConfig(first_k_dense_replace=1),
    "8B-A1B-conv": lambda: Lfm2MoeConfig(
        **_sizes(24, 2048, 7168, 32, 8, 65_536),
        moe_intermediate_size=1792,
        num_experts=32,
        num_experts_per_tok=4,
        num_dense_layers=2,
        layer_types=["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    ),
    "tiny": lambda: LlamaConfig(**_sizes(2, 64, 64, 2, 1, 304), head_dim=32, tie_word_embeddings=False),
}
SHAPE_NAMES = (
    "0.6B and 1.7B: Qwen3's; 7B: Qwen2.5's; 8B: Llama 3's; 30B-A3B: Qwen3's with experts; 9B-hybrid: Qwen3.5's, whose"
    " layers mostly keep a state; 20B-A4B: gpt-oss's; 30B-latent: GLM-4.7-Flash's, with experts and latent attention;"
    " 8B-A1B-conv: LFM2's, with experts and short convolutions; tiny: for rehearsals"
)


def random_model(
    shape: str, weights: str = "bf16", device: str = "cpu", distinct_rows: int | None = 8, dtype: Any = torch.bfloat16,
    layers: int | None = None,
) -> Any:  # fmt: skip
    """A model of this shape, whose weights are drawn on the device.

    Rows of a matrix repeat the first `distinct_rows`, which draws faster and reads alike; None: all are different, as
    those of routers always are.
    `weights` may be packed ("q4_1", "q8_0", on the CPU) and then multiply activations of 8 bits. "fp8" are 8-bit floats
    with a scale for 128 inputs, to be moved to a GPU; embeddings and the output layer stay in `dtype`.
    It has all layers of the shape, or the first so many.
    """
    config = SHAPES[shape]()
    if layers is not None:
        _keep_layers(config, layers)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, module in model.model.named_children():
        if name in ("rotary_emb", "pos_emb"):  # computed, not drawn
            setattr(model.model, name, type(module)(config=config).to(device))
    torch.manual_seed(0)
    for module in model.modules():
        kind = weights, distinct_rows
        if type(module).__name__.endswith("Router"):
            kind = "bf16", None
        elif weights == "fp8" and (isinstance(module, nn.Embedding) or module is model.lm_head):
            kind = "bf16", distinct_rows
        for name, parameter in list(module.named_parameters(recurse=False)):
            values = _random(parameter, *kind, device, dtype)
            module.register_parameter(name, nn.Parameter(values, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # what is added to experts' scores
                setattr(module, name, torch.zeros(buffer.shape, device=device))
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()


def _keep_layers(config: Any, count: int) -> None:
    config.num_hidden_layers = count
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:count])


def _random(parameter: Any, weights: str, distinct_rows: int | None, device: str, dtype: Any) -> Any:
    if parameter.ndim == 1:
        return torch.ones(parameter.shape, dtype=dtype, device=device)
    *stack, width = parameter.shape
    rows = math.prod(stack)
    if weights != "bf16":
        assert distinct_rows is not None, "packed rows repeat"
        if weights == "fp8":
            return _random_floats8(stack, width, distinct_rows)
        format = GGMLQuantizationType[weights.upper()]
        few = (torch.randn(distinct_rows, width) * 0.02).numpy()
        blocks = np.array(quantize(few, format)).view(np.uint8).reshape(distinct_rows, -1)
        whole = torch.from_numpy(blocks).repeat(rows // distinct_rows, 1)
        return PackedWeight.from_blocks(whole.unflatten(0, stack), format, "int8")
    if distinct_rows is None:
        return torch.randn(parameter.shape, dtype=dtype, device=device).mul_(0.02)
    few = (torch.randn(distinct_rows, width, device=device) * 0.02).to(dtype)
    return few.repeat(rows // distinct_rows, 1).unflatten(0, stack)


def _random_floats8(stack: list[int], width: int, distinct_rows: int) -> GPUPackedWeight:
    spans = (torch.randn(distinct_rows, width) * 0.02).split(SPAN, 1)
    scales = torch.stack([each.abs().amax(1) for each in spans], 1) / torch.finfo(torch.float8_e4m3fn).max
    floats = torch.cat([each / scale[:, None] for each, scale in zip(spans, scales.T, strict=True)], 1)
    repeated = [
        each.repeat(math.prod(stack) // distinct_rows, 1).unflatten(0, stack)
        for each in (floats.to(torch.float8_e4m3fn), scales)
    ]
    return GPUPackedWeight.from_floats(*repeated, min(SPAN, width))
