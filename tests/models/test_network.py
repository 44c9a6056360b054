"""A causal network over many architectures: the model's own laws, and the same bits however they are asked."""

import copy
import threading

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM

from architectures import (
    ARCHITECTURES,
    DESCRIBED,
    GEMMA4_EXPERTS,
    LATENT_OF_WHOLE_BLOCKS,
    LLAMA_LIKE,
    ONE_PER_FEATURE,
    RECURRENT,
    VOCAB,
    WITH_FLOAT32_ROUTERS,
    chain,
    model_class,
    random_tree,
    read,
    text,
    tiny,
)
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.target_network import make_network
from saltus.kernels import native
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.packing import pack_places, packable_places
from saltus.models.architectures import describe_decoder
from saltus.models.causal import CausalNetwork
from saltus.models.cpu import chunked_prefill
from saltus.models.cpu.chunked_prefill import MAX_NODES, MAX_ROWS_PER_CALL
from saltus.models.decoder_of import decoder_of

DTYPES = [torch.float32, torch.bfloat16]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.004}  # of the error's norm over the logits'
LENGTH = 40

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
each_feature = pytest.mark.parametrize("name", ONE_PER_FEATURE)
each_architecture_in_a_dtype = pytest.mark.parametrize(  # one per feature in each, the others by turns
    ("name", "dtype"),
    [
        (name, dtype)
        for row, name in enumerate(ARCHITECTURES)
        for turn, dtype in enumerate(DTYPES)
        if name in ONE_PER_FEATURE or (row + turn) % 2 == 0
    ],
)


@pytest.fixture(scope="module")
def networks():
    """Networks by architecture and dtype, made once."""
    made: dict[tuple[str, torch.dtype], CausalNetwork] = {}

    def network(name: str, dtype: torch.dtype) -> CausalNetwork:
        if (name, dtype) not in made:
            made[name, dtype] = CausalNetwork(tiny(name).to(dtype))
        return made[name, dtype]

    return network


@torch.inference_mode()
def own_logits(model, tokens) -> torch.Tensor:
    """What Transformers says by its own attention."""
    return model(torch.tensor(np.asarray(tokens)[None]), use_cache=False).logits[0].float()


