"""Gated adapters: they act on auxiliary queries alone, and every other row keeps the bits of the bare model."""

import ctypes
import json
import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from architectures import DESCRIBED, random_tree, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.checkpoints import load_checkpoint
from saltus.engine.target_network import make_network
from saltus.kernels import native
from saltus.kernels.batch_invariant_ops import linear
from saltus.kernels.native import structs
from saltus.loading.load_model import load_model
from saltus.methods.shared.adapter_files import load_adapter, save_adapter
from saltus.methods.shared.query_chains import with_query_chains
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.chunked_prefill import MAX_ROWS_PER_CALL
from saltus.models.gated_lora import (
    Adapter,
    Gate,
    GatedLoraSettings,
    _output_layer,
    gated_adapter,
    linear_layers,
    new_adapter,
)
from saltus.models.uniform_embedding import KINDS, UniformEmbedding

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.008}  # of the error's norm over the logits'
STEPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # between numbers near one
NAMES = ["Llama", "Qwen2", "Qwen3", "Mistral", "GPT2", "Gemma2", "OPT", "Phi3"]
SLIDING = ["Mistral", "Gemma2", "Phi3"]
TREE = random_tree(7)

STARTS = ["blank", "last-token"]
each_start = pytest.mark.parametrize("query_start", STARTS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES[:2], ids=["float32", "bfloat16"])
each_name_twice = pytest.mark.parametrize(  # with each dtype and each start once, natively and by Transformers' layers
    ("name", "dtype", "native_decoder", "query_start"),
    [
        (name, DTYPES[(i + turn) % 2], is_native, STARTS[(i // 2 + turn + is_native) % 2])
        for i, name in enumerate(NAMES)
        for is_native in (True, False)
        for turn in range(2)
    ],
)


def adapter_for(model, seed: int = 0, **settings) -> Adapter:
    """One that changes much: nothing in it is zero, and everything can be said in the model's format."""
    rank = settings.pop("rank", 6)
    adapter = new_adapter(model, GatedLoraSettings(**{"rank": rank, "alpha": 1.5 * rank} | settings), seed)
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter.parameters():
            drawn = torch.randn(weight.shape, generator=dice) * (0.2 if weight.ndim == 1 else 0.5 * rank**-0.25)
            weight.copy_((weight + drawn.to(weight.device) * min(weight.shape[-1], 8) ** -0.5).to(model.dtype))
    return adapter.eval()


def network_of(model, adapter: Adapter | None, native_decoder: bool = True) -> CausalNetwork:
    network = CausalNetwork(model)
    if not native_decoder:
        network.native_decoder = None
    network.attach_adapter(adapter)
    return network


def with_queries(
    decided, tokens=(), parents=(), groups=((-1, (0.25, 0.5, 0.75)),), temperature=0.7, **more
) -> ForwardInputs:
    """A tree and chains of queries: (the node that a chain hangs from, its uniforms)."""
    canvas = continuation(np.asarray(decided), 60)
    tree = ForwardInputs(canvas, tuple(tokens), tuple(parents), **more)
    return with_query_chains(tree, groups, temperature)


def bare(inputs: ForwardInputs) -> ForwardInputs:
    """The same without its queries."""
    return ForwardInputs(
        inputs.canvas, inputs.tokens[: inputs.num_draft_tokens], inputs.parents[: inputs.num_draft_tokens]
    )


GROUPS = ((-1, (0.1,)), (2, (0.9, 0.3)), (6, (0.5, 0.2, 0.8, float("nan"))), (-1, (0.1, 0.7)))


@each_name_twice
def test_rows_that_are_no_queries_keep_the_bits_of_the_bare_model(name, dtype, native_decoder, query_start):
    if native_decoder and name not in DESCRIBED:
        pytest.skip(f"the native decoder does not run {name}; Transformers' layers do")
    model = tiny(name).to(dtype)
    network, alone = (
        network_of(model, adapter_for(model, query_start=query_start), native_decoder),
        network_of(tiny(name).to(dtype), None, native_decoder),
    )
    batch = [
        with_queries(text(33), *TREE, GROUPS),
        with_queries(text(5, seed=1), temperature=0.0),
        bare(with_queries(text(12, seed=2), *TREE)),
        with_queries(text(MAX_ROWS_PER_CALL + 9, seed=3), *TREE, GROUPS[1:]),
    ]
    batch_outputs = network.forward(batch, [network.new_kv_cache() for _ in batch])
    for inputs, outputs in zip(batch, batch_outputs, strict=True):
        expected = alone.forward([bare(inputs)], [alone.new_kv_cache()])[0].logits
        assert torch.equal(outputs.logits[: inputs.num_draft_tokens + 1], expected)
        assert len(outputs.logits) == len(inputs.tokens) + 1
    lone = network.forward([bare(batch[0])], [network.new_kv_cache()])[0]  # and when no gate is on any more
    assert torch.equal(lone.logits, batch_outputs[0].logits[: batch[0].num_draft_tokens + 1])


@torch.inference_mode()
def reference(model, adapter: Adapter, tokens, uniforms, temperature: float) -> torch.Tensor:
    """Logits of a chain of queries behind a text, by merged weights where the gate is on, in float32."""
    start, hooks, first = len(tokens), [], adapter.settings.query_start == "last-token"
    for path in linear_layers(model):
        part, layer = adapter.lora_layer(path), model.get_submodule(path)
        if part is None:
            continue
        turned = type(layer).__name__ == "Conv1D"
        weight = layer.weight.float().T if turned else layer.weight.float()
        merged = weight + adapter.settings.scale * part.up @ part.down

        def merge(module, inputs, out, merged=merged):
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            new = F.linear(rows, merged, module.bias)
            return torch.cat([out.reshape(-1, out.shape[-1])[:start], new[start:]]).view(out.shape)

        hooks.append(layer.register_forward_hook(merge))
    u = torch.tensor(uniforms, dtype=torch.float64)
    has_token = torch.arange(len(u)) < first
    gate = Gate(torch.arange(len(u)), u, torch.full_like(u, temperature), has_token)

    def embed(module, inputs, out):
        return torch.cat([out[:, :start], adapter.embed_queries(gate, out[0, start:])[None]], 1)

    hooks.append(model.get_input_embeddings().register_forward_hook(embed))
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([[*tokens, tokens[-1] if first else 0, *[0] * (len(uniforms) - 1)]])
        positions = torch.arange(ids.shape[1])
        positions[start:] -= int(first)
        mask = torch.ones_like(ids)  # else repeated positions are taken for another text's
        return model(ids, attention_mask=mask, position_ids=positions[None], use_cache=False).logits[0, start:]
    finally:
        for hook in hooks:
            hook.remove()


@each_name_twice
def test_queries_get_the_logits_of_merged_weights_behind_their_own_context(name, dtype, native_decoder, query_start):
    if native_decoder and name not in DESCRIBED:
        pytest.skip(f"the native decoder does not run {name}; Transformers' layers do")
    if query_start == "last-token" and name in SLIDING:
        pytest.skip("Transformers' sliding window counts rows, not positions")
    model = tiny(name).to(dtype)
    adapter = adapter_for(model, query_start=query_start)
    network = network_of(model, adapter, native_decoder)
    decided, groups = text(33), ((2, (0.9, 0.3)), (6, (0.5, 0.2, 0.8, float("nan"))), (-1, (0.1, 0.7)))
    inputs = with_queries(decided, *TREE, groups)
    logits = network.forward([inputs], [network.new_kv_cache()])[0].logits.float()
    for at, uniforms in groups:
        expected = reference(tiny(name).to(dtype).float(), adapter, [*decided, *inputs.path_tokens(at)], uniforms, 0.7)
        got = logits[[node + 1 for node in inputs.query_chain(at)]]
        assert ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < BOUNDS[dtype]


def test_a_query_is_told_its_uniform_its_temperature_and_what_stands_before_it():
    model = tiny("Llama")
    network = network_of(model, adapter_for(model))

    def logits(*uniforms, temperature=0.7, length=20):
        inputs = with_queries(text(length), groups=((-1, uniforms),), temperature=temperature)
        return network.forward([inputs], [network.new_kv_cache()])[0].logits[1:]

    first = logits(0.3, 0.6)
    assert torch.equal(logits(0.3, 0.6, 0.9)[:2], first)
    assert torch.equal(logits(0.3, 0.7)[0], first[0])
    for other in (logits(0.4, 0.6), logits(0.3, 0.6, temperature=1.0), logits(0.3, 0.6, length=21)):
        assert not torch.equal(other[1], first[1])
    assert not torch.equal(logits(0.3, 0.7)[1], first[1])


@each_dtype
@pytest.mark.parametrize("native_decoder", [True, False], ids=["native", "transformers"])
def test_queries_round_alike_whatever_else_is_in_the_call(dtype, native_decoder):
    model = tiny("Llama").to(dtype)
    network = network_of(model, adapter_for(model, rank=37), native_decoder)
    inputs = with_queries(text(33), *TREE, GROUPS)
    other = with_queries(text(50, seed=1), *random_tree(20), ((19, (0.5,) * 9),))
    alone = network.forward([inputs], [network.new_kv_cache()])[0].logits
    together = network.forward([other, inputs], [network.new_kv_cache(), network.new_kv_cache()])[1].logits
    assert torch.equal(alone, together)
    chain = with_queries(text(33), *TREE, GROUPS[2:3])
    lone = network.forward([chain], [network.new_kv_cache()])[0].logits[chain.num_draft_tokens + 1 :]
    assert torch.equal(lone, alone[[node + 1 for node in inputs.query_chain(6)]])


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rank", [1, 3, 8, 16, 33])
def test_both_paths_agree_at_every_rank(dtype, rank):
    model = tiny("Qwen2").to(dtype)
    adapter, inputs = adapter_for(model, rank=rank), with_queries(text(33), *TREE, GROUPS)
    one, other = (
        (network := network_of(model, adapter, native_decoder))
        .forward([inputs], [network.new_kv_cache()])[0]
        .logits.float()
        for native_decoder in (True, False)
    )
    assert ((one - other).norm(dim=-1) / other.norm(dim=-1)).max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "rank"), [(7, 3, 1), (33, 9, 5), (48, 20, 16), (576, 50, 64), (100, 4, 70)]
)
def test_the_kernel_adds_the_low_rank_part_to_gated_rows_and_rounds_once(dtype, inputs, outputs, rank):
    kernel = native.kernel("linear", dtype, torch.device("cpu"))
    if kernel is None:
        pytest.skip(f"no compiled kernels for {dtype}")
    dice = np.random.default_rng(inputs)

    def normal(*shape):
        return torch.from_numpy(dice.normal(size=shape) / shape[-1] ** 0.5).to(dtype)

    x, gate, weights, bias = (
        normal(23, inputs),
        [1, 2, 7, 9, 10, 11, 20, 22],
        [normal(outputs, inputs)] * 2,
        normal(outputs),
    )
    down, up, plain = normal(rank, inputs), normal(outputs, rank), linear(x, weights, [bias, None])
    outs, place = [torch.empty_like(out) for out in plain], torch.full((23,), -1, dtype=torch.int32)
    place[gate] = torch.arange(len(gate), dtype=torch.int32)
    struct = structs.Linear(x=x.data_ptr(), rows=23, inputs=inputs, count=2, rank=rank, gated=len(gate), scale=1.5)
    for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
        struct.weight[i], struct.out[i], struct.outs[i] = weight.data_ptr(), out.data_ptr(), outputs
    struct.bias[0], struct.place = bias.data_ptr(), place.data_ptr()
    turned = up.T.contiguous()
    struct.down[0], struct.up[0] = down.data_ptr(), turned.data_ptr()
    assert kernel(ctypes.byref(struct)) == 0
    assert torch.equal(outs[1], plain[1])
    others = [row for row in range(23) if row not in gate]
    assert torch.equal(outs[0][others], plain[0][others])
    exact = F.linear(x.double(), weights[0].double() + 1.5 * up.double() @ down.double(), bias.double())[gate]
    error = (outs[0][gate].double() - exact).abs()
    assert (error <= exact.abs() * STEPS[dtype] / 2 + 1e-5).all()
    assert (outs[0][gate] != plain[0][gate]).double().mean() > 0.9


def test_a_chosen_set_of_layers_is_the_set_that_is_adapted():
    model = tiny("Llama")
    adapter = adapter_for(model, targets=("q_proj", "down_proj"))
    assert {path.rpartition(".")[2] for path in adapter.sizes} == {"q_proj", "down_proj"}
    inputs = with_queries(text(20))
    network = network_of(model, adapter)
    got = network.forward([inputs], [network.new_kv_cache()])[0].logits[1:]
    expected = reference(tiny("Llama"), adapter, text(20), (0.25, 0.5, 0.75), 0.7)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"no linear layer 'c_proj'; there are down_proj"):
        new_adapter(model, GatedLoraSettings(targets=("c_proj",)))


