"""DFlash drafters compute what the paper describes, draft like any other, and move to other engines and back."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_cli import complaint, lines, saltus_
from test_ptp import question, states
from transformers import LlamaForCausalLM, set_seed

import saltus
from saltus.engine import target_drafters
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.loading.metadata import DrafterMetadata, write_metadata
from saltus.methods.published import dflash_model as dflash_module
from saltus.methods.published.dflash_files import load_dflash
from saltus.methods.published.dflash_model import DFlashModel, DFlashShape
from saltus.methods.published.dflash_network import DFlashNetwork
from saltus.methods.published.training.dflash import forward_blocks, new_dflash_model
from saltus.methods.published.training.objectives import DFlashSettings
from saltus.methods.shared.drafter_files import save_drafter
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD
from saltus.models.causal import CausalNetwork
from saltus.models.memory_use import kv_bytes_per_token
from saltus.training.data.hidden_states import HiddenStateCorpus
from saltus.training.data.window_dataset import WindowDataset, WindowSettings
from tiny_models import tiny_llama

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
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], 1
        )

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
    shape = {
        "hidden": 32,
        "intermediate": 48,
        "hidden_state_layers": (1,),
        "mask_token": 299,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 16,
    }
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
    target.add_hidden_state_layers(model.shape.hidden_state_layers)
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
@pytest.mark.parametrize("hidden_state_layers", [(1,), (1, 2)])
def test_it_computes_what_the_paper_writes_down(hidden_state_layers, kernels):
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    network, text = (
        dflash_network(target, hidden_state_layers=hidden_state_layers, kernels=kernels),
        np.random.default_rng(0).integers(5, 250, 21),
    )
    hidden = states(target, text)
    outputs = network.forward([question(text, hidden[:-1])], [network.new_kv_cache()])[0]
    model = network.model
    expected = plain_dflash(
        published_names(model), plain_shape(model.shape), target.model.get_input_embeddings().weight.detach(),
        model.lm_head.weight.detach(), hidden[:-1, : len(hidden_state_layers) * 32], int(text[-1]),
    )  # fmt: skip
    torch.testing.assert_close(outputs.logits, expected.float(), rtol=1e-4, atol=1e-4)
    assert outputs.token_ids.tolist() == list(range(5, 250))
    assert kv_bytes_per_token(network) == 2 * 2 * 4 * 16 * 4


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_text_of_a_batch_has_the_bits_that_it_has_alone(dtype, kernels):
    target = CausalNetwork(tiny_llama().to(dtype))
    network, random = dflash_network(target, dtype, kernels), np.random.default_rng(3)
    texts = [random.integers(5, 250, length + 5) for length in LENGTHS]
    hidden = [states(target, text) for text in texts]
    together, apart = ([network.new_kv_cache() for _ in texts] for _ in range(2))
    for begin, end in ((1, -4), (-4, -3), (-3, 0)):  # hidden states of the prompts, then of new tokens
        questions = [
            question(text[: len(text) + end], of[begin - 1 : len(text) + end - 1])
            for text, of in zip(texts, hidden, strict=True)
        ]
        expected = [network.forward([one], [cache])[0] for one, cache in zip(questions, apart, strict=True)]
        for found, alone in zip(network.forward(questions, together), expected, strict=True):
            assert torch.equal(found.logits, alone.logits)
            assert torch.equal(found.hidden_states, alone.hidden_states)
            assert found.context_tokens_read == alone.context_tokens_read
    for one, other in zip(together, apart, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


def test_read_in_pieces_or_at_once_the_answer_is_the_same_also_after_a_change():
    target = CausalNetwork(tiny_llama())
    network, text = dflash_network(target), np.random.default_rng(0).integers(5, 250, 90)
    kv_cache = network.new_kv_cache()
    for begin, end in ((1, 4), (4, 5), (5, 40), (40, 90)):
        outputs = network.forward([question(text[:end], states(target, text)[begin - 1 : end - 1])], [kv_cache])[0]
        assert outputs.context_tokens_read == end - begin
    whole = network.forward([question(text, states(target, text)[:-1])], [network.new_kv_cache()])[0]
    assert torch.equal(outputs.logits, whole.logits)
    other = text.copy()
    other[80:] = np.random.default_rng(2).integers(5, 250, 10)
    changed = network.forward([question(other, states(target, other)[69:-1])], [kv_cache])[0]
    assert changed.context_tokens_read == 10
    afresh = network.forward([question(other, states(target, other)[:-1])], [network.new_kv_cache()])[0]
    assert torch.equal(changed.logits, afresh.logits)


def test_fewer_queries_are_the_first_of_a_whole_block_and_uniforms_are_not_read():
    target = CausalNetwork(tiny_llama())
    network, text = dflash_network(target), np.arange(5, 25)
    hidden = states(target, text)[:-1]
    whole, *fewer = (
        network.forward([question(text, hidden, uniforms)], [network.new_kv_cache()])[0].logits
        for uniforms in ((0.1, 0.2, 0.3), (0.9,), (0.5, 0.6, 0.7, 0.8, 0.9))
    )
    assert len(whole) == 1 + 3
    assert torch.equal(fewer[0], whole[:2])
    assert torch.equal(fewer[1], whole)


@pytest.fixture(scope="session")
def dflash_folder(tiny_folder, tmp_path_factory):
    """A folder with an untrained DFlash drafter for the tiny model of seed 0."""
    target, out = LlamaForCausalLM.from_pretrained(tiny_folder()), tmp_path_factory.mktemp("dflash")
    save_drafter("drafter", dflash_model(target), out, "tiny", target, {})
    return out


@pytest.mark.parametrize("method", ["ptp", "ptp+lookup"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "coupling": "probability"}])
def test_a_text_is_that_of_plain_decoding_alone_and_in_a_batch(tiny_folder, dflash_folder, method, sampling):
    options = {"ptp": {"model": str(dflash_folder)}}
    engine = saltus.load(str(tiny_folder()), method, options=options, adaptive=False, max_draft_tokens=8)
    prompts = ["the cat sat on the mat", "a dog " * 40, "x"]
    settings = {"max_new_tokens": 24, "ignore_eos": True, "raw": True, "seed": 3, **sampling}
    plain = engine.copy_with().generate(prompts, method="plain", **settings)
    together = engine.generate(prompts, **settings)
    assert [one.tokens for one in together] == [one.tokens for one in plain]
    alone = [engine.copy_with().generate(prompt, **settings) for prompt in prompts]
    assert [one.tokens for one in alone] == [one.tokens for one in plain]
    assert sum(call.num_draft_tokens for one in alone for call in one.calls) > 20


def test_by_rejection_a_text_of_a_batch_is_the_one_that_it_is_alone(tiny_folder, dflash_folder):
    options = {"ptp": {"model": str(dflash_folder)}}
    engine = saltus.load(str(tiny_folder()), "ptp", options=options, rule="reject")
    prompts, settings = ["the cat", "a dog " * 40, "x"], {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    together = engine.generate(prompts, **settings)
    alone = [engine.copy_with().generate(prompt, **settings) for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_it_reads_the_states_of_a_longer_prompt_than_other_drafters(tiny_folder, dflash_folder):
    engine = saltus.load(str(tiny_folder()), "ptp", options={"ptp": {"model": str(dflash_folder)}}, adaptive=False)
    network, read = engine.decoder.setup("ptp").networks["ptp"], []
    forward = network.forward
    network.forward = lambda batch, caches: [
        read.append(one.context_tokens_read) or one for one in forward(batch, caches)
    ]
    engine.generate("a cat " * 30, raw=True, max_new_tokens=8, ignore_eos=True)
    assert read[0] == len(engine.encode("a cat " * 30, raw=True)) > MAX_UNREAD


# Training.


def corpus_of(target: CausalNetwork, texts: list[np.ndarray]) -> HiddenStateCorpus:
    hidden, lengths = [states(target, text) for text in texts], [len(text) for text in texts]
    starts = np.cumsum([0, *lengths[:-1]])
    table = np.array([(start, 4, length, 0) for start, length in zip(starts, lengths, strict=True)])
    tokens = torch.from_numpy(np.concatenate(texts))
    intervals = torch.full((1, len(tokens), 2), torch.nan, dtype=torch.float64)
    layers = target.hidden_state_layers
    return HiddenStateCorpus(tokens, torch.cat(hidden), intervals, table, (0.7,), layers, "", "gumbel")


def test_in_training_windows_are_the_blocks_of_decoding():
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    network = dflash_network(target, hidden_state_layers=(1, 2))
    texts = [np.random.default_rng(seed).integers(5, 250, 30 + 7 * seed) for seed in range(4)]
    corpus = corpus_of(target, texts)
    module = dflash_model(target.model, trainable=True, hidden_state_layers=(1, 2))
    own = {name: weight for name, weight in network.model.state_dict().items() if "embed_tokens" not in name}
    module.load_state_dict(own, strict=False)
    batch = WindowDataset(
        corpus, WindowSettings(batch_size=3, windows_per_text=5, validation_fraction=0.0), 3
    ).training_batch(0)
    found = forward_blocks(module, corpus, batch)
    assert found.shape == (3, 5, 3, 32)
    for row, starts in enumerate(batch.window_starts.tolist()):
        read = corpus.hidden_states[batch.corpus_rows[row] - 1]
        for window, start in enumerate(starts):
            text = np.concatenate([[0], batch.tokens[row, :start].numpy()])  # any token whose state is the first one
            outputs = network.forward([question(text, read[:start])], [network.new_kv_cache()])[0]
            torch.testing.assert_close(found[row, window], outputs.hidden_states[1:], rtol=1e-4, atol=1e-4)


def test_it_drafts_beside_packed_weights(tiny_folder, tmp_path):
    """Its own output layer is rows of the target's, expanded."""
    folder = tiny_folder()
    target = LlamaForCausalLM.from_pretrained(folder)
    save_drafter("drafter", dflash_model(target), tmp_path, str(folder), target, {})
    options = {"ptp": {"model": str(tmp_path)}}
    engine = saltus.load(str(folder), "ptp", options=options, weights="q8_0", adaptive=False)
    found, plain = (engine.generate("the cat", max_new_tokens=12, method=method) for method in ("ptp", "plain"))
    assert found.tokens == plain.tokens
    assert found.statistics.draft_calls > 0


