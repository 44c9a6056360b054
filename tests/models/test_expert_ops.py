"""Descriptions of mixtures of experts give what Transformers' own blocks give."""

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from architectures import LLAMA_LIKE, VOCAB
from saltus.kernels import native
from saltus.models.architectures import gpt_oss
from saltus.models.common_layers import deepseek_mixture, mixture
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cpu.expert_ops import experts_struct
from saltus.models.decoder_description import Experts

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")

HIDDEN, EXPERTS = 48, 8
COMMON = {**LLAMA_LIKE, "vocab_size": VOCAB, "num_hidden_layers": 1, "initializer_range": 0.3, "pad_token_id": 0}
GROUPED = {
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 40,
    "first_k_dense_replace": 0, "num_key_value_heads": 6, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "q_lora_rank": 16, "kv_lora_rank": 16,
}  # fmt: skip
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": 3}


def llama4(config: Any) -> Experts:
    path = "layers.0.feed_forward"
    return mixture(
        config, 0, router=f"{path}.router", experts=f"{path}.experts", scoring="sigmoid", scales_inputs=True,
        is_transposed=True,
    )  # fmt: skip


def lfm2_moe(config: Any) -> Experts:
    path = "layers.0.feed_forward"
    return Experts(
        f"{path}.gate", f"{path}.experts", config.num_experts_per_tok, scoring="sigmoid", is_normalized=True,
        least_sum=1e-6, scale=config.routed_scaling_factor, selection_bias=f"{path}.expert_bias",
    )  # fmt: skip


def deepseek_v2(config: Any) -> Experts:
    return mixture(
        config, 0, groups=config.n_group, top_groups=config.topk_group, scale=config.routed_scaling_factor
    )  # fmt: skip


BLOCKS = {
    "GptOss": ({**LOCAL, "head_dim": 8, "swiglu_limit": 1.0}, lambda config: gpt_oss.describe(config).layers[0].mlp),
    "Llama4": ({**LOCAL, "num_experts_per_tok": 2, "head_dim": 8, "interleave_moe_layer_step": 1}, llama4),
    "DeepseekV2": ({**GROUPED, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}, deepseek_v2),
    "DeepseekV3": (GROUPED, lambda config: replace(deepseek_mixture(config, 0), shared=None)),
    "Glm4Moe": (GROUPED, lambda config: replace(deepseek_mixture(config, 0), shared=None)),
    "Lfm2Moe": (
        {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_dense_layers": 0,
         "layer_types": ["full_attention"]},
        lfm2_moe,
    ),
}  # fmt: skip


def block_of(name: str) -> tuple[Any, Any, Experts]:
    """A tiny model without its output layer, the block of its only layer, and its description."""
    changes, describe = BLOCKS[name]
    kind = {"Llama4": "Llama4TextConfig"}.get(name, f"{name}Config")
    config = getattr(transformers, kind)(**COMMON | changes)
    transformers.set_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_experts_implementation("eager")
    base = model.model
    for name, buffer in base.named_buffers():
        if "bias" in name:
            nn.init.normal_(buffer, std=0.3)
    layer = base.layers[0]
    return base, getattr(layer, "mlp", None) or layer.feed_forward, describe(config)


@torch.inference_mode()
def run(base: Any, experts: Experts, x: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """What the kernel gives for rows [rows, hidden]."""
    weights, out = Resolver(base), torch.empty_like(x)
    struct = experts_struct(experts, weights, HIDDEN, {})
    struct.x, struct.out, struct.rows = x.data_ptr(), out.data_ptr(), len(x)
    struct.shared = None if shared is None else shared.data_ptr()
    kernel = native.kernel("experts", torch.float32, torch.device("cpu"))
    assert kernel is not None
    assert kernel(ctypes.byref(struct)) == 0
    return out


@pytest.mark.parametrize("name", BLOCKS)
def test_a_description_gives_what_the_block_gives(name):
    base, block, experts = block_of(name)
    x = torch.randn(30, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = block(x[None])
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted).view(30, HIDDEN)
        own = getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)
        shared = None if own is None else own(x)
    for _ in range(2):  # the second time with weights that lie as the first left them
        out = run(base, experts, x, shared)
        assert (out - wanted).norm() < 1e-5 * wanted.norm()
    with torch.inference_mode():
        again = block(x[None])
        again = (again[0] if isinstance(again, tuple) else again).view(30, HIDDEN)
    assert (again - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"top_k": 5}, "chooses 5 of 4 experts"),
        ({"top_k": 0}, "experts_per_token is 0"),
        ({"groups": 3}, "of 3 groups"),
        ({"top_groups": 9}, "chooses 9 of 4 groups"),
        ({"best_of_group": 3}, "by 3 of their members"),
    ],
)
def test_numbers_that_do_not_fit_the_experts_are_refused(changes, complaint):
    base, _, experts = block_of("DeepseekV3")
    with pytest.raises(ValueError, match=complaint):
        experts_struct(replace(experts, **changes), Resolver(base), HIDDEN, {})