def off(ours: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The error of each row, as a share of its size."""
    return (ours.float() - own).norm(dim=-1) / own.norm(dim=-1)


def without_other_experts(model, dtype: torch.dtype, errors: torch.Tensor) -> torch.Tensor:
    """The errors of most rows: rounding sends a few rows to other experts."""
    has_experts = any("Experts" in type(module).__name__ for module in model.modules())
    return errors.sort().values[: LENGTH * 3 // 4] if has_experts and dtype != torch.float32 else errors


SENSITIVE = [  # rounding changes much
    "BailingHybrid", "Bamba", "Glm5Next", "GraniteMoeHybrid without experts", "Jamba", "KimiLinear", "Llama4",
    "Llama4 without experts", "MuseGlimmer", "Olmo", "OlmoHybrid", "Youtu",
    *(name for name in RECURRENT if name.startswith(("Qwen", "FalconH1"))),
]  # fmt: skip


def is_as_near_as_its_own(model, tokens) -> bool:
    """True if our logits are as far from those of the same weights in float64 as those of the model's own forward."""
    ours, own = chain(CausalNetwork(model), tokens), own_logits(model, tokens)
    exact = own_logits(copy.deepcopy(model).double(), tokens)
    return bool(off(ours, exact).quantile(0.75) < 1.5 * off(own, exact).quantile(0.75))


@each_dtype
@each_architecture
def test_a_read_gives_the_logits_of_the_models_own_forward(name, dtype):
    """In float32 each norm and bias has numbers of its own: at first the weights of norms are alike, and biases 0."""
    model, tokens = tiny(name).to(dtype), text(LENGTH)
    for values in model.parameters() if dtype == torch.float32 else ():
        if values.ndim == 1 and (values == values[0]).all():
            values.data += torch.empty_like(values).uniform_(-0.3, 0.3)
    own = own_logits(model, tokens)
    network = CausalNetwork(model)
    has_kernels = native.load_kernels() is not None
    assert network.compute_path == ("native" if name.split()[0] in DESCRIBED and has_kernels else "transformers")
    if name in SENSITIVE:
        assert is_as_near_as_its_own(model, tokens)
        return
    errors = without_other_experts(model, dtype, off(chain(network, tokens), own))
    if dtype == torch.bfloat16 and name.startswith(("Gemma3n", "Gemma4")):
        errors = errors / 5  # scores are not scaled: its own forward is 0.1 from float32's logits, as far as ours
    assert errors.max() < BOUNDS[dtype]


def test_layers_of_llama_under_another_name_run_on_kernels():
    iquest = pytest.importorskip("transformers.models.iquestcoder", reason="Transformers is older than the model")
    config = iquest.IQuestCoderConfig(vocab_size=VOCAB, num_hidden_layers=2, head_dim=8, **LLAMA_LIKE)
    assert describe_decoder(LlamaForCausalLM(config)) is not None


@pytest.mark.parametrize("name", DESCRIBED)
def test_half_precision_gives_the_logits_of_the_models_own_forward(name):
    model, tokens = tiny(name).to(torch.float16), text(LENGTH)
    if name in SENSITIVE:
        assert is_as_near_as_its_own(model, tokens)
        return
    own = own_logits(model, tokens)
    errors = without_other_experts(model, torch.float16, off(chain(CausalNetwork(model), tokens), own))
    assert errors.max() < BOUNDS[torch.float16] * (5 if name in ("Gemma3n", "Gemma4") else 1)  # as above


@pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
@pytest.mark.parametrize(
    ("changes", "packing"),
    [({}, "q4_1"), ({"v_head_dim": 24}, "q4_1"), ({"qk_nope_head_dim": 24}, "q8_0")],
    ids=["whole groups of values", "values across groups", "keys that stay expanded"],
)
def test_packed_latent_attention_gives_the_logits_of_the_models_own_forward(changes, packing):
    model, tokens = tiny("Youtu", **LATENT_OF_WHOLE_BLOCKS | changes).bfloat16(), text(LENGTH)
    pack_places(packable_places(model, 32).values(), packing, "int8")
    ours, own = chain(CausalNetwork(model), tokens), own_logits(model, tokens)
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), PackedWeight):
            module.weight = torch.nn.Parameter(weight.dequantize())
    exact = own_logits(model.double(), tokens)
    assert off(ours, exact).quantile(0.75) < 1.5 * off(own, exact).quantile(0.75)


@pytest.mark.parametrize("name", WITH_FLOAT32_ROUTERS)
def test_routers_that_transformers_keeps_in_float32_run_on_kernels(name, tmp_path):
    tiny(name).to(torch.bfloat16).save_pretrained(tmp_path)
    model, tokens = model_class(name).from_pretrained(tmp_path), text(LENGTH)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32, torch.bfloat16}
    network = CausalNetwork(model)
    assert network.compute_path == ("native" if native.load_kernels() is not None else "transformers")
    errors = without_other_experts(model, torch.bfloat16, off(chain(network, tokens), own_logits(model, tokens)))
    assert errors.max() < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Gemma4 of shared keys", {"use_double_wide_mlp": True}),
        ("Gemma4", {"hidden_size_per_layer_input": 0}),
        ("Gemma4", GEMMA4_EXPERTS),
        ("DeepseekV3", {"n_shared_experts": 0}),
        ("Qwen2Moe", {"shared_expert_intermediate_size": 0}),
        ("Gemma3n", {"altup_num_inputs": 4, "activation_sparsity_pattern": [0.95, 0.3, 0.0, 0.5]}),
        ("Gemma3n", {"altup_num_inputs": 3, "altup_active_idx": 2, "hidden_size": 60}),
        ("Gemma3n", {"altup_num_inputs": 1, "altup_correct_scale": False, "vocab_size_per_layer_input": VOCAB // 2}),
        ("Lfm3", {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True, "attention_bias": True}),
    ],
)
def test_a_described_decoder_with_other_layers(name, changes):
    model, tokens = tiny(name, **changes), text(LENGTH)
    for path, values in (*model.named_parameters(), *model.named_buffers()):
        if path.endswith(("layer_scalar", "router.scale", "router.per_expert_scale", "correct_output_scale")):
            torch.nn.init.uniform_(values, 0.5, 2)
    network = CausalNetwork(model)
    assert network.compute_path == ("native" if native.load_kernels() is not None else "transformers")
    assert off(chain(network, tokens), own_logits(model, tokens)).max() < 5e-5
    kv_cache = network.new_kv_cache()
    one_by_one = [read(network, tokens[: i + 1], kv_cache=kv_cache) for i in range(LENGTH)]
    assert torch.equal(torch.cat(one_by_one), chain(network, tokens))


