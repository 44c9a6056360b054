"""Our kernels in Triton, run by its interpreter where there is no GPU: right, and alike for a row in every call."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from architectures import GEMMA4_EXPERTS, by_our_kernels, random_tree, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.prefix_tree import PrefixTree, supports_prefix_tree
from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.packing import quantized_blocks
from saltus.methods.ptp.gpu_draft_pass import GPUDraftPass
from saltus.methods.ptp.network import DrafterShape, DraftModel, DraftNetwork
from saltus.methods.shared.context_rows import ContextKVCache, DraftRows
from saltus.models.attention_span import Chunks, first_visible
from saltus.models.causal import CausalNetwork
from saltus.models.cuda import attention_kernels, linear_kernels, row_kernels
from saltus.models.cuda.attention_kernels import tiles_of_heads
from saltus.models.cuda.described_layers import described_for_gpu
from saltus.models.cuda.fixed_shape_calls import (
    FixedShapeSettings,
    first_recent_position,
    size_class,
)
from saltus.models.cuda.gpu_decoder import GPUDecoder
from saltus.models.cuda.gpu_decoder_support import fits_described, fits_kernels
from saltus.models.cuda.packed_weight import GPUPackedWeight

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
BOUND = 0.06 if CUDA else 1e-5  # of the error's norm over the logits'
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
SETTINGS = FixedShapeSettings(page_size=128, pages_per_block=1, prefill_chunk=64, rows_per_group=4)
TREE = random_tree(7)
NORMS = "q_norm", "k_norm", "query_layernorm", "key_layernorm", "post_attention_layernorm"  # with weights of 1

pytestmark = pytest.mark.slow


def decoded(name: str, described: bool = False, **changes) -> tuple[CausalNetwork, CausalNetwork]:
    """A tiny model run by our kernels, and the same one as Transformers computes it in float64."""
    model = tiny(name, **SIZES | changes).to(DTYPE)
    for path, values in model.named_parameters():
        if path.endswith(".bias"):  # zeros otherwise
            torch.nn.init.normal_(values, std=0.3)
        elif path.endswith(tuple(f"{norm}.weight" for norm in NORMS)):
            torch.nn.init.uniform_(values, 0.5, 1.5)
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    plain = CausalNetwork(exact, fixed_shapes=False, batch_invariant=False)
    model, description = model.to(DEVICE), None
    if described:
        description = described_for_gpu(model)
        assert description is not None
        assert fits_described(model, description)
    else:
        assert fits_kernels(model)
    return by_our_kernels(model, description, SETTINGS), plain


@pytest.fixture(scope="module")
def llama():
    return decoded("Llama")


@torch.inference_mode()
def logits(network, tokens, tree=(), kv_cache=None, **more) -> torch.Tensor:
    inputs = ForwardInputs(continuation(tokens, 60), *tree, **more)
    outputs = network.forward([inputs], [kv_cache or network.new_kv_cache()])[0]
    return outputs.logits.float().cpu()


@pytest.mark.parametrize(  # recent columns alone, and a split of the pages
    ("name", "length"), [("Llama", 5), ("Qwen2", 66), ("Qwen3", 5), ("Mistral", 66)]
)
def test_logits_are_those_of_transformers(name, length):
    network, plain = decoded(name, num_hidden_layers=1, **{"sliding_window": 50} if name == "Mistral" else {})
    tokens = text(length)
    found, expected = logits(network, tokens, TREE), logits(plain, tokens, TREE)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUND


LATENT = {
    "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 64,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_head": 2}
OPT = {"word_embed_proj_dim": 64, "ffn_dim": 128}
DESCRIBED = {
    "Gemma": {}, "Gemma3": {"sliding_window": 50}, "Granite": {}, "SmolLM3": {}, "Exaone4": {}, "SeedOss": {},
    "Phi3": {}, "Cwm": {}, "Ministral": {}, "Glm4": {}, "Ernie4_5": {}, "Helium": {}, "Olmo2": {}, "Olmo3": {},
    "Ministral3": {}, "Gemma2": {"sliding_window": 50}, "Cohere": {}, "Cohere2": {"sliding_window": 50},
    "CohereCompass": {"sliding_window": 50},
    "Gemma4": {"sliding_window": 50, "global_head_dim": 64, "hidden_size_per_layer_input": 64},
    "Gemma4 of unlike heads": {"sliding_window": 50, "hidden_size_per_layer_input": 64},
    "Gemma4 of shared keys": {
        "sliding_window": 50, "global_head_dim": 64, "hidden_size_per_layer_input": 64, "num_hidden_layers": 4,
    },
    "HunYuanDenseV1": {}, "Gemma4Unified": {"sliding_window": 50, "global_head_dim": 64},
    "Olmo": {}, "NanoChat": {}, "VaultGemma": {"sliding_window": 50},
    "GraniteSWA": {"sliding_window": 50, "layer_rope_theta": [1e4, 1e3]},
    "Llama of other sizes": {"head_dim": 48, "num_attention_heads": 20, "hidden_size": 320},
    "Youtu": LATENT | {"rope_interleave": False}, "Mistral4": LATENT | {"attention_bias": True, "head_dim": 48},
    "DeepseekV2": LATENT | {"num_attention_heads": 16, "q_lora_rank": None}, "Glm": {},
    "MiniCPM3": LATENT | {"num_attention_heads": 16, "num_key_value_heads": 16},
    "MuseGlimmer": {"sliding_window": 50}, "HyperCLOVAX": {}, "Afmoe": {"sliding_window": 50, "num_dense_layers": 2},
    "Laguna": {"mlp_layer_types": ["dense"] * 2, "num_attention_heads_per_layer": [4, 4], "sliding_window": 50},
    "Laguna with other gates": {"mlp_layer_types": ["dense"] * 2, "sliding_window": 50},
    "Starcoder2": {"sliding_window": 50}, "Jais2": {}, "InternLM3": {}, "Nemotron": {},
    "Phi": {"num_key_value_heads": None}, "StableLm": {},
    "GPTNeoX": {}, "GPTNeoX of layers after each other": {}, "GPT2": GPT2, "GPTBigCode": GPT2,
    "OPT": OPT, "OPT without weights of norms": OPT, "Apertus": {},
    "Gemma3n": {
        "sliding_window": 50, "num_hidden_layers": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 64,
        "altup_num_inputs": 3, "activation_sparsity_pattern": [0.6, 0.0] * 2, "vocab_size_per_layer_input": 80,
    },
    "Llama4": {"attention_chunk_size": 50, "num_hidden_layers": 3, "intermediate_size_mlp": 64},
}  # fmt: skip
LIKE_OTHERS = {  # they launch no kernel with constants that none of the others has: their rows are compared there
    "Gemma", "Granite", "SmolLM3", "SeedOss", "Phi3", "Cwm", "Ministral", "Ernie4_5", "Helium", "Olmo3", "Ministral3",
    "Cohere", "Gemma4Unified", "Olmo", "VaultGemma", "Glm", "Starcoder2", "Jais2", "GPT2", "CohereCompass",
}  # fmt: skip


@pytest.mark.parametrize("name", ["Llama", *DESCRIBED])
def test_described_layers_are_those_of_transformers_and_rows_do_not_depend_on_each_other(name, monkeypatch):
    if name == "Gemma4 of unlike heads" and not CUDA:  # of 512 dimensions: two programs of a row instead of sixteen
        monkeypatch.setattr(attention_kernels, "COMBINED_DIMS", 256)
    network, plain = decoded(name, described=True, **DESCRIBED.get(name, {}))
    tokens, kv_cache = text(66), network.new_kv_cache()
    lengths = () if name in LIKE_OTHERS else (64, 65, 66)
    alone = [logits(network, tokens[:length], kv_cache=kv_cache)[0] for length in lengths]
    found, expected = logits(network, tokens, TREE, kv_cache), logits(plain, tokens, TREE)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUND
    if name in LIKE_OTHERS:
        return
    assert torch.equal(found[0], alone[-1])
    chain = tuple(tokens[64:].tolist()), (-1, 0)
    inputs = [ForwardInputs(continuation(each, 60), *chain) for each in (text(7), tokens[:64])]
    together = network.forward(inputs, [network.new_kv_cache(), kv_cache])
    assert torch.equal(together[1].logits.float().cpu(), torch.stack(alone))


FALCON = {"ffn_hidden_size": 64, "num_attention_heads": 4, "hidden_size": 128, "num_hidden_layers": 1}
GPT_NEO = {"intermediate_size": 64, "num_heads": 4, "hidden_size": 128, "window_size": 4}


@pytest.mark.parametrize(
    ("name", "changes"), [("Falcon", FALCON), ("Falcon of groups", FALCON), ("GPTNeo", GPT_NEO)]
)  # fmt: skip
@torch.inference_mode()
def test_layers_that_attend_by_code_of_their_own_are_those_of_transformers(name, changes):
    model, tokens = tiny(name, **changes).to(DTYPE), text(5).tolist()
    exact, description = copy.deepcopy(model).double(), described_for_gpu(model.to(DEVICE))
    assert fits_described(model, description)
    found = logits(by_our_kernels(model, description, SETTINGS), np.array(tokens), ((7, 9), (-1, 0)))
    expected = exact(torch.tensor([[*tokens, 7, 9]])).logits[0, -3:]
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUND


def test_layers_that_the_kernels_do_not_know_are_left_to_others():
    assert described_for_gpu(tiny("GraniteMoeHybrid", mamba_proj_bias=True)) is None


def test_drafts_may_lie_beyond_the_learned_positions():
    network, plain = decoded("GPT2", described=True, **GPT2, num_hidden_layers=1, n_positions=5)
    found, expected = logits(network, text(5), ((7,), (-1,)))[0], logits(plain, text(5))[0]
    assert (found - expected).norm() < BOUND * expected.norm()


def test_a_model_of_transposed_weights_is_decoded_twice_and_keeps_its_numbers():
    model = tiny("GPT2", **SIZES | GPT2).to(DEVICE, DTYPE)
    numbers = model.state_dict()["transformer.h.0.mlp.c_fc.weight"].clone()
    for _ in range(2):
        description = described_for_gpu(model)
        assert fits_described(model, description)
        decoder = by_our_kernels(model, description, SETTINGS).fixed_shape_runner.decoder
        assert decoder.layers[0].mlp.gate_and_up[0].data_ptr() == model.transformer.h[0].mlp.c_fc.weight.data_ptr()
    assert torch.equal(model.transformer.h[0].mlp.c_fc.weight, numbers)


@pytest.mark.parametrize(
    "changes", [{"num_attention_heads": 4, "head_dim": 24}, {"intermediate_size": 96}, {"hidden_size": 96}]
)
def test_sizes_that_the_kernels_do_not_know_are_left_to_others(changes):
    model = tiny("Gemma3", **SIZES)
    assert fits_described(model, described_for_gpu(model))
    other = tiny("Gemma3", **SIZES | changes)
    assert not fits_described(other, described_for_gpu(other))


MIXTURES = {
    "Mixtral": {"num_hidden_layers": 1}, "Qwen3Moe": {}, "Qwen2Moe": {"shared_expert_intermediate_size": 64},
    "Olmoe": {"num_hidden_layers": 1}, "Glm4Moe": {"moe_intermediate_size": 64}, "GraniteMoe": {},
    "GptOss": {}, "Dots1": {"moe_intermediate_size": 64}, "MiniMaxM2": {"num_hidden_layers": 1},
    "Gemma4": {**GEMMA4_EXPERTS, "global_head_dim": 64},
    "ExaoneMoe": {"moe_intermediate_size": 64}, "Ernie4_5_Moe": {"moe_intermediate_size": 64},
    "HunYuanMoEV1": {"moe_topk": 2}, "Mellum": {"sliding_window": 50, "mlp_layer_types": None},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_layers_with_experts_are_those_of_transformers(name):
    network, plain = decoded(name, described=True, **{"moe_intermediate_size": 48} | MIXTURES[name])
    found, expected = logits(network, text(5), TREE), logits(plain, text(5), TREE)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUND


BY_LENGTH = {  # angles of texts of more than 16 tokens, and of others
    "Phimoe": {
        "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "short_mscale": 1.2,
        "long_mscale": 1.2, "original_max_position_embeddings": 16,
    },
    "MiniCPM3": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0,
        "original_max_position_embeddings": 16,
    },
    "Llama": {"rope_type": "dynamic", "factor": 8.0},
}  # fmt: skip


@pytest.mark.parametrize("name", BY_LENGTH)
def test_texts_beside_each_other_have_the_angles_of_their_own_lengths(name):
    changes = {
        **DESCRIBED.get(name, {}), "num_hidden_layers": 1, "rope_parameters": {"rope_theta": 1e4, **BY_LENGTH[name]},
        "max_position_embeddings": 16 if name == "Llama" else 1024,
    }  # fmt: skip
    network, plain = decoded(name, described=True, **changes)
    batch = [ForwardInputs(continuation(text(9), more), (7,), (-1,)) for more in (5, 60)]
    together = network.forward(batch, [network.new_kv_cache() for _ in batch])
    for inputs, found in zip(batch, together, strict=True):
        alone = network.forward([inputs], [network.new_kv_cache()])[0].logits
        assert torch.equal(alone, found.logits)
        expected = plain.forward([inputs], [plain.new_kv_cache()])[0].logits.float()
        assert (found.logits.float().cpu() - expected).norm() < BOUND * expected.norm()
    if name != "Phimoe":  # where Transformers takes the short factors for all texts
        assert (together[0].logits - together[1].logits).norm() > 0.02 * together[0].logits.norm()


def test_routers_stay_in_float32_where_transformers_keeps_them_so():
    model = tiny("Glm4Moe", **SIZES | MIXTURES["Glm4Moe"]).to(torch.bfloat16)
    router = model.model.layers[1].mlp.gate
    router.weight.data = router.weight.float() * 1.001  # numbers that bfloat16 does not have
    expected = logits(CausalNetwork(copy.deepcopy(model).float(), fixed_shapes=False, batch_invariant=False), text(5))
    description = described_for_gpu(model.to(DEVICE))
    assert fits_described(model, description)
    found = logits(by_our_kernels(model, description, SETTINGS), text(5))
    assert (found - expected).norm() < 0.06 * expected.norm()
    model.model.layers[1].self_attn.q_proj.float()
    assert not fits_described(model, description)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_rows_of_layers_with_experts_do_not_depend_on_each_other(name):
    network, _ = decoded(name, described=True, **MIXTURES[name] | {"num_hidden_layers": 1, "layer_types": None})
    tokens = text(5)
    found = logits(network, tokens, TREE)
    assert torch.equal(logits(network, tokens)[0], found[0])
    others = [ForwardInputs(continuation(text(length, seed=length), 60), *TREE) for length in (3, 4)]
    batch = [others[0], ForwardInputs(continuation(tokens, 60), *TREE), others[1]]
    together = network.forward(batch, [network.new_kv_cache() for _ in batch])
    assert torch.equal(together[1].logits.float().cpu(), found)


def test_a_row_has_the_same_bits_as_text_and_as_a_node_alone_and_in_a_batch(llama):
    network, tokens = llama[0], text(140)
    kv_cache, plain = network.new_kv_cache(), []
    for length in range(127, 130):  # across the border of a page
        plain.append(logits(network, tokens[:length], kv_cache=kv_cache)[0])
    chain = tuple(tokens[127:129].tolist()), (-1, 0)
    assert torch.equal(logits(network, tokens[:127], chain, kv_cache), torch.stack(plain))
    others = [ForwardInputs(continuation(text(length, seed=length), 60), *TREE) for length in (3, 20)]
    batch = [others[0], ForwardInputs(continuation(tokens[:127], 60), *chain), others[1]]
    together = network.forward(batch, [network.new_kv_cache(), kv_cache, network.new_kv_cache()])
    assert torch.equal(together[1].logits.float().cpu(), torch.stack(plain))


@torch.inference_mode()
def test_what_a_former_text_left_in_a_page_changes_no_row_though_it_is_not_finite(llama):
    network, tokens = llama[0], text(70)
    expected = logits(network, tokens, TREE)
    pool = network.fixed_shape_runner.pool
    for buffer in pool.buffers:
        buffer.view(len(buffer), pool.num_pages, -1)[:, pool.free_pages] = torch.nan
    found = logits(network, tokens, TREE)
    for buffer in pool.buffers:
        buffer.zero_()
    assert torch.equal(found, expected)


def test_gradients_pass_through_weights_that_are_merged_when_a_network_is_made():
    """Which is in inference mode, whose tensors no gradient passes through."""
    model = tiny("Llama", **SIZES | {"num_hidden_layers": 1}).to(DEVICE, torch.bfloat16)
    with torch.inference_mode():
        GPUDecoder(model)
    inputs = torch.ones(1, 1, 64, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    model(inputs_embeds=inputs, use_cache=False).logits.sum().backward()
    assert inputs.grad is not None


@pytest.fixture(scope="module")
def read_texts(llama) -> list:
    """Texts with recent columns alone, with a split of the pages and with two, and their KV caches but for a token."""
    read = [(text(length, seed=length), llama[0].new_kv_cache()) for length in (3, 66, 140)]
    for tokens, kv_cache in read:
        logits(llama[0], tokens[:-1], kv_cache=kv_cache)
    return read


@pytest.mark.parametrize("trees", [((), (), ()), ((), (), ((7, 9, 4), (-1, 0, 0)))])
def test_texts_of_few_rows_share_a_call_without_padding_and_have_the_bits_that_they_have_alone(
    llama, read_texts, monkeypatch, trees
):
    network, kv_caches = llama[0], [kv_cache for _, kv_cache in read_texts]
    inputs = [
        ForwardInputs(continuation(tokens, 60), *tree) for (tokens, _), tree in zip(read_texts, trees, strict=True)
    ]
    alone = [network.forward([each], [kv_cache])[0].logits for each, kv_cache in zip(inputs, kv_caches, strict=True)]
    runner, shapes = network.fixed_shape_runner, []
    run_call = runner._run_call
    monkeypatch.setattr(runner, "_run_call", lambda call: shapes.append(call.shape) or run_call(call))
    together = network.forward(inputs, kv_caches)
    rows = len(inputs) + sum(len(tree[0]) for tree in trees if tree)
    assert [(shape.num_groups, shape.rows_per_group) for shape in shapes] == [(size_class(rows), 1)]
    assert all(torch.equal(one.logits, own) for one, own in zip(together, alone, strict=True))


@pytest.mark.skipif(native.load_kernels() is None, reason="packed weights need compiled kernels")
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Phi3"])
@torch.inference_mode()
def test_packed_weights_decode_as_their_numbers_do(name):
    sizes = SIZES | {"intermediate_size": 128, "tie_word_embeddings": False}
    model = tiny(name, **sizes | ({} if name == "Gemma3" else {"num_hidden_layers": 1})).to(DTYPE)
    plain = copy.deepcopy(model).float()
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            blocks = quantized_blocks(layer.weight, GGMLQuantizationType.Q8_0)
            numbers = dequantize(blocks.numpy(), GGMLQuantizationType.Q8_0)
            plain.get_submodule(name).weight.data = torch.from_numpy(np.array(numbers))
            packed = PackedWeight.from_blocks(blocks, GGMLQuantizationType.Q8_0, "int8")
            layer._parameters["weight"] = GPUPackedWeight.from_packed(packed, DEVICE)
    model.to(DEVICE)
    network = by_our_kernels(model, None if name == "Llama" else described_for_gpu(model), SETTINGS)
    tokens = text(66)
    found = logits(network, tokens, TREE)
    expected = logits(CausalNetwork(plain, fixed_shapes=False, batch_invariant=False), tokens, TREE)
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUND
    alone = logits(network, tokens)
    assert torch.equal(alone[0], found[0])


@pytest.mark.parametrize(
    ("softcap", "sinks", "span"),
    [
        (None, None, 100),
        (0.5, None, None),
        (None, (1.5, -2.0), None),
        (0.5, (0.3, 9.0), None),
        (None, None, Chunks(100)),
    ],
)
def test_groups_of_long_texts_attend_in_turn_with_the_bits_that_they_have_at_once(monkeypatch, softcap, sinks, span):
    queries, keys, values = (
        torch.randn(*sizes, 32, generator=torch.Generator().manual_seed(len(sizes))).to(DEVICE, DTYPE)
        for sizes in ((6, 2), (512, 1), (512, 1))
    )
    tables, positions = torch.tensor([[1, 2], [3, 0], [2, 3]]), torch.tensor([200, 201, 90, 91, 255, 170])
    recent = torch.from_numpy(first_recent_position(positions.numpy(), 32)[:, None] + np.arange(64))
    slots = tables.repeat_interleave(2, 0).gather(1, recent // 128) * 128 + recent % 128
    found = []
    for limit in (1 << 28, 1):
        monkeypatch.setattr(attention_kernels, "MAX_SUM_BYTES", limit)
        sums = attention_kernels.SplitSums.empty(queries, 1, 3, 256)
        assert len(sums.tops) == (3 if limit > 1 else 1)
        found.append(torch.empty_like(queries))
        attention_kernels.attend(
            queries, keys, values, tables.to(DEVICE), slots.to(DEVICE), positions.to(DEVICE), sums, found[-1],
            rows_per_group=2, page=128, scale=0.2, span=span, softcap=softcap,
            sinks=None if sinks is None else torch.tensor(sinks, device=DEVICE, dtype=DTYPE),
        )  # fmt: skip
    assert torch.equal(*found)
    for row in (4, 5):
        position = int(positions[row])
        seen = slice(256 + int(first_visible(positions[row], span)), 256 + position + 1)
        scores = queries[row].float() @ keys[seen, 0].float().T * 0.2
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, torch.tensor(sinks, device=DEVICE)[:, None]], 1)
        expected = scores.softmax(-1)[:, : len(values[seen])] @ values[seen, 0].float()
        assert (found[1][row].float() - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_heads_are_rotated_in_the_precision_of_the_angles_and_grow_in_float32(kept):
    generator, rows = torch.Generator().manual_seed(0), 64
    x = torch.randn(1, rows, 4 * 32, generator=generator).to(DEVICE)
    angles = torch.randn(rows, 16, generator=generator).to(DEVICE).repeat(1, 2)
    table, growth = row_kernels.AngleTable(angles.cos().to(kept), angles.sin().to(kept)), torch.linspace(1, 2, rows)
    empty = row_kernels.AngleTable(table.cosines[:, :0], table.sines[:, :0], growth=growth.to(DEVICE))
    at, found = torch.arange(rows, device=DEVICE), x.new_empty(2, rows, 2, 32, dtype=torch.bfloat16)
    keys, values = x.new_empty(2, rows, 1, 32, dtype=torch.bfloat16)
    for each, queries in zip((table, empty), found, strict=True):
        row_kernels.rotate_and_store(x, None, None, [each, each], at, at, queries, keys, values)
    first, second = (half.to(kept) for half in x.bfloat16()[0, :, :64].view(rows, 2, 32).chunk(2, -1))
    cos, sin = (each[:, None, :16] for each in table[:2])
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16()
    assert (found[0] == expected).float().mean() > 0.99
    grown = x.bfloat16()[0, :, :64].float() * growth[:, None].to(DEVICE)
    assert torch.equal(found[1].flatten(1), grown.bfloat16())
    assert torch.equal(keys[:, 0], x.bfloat16()[0, :, 64:96])


def test_sums_of_splits_take_a_bounded_memory_whatever_the_texts():
    queries = torch.empty(512, 28, 128, dtype=torch.bfloat16, device="meta")
    for positions, groups in ((1 << 17, 64), (1 << 17, 1), (512, 64)):
        sums = attention_kernels.SplitSums.empty(queries, 4, groups, positions)
        assert sums.weighted.nbytes <= attention_kernels.MAX_SUM_BYTES
        assert len(sums.tops) == min(groups, 2 if positions > 512 else 64)


def test_a_prompt_that_begins_like_a_known_text_is_read_from_there_with_the_same_bits(llama):
    network, tokens, tree = llama[0], text(140), PrefixTree()
    assert supports_prefix_tree(network)
    kv_cache = network.new_kv_cache()
    plain = logits(network, tokens[:131], TREE, kv_cache)
    network.forward(
        [ForwardInputs(continuation(tokens, 9))], [kv_cache]
    )  # moves accepted nodes, of which there are none
    tree.put(tokens.tolist(), {"target": kv_cache})
    assert tree.num_bytes == 140 * kv_cache.bytes_per_token
    del kv_cache
    taken = tree.take([*tokens[:130].tolist(), 7, 8])["target"]  # within a page and a chunk
    assert taken.tokens.tolist() == tokens[:130].tolist()
    outputs = network.forward([ForwardInputs(continuation(tokens[:131], 60), *TREE)], [taken])[0]
    assert outputs.context_tokens_read == 1
    assert torch.equal(outputs.logits.float().cpu(), plain)


@pytest.fixture(scope="module")
def gemma4():
    """Layers with heads of two sizes, of which two read the keys and values of the others."""
    return decoded("Gemma4 of shared keys", described=True, **DESCRIBED["Gemma4 of shared keys"])


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_accepted_nodes_are_read_from_where_text_is_read(request, name):
    network, tokens = request.getfixturevalue(name)[0], text(20)
    kv_cache = network.new_kv_cache()
    wrong_then_right = (7, int(tokens[12]), 9, int(tokens[13])), (-1, -1, 0, 1)
    logits(network, tokens[:12], wrong_then_right, kv_cache)
    expected = logits(network, tokens[:14])
    assert torch.equal(logits(network, tokens[:14], kv_cache=kv_cache), expected)
    tree = PrefixTree()
    tree.put(tokens[:14].tolist(), {"target": kv_cache})
    assert torch.equal(logits(network, tokens[:14], kv_cache=tree.take(tokens[:13].tolist())["target"]), expected)


def test_a_text_keeps_keys_and_values_of_the_layers_that_have_their_own(gemma4):
    kv_cache = gemma4[0].new_kv_cache()
    logits(gemma4[0], text(3), kv_cache=kv_cache)
    assert [each.shape[0] for each in kv_cache.pool.buffers] == [1, 1, 1, 1]
    assert kv_cache.bytes_per_token == 2 * (32 + 64) * kv_cache.keys.element_size()


@torch.inference_mode()
def test_hidden_states_after_a_layer_and_the_greatest_logits_come_along(llama):
    network, tokens = llama[0], text(20)
    network.add_hidden_state_layers((1, SIZES["num_hidden_layers"]))
    inputs = ForwardInputs(continuation(tokens, 9), *TREE, output_hidden_states=True)
    outputs = network.forward([inputs], [network.new_kv_cache()])[0]
    assert outputs.hidden_states.shape == (20 + 7, 3 * SIZES["hidden_size"])
    assert outputs.likeliest.tolist() == outputs.logits.float().cpu().numpy().argmax(-1).tolist()
    head = network.model.lm_head.weight
    _, after_all, last = outputs.hidden_states.split(SIZES["hidden_size"], 1)
    normed = network.model.model.norm(after_all)
    assert ((normed - last).float().norm() / last.float().norm()) < BOUND
    again = last[19:].float() @ head.float().T
    assert ((again - outputs.logits.float()).norm() / again.norm()) < BOUND


@pytest.mark.skipif(native.load_kernels() is None, reason="compares with compiled kernels")
def test_hidden_states_of_several_streams_are_those_of_the_active_one_as_on_a_cpu():
    sizes = DESCRIBED["Gemma3n"] | {
        "altup_active_idx": 1, "num_hidden_layers": 2, "num_kv_shared_layers": 0, "layer_types": None,
        "activation_sparsity_pattern": None,
    }  # fmt: skip
    network, _ = decoded("Gemma3n", described=True, **sizes)
    on_cpu, found = CausalNetwork(copy.deepcopy(network.model).float().cpu(), fixed_shapes=False), []
    assert on_cpu.compute_path == "native"
    for each in (network, on_cpu):
        each.add_hidden_state_layers((1, 2))
        inputs = ForwardInputs(continuation(text(5), 9), *TREE, output_hidden_states=True)
        found.append(each.forward([inputs], [each.new_kv_cache()])[0].hidden_states.float().cpu())
    for states, expected in zip(*(each.split(SIZES["hidden_size"], 1) for each in found), strict=True):
        assert (states - expected).norm() < BOUND * expected.norm()


@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(70, 64, 1), (96, 640, 3)])
def test_a_product_is_right_and_its_rows_do_not_depend_on_their_number(outputs, inputs, parts):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(DEVICE, DTYPE)
    x = torch.randn(128, inputs, generator=generator).to(DEVICE, DTYPE)
    blocks = linear_kernels.blocks_of(weight)._replace(parts=parts)
    whole = linear_kernels.linear_parts(x, [weight], blocks, 128)
    expected = x.double() @ weight.double().T
    assert ((whole.double().sum(0) - expected).norm() / expected.norm()) < 1e-5
    for rows in (1, 17, 40):
        assert torch.equal(linear_kernels.linear_parts(x, [weight], blocks, rows), whole[:, :rows])
    bias = torch.randn(outputs, generator=generator).to(DEVICE, DTYPE)
    biased = linear_kernels.linear_parts(x, [weight], blocks, 17, bias)
    assert torch.equal(biased[0], whole[0, :17] + bias.float())
    assert torch.equal(biased[1:], whole[1:, :17])


def test_size_classes_are_few_and_never_too_small():
    classes = {count: size_class(count) for count in range(1, 65)}
    assert all(one >= count for count, one in classes.items())
    assert sorted(set(classes.values())) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "of_tile"),
    [(16, 1, 128, 16), (32, 1, 128, 16), (16, 1, 256, 8), (20, 1, 32, 10), (128, 1, 576, 16), (34, 2, 64, 1)],
)
def test_tiles_of_attention_fit_into_shared_memory(heads, kv_heads, dim, of_tile):
    """In Triton 3.6 a tile of 256 rows takes 131 kB on an H200, and one of 512 minutes of the compiler."""
    assert heads / tiles_of_heads(heads, kv_heads, dim) == of_tile


@pytest.fixture(scope="module")
def drafter() -> DraftModel:
    torch.manual_seed(0)
    shape = DrafterShape(64, 128, (1,), layers=2, heads=2, kv_heads=1, reads_uniforms=False, correction=16)
    embeddings, tokens = torch.randn(90, 64), torch.arange(3, 80)
    model = DraftModel(shape, tokens, embeddings, embeddings).eval()
    torch.nn.init.normal_(model.correction.output.weight, std=0.2)
    return model.to(DTYPE).to(DEVICE)


@torch.inference_mode()
def test_a_drafters_pass_is_that_of_its_network(drafter):
    drafter = copy.deepcopy(drafter)
    drafter.embeddings = [drafter.embeddings[0].to(DEVICE, DTYPE)]
    network = DraftNetwork(drafter, None)
    network.whole_pass = None
    ours = GPUDraftPass(copy.deepcopy(drafter), use_cuda_graphs=CUDA)
    caches = {False: [ContextKVCache(), ContextKVCache()],
              True: [ContextKVCache(ours.new_kv_cache) for _ in range(2)]}  # fmt: skip
    past = [0, 0]
    for contexts in ((9, 2), (1, 3)):
        rows = {}
        for paged, own in caches.items():
            rows[paged] = [
                DraftRows(
                    torch.randn(count, 128, generator=torch.Generator().manual_seed(count)).to(DEVICE, DTYPE),
                    np.arange(count) + 5, network._query_vectors((float("nan"),) * queries, 0.0).to(DTYPE),
                    kv_cache, start,
                )
                for count, start, kv_cache, queries in zip(contexts, past, own, (6, 4), strict=True)
            ]  # fmt: skip
        past = [start + count for start, count in zip(past, contexts, strict=True)]
        expected, found = network._run(rows[False]), ours(rows[True])
        for (wanted, states), one in zip(expected, found, strict=True):
            assert ((one.logits.float() - wanted.float().cpu()).norm() / wanted.float().norm().cpu()) < BOUND
            assert ((one.hidden_states.float() - states.float()).norm() / states.float().norm()) < BOUND
            own = states.float() @ drafter.correction.state.weight.float().T
            assert np.linalg.norm(one.projected - own.cpu().numpy()) < BOUND * np.linalg.norm(own.cpu().numpy())
            assert len(one.likely) == len(wanted)
    alone = ours([replace(rows[True][0])])[0]
    assert torch.equal(alone.logits, found[0].logits)


@pytest.mark.unchecked  # the target is not a whole one
def test_a_text_leaves_the_pages_of_a_drafter_that_is_replaced(drafter):
    """As `saltus serve --learn` replaces one: the pages that the text has belong to others in the new one's pool."""
    drafter = copy.deepcopy(drafter)
    drafter.embeddings = [drafter.embeddings[0].to(DEVICE, DTYPE)]
    tokens, states = np.arange(12) + 5, torch.randn(12, 128).to(DEVICE, DTYPE)
    networks = [DraftNetwork(drafter, SimpleNamespace(layers_of=lambda states: (1,))) for _ in range(2)]
    for network in networks:
        network.whole_pass = GPUDraftPass(copy.deepcopy(drafter), use_cuda_graphs=CUDA)

    def drafted(network: DraftNetwork, kv_cache: ContextKVCache, first: int, end: int) -> torch.Tensor:
        inputs = ForwardInputs(continuation(tokens[:end], 9), hidden_states=states[first:end])
        return network.forward([inputs], [kv_cache])[0].logits

    kv_cache = networks[0].new_kv_cache()
    drafted(networks[0], kv_cache, 0, 9)
    found = drafted(networks[1], kv_cache, 9, 11)
    assert kv_cache.kv_cache.pool is networks[1].whole_pass.passes.pool
    assert torch.equal(found, drafted(networks[1], networks[1].new_kv_cache(), 9, 11))