def test_a_first_query_with_the_last_token_is_that_token_again_and_its_uniform():
    """Untrained it is the token's own row, which sees itself twice; the next query stands one position later."""
    model = tiny("Llama")
    settings = GatedLoraSettings(query_start="last-token")
    network = network_of(model, new_adapter(model, settings))
    inputs = with_queries(text(20), *TREE, ((-1, (0.3, 0.6)), (6, (0.9, 0.2))))
    got = network.forward([inputs], [network.new_kv_cache()])[0].logits
    for node in (-1, 6):
        tokens = [*text(20), *inputs.path_tokens(node)]
        with torch.inference_mode():
            ids, positions = (
                torch.tensor([[*tokens, tokens[-1]]]),
                torch.tensor([[*range(len(tokens)), len(tokens) - 1]]),
            )
            twice = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits[0]
        first, second = inputs.query_chain(node)
        torch.testing.assert_close(got[first + 1], twice[-1], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got[second + 1], twice[-1], atol=0.01)
    drawn = network_of(model, new_adapter(model, settings, embedding_init="normal"))
    other = with_queries(text(20), *TREE, ((-1, (0.4, 0.6)), (6, (0.9, 0.2))))
    ours, theirs = (drawn.forward([each], [drawn.new_kv_cache()])[0].logits[8:] for each in (inputs, other))
    assert (ours[:2] != theirs[:2]).any(1).all(), "it reads its uniform"
    assert torch.equal(ours[2:], theirs[2:])


