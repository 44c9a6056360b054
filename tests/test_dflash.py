"""DFlash drafters compute what the paper's network computes, draft like any other, and move to other engines and back."""

import numpy as np
import pytest
import torch
from transformers import set_seed

import saltus
from conftest import tiny_llama
from saltus.networks.draft_models.dflash import DFlashModel, DFlashShape
from saltus.networks.draft_models.dflash_network import DFlashNetwork
from saltus.networks.models.causal import CausalNetwork
from test_ptp import question, states

LENGTHS = (3, 40, 300, 17, 1, 150)


def plain_dflash(weights, shape, embeddings, unembedding, hidden_states, last_token):
    """The logits of all rows of a block, written down row by row after Chen et al. 2026, in float64."""
    w = {name: weight.double() for name, weight in weights.items()}

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + shape["eps"]).sqrt() * w[name]

    def rotate(x, position):  # [heads, dim]
        half = x.shape[-1] // 2
        angles = position * shape["theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1)

    context = norm(hidden_states.double() @ w["fc.weight"].T, "hidden_norm.weight")
    rows = [embeddings[last_token].double(), *(embeddings[shape["mask"]].double(),) * shape["window"]]
    dim, group = shape["dim"], shape["heads"] // shape["kv_heads"]
    for number in range(shape["layers"]):
        at = f"layers.{number}."
        inputs = [norm(row, at + "input_layernorm.weight") for row in rows]
        keys, values = [], []
        for position, read in enumerate([*context, *inputs]):
            key = (w[at + "self_attn.k_proj.weight"] @ read).view(-1, dim)
            keys.append(rotate(norm(key, at + "self_attn.k_norm.weight"), position))
            values.append((w[at + "self_attn.v_proj.weight"] @ read).view(-1, dim))
        keys, values = torch.stack(keys), torch.stack(values)
        for row, x in enumerate(inputs):
            query = (w[at + "self_attn.q_proj.weight"] @ x).view(-1, dim)
            query = rotate(norm(query, at + "self_attn.q_norm.weight"), len(context) + row)
            heads = []
            for head in range(shape["heads"]):
                scores = keys[:, head // group] @ query[head] / dim**0.5
                heads.append(scores.softmax(0) @ values[:, head // group])
            rows[row] = rows[row] + w[at + "self_attn.o_proj.weight"] @ torch.cat(heads)
            x = norm(rows[row], at + "post_attention_layernorm.weight")
            gate, up = w[at + "mlp.gate_proj.weight"] @ x, w[at + "mlp.up_proj.weight"] @ x
            rows[row] = rows[row] + w[at + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
    return torch.stack([norm(row, "norm.weight") @ unembedding.double().T for row in rows])


def dflash_model(target, trainable=False, **changes) -> DFlashModel:
    set_seed(7)
    shape = {"hidden": 32, "intermediate": 48, "taps": (1,), "mask_token": 299, "heads": 8, "kv_heads": 4, "head_dim": 16}
    shape = DFlashShape(**shape | {"window": 3} | changes)
    weights = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    model = DFlashModel(shape, torch.arange(5, 250), *weights, trainable)
    for name, weight in model.state_dict().items():
        if "embed_tokens" not in name and "lm_head" not in name:
            near_one = 1 + 0.2 * torch.randn(weight.shape) if weight.ndim == 1 else None
            drawn = near_one if near_one is not None else 0.2 * torch.randn(weight.shape)
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, torch.nn.Parameter(drawn, requires_grad=trainable))
    return model.eval()


def dflash_network(target: CausalNetwork, dtype=torch.float32, kernels: bool = True, **changes) -> DFlashNetwork:
    model = dflash_model(target.model, trainable=not kernels, **changes).to(dtype)
    target.add_hidden_state_layers(model.shape.taps)
    network = DFlashNetwork(model, target)
    if not kernels:
        network.context_layers.native_decoder = None
    return network


def published_names(model: DFlashModel) -> dict[str, torch.Tensor]:
    found = {name.removeprefix("decoder.model."): weight.detach() for name, weight in model.state_dict().items()}
    return {name: weight for name, weight in found.items() if "embed_tokens" not in name and "lm_head" not in name}


def plain_shape(shape: DFlashShape) -> dict:
    return {
        "eps": shape.norm_epsilon, "theta": shape.rope_theta, "mask": shape.mask_token, "window": shape.window,
        "dim": shape.head_dim, "heads": shape.heads, "kv_heads": shape.kv_heads, "layers": shape.layers,
    }  # fmt: skip


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "transformers"])
@pytest.mark.parametrize("taps", [(1,), (1, 2)])
def test_it_computes_what_the_paper_writes_down(taps, kernels):
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    network, text = dflash_network(target, taps=taps, kernels=kernels), np.random.default_rng(0).integers(5, 250, 21)
    hidden = states(target, text)
    outputs = network.forward([question(text, hidden[:-1])], [network.new_kv_cache()])[0]
    model = network.model
    expected = plain_dflash(
        published_names(model), plain_shape(model.shape), target.model.get_input_embeddings().weight.detach(),
        model.lm_head.weight.detach(), hidden[:-1, : len(taps) * 32], int(text[-1]),
    )  # fmt: skip
    torch.testing.assert_close(outputs.logits, expected.float(), rtol=1e-4, atol=1e-4)
    assert outputs.token_ids.tolist() == list(range(5, 250))
