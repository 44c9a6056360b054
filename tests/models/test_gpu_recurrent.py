"""Layers that keep a state by our kernels for GPUs: right, and alike as text, as a tree and in batches."""

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from architectures import by_our_kernels, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.prefix_tree import PrefixTree, supports_prefix_tree
from saltus.models.causal import CausalNetwork
from saltus.models.cuda.described_layers import described_for_gpu
from saltus.models.cuda.fixed_shape_calls import FixedShape, FixedShapeSettings
from saltus.models.cuda.gpu_decoder_support import fits_described
from saltus.models.cuda.recurrent_inputs import RecurrentInputs

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
BOUND = 0.06 if CUDA else 1e-4  # of the error's norm over the logits'; Transformers adds in chunks, in float32
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "moe_intermediate_size": 48,
}  # fmt: skip
STATES = {
    "Qwen3_5": {"linear_value_head_dim": 16}, "Qwen3Next": {"linear_value_head_dim": 16},
    "Qwen3_5Moe": {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 64}, "Lfm2": {}, "Lfm2Moe": {},
    "Lfm3": {}, "OlmoHybrid": {"linear_value_head_dim": 32, "linear_num_value_heads": 6}, "KimiLinear": {
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "linear_num_heads": 2,
        "linear_head_dim": 64, "moe_intermediate_size": 64,
    },
    "NemotronH": {"mamba_num_heads": 4, "use_bias": False},
    "NemotronH with experts": {"mamba_num_heads": 4, "moe_shared_expert_intermediate_size": 64},
    "FalconH1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "Mamba2": {"num_heads": 8, "head_dim": 16}, "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "Mamba": {}, "FalconMamba": {}, "Jamba": {"num_hidden_layers": 3, "mamba_dt_rank": 64},
    "GraniteMoeHybrid without experts": {"mamba_n_heads": 8, "mamba_d_head": 16, "shared_intermediate_size": 64},
}  # fmt: skip
SETTINGS = FixedShapeSettings(page_size=128, pages_per_block=1, prefill_chunk=16, rows_per_group=4)
TREE = (7, 9, 4, 11, 5), (-1, 0, -1, 1, 2)
PATHS = (), (7,), (7, 9), (4,), (7, 9, 11), (4, 5)

pytestmark = pytest.mark.slow


def decoded(name: str) -> tuple[CausalNetwork, torch.nn.Module]:
    """A tiny model run by our kernels, and Transformers' layers."""
    model = tiny(name, **SIZES | STATES[name]).to(DTYPE)
    plain, description = copy.deepcopy(model).float(), described_for_gpu(model.to(DEVICE))
    assert description is not None
    assert fits_described(model, description)
    return by_our_kernels(model, description, SETTINGS), plain


@pytest.fixture(scope="module")
def qwen() -> CausalNetwork:
    return decoded("Qwen3_5")[0]


@torch.inference_mode()
def logits(network: CausalNetwork, tokens, tree=(), kv_cache=None) -> torch.Tensor:
    inputs = ForwardInputs(continuation(np.asarray(tokens), 60), *tree)
    return network.forward([inputs], [kv_cache or network.new_kv_cache()])[0].logits.float().cpu()


@pytest.mark.parametrize("name", STATES)
@torch.inference_mode()
def test_layers_are_those_of_transformers(name):
    """A prompt of several calls, and a tree after it."""
    network, plain = decoded(name)
    tokens = text(20).tolist()
    for row, path in zip(logits(network, tokens, TREE), PATHS, strict=True):
        expected = plain(torch.tensor([[*tokens, *path]])).logits[0, -1]
        assert (row - expected).norm() < BOUND * expected.norm(), path