def test_factors_of_the_hidden_states_are_in_the_weights_of_files(tmp_path):
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    target.add_hidden_state_layers((1,))
    corpus = corpus_of(target, [np.random.default_rng(seed).integers(5, 250, 60) for seed in range(3)])
    corpus.hidden_states[:, 3] *= 1000
    shape = DFlashSettings(hidden_state_layers=(1,), intermediate=48).shape(target.model)
    module = new_dflash_model(shape, torch.arange(5, 250), target.model, corpus)
    assert module.state_scale[3] < 0.01 * module.state_scale.median()
    save_drafter("drafter", module, tmp_path, "tiny", target.model, {})
    loaded = load_dflash(tmp_path, target.model, "tiny")
    hidden = corpus.hidden_states[:, :32]
    torch.testing.assert_close(loaded.context_inputs(hidden), module.context_inputs(hidden), rtol=0.02, atol=0.02)
    weights = module.trained_weights(module.saved_weights())
    torch.testing.assert_close(weights["fc.weight"], module.fc.weight.detach())


def test_its_heads_can_be_split_over_devices_and_its_mask_is_a_token_with_an_embedding():
    target = tiny_llama(num_attention_heads=9, num_key_value_heads=3, hidden_size=36, head_dim=4)
    with torch.no_grad():
        target.model.embed_tokens.weight[297:] = 0
    shape = DFlashSettings(hidden_state_layers=(1,)).shape(target)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.mask_token) == (8, 4, 4, 296)


