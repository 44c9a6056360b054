"""Hyper-connections: the kernel's gates and streams, what is kept of them, and what drafters read between layers."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from architectures import chain, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.kernels import native
from saltus.kernels.native import structs
from saltus.loading.load_model import load_model
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.decoder_weights import Resolver
from saltus.models.cpu.hyper_ops import HyperOps
from saltus.models.decoder_description import HyperConnection, HyperStreams

pytestmark = pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
deepseek = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4", reason="Transformers is older than the models"
)
ROWS, COUNT, SIZE = 40, 3, 20


def own_logits(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].float()


class Recorded:
    """Operations that are done by `run`, over buffers of ROWS rows."""

    def __init__(self, base, dtype) -> None:
        self.weights, self.hidden, self.list, self.buffers = (
            Resolver(base),
            torch.zeros(ROWS, SIZE, dtype=dtype),
            [],
            {},
        )

    def buffer(self, name: str, width: int) -> torch.Tensor:
        return self.buffers.setdefault(name, torch.zeros(ROWS, width, dtype=self.hidden.dtype))

    def op(self, kind: int, struct) -> None:
        self.list.append((kind, struct))

    def run(self, rows: int) -> None:
        ops = (structs.Op * len(self.list))()
        for op, (kind, struct) in zip(ops, self.list, strict=True):
            op.kind, op.of = kind, ctypes.addressof(struct)
        call = structs.Decoder(ops=ctypes.addressof(ops), num_ops=len(ops), rows=rows)
        assert not native.kernel("decode", self.hidden.dtype, self.hidden.device)(ctypes.byref(call))


def connection_of(config) -> tuple[torch.nn.Module, HyperConnection]:
    torch.manual_seed(0)
    module = deepseek.DeepseekV4HyperConnection(config)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    base = torch.nn.Module()
    base.hc = module
    paths = "hc.fn", "hc.base", "hc.scale"
    return base, HyperConnection(*paths, config.rms_norm_eps, config.hc_eps, 2.0, rounds=config.hc_sinkhorn_iters)


@pytest.mark.unchecked
@pytest.mark.parametrize("rounds", [1, 3, 20])
def test_streams_are_mixed_as_those_of_deepseek_v4(rounds):
    """Rows alone have the bits that they have among others."""
    config = SimpleNamespace(
        hc_mult=COUNT, hidden_size=SIZE, hc_eps=1e-3, hc_sinkhorn_iters=rounds, rms_norm_eps=1e-2
    )  # fmt: skip
    base, connection = connection_of(config)
    x, given = torch.randn(ROWS, COUNT, SIZE), torch.randn(ROWS, SIZE)
    post, comb, read = base.hc(x[None])
    expected = post[0, ..., None] * given[:, None] + comb[0].mT @ x
    found = []
    for rows in (ROWS, 1):
        before, after = Recorded(base, torch.float32), Recorded(base, torch.float32)
        hyper = HyperOps(before, HyperStreams(COUNT))
        struct = hyper.collapse(connection)
        hyper.streams.copy_(x.flatten(1))
        before.run(rows)
        found.append(before.hidden[0].clone())
        if rows == ROWS:
            assert torch.allclose(before.hidden, read[0], atol=1e-5)
        hyper.ops = after
        hyper.spread(struct)
        before.hidden.copy_(given)
        after.run(rows)
        found.append(hyper.streams[0].clone())
        if rows == ROWS:
            assert torch.allclose(hyper.streams.view_as(expected), expected, atol=1e-4)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_weights_that_transformers_keeps_in_float32_run_on_kernels(tmp_path):
    """But for the output layer, which gets the dtype of the others."""
    tiny("HYV4").bfloat16().save_pretrained(tmp_path)
    model = load_model("tiny", tmp_path, torch.bfloat16)
    assert model.model.layers[0].attn_hc.fn.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16
    network, tokens = CausalNetwork(model), text(30)
    assert network.compute_path == "native"
    ours, own = chain(network, tokens).float(), own_logits(model, tokens)
    errors = (ours - own).norm(dim=-1) / own.norm(dim=-1)
    assert errors.median() < 0.03


def test_drafters_read_what_the_next_mixer_and_the_last_norm_read():
    model, tokens, seen = tiny("HYV4"), text(20), []
    for norm in (model.model.layers[1].input_layernorm, model.model.norm):
        norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    own_logits(model, tokens)
    network = CausalNetwork(tiny("HYV4"))
    network.add_hidden_state_layers((1, 3))
    inputs = ForwardInputs(continuation(tokens, 1), output_hidden_states=True)
    states = network.forward([inputs], [network.new_kv_cache()])[0].hidden_states
    assert torch.allclose(states[:, :48], seen[0], atol=1e-4)
    assert torch.allclose(states[:, 48:96], seen[1], atol=1e-4)