def test_layers_that_the_kernels_do_not_know_are_left_to_others():
    assert described_for_gpu(tiny("Mamba", use_bias=True)) is None
    for name in ("Mamba", "Mamba2"):
        for hidden, fits in ((96, False), (128, True)):  # what the first product sums over
            heads = {"num_heads": hidden // 8, "head_dim": 16} if name == "Mamba2" else {}
            model = tiny(name, hidden_size=hidden, **heads)
            assert fits_described(model, described_for_gpu(model)) is fits


@pytest.mark.parametrize("name", ["Qwen3_5", "Lfm2", "Lfm3", "Bamba", "KimiLinear", "Jamba"])
def test_a_token_has_the_same_bits_as_text_as_a_node_and_in_a_batch(name):
    network, tokens = decoded(name)[0], text(18)
    kv_cache, other = network.new_kv_cache(), network.new_kv_cache()
    plain = [logits(network, tokens[:length], kv_cache=kv_cache)[0] for length in range(10, 15)]
    chain = tuple(tokens[10:14].tolist()), (-1, 0, 1, 2)
    assert torch.equal(logits(network, tokens[:10], chain, other), torch.stack(plain))
    tree = (7, int(tokens[13]), 9, int(tokens[14])), (-1, -1, 1, 1)
    logits(network, tokens[:13], tree, other)  # which applies two accepted nodes
    assert torch.equal(logits(network, tokens[:16], kv_cache=other), logits(network, tokens[:16]))  # and two others
    inputs = [ForwardInputs(continuation(each, 60), *chain) for each in (text(7, seed=3), tokens[:10])]
    together = network.forward(inputs, [network.new_kv_cache() for _ in inputs])
    assert torch.equal(together[1].logits.float().cpu(), torch.stack(plain))


def test_a_text_that_goes_back_continues_a_snapshot(qwen):
    tokens, kv_cache = text(70), qwen.new_kv_cache()
    logits(qwen, tokens, kv_cache=kv_cache)
    assert list(kv_cache.snapshots) == [69]
    changed = np.concatenate([tokens[:69], [5, 6]])
    outputs = qwen.forward([ForwardInputs(continuation(changed, 9))], [kv_cache])[0]
    assert outputs.context_tokens_read == 2
    assert torch.equal(outputs.logits.float().cpu(), logits(qwen, changed))
    outputs = qwen.forward([ForwardInputs(continuation(tokens[:40], 9))], [kv_cache])[0]
    assert outputs.context_tokens_read == 40
    assert torch.equal(outputs.logits.float().cpu(), logits(qwen, tokens[:40]))


def test_a_draft_models_text_goes_back_to_where_its_drafts_began(qwen):
    tokens, kv_cache = text(30), qwen.new_kv_cache()
    logits(qwen, tokens[:10], kv_cache=kv_cache)
    read = []
    for length in range(11, 24, 3):  # two drafts after each text, of which the target takes none
        for drafts in ([], [7], [7, 9]):
            context = np.concatenate([tokens[:length], drafts]).astype(np.int64)
            outputs = qwen.forward([ForwardInputs(continuation(context, 9))], [kv_cache])[0]
            read.append(outputs.context_tokens_read)
    assert max(read[6:]) <= 4, read
    assert torch.equal(outputs.logits.float().cpu(), logits(qwen, context))


def test_a_failed_call_loses_a_texts_state_and_not_its_bits(qwen, monkeypatch):
    tokens, kv_cache = text(20), qwen.new_kv_cache()
    logits(qwen, tokens[:9], kv_cache=kv_cache)
    with monkeypatch.context() as patch:
        patch.setattr(type(qwen.fixed_shape_runner.decoder), "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(qwen, tokens[:12], kv_cache=kv_cache)
    assert torch.equal(logits(qwen, tokens[:12], kv_cache=kv_cache), logits(qwen, tokens[:12]))


def test_the_next_turn_of_a_conversation_continues_the_last_one(qwen):
    tokens, tree, kv_cache = text(60), PrefixTree(), qwen.new_kv_cache()
    assert supports_prefix_tree(qwen)
    logits(qwen, tokens[:40], kv_cache=kv_cache)
    logits(qwen, tokens[:43], kv_cache=kv_cache)  # an answer
    tree.put(tokens[:40].tolist(), {"target": kv_cache}, ended=False)
    assert not tree.take(tokens[:50].tolist())
    tree.put(tokens[:40].tolist(), {"target": kv_cache})
    assert tree.num_bytes == kv_cache.num_bytes > 0
    taken = tree.take(tokens[:50].tolist())["target"]
    assert taken is kv_cache
    assert tree.num_bytes == 0
    outputs = qwen.forward([ForwardInputs(continuation(tokens[:50], 9))], [taken])[0]
    assert outputs.context_tokens_read == 7
    assert torch.equal(outputs.logits.float().cpu(), logits(qwen, tokens[:50]))


def test_slots_and_nodes_of_ended_texts_are_free_again(qwen):
    pool = qwen.fixed_shape_runner.states
    kept = [qwen.new_kv_cache() for _ in range(3)]
    for kv_cache in kept:
        logits(qwen, text(40), TREE, kv_cache)
    slots, blocks = len(pool.free_slots), len(pool.free_blocks)
    del kept, kv_cache
    assert len(pool.free_slots) == slots + 2 * 3  # a state and a snapshot
    assert len(pool.free_blocks) == blocks + 3
    assert len(set(pool.free_slots)) == len(pool.free_slots)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_tables_begin_where_every_call_has_the_same_binary(groups):
    tables = RecurrentInputs(FixedShape(groups, 1, 2, 0), 3, 32, torch.device("cpu"))
    for table in (tables.row_sources, tables.text_sources, tables.node_places, *tables.texts, *tables.nodes):
        assert (table.data_ptr() - tables.packed.data_ptr()) % 16 == 0