@pytest.mark.parametrize("embedding", KINDS)
def test_an_embedding_is_drawn_with_the_deviation_of_the_models_embeddings(embedding):
    model = tiny("Llama")
    settings = GatedLoraSettings(embedding=embedding, query_start="last-token")
    zero, one, again, other = (
        new_adapter(model, settings, seed, embedding_init=init).auxiliary
        for seed, init in ((0, "zeros"), (0, "normal"), (0, "normal"), (1, "normal"))
    )
    embeddings = model.get_input_embeddings().weight
    assert torch.equal(zero.blank, embeddings.mean(0))
    last = [_output_layer(each).weight for each in (zero, one, again, other)]
    assert not last[0].any()
    assert torch.equal(last[1], last[2])
    assert not torch.equal(last[1], last[3])
    assert last[1].std().item() == pytest.approx(embeddings.std().item(), rel=0.35)


def test_an_embedding_of_two_layers_starts_from_the_seed_alone():
    """Its first layer, which is not zero."""
    model, settings = tiny("Llama"), GatedLoraSettings(embedding="bits+nn")
    one, again, other = (new_adapter(model, settings, seed).auxiliary.state_dict() for seed in (0, 0, 1))
    for name in ("map.0.weight", "map.0.bias"):
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name])


def test_three_vectors_are_interpolated_by_a_uniform():
    embedding = UniformEmbedding(8, "interpolated")
    with torch.no_grad():
        embedding.map.weight.normal_(generator=torch.Generator().manual_seed(0))
    first, middle, last = embedding.map.weight.T
    us = torch.tensor([0.0, 0.125, 0.5, 0.75, 1 - 2.0**-53, float("nan")], dtype=torch.float64)
    expected = torch.stack([first, 0.75 * first + 0.25 * middle, middle, (middle + last) / 2, last, 0 * first])
    torch.testing.assert_close(embedding(us, torch.ones(6)), expected)


