"""Kernels get pointers only to what has the sizes that they read and write."""

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from saltus.kernels import native
from saltus.models.cpu.decoder_weights import NormWeights, linear_struct
from saltus.models.cpu.native_decoder import NativeDecoder
from tiny_models import tiny_llama

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")

INPUTS, OUTPUTS = 8, 6


def product(
    x=(3, INPUTS), out=(3, OUTPUTS), norm=INPUTS, gate=(3, INPUTS), add=(3, OUTPUTS), bias=OUTPUTS, second=INPUTS
):
    """The kernel's arguments of a product of two matrices, with buffers of these sizes."""
    one, other = nn.Linear(INPUTS, OUTPUTS), nn.Linear(second, OUTPUTS, bias=False)
    one.bias = nn.Parameter(torch.zeros(bias))
    weights = [(one, torch.zeros(out)), (other, None)]
    return linear_struct(
        torch.zeros(x), weights, NormWeights(torch.ones(norm), 0, 1e-5), torch.zeros(gate), torch.zeros(add)
    )


def test_a_product_whose_buffers_fit_is_described_with_their_sizes():
    struct = product()
    assert (struct.inputs, struct.count, list(struct.outs)[:2]) == (INPUTS, 2, [OUTPUTS, OUTPUTS])
    assert product(x=(1,)).inputs == INPUTS, "a vector only holds a place"
    assert product(x=(3, 2, 4), out=(3, 2, 3)).inputs == INPUTS, "heads beside each other"


@pytest.mark.parametrize(
    "sizes",
    [
        {"x": (3, INPUTS - 1)}, {"x": (3, 2, 5)}, {"out": (3, OUTPUTS - 1)}, {"out": (3, OUTPUTS + 1)},
        {"norm": INPUTS - 1}, {"gate": (3, INPUTS - 1)}, {"add": (3, OUTPUTS - 1)}, {"bias": OUTPUTS - 1},
        {"second": INPUTS - 1},
    ],
)  # fmt: skip
def test_a_product_with_a_buffer_of_another_size_is_not_made(sizes):
    with pytest.raises(AssertionError):
        product(**sizes)


def tiny_qwen3() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (300, 31)), ("model.norm.weight", (31,)), ("lm_head.weight", (300, 31)),
        *((f"model.layers.1.{layer}.weight", shape) for layer, shape in {
            "self_attn.q_proj": (16, 32), "self_attn.k_proj": (8, 32), "self_attn.v_proj": (16, 31),
            "self_attn.o_proj": (32, 31), "mlp.gate_proj": (47, 32), "mlp.up_proj": (48, 31),
            "mlp.down_proj": (31, 48), "input_layernorm": (31,), "post_attention_layernorm": (33,),
            "self_attn.q_norm": (4,), "self_attn.k_norm": (16,),
        }.items()),
    ],
)  # fmt: skip
def test_a_decoder_with_a_weight_of_another_size_is_not_made(name, shape):
    model = tiny_qwen3()
    NativeDecoder(model, 4)
    path, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(path), attribute, nn.Parameter(torch.zeros(shape)))
    with pytest.raises(AssertionError):
        NativeDecoder(model, 4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 3}, "cannot share evenly"), ({"head_dim": 7}, "must be even"),
        ({"hidden_size": 0}, "hidden_size is 0"), ({"intermediate_size": -48}, "intermediate_size is -48"),
    ],
)  # fmt: skip
def test_a_decoder_of_sizes_that_kernels_cannot_divide_is_refused(changes, said):
    model = tiny_llama()
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=said):
        NativeDecoder(model, 4)