def test_a_stream_of_almost_nothing_is_not_scaled_up_without_limit():
    model, tokens = tiny("Gemma3n"), text(LENGTH)
    for projection in (*model.model.altup_projections, *model.model.altup_unembed_projections):
        projection.weight.data *= 1e-4
    assert off(chain(CausalNetwork(model), tokens), own_logits(model, tokens)).max() < BOUNDS[torch.float32]


def test_gemmas_activation_is_the_one_that_its_layers_use():
    model, tokens = tiny("Gemma2", hidden_act="silu"), text(LENGTH)
    assert off(chain(CausalNetwork(model), tokens), own_logits(model, tokens)).max() < BOUNDS[torch.float32]


@each_dtype
@each_feature
def test_one_token_at_a_time_and_all_at_once_give_the_same_bits(networks, name, dtype):
    network, tokens = networks(name, dtype), text(LENGTH)
    kv_cache = network.new_kv_cache()
    one_by_one = torch.cat([read(network, tokens[: i + 1], kv_cache=kv_cache) for i in range(LENGTH)])
    assert torch.equal(one_by_one, chain(network, tokens))
    for length in (1, 7, LENGTH):
        assert torch.equal(read(network, tokens[:length])[0], one_by_one[length - 1])


@each_dtype
@each_feature
def test_a_node_of_a_tree_gets_the_bits_of_its_path_read_as_text(networks, name, dtype):
    network, decided = networks(name, dtype), text(20)
    tokens, parents = random_tree(30)
    tree = ForwardInputs(continuation(decided, 40), tokens, parents)
    kv_cache = network.new_kv_cache()
    read(network, decided[:-3], kv_cache=kv_cache)
    distributions = read(network, decided, tokens, parents, kv_cache)
    assert torch.equal(distributions[0], read(network, decided)[0])
    for node in range(0, 30, 2):
        assert torch.equal(distributions[node + 1], read(network, [*decided, *tree.path_tokens(node)])[0])


@each_architecture_in_a_dtype
def test_texts_in_a_batch_get_the_bits_that_each_gets_alone(networks, name, dtype):
    network = networks(name, dtype)
    batch = [
        ForwardInputs(continuation(text(5), 9), (3, 4, 5), (-1, 0, -1)),
        ForwardInputs(continuation(text(33, seed=1), 9)),
        ForwardInputs(continuation(text(61, seed=2), 9), *random_tree(9)),
    ]
    batch_outputs = network.forward(batch, [network.new_kv_cache() for _ in batch])
    for inputs, outputs in zip(batch, batch_outputs, strict=True):
        assert torch.equal(outputs.logits, network.forward([inputs], [network.new_kv_cache()])[0].logits)


@pytest.fixture
def most_rows(monkeypatch) -> int:
    """Of a call; few where there are no kernels, and a row takes long."""
    if native.load_kernels() is None:
        monkeypatch.setattr(chunked_prefill, "MAX_ROWS_PER_CALL", 64)
    return chunked_prefill.MAX_ROWS_PER_CALL