def test_a_new_adapter_adds_nothing_but_its_embedding():
    model = tiny("Llama")
    adapter = new_adapter(model)
    network = network_of(model, adapter)
    inputs = with_queries(text(20), groups=((-1, (0.3, 0.6)),))
    got = network.forward([inputs], [network.new_kv_cache()])[0].logits[1:]
    other = with_queries(text(20), groups=((-1, (0.9, 0.1)),), temperature=0.0)
    assert torch.equal(got, network.forward([other], [network.new_kv_cache()])[0].logits[1:])


@each_start
def test_queries_leave_nothing_in_memory(query_start):
    """The text goes on behind them as if they had not been asked, also where the same ids follow."""
    model = tiny("Llama")
    network = network_of(model, adapter_for(model, query_start=query_start))
    kv_cache, inputs = network.new_kv_cache(), with_queries(text(20), *TREE, GROUPS)
    network.forward([inputs], [kv_cache])
    grown = np.array([*text(20), *inputs.path_tokens(6), 0, 0])
    outputs = network.forward([ForwardInputs(continuation(grown, 9))], [kv_cache])[0]
    assert outputs.context_tokens_read == 2
    assert torch.equal(
        outputs.logits, network.forward([ForwardInputs(continuation(grown, 9))], [network.new_kv_cache()])[0].logits
    )