RECIPE = """
kind = "dflash"
coupling = "gumbel"
temperatures = [0.7]

[dflash]
layers = 1
intermediate = 16
hidden_state_layers = [1]
window = 3
vocabulary = 0
correction = 8

[data]
batch_size = 3
windows_per_text = 6
validation_fraction = 0.3

[schedule]
steps = 12
checkpoint_steps = 4
"""


@pytest.mark.slow
def test_it_is_trained_by_the_command_goes_on_from_a_folder_and_drafts(tiny_folder, tmp_path):
    folder, out = tiny_folder(), tmp_path / "drafter"
    (tmp_path / "tiny.toml").write_text(RECIPE)
    inputs = lines(tmp_path / "prompts.jsonl", *({"prompt": f"the cat sat {number} times"} for number in range(10)))
    texts = "collect", "text", "-f", inputs, "-m", folder, "-n", 24, "-t", 0, "-t", 0.7, "--out", tmp_path / "teacher"
    saltus_(*texts)
    train = "train", "ptp", "-r", tmp_path / "tiny.toml", "-m", folder, "--teacher", tmp_path / "teacher"
    saltus_(*train, "--work", tmp_path / "work", "--out", out)
    settings = json.loads((out / "saltus.json").read_text())["settings"]
    assert (settings["network"], settings["hidden_state_layers"], settings["heads"]) == ("dflash", [1], 8)
    assert load_file(out / "drafter.safetensors")["tokens"].tolist() == list(range(300))
    engine = saltus.load(str(folder), "ptp", options={"ptp": {"model": str(out)}}, adaptive=False)
    for temperature in (0.0, 0.7):
        given = {"max_new_tokens": 24, "temperature": temperature}
        found = engine.generate("the cat", **given)
        assert found.tokens == engine.generate("the cat", method="plain", **given).tokens
        assert found.statistics.draft_calls > 0
    onward = *train, "--work", tmp_path / "more", "--from", out, "--steps", 1, "--set", "learning_rate=1e-9"
    saltus_(*onward, "--set", "window=4", "--out", tmp_path / "longer")
    one, other = (load_file(folder / "drafter.safetensors") for folder in (out, tmp_path / "longer"))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0.02, atol=1e-4)
    assert "leave distillation_weight out" in complaint(*train, "--set", "distillation_weight=0.5")
    assert "no states but those of hidden_state_layers" in complaint(*train, "--set", "hidden_state_layers=[]")
    assert "has 300 tokens" in complaint(*train, "--work", tmp_path / "new", "--set", "mask_token=300")


