"""Layers that attend to chosen keys: which are chosen, what is kept of them, and that short texts need no choice."""

import numpy as np
import pytest
import torch

from architectures import chain, random_tree, read, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.models.architectures import describe_decoder
from saltus.models.causal import CausalNetwork
from saltus.models.cuda.described_layers import described_for_gpu
from saltus.training.data.packed_forward import prepare_model

TOP_K = 8  # of the tiny models
KEY_BY_KEY = ["DeepseekV32", "GlmMoeDsa", "HYV4", "MistralLarge4"]
each_model = pytest.mark.parametrize("name", [*KEY_BY_KEY, "Glm5Next"])
each_without_pools = pytest.mark.parametrize("name", KEY_BY_KEY)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def network(name: str, dtype=torch.float32, **changes) -> CausalNetwork:
    model = tiny(name, **changes)
    return CausalNetwork(model.to(dtype))


def indexers(model):
    return [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]


def layers_with_latent_vectors(model):
    return [layer for layer in model.model.layers if layer.self_attn.kv_a_proj_with_mqa is not None]


@DTYPES
@each_model
def test_rows_that_see_no_more_keys_than_are_chosen_have_the_bits_of_attention_to_all(name, dtype):
    """Also those in a call whose later rows choose, and around the place where a text becomes too long."""
    few, all_keys = network(name, dtype, index_topk=20), network(name, dtype, index_topk=512)
    tokens = text(40)
    chosen, dense = chain(few, tokens), chain(all_keys, tokens)
    assert torch.equal(chosen[:20], dense[:20])
    assert all((chosen[at] != dense[at]).any() for at in range(24, 40))
    cache = few.new_kv_cache()
    for end in (15, 19, 20, 21, 22, 30, 40):
        assert torch.equal(read(few, tokens[:end], kv_cache=cache)[0], chosen[end - 1])


@DTYPES
def test_short_texts_have_the_bits_of_deepseek_v3(dtype):
    sparse, dense = tiny("DeepseekV32", index_topk=40).to(dtype), tiny("DeepseekV3").to(dtype)
    missing = dense.load_state_dict(sparse.state_dict(), strict=False)
    assert not missing.missing_keys
    assert all("indexer" in key for key in missing.unexpected_keys)
    tokens = text(40)
    assert torch.equal(chain(CausalNetwork(sparse), tokens), chain(CausalNetwork(dense), tokens))


@each_without_pools
def test_of_equal_scores_the_first_keys_are_chosen(name):
    model = tiny(name)
    for indexer in indexers(model):
        torch.nn.init.zeros_(indexer.weights_proj.weight)
    ours, tokens = CausalNetwork(model), text(40)
    others = tokens.copy()
    others[TOP_K:30] = text(30, seed=1)[TOP_K:]
    before = chain(ours, tokens)
    assert torch.equal(before[30:], chain(ours, others)[30:]), "no row sees what comes after the first keys"
    others[TOP_K - 1] += 1 if others[TOP_K - 1] < 90 else -1
    assert (before[30:] != chain(ours, others)[30:]).any(-1).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers_choose_as_many_keys(number):
    model = tiny("DeepseekV32")
    for indexer in indexers(model):
        torch.nn.init.constant_(indexer.weights_proj.weight, number)
    ours, tokens = CausalNetwork(model), text(40)
    logits = chain(ours, tokens)
    assert logits.isfinite().all()
    assert torch.equal(read(ours, tokens)[0], logits[-1])


@DTYPES
@each_model
def test_many_heads_and_long_texts_have_the_same_rows_in_every_call(name, dtype):
    """More heads than a tile of scores has rows, more keys than a piece, and prompts that a call reads in chunks."""
    ours = network(name, dtype, index_n_heads=50, index_topk=100, max_position_embeddings=2048)
    tokens = text(700)
    alone, cache = read(ours, tokens)[0], ours.new_kv_cache()
    for end in (90, 101, 400, 540, 699, 700):
        last = read(ours, tokens[:end], kv_cache=cache)[0]
    assert torch.equal(last, alone)
    nodes, parents = random_tree(12)
    tree = read(ours, tokens, nodes, parents, kv_cache=cache)
    path = [11]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    assert torch.equal(read(ours, [*tokens, *(nodes[node] for node in path)])[0], tree[12])
    batch = [tokens, tokens[:60], tokens[:300]]
    inputs = [ForwardInputs(*_decided(each)) for each in batch]
    together = ours.forward(inputs, [ours.new_kv_cache() for _ in batch])
    for each, outputs in zip(batch, together, strict=True):
        assert torch.equal(outputs.logits, read(ours, each))


def _decided(tokens):
    return continuation(np.asarray(tokens), 1), (), ()


@each_without_pools
def test_layers_with_an_indexer_keep_a_key_of_it(name):
    model = tiny(name)
    ours, cache = CausalNetwork(model), None
    cache = ours.new_kv_cache()
    read(ours, text(20), kv_cache=cache)
    config = model.config
    index = config.index_head_dim * len(indexers(model))
    latent = sum(layer.self_attn.kv_a_proj_with_mqa.out_features for layer in layers_with_latent_vectors(model))
    assert cache.bytes_per_token == 4 * (latent + index)


def test_rows_choose_beside_a_text_that_has_no_whole_pool_of_keys():
    """Nor does a path of the tree end one, so that there is nothing to choose from."""
    ours, tokens, nodes = network("Glm5Next"), text(2), text(12, seed=1)
    together = read(ours, tokens, nodes, [-1] * len(nodes))
    alone = [read(ours, tokens), *(read(ours, tokens, [node], [-1])[1:] for node in nodes)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("HYV4", {"index_head_dim": 2}, "index_head_dim is 2"),
        ("HYV4", {"hc_mult": 9}, "hc_mult is 9"),
        ("Glm5Next", {"hc_mult": 9}, "hc_mult is 9"),
    ],
)
def test_sizes_that_kernels_have_no_room_for_are_refused(name, changes, said):
    with pytest.raises(ValueError, match=said):
        network(name, **changes)


@each_model
def test_our_kernels_for_gpus_do_not_choose_keys(name):
    model = tiny(name)
    assert describe_decoder(model) is not None
    assert described_for_gpu(model) is None


def test_a_first_layer_without_an_indexer_is_not_described():
    model = tiny("GlmMoeDsa", indexer_types=["shared", "full", "full"])
    assert describe_decoder(model) is None


def test_latent_vectors_of_another_layer_than_transformers_shares_are_not_described():
    model = tiny("MistralLarge4", kv_source_layers=[0, 1, 2, 3, 0, 2], no_rope_layers=[1] * 6)
    assert describe_decoder(model) is None


def test_adapters_are_not_trained_through_a_choice():
    with pytest.raises(ValueError, match="chooses keys in indexed_attention layers") as told:
        prepare_model(tiny("DeepseekV32"))
    assert "\n" not in str(told.value)


def test_weights_of_heads_may_be_in_float32():
    (model, plain), tokens = (tiny("DeepseekV32").bfloat16() for _ in range(2)), text(40)
    for indexer in indexers(model):
        indexer.weights_proj.float()
    assert CausalNetwork(model).compute_path == "native"
    assert torch.equal(chain(CausalNetwork(model), tokens), chain(CausalNetwork(plain), tokens))


def test_the_model_itself_still_attends_to_chosen_keys():
    """Its own forward is a baseline of benchmarks."""
    model, tokens = tiny("DeepseekV32"), torch.from_numpy(text(40))[None]
    before = model(tokens, use_cache=False).logits
    CausalNetwork(model)
    assert torch.equal(model(tokens, use_cache=False).logits, before)