def test_queries_without_an_adapter_are_refused():
    network = CausalNetwork(tiny("Llama"))
    with pytest.raises(ValueError, match="need an adapter"):
        network.forward([with_queries(text(9))], [network.new_kv_cache()])
    shaped = CausalNetwork(tiny("Llama"), fixed_shapes=True)
    with pytest.raises(ValueError, match="need an adapter"):
        shaped.forward([with_queries(text(9))], [shaped.new_kv_cache()])


def test_an_adapter_learns_where_the_gate_is_on_and_the_model_stays_as_it_is():
    model = tiny("Llama").requires_grad_(False)
    adapter, before = adapter_for(model).train(), {k: v.clone() for k, v in model.state_dict().items()}
    ids = torch.from_numpy(text(24))[None].repeat(2, 1)
    gate = Gate(torch.tensor([5, 6, 30, 47]), torch.tensor([0.1, 0.5, 0.2, 0.9]).double(), torch.ones(4).double())
    optimizer = torch.optim.Adam(adapter.parameters(), 0.01)
    losses = []
    for _ in range(30):
        model.set_attn_implementation("eager")
        with gated_adapter(model, adapter, gate):
            logits = model(ids, use_cache=False).logits.flatten(0, 1)[gate.rows]
        loss = F.cross_entropy(logits, torch.tensor([7, 8, 9, 10]))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None for weight in adapter.parameters())
        optimizer.step()
    assert losses[-1] < losses[0] / 3
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


# Folders


@pytest.fixture
def folder(tmp_path):
    model = tiny("Llama")
    save_adapter(adapter_for(model), tmp_path / "adapter", model, "mine", {"steps": 7})
    return tmp_path / "adapter"


def load(folder, model=None):
    return load_adapter(folder, model or tiny("Llama"), "mine")


@pytest.mark.parametrize("embedding", ["bits", "scalar+nn", "thermometer", "arithmetic", "interpolated"])
@pytest.mark.parametrize(("told", "query_start"), [(True, "blank"), (False, "last-token")])
def test_an_adapter_comes_back_as_it_was_saved(tmp_path, embedding, told, query_start):
    model = tiny("GPT2")
    adapter = adapter_for(
        model, embedding=embedding, embeds_temperature=told, targets=("c_attn", "c_fc"), query_start=query_start
    )
    for _ in range(2):  # the second takes the place of the first
        save_adapter(adapter, tmp_path / "new" / "one", model, "mine")
    again = load(tmp_path / "new" / "one", model=model)
    assert again.settings == adapter.settings
    stored = json.loads((tmp_path / "new" / "one" / "saltus.json").read_text())["settings"]
    assert stored.get("query_start", "blank") == query_start
    assert ("query_start" in stored) == (query_start != "blank"), "older versions refuse settings they do not know"
    assert os.listdir(tmp_path / "new") == ["one"]
    inputs = with_queries(text(20), *TREE, GROUPS)
    logits = [
        (network := network_of(model, one)).forward([inputs], [network.new_kv_cache()])[0].logits
        for one in (adapter, again)
    ]
    assert torch.equal(*logits)


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def change(name, **values):
    def apply(folder):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return apply


WRONG = {
    "its weights are cut short": lambda folder: cut(folder / "adapter_model.safetensors"),
    "a bit of its weights differs": lambda folder: flip(folder / "adapter_model.safetensors"),
    "its embedding is cut short": lambda folder: cut(folder / "auxiliary.safetensors"),
    "its embedding is gone": lambda folder: (folder / "auxiliary.safetensors").unlink(),
    "its metadata are cut short": lambda folder: cut(folder / "saltus.json"),
    "its metadata are gone": lambda folder: (folder / "saltus.json").unlink(),
    "its metadata are no object": lambda folder: (folder / "saltus.json").write_text("[]"),
    "its target was changed": change("saltus.json", target="other"),
    "its rank was changed": change("adapter_config.json", r=0),
    "it is gone": shutil.rmtree,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_folder_that_is_not_whole_is_refused_with_the_cure(folder, wrong):
    load(folder)
    WRONG[wrong](folder)
    with pytest.raises(ValueError, match=r"; (copy it again, or train it again|give a folder)") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_an_adapter_for_another_target_is_refused(folder):
    with pytest.raises(ValueError, match=r"was trained for mine \(\w+\), not mine \(\w+\); train it again") as error:
        load(folder, model=tiny("Llama", seed=1))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="does not fit GPT2LMHeadModel"):
        network_of(tiny("GPT2"), load(folder))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "settings",
    [{"rank": 0}, {"window": 0}, {"alpha": 0.0}, {"dropout": 1.0}, {"embedding": "x"}, {"query_start": "first-token"}],
)
def test_settings_that_make_no_adapter_are_refused(settings):
    with pytest.raises(ValueError, match=r"an adapter's .* must"):
        GatedLoraSettings(**settings)