# Other engines.


def export(folder, out: Path, layout: str) -> dict[str, torch.Tensor]:
    target = LlamaForCausalLM.from_pretrained(folder)
    model = dflash_model(target)
    if layout == "flat":
        weights = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
        whole = DFlashModel(model.shape, torch.arange(300), *weights, trainable=False)
        whole.load_state_dict({k: v for k, v in model.state_dict().items() if "lm_head" not in k}, False, assign=True)
        model = whole
    save_drafter("drafter", model, out / "drafter", str(folder), target, {})
    done = saltus_("export", out / "drafter", "--to", layout, "--out", out / layout, "--verifier", "owner/model")
    assert f"--method ptp --option ptp.model={out / layout} " in done.stderr
    return load_file(out / layout / "model.safetensors")


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """As vLLM 0.32 and SGLang 0.5.23 read them, for hidden states of 32 numbers and 8 heads of 16."""
    found = {"fc.weight": (32, 32), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for at in ("layers.0", "layers.1"):
        found |= {
            f"{at}.self_attn.q_proj.weight": (128, 32), f"{at}.self_attn.k_proj.weight": (64, 32),
            f"{at}.self_attn.v_proj.weight": (64, 32), f"{at}.self_attn.o_proj.weight": (32, 128),
            f"{at}.self_attn.q_norm.weight": (16,), f"{at}.self_attn.k_norm.weight": (16,),
            f"{at}.mlp.gate_proj.weight": (48, 32), f"{at}.mlp.up_proj.weight": (48, 32),
            f"{at}.mlp.down_proj.weight": (32, 48), f"{at}.input_layernorm.weight": (32,),
            f"{at}.post_attention_layernorm.weight": (32,),
        }  # fmt: skip
    return found


def test_the_form_of_speculators_has_the_names_sizes_and_settings_that_vllm_reads(tiny_folder, tmp_path):
    weights = export(tiny_folder(), tmp_path, "speculators")
    cut = {"d2t": (245,), "t2d": (300,), "lm_head.weight": (245, 32)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected_shapes() | cut
    assert (
        (torch.arange(245) + weights["d2t"]).tolist() == list(range(5, 250)) == weights["t2d"].nonzero()[:, 0].tolist()
    )
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/model"
    assert (config["aux_hidden_state_layer_ids"], config["mask_token_id"], config["block_size"]) == ([1], 299, 4)
    assert (config["draft_vocab_size"], config["sliding_window_non_causal"]) == (245, True)
    layers = config["transformer_layer_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [layers[name] for name in (*sizes, "head_dim", "vocab_size")] == [32, 48, 2, 8, 4, 16, 300]
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert layers["layer_types"] == ["full_attention"] * 2


def test_the_flat_form_counts_layers_from_the_first_output_and_has_the_whole_vocabulary(tiny_folder, tmp_path):
    weights = export(tiny_folder(), tmp_path, "flat")
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected_shapes()
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 299, "target_layer_ids": [0]}
    assert (config["architectures"], config["model_type"], config["block_size"]) == (["DFlashDraftModel"], "qwen3", 4)
    assert (config["num_target_layers"], config["vocab_size"], config["head_dim"]) == (2, 300, 16)
    drafter = tmp_path / "cut"
    target = LlamaForCausalLM.from_pretrained(tiny_folder())
    save_drafter("drafter", dflash_model(target), drafter, str(tiny_folder()), target, {})
    assert "train it with --set vocabulary=0" in complaint("export", drafter, "--to", "flat", "--out", tmp_path / "no")


@pytest.mark.parametrize("layout", ["speculators", "flat"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_drafter_comes_back_with_the_same_bits(tiny_folder, tmp_path, layout, dtype):
    export(tiny_folder(), tmp_path, layout)
    target = CausalNetwork(LlamaForCausalLM.from_pretrained(tiny_folder()).to(dtype))
    text = np.random.default_rng(0).integers(5, 250, 40)
    own, back = (
        load_drafter_for_target(f"drafter:{folder}", target, "tiny")
        for folder in (tmp_path / "drafter", tmp_path / layout)
    )
    hidden = states(target, text)[:-1]
    one, other = (each.forward([question(text, hidden)], [each.new_kv_cache()])[0] for each in (own, back))
    assert torch.equal(one.logits, other.logits)
    assert torch.equal(one.token_ids, other.token_ids)


def published_folder(folder: Path, layout: str, **changes) -> tuple[dict[str, torch.Tensor], dict]:
    """A random drafter as others publish it: three layers, settings that are Transformers' defaults left out."""
    set_seed(11)
    shapes = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for number in range(3):
        shapes |= {name.replace("layers.0", f"layers.{number}"): size for name, size in expected_shapes().items()
                   if name.startswith("layers.0.")}  # fmt: skip
    shapes |= {f"layers.{number}.self_attn.{name}_norm.weight": (128,) for number in range(3) for name in "qk"}
    shapes |= {f"layers.{number}.self_attn.q_proj.weight": (512, 32) for number in range(3)}
    shapes |= {f"layers.{number}.self_attn.{name}_proj.weight": (256, 32) for number in range(3) for name in "kv"}
    shapes |= {f"layers.{number}.self_attn.o_proj.weight": (32, 512) for number in range(3)}
    weights = {name: 0.2 * torch.randn(size) + (len(size) == 1) for name, size in shapes.items()}
    layers = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 300,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    }  # fmt: skip
    if layout == "flat":
        dflash = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
        config = layers | {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": dflash}
    else:
        tokens = torch.cat([torch.arange(3, 20), torch.arange(50, 200)])
        weights |= {"d2t": tokens - torch.arange(len(tokens)), "t2d": torch.isin(torch.arange(300), tokens)}
        weights |= {"lm_head.weight": torch.randn(len(tokens), 32), "embed_tokens.weight": torch.randn(300, 32)}
        config = {
            "speculators_model_type": "dflash", "transformer_layer_config": layers, "block_size": 5, "mask_token_id": 7,
            "aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": len(tokens), "sliding_window_non_causal": False,
        }  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return weights, {
        "eps": 1e-6, "theta": 1e6, "mask": 7, "window": 4, "dim": 128, "heads": 4, "kv_heads": 2, "layers": 3,
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["speculators", "flat"])
def test_a_published_drafter_computes_what_its_weights_say(tmp_path, layout):
    weights, shape = published_folder(tmp_path, layout)
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    network, text = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny"), np.arange(5, 25)
    assert target.hidden_state_layers == (1, 2)
    hidden = states(target, text)[:-1]
    outputs = network.forward([question(text, hidden, (0.1,) * 6)], [network.new_kv_cache()])[0]
    embeddings = weights.get("embed_tokens.weight", target.model.get_input_embeddings().weight.detach())
    head = weights.get("lm_head.weight", target.model.get_output_embeddings().weight.detach())
    expected = plain_dflash(weights, shape, embeddings, head, hidden[:, :64], int(text[-1]))
    torch.testing.assert_close(outputs.logits, expected.float(), rtol=1e-4, atol=1e-3)
    drafted = torch.arange(167) + weights["d2t"] if layout == "speculators" else torch.arange(300)
    assert outputs.token_ids.tolist() == drafted.tolist()
    torch.save({"embedding": torch.ones(32), "mask_token_id": 7}, tmp_path / "mask_embedding.pt")
    masked = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    outputs = masked.forward([question(text, hidden, (0.1,) * 6)], [masked.new_kv_cache()])[0]
    embeddings = torch.cat([embeddings, torch.ones(1, 32)])
    expected = plain_dflash(weights, shape | {"mask": 300}, embeddings, head, hidden[:, :64], int(text[-1]))
    torch.testing.assert_close(outputs.logits, expected.float(), rtol=1e-4, atol=1e-3)


def test_the_assistant_of_muse_glimmer_computes_what_transformers_does(tmp_path):
    from transformers.cache_utils import DFlashCache  # older versions have neither

    set_seed(11)
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=6, block_size=5, mask_token_id=7, target_layer_ids=[0, 1], pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.MuseGlimmerAssistantModel(config).eval()
    theirs.save_pretrained(tmp_path)
    target, text = CausalNetwork(tiny_llama(num_hidden_layers=3)), np.arange(5, 25)
    network = load_drafter_for_target(f"drafter:{tmp_path}", target, "tiny")
    assert target.hidden_state_layers == (1, 2)
    hidden = states(target, text)[:-1]
    outputs = network.forward([question(text, hidden, (0.1,) * 6)], [network.new_kv_cache()])[0]
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(len(hidden))
    with torch.no_grad():
        embeddings = target.model.get_input_embeddings()(torch.tensor([[int(text[-1]), 7, 7, 7, 7]]))
        states_after = theirs(
            noise_embeds=embeddings, context_hidden_states=hidden[None, :, :64], cache=cache, use_cache=True,
            position_ids=torch.arange(len(hidden) + 5)[None],
        ).last_hidden_state[0]  # fmt: skip
        expected = target.model.get_output_embeddings()(states_after)
    torch.testing.assert_close(outputs.logits[1:], expected[1:], rtol=1e-4, atol=1e-3)


def test_a_hub_id_is_fetched(tmp_path, monkeypatch):
    published_folder(tmp_path, "flat")
    asked = []
    monkeypatch.setattr(target_drafters, "resolve", lambda name: asked.append(name) or tmp_path)
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    assert load_drafter_for_target("drafter:owner/dflash@main", target, "tiny").model.shape.window == 4
    assert asked == ["owner/dflash@main"]


def test_a_text_drafted_by_a_published_drafter_is_that_of_plain_decoding(tiny_folder, tmp_path):
    published_folder(tmp_path, "flat")
    engine = saltus.load(
        str(tiny_folder(num_hidden_layers=3)), "ptp+lookup", options={"ptp": {"model": str(tmp_path)}}, adaptive=False
    )
    for temperature in (0.0, 1.0):
        given = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True}
        assert engine.generate("the cat", **given).tokens == engine.generate("the cat", method="plain", **given).tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_bias": True}, "biases of attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "a sliding window of None"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "dynamic"}}, "rotary embeddings of the type dynamic"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"dflash_config": {"mask_token_id": 7}}, "lacks 'target_layer_ids'"),
        ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 3]}}, "states of layer 4, and tiny has 3"),
        ({"dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 1]}}, "the mask token 300, and tiny has 300"),
        ({"hidden_size": 64}, "states of 64 numbers, and tiny has 32"),
        ({"num_hidden_layers": 2}, "has an unknown weight layers.2"),
        ({"num_hidden_layers": 4}, "lacks layers.3"),
        ({"intermediate_size": 49}, r"layers.0.mlp.down_proj.weight is \(32, 48\), but must be \(32, 49\)"),
    ],
)
def test_a_published_drafter_that_does_not_serve_is_refused_in_a_line(tmp_path, changes, said):
    published_folder(tmp_path, "flat", **changes)
    with pytest.raises(ValueError, match=said) as error:
        load_dflash(tmp_path, tiny_llama(num_hidden_layers=3), "tiny")
    assert "\n" not in str(error.value)