@each_dtype
@each_feature
def test_a_prompt_longer_than_a_call_gets_the_bits_of_decoding(networks, name, dtype, most_rows):
    network, tokens = networks(name, dtype), text(most_rows + 60)
    kv_cache = network.new_kv_cache()
    for length in (most_rows * 2 // 5, most_rows + 1, most_rows + 58):
        read(network, tokens[:length], kv_cache=kv_cache)
    for length in (most_rows + 59, most_rows + 60):
        assert torch.equal(read(network, tokens[:length], kv_cache=kv_cache), read(network, tokens[:length]))
    assert torch.equal(read(network, tokens, *random_tree(9), kv_cache), read(network, tokens, *random_tree(9)))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_batches_longer_than_a_call_are_cut_and_every_text_gets_its_own_answer(networks, name):
    network = networks(name, torch.float32)
    batch = [
        ForwardInputs(continuation(text(length, seed=length), 9), *random_tree(nodes), output_hidden_states=True)
        for length, nodes in ((500, 5), (3, 0), (MAX_ROWS_PER_CALL - 6, 7), (90, 200), (400, 300), (90, MAX_NODES))
    ]
    for inputs, outputs in zip(batch, network.forward(batch, [network.new_kv_cache() for _ in batch]), strict=True):
        alone = network.forward([inputs], [network.new_kv_cache()])[0]
        assert torch.equal(outputs.logits, alone.logits)
        assert torch.equal(outputs.hidden_states, alone.hidden_states)
        assert len(outputs.logits) == len(inputs.tokens) + 1


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_tree_larger_than_a_piece_of_a_prompt_gets_the_bits_of_its_branches_alone(networks, name):
    """Also after a prompt that was read in pieces, and where the cache holds all of the text but its last token."""
    network, decided, tree = networks(name, torch.bfloat16), text(MAX_ROWS_PER_CALL + 3), random_tree(MAX_NODES)
    kv_cache = network.new_kv_cache()
    for _ in range(2):
        rows = read(network, decided, *tree, kv_cache)
        inputs = ForwardInputs(continuation(decided, 99), *tree)
        for node in (-1, 0, 255, 256, 257, MAX_NODES - 1):
            assert torch.equal(rows[node + 1], read(network, [*decided, *inputs.path_tokens(node)])[0])


def test_a_window_counts_positions_where_branches_push_slots_apart():
    """Eleven siblings stand between the text and a branch that is longer than the window."""
    network = CausalNetwork(tiny("Mistral", sliding_window=4))
    decided, tokens = text(9), (*range(3, 14), *range(20, 30))
    parents = (*[-1] * 11, -1, *range(11, 20))
    distributions = read(network, decided, tokens, parents)
    for node in range(11, 21):
        assert torch.equal(distributions[node + 1], read(network, [*decided, *range(20, 20 + node - 10)])[0])


@torch.inference_mode()
def test_features_are_what_the_unembedding_reads(networks):
    for name in ("Llama", "GPT2"):
        network = networks(name, torch.float32)
        inputs = ForwardInputs(continuation(text(9), 9), (3, 4), (-1, 0), output_hidden_states=True)
        outputs = network.forward([inputs], [network.new_kv_cache()])[0]
        assert outputs.hidden_states.shape == (9 + 2, 48)
        unembedded = network.model.get_output_embeddings()(outputs.hidden_states[-3:])
        torch.testing.assert_close(unembedded, outputs.logits)
        plain = network.forward(
            [ForwardInputs(inputs.canvas, inputs.tokens, inputs.parents)], [network.new_kv_cache()]
        )[0]
        assert plain.hidden_states is None


@pytest.mark.parametrize("name", ["Llama", "Cohere", "FalconH1", "Qwen3Moe"])
@torch.inference_mode()
def test_rows_without_logits_end_with_the_last_mixer(name):
    """A prompt's last row is then the first one of the buffer, where hidden states of all are not wanted."""
    network, canvas = CausalNetwork(tiny(name)), continuation(text(LENGTH), 9)
    hidden = network.native_decoder.hidden
    whole = network.forward([ForwardInputs(canvas, output_hidden_states=True)], [network.new_kv_cache()])[0]
    last = hidden[LENGTH - 1].clone()
    assert not torch.equal(hidden[0], last)
    [outputs] = network.forward([ForwardInputs(canvas)], [network.new_kv_cache()])
    assert torch.equal(hidden[0], last)
    assert torch.equal(outputs.logits, whole.logits)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma", "Llama4 without experts", "GptOss"])
@torch.inference_mode()
def test_tapped_layers_stand_before_the_last_states_and_do_not_touch_the_logits(name):
    """Those of the last layer are the inputs of the last norm."""
    network, model = CausalNetwork(tiny(name)), tiny(name)  # one of its own, since it keeps the layers
    inputs = ForwardInputs(continuation(text(9), 9), (3, 4), (-1, 0), output_hidden_states=True)
    plain = network.forward([inputs], [network.new_kv_cache()])[0]
    network.add_hidden_state_layers((1, 2))
    tapped = network.forward([inputs], [network.new_kv_cache()])[0]
    assert torch.equal(tapped.logits, plain.logits)
    assert torch.equal(tapped.hidden_states[:, 96:], plain.hidden_states)
    tokens, after_all = torch.tensor([[*text(9), 3, 4]]), []
    norm = next(module for module in reversed(list(decoder_of(model).children())) if "Norm" in type(module).__name__)
    norm.register_forward_pre_hook(lambda _, inputs: after_all.append(inputs[0]))
    own = model(tokens, output_hidden_states=True, use_cache=False).hidden_states[1][0]
    assert off(tapped.hidden_states[:, :48], own).max() < BOUNDS[torch.float32]
    assert off(tapped.hidden_states[:, 48:96], after_all[0][0]).max() < BOUNDS[torch.float32]
    with pytest.raises(ValueError, match="after layer 0 are needed, but the model has layers 1 to 2"):
        network.add_hidden_state_layers((1, 0))


def test_hidden_states_of_two_sizes_are_refused_in_a_line():
    network = make_network(tiny("OPT", word_embed_proj_dim=24, do_layer_norm_before=False), "OPT-350m's shape")
    with pytest.raises(ValueError, match="hidden states of 48 numbers, and its last ones 24"):
        network.add_hidden_state_layers((1,))


@pytest.mark.parametrize("active", [0, 1])
def test_of_several_streams_the_active_one_is_tapped_by_kernels_and_by_transformers_layers(active):
    inputs = ForwardInputs(continuation(text(20), 9), (3, 4), (-1, 0), output_hidden_states=True)
    states = []
    for runs_on_kernels in (True, False):
        network = CausalNetwork(tiny("Gemma3n", altup_active_idx=active))
        if not runs_on_kernels:
            network.native_decoder = None
        network.add_hidden_state_layers((1, 4))
        states.append(network.forward([inputs], [network.new_kv_cache()])[0].hidden_states)
    assert states[0].shape == (22, 3 * 48)
    assert off(*states).max() < BOUNDS[torch.float32]


@pytest.mark.parametrize("name", ["Mistral", "Phi", "Gemma2"])
def test_without_batch_invariance_there_are_the_same_logits_but_for_rounding(name):
    model, tokens = tiny(name), text(LENGTH)
    own = own_logits(model, tokens)
    assert off(chain(CausalNetwork(model, batch_invariant=False), tokens), own).max() < BOUNDS[torch.float32]


@pytest.mark.skipif(native.load_kernels() is None, reason="no compiled kernels")
@pytest.mark.parametrize("name", ["Llama4 without experts", "FalconH1", "Olmo"])
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(name, default):
    """Norms without weights and scales of columns are made here, in float32 as kernels read them."""
    model = tiny(name, **LLAMA_LIKE if name == "Olmo" else {})
    inputs = ForwardInputs(continuation(np.arange(9) % 50, 1))
    network = CausalNetwork(model)
    wanted = network.forward([inputs], [network.new_kv_cache()])[0].logits
    torch.set_default_dtype(default)
    try:
        network = CausalNetwork(model)
        assert torch.equal(network.forward([inputs], [network.new_kv_cache()])[0].logits, wanted)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_threads_may_share_a_network(networks, name):
    network = networks(name, torch.float32)
    batch = [ForwardInputs(continuation(text(20, seed), 9), *random_tree(8, seed)) for seed in range(4)]
    alone = [network.forward([inputs], [network.new_kv_cache()])[0].logits for inputs in batch]
    wrong = []

    def work(number: int) -> None:
        for _ in range(15):
            logits = network.forward([batch[number]], [network.new_kv_cache()])[0].logits
            if not torch.equal(logits, alone[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


OF_TRANSFORMERS = {"scale_attn_by_inverse_layer_idx": True}  # which kernels do not do


def test_weights_stored_as_columns_are_turned_anew_when_they_change():
    model = tiny("GPT2", **OF_TRANSFORMERS)
    network, tokens = CausalNetwork(model), text(9)
    before = chain(network, tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert torch.equal(chain(network, tokens), chain(CausalNetwork(model), tokens))
    assert not torch.equal(chain(network, tokens), before)
    model.to(torch.bfloat16)
    assert torch.equal(chain(network, tokens), chain(CausalNetwork(tiny_like(model)), tokens))


def tiny_like(model):
    """A second GPT-2 with the same weights in other places."""
    other = tiny("GPT2", seed=1, **OF_TRANSFORMERS).to(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    return other


REFUSED = {
    "Falcon with ALiBi": ({"hidden_size": 48, "num_attention_heads": 6, "alibi": True}, "AttentionInterface"),
    "RecurrentGemma": ({**LLAMA_LIKE, "num_hidden_layers": 3}, "keeps a state"),
    "Bart": (
        {"d_model": 48, "decoder_attention_heads": 6, "decoder_layers": 2, "decoder_ffn_dim": 64, "encoder_layers": 1},
        "other logits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_an_error_that_says_why(name):
    settings, why = REFUSED[name]
    with pytest.raises(ValueError, match=why) as error:
        make_network(tiny(name, **settings), "mine")
    assert "\n" not in str(error.value)


def test_what_kernels_do_not_compute_beside_a_state_is_named():
    with pytest.raises(ValueError, match=r"keeps a state in .*, and our kernels do not compute the activation gelu"):
        make_network(tiny("NemotronH", mamba_hidden_act="gelu"), "mine")


def test_a_sum_of_scores_that_is_limited_is_left_to_transformers_layers():
    model, tokens = tiny("Ernie4_5_Moe", moe_norm_min=0.9), text(LENGTH)
    assert off(chain(CausalNetwork(model), tokens), own_logits(model, tokens)).max() < BOUNDS[torch.float32]


@pytest.mark.parametrize("name", RECURRENT)
def test_layers_with_states_need_compiled_kernels(name, monkeypatch):
    monkeypatch.setattr(native, "load_kernels", lambda: None)
    with pytest.raises(ValueError, match=r"state in .* which only our own kernels .*; install a C compiler") as error:
        make_network(tiny(name), "mine")
    assert "\n" not in str(error.value)


def test_layers_with_states_are_not_those_with_hooks():
    model = tiny("Mamba2")
    model.backbone.layers[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match=r"which only our own kernels .*; load it without hooks"):
        make_network(model, "mine")


@pytest.mark.parametrize("name", [*RECURRENT, "DeepseekV32"])
def test_models_with_states_and_chosen_keys_are_served(name):
    for exact in (True, False):  # there is no other way of reading trees
        network = make_network(tiny(name), "mine", exact)
        assert network.compute_path == "native"
        assert network.batch_invariant


@pytest.mark.parametrize("setting", ["mamba_chunk_size", "chunk_size"])
def test_a_model_is_checked_without_filling_chunks_of_mamba(setting):
    """Transformers' layers pad nine tokens to a whole chunk; one as long as this has no memory to take."""
    model = tiny({"mamba_chunk_size": "GraniteMoeHybrid", "chunk_size": "NemotronH"}[setting], **{setting: 1 << 40})
    make_network(model, "the model")
    assert {m.chunk_size for m in model.modules() if hasattr(m, "chunk_size")} == {1 << 40}


def test_a_state_and_experts_without_a_shared_one_are_served():
    model, tokens = tiny("GraniteMoeHybrid", shared_intermediate_size=0), text(LENGTH)
    assert off(chain(CausalNetwork(model), tokens), own_logits(model, tokens)).max() < BOUNDS[torch.float32]


@pytest.mark.parametrize(
    ("name", "changes"),
    [("Gemma3n", {"laurel_rank": 0}), ("DeepseekV3", {"q_lora_rank": 0})],
)
def test_weights_without_numbers_are_refused(name, changes):
    with pytest.raises(ValueError, match="of 0 x 48 numbers") as error:
        make_network(tiny(name, **changes), "mine")
    assert "\n" not in str(error.value)


def test_position_biases_are_refused():
    config = BloomConfig(vocab_size=VOCAB, hidden_size=48, n_head=6, n_layer=2)
    with pytest.raises(ValueError, match="AttentionInterface"):
        make_network(BloomForCausalLM(config).eval(), "mine")