@pytest.mark.unchecked
def test_a_folder_with_an_unknown_query_start_is_refused(tmp_path):
    model = tiny("Llama")
    adapter = adapter_for(model, query_start="last-token")
    object.__setattr__(adapter.settings, "query_start", "second-token")
    save_adapter(adapter, tmp_path / "adapter", model, "mine")
    with pytest.raises(ValueError, match=r"holds no adapter that fits together .*query_start") as error:
        load(tmp_path / "adapter")
    assert "\n" not in str(error.value)


def test_token_queries_with_a_start_are_refused():
    with pytest.raises(ValueError, match=r"query_start=last-token means nothing; leave it out"):
        new_adapter(tiny("Llama"), GatedLoraSettings(query_start="last-token"), reads_tokens=True)


def test_peft_reads_the_low_rank_parts(tmp_path):
    """It knows no gate, so that every row gets them: as if all weights were merged."""
    peft = pytest.importorskip("peft")
    model, tokens = tiny("Llama"), text(20)
    adapter = adapter_for(model)
    save_adapter(adapter, tmp_path / "adapter", model, "mine")
    theirs = peft.PeftModel.from_pretrained(tiny("Llama"), tmp_path / "adapter").eval()
    merged = tiny("Llama")
    with torch.no_grad():
        for path in adapter.sizes:
            part = adapter.lora_layer(path)
            merged.get_submodule(path).weight += adapter.settings.scale * part.up @ part.down
        ids = torch.from_numpy(tokens)[None]
        torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(theirs(ids).logits, tiny("Llama")(ids).logits, atol=1e-2)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_model_keeps_its_bits_beside_queries(model_folder, dtype):
    network = make_network(load_model("the default model", model_folder, getattr(torch, dtype)), "the default model")
    inputs = with_queries(text(60) + 500, *TREE, GROUPS)
    before = network.forward([bare(inputs)], [network.new_kv_cache()])[0].logits
    adapter = new_adapter(network.model, GatedLoraSettings(rank=16))
    with torch.no_grad():
        for path in adapter.sizes:
            adapter.lora_layer(path).up.fill_(0.01)
    network.attach_adapter(adapter)
    logits = network.forward([inputs], [network.new_kv_cache()])[0].logits
    assert torch.equal(logits[: inputs.num_draft_tokens + 1], before)
    network.native_decoder = None
    slower = network.forward([inputs], [network.new_kv_cache()])[0].logits
    queries = slice(inputs.num_draft_tokens + 1, None)
    error = (logits[queries] - slower[queries]).float().norm(dim=-1) / slower[queries].float().norm(dim=-1)
    assert error.max() < (0.05 if dtype == "bfloat16" else 1e-4)


def test_an_adapter_of_others_is_no_model_of_its_own(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING", "base_model_name_or_path": "a/b"}')
    with pytest.raises(ValueError, match="PROMPT_TUNING"):
        load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["Llama4", "HunYuanMoEV1", "Qwen3Moe"])
def test_what_chooses_experts_has_no_low_rank_part(name):
    model = tiny(name)
    assert not [path for path in linear_layers(model) if "router" in path or "gate" in path.split(".")]
    network = network_of(model, adapter_for(model), native_decoder=False)
    inputs = with_queries(text(9), *TREE, GROUPS)
    logits = network.forward([inputs], [network.new_kv_cache()])[0].logits
    kernels = network_of(model, adapter_for(model), native_decoder=True)
    found = kernels.forward([inputs], [kernels.new_kv_cache()])[0].logits
    torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