def test_what_cannot_be_exported_is_refused(tiny_drafter, tmp_path):
    assert "no other engine loads" in complaint("export", tiny_drafter(), "--to", "flat", "--out", tmp_path)
    assert "there are speculators, flat" in complaint("export", tiny_drafter(), "--to", "onnx", "--out", tmp_path)
    heads = tmp_path / "heads"
    heads.mkdir()
    write_metadata(heads, DrafterMetadata("heads", "tiny", "0"))
    said = complaint("export", heads, "--to", "flat", "--out", tmp_path)
    assert "(kind heads), which no other engine loads; train one that others load" in said


@pytest.mark.parametrize("name", ["config.json", "saltus.json"])
def test_an_export_replaces_its_own_drafter_and_nothing_else(name, tiny_folder, tmp_path, monkeypatch):
    export(tiny_folder(), tmp_path, "speculators")
    again = "export", tmp_path / "drafter", "--to", "speculators", "--out"
    saltus_(*again, tmp_path / "speculators")
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"weights")
    (other / name).write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setattr("saltus.cli.open_engine.open_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    assert f"{other} holds another model, whose files would be replaced" in complaint(*again, other)
    assert f"{other / name} is a file; name a folder" in complaint(*again, other / name)
    assert (other / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "as on a GPU"])
def test_the_targets_output_layer_is_not_copied(monkeypatch, kernels):
    if not kernels:
        monkeypatch.setattr(dflash_module.native, "kernel", lambda *_: None)
    embeddings, unembedding = torch.randn(2, 40, 64)
    shape = DFlashShape(64, 64, (1,), mask_token=4, layers=1, heads=1, kv_heads=1, head_dim=64)
    for tokens, shared in ((torch.arange(40), True), (torch.arange(3, 40), False)):
        weight = DFlashModel(shape, tokens, embeddings, unembedding, trainable=False).lm_head.weight
        assert (weight.data_ptr() == unembedding.data_ptr()) is shared
