"""GGUF files of each architecture give the logits of Transformers' model with the weights that were written."""

import math
import random
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Q

import gguf_models
import saltus
from gguf_models import CASES, write
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.engine.checkpoints import load_checkpoint
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import gguf_index, packing, sources
from saltus.loading.fetching import SourceError
from saltus.loading.load_model import load_model
from saltus.loading.sources import resolve
from saltus.models.architectures import gguf_architectures

NOT_DESCRIBED = {"command-r, norms of heads", "olmo, clipped"}  # run by the layers of Transformers
REPEATED = {
    "qwen3next",
    "qwen35",
    "qwen35moe",
}  # queries and keys are repeated: products of other sizes, which round otherwise
OF_FILES = {"llama", "qwen2", "qwen3"}  # that test_gguf.py writes
PLAIN, MIXED = (Q.F16, Q.F32), (Q.Q8_0, Q.Q4_0, Q.F16, Q.F32)

# The tests of an architecture follow each other, with the same tensors.
each_architecture = pytest.mark.parametrize("name", CASES, scope="module")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The kernels stay where they are."""
    for module in (sources, gguf_index):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")


@cache
def model_of(name: str):
    model = gguf_models.tiny(CASES[name])
    model.set_experts_implementation("eager")
    return model


@lru_cache(maxsize=4)
def converted(name: str, formats):
    """A model, and its tensors in files of it."""
    model = deepcopy(model_of(name))
    return model, gguf_models.converted(model, CASES[name], formats)


def file_of(name: str, tmp_path, formats, **more):
    """A file of a model."""
    file, (model, tensors) = tmp_path / "tiny.gguf", converted(name, tuple(formats))
    write(model, CASES[name], file, formats, tensors=tensors, **more)
    return file


def written(name: str, tmp_path, formats, **more):
    """A model, and a file of it."""
    file = file_of(name, tmp_path, formats, **more)
    return deepcopy(converted(name, tuple(formats))[0]), file


def in_float32(model):
    """The model that loads in float32: a constant of Gemma 3n, √½, was rounded to the model's dtype."""
    for module in model.float().modules():
        if type(module).__name__ == "Gemma3nTextModel":
            module.per_layer_input_scale.fill_(0.5**0.5)
    return model


def case_name(name: str) -> str:
    return CASES[name].name


def test_every_architecture_is_tested():
    assert set(gguf_architectures()) == {case.name for case in CASES.values()} | OF_FILES


@each_architecture
def test_the_logits_are_those_of_transformers(name, tmp_path):
    """In bfloat16, of some matrices in blocks or none by turns; those in float32 are compared by the next test."""
    theirs, file = written(name, tmp_path, (PLAIN, MIXED)[list(CASES).index(name) % 2])
    folder = resolve(str(file))
    expanded = load_model("tiny", folder, weights="bf16")
    assert type(expanded) is type(theirs) or name == "qwen3next"  # runs as Qwen3.5 with experts
    assert not any(isinstance(weight, PackedWeight) for weight in expanded.parameters())
    text = torch.randint(2, 300, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        if name == "gpt-oss":  # its products are rounded by a weight's place in memory, without AVX-512
            weights, read = theirs.state_dict(), expanded.state_dict()
            assert all(torch.equal(weights[key], read[key]) for key in weights)
        elif case_name(name) in REPEATED:
            expanded = load_model("tiny", folder, torch.float32)
            assert (expanded(text).logits - in_float32(theirs)(text).logits).abs().max() < 1e-4
        else:
            assert torch.equal(theirs(text).logits, expanded(text).logits), "the same weights and settings"


@each_architecture
def test_the_kernels_read_packed_weights_where_they_lie(name, tmp_path):
    theirs, file = written(name, tmp_path, MIXED)
    text = np.random.default_rng(0).integers(2, 300, 40)
    inputs = ForwardInputs(continuation(text, 8), (5, 6, 7), (-1, 0, -1))
    logits = {}
    for dtype, weights in (("bfloat16", "file"), ("bfloat16", "bf16"), ("float32", "file")):
        network = load_checkpoint(str(file), "cpu", dtype, weights=weights, arithmetic="bf16").network
        assert (network.native_decoder is None) == (name in NOT_DESCRIBED)
        is_packed = any(isinstance(weight, PackedWeight) for weight in network.model.parameters())
        assert is_packed == ((dtype, weights) == ("bfloat16", "file"))
        logits[dtype, weights] = network.forward([inputs], [network.new_kv_cache()])[0].logits
    numbers = [logits["bfloat16", weights] for weights in ("file", "bf16")]
    assert torch.equal(*numbers), "packed weights are the numbers that they are expanded to"
    with torch.no_grad():
        expected = in_float32(theirs)(torch.from_numpy(np.append(text, 7))[None]).logits[0, -2:]
    assert (logits["float32", "file"][[0, 3]] - expected).abs().max() < 1e-4


def test_rope_factors_of_layers_with_angles_of_their_own_are_those_of_their_first_dimensions(tmp_path):
    theirs, factors = model_of("step35"), np.linspace(1, 8, 16, dtype=np.float32)
    file = file_of("step35", tmp_path, [Q.Q8_0], more=lambda out: out.add_tensor("rope_freqs.weight", factors))
    ours, theirs = (model.model.rotary_emb for model in (load_model("tiny", resolve(str(file))), theirs))
    assert torch.allclose(ours.full_attention_inv_freq * torch.from_numpy(factors[:8]), theirs.full_attention_inv_freq)
    assert torch.equal(ours.sliding_attention_inv_freq, theirs.sliding_attention_inv_freq)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe", "llama4", "granitemoe"])
def test_experts_that_are_packed_at_load_are_those_of_a_file(name, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "cache_folder", lambda: tmp_path / "cache")
    model, file = written(name, tmp_path, [Q.Q8_0])
    model.save_pretrained(tmp_path / "model")
    of_file = dict(load_model("tiny", resolve(str(file))).named_parameters())
    packed = load_model("tiny", tmp_path / "model", weights="q8_0")
    stacks = {name: weight for name, weight in packed.named_parameters() if weight.ndim == 3}
    assert len(stacks) >= 2
    for path, stack in stacks.items():
        assert torch.equal(stack.rows, of_file[path].rows)


@each_architecture
def test_texts_of_methods_are_those_of_plain_decoding(name, tmp_path):
    file = file_of(name, tmp_path, MIXED)
    engine = saltus.load(str(file), "jacobi+lookup", device="cpu")
    texts = {
        tuple(engine.generate("one two one two", raw=True, temperature=0.9, max_new_tokens=16, method=method).tokens)
        for method in ("plain", "jacobi+lookup")
    }
    assert len(texts) == 1


def test_a_file_of_a_type_that_transformers_does_not_know_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("The checkpoint has model type `gemma` but Transformers does not recognize this architecture.")

    file = file_of("gemma", tmp_path, MIXED)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)
    with pytest.raises(SourceError, match=r"tiny\.gguf is of the type gemma, which Transformers .* does not know"):
        load_checkpoint(str(file), "cpu")


def test_a_file_with_both_forms_of_an_expansion_is_read_by_the_whole_one(tmp_path, monkeypatch):
    """Some converters write attn_kv_b beside attn_k_b and attn_v_b."""
    real, whole = gguf_models.convert, []

    def whole_too(architecture, config, name, values):
        if name.endswith("kv_b_proj.weight"):
            whole.append((f"blk.{name.split('.')[2]}.attn_kv_b.weight", values))
        return real(architecture, config, name, values)

    def add(out):
        for name, values in whole:
            out.add_tensor(name, values)

    converted.cache_clear()
    monkeypatch.setattr(gguf_models, "convert", whole_too)
    theirs, file = written("deepseek2", tmp_path, [Q.F32], more=add)
    text = torch.arange(2, 40)[None]
    ours = load_model("tiny", resolve(str(file)), weights="bf16")
    assert torch.equal(theirs(text).logits, ours(text).logits)


def test_deepseeks_sigmoids_without_biases_choose_by_the_scores_alone(tmp_path):
    theirs, file = written("deepseek2", tmp_path, [Q.F32], left_out="blk.1.exp_probs_b.bias")
    theirs.model.layers[1].mlp.gate.e_score_correction_bias.zero_()
    text = torch.arange(2, 40)[None]
    assert torch.equal(theirs(text).logits, load_model("tiny", resolve(str(file)), weights="bf16")(text).logits)


def test_latent_attention_without_experts_is_deepseek_v3_of_dense_layers(tmp_path, monkeypatch):
    """Youtu's files count neither experts nor those that a token uses."""

    def without_experts(out):
        for key in [key for key in out.kv_data[0] if "expert" in key]:
            del out.kv_data[0][key]

    case = CASES["deepseek2"]
    dense = replace(case, settings=case.settings | {"first_k_dense_replace": 2})
    monkeypatch.setitem(CASES, "deepseek2, dense", dense)
    theirs, file = written("deepseek2, dense", tmp_path, [Q.F32], more=without_experts)
    text = torch.arange(2, 40)[None]
    assert torch.equal(theirs(text).logits, load_model("tiny", resolve(str(file)), weights="bf16")(text).logits)


# Files that cannot be served


def complaint(file) -> str:
    with pytest.raises(SourceError) as caught:
        load_model("tiny", resolve(str(file)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@each_architecture
def test_tensors_that_are_missing_or_too_many_are_one_line(name, tmp_path):
    """Each architecture lacks one, and has one too many: three kinds by turns."""
    file = file_of(name, tmp_path, MIXED, left_out="token_embd.weight")
    assert "lacks" in complaint(file)
    tensor = ("blk.0.attn_rot_embd.weight", "blk.9.attn_q.weight", "unheard_of")[list(CASES).index(name) % 3]
    file = file_of(name, tmp_path, MIXED, more=lambda out: out.add_tensor(tensor, np.ones(32, np.float32)))
    assert "has a tensor" in (line := complaint(file)) or "lacks" in line


def test_biases_of_scores_by_distance_are_one_line(tmp_path):
    """Of Baichuan 13B, whose files differ from those of 7B in the number of layers alone."""
    file = file_of("baichuan", tmp_path, PLAIN, more=lambda out: out.add_block_count(40))
    with pytest.raises(SourceError, match="ALiBi"):
        resolve(str(file))


def test_a_bias_with_too_few_rows_for_queries_keys_and_values_is_one_line(tmp_path):
    name, bias = "chatglm, one layer for queries, keys and values", "blk.0.attn_qkv.bias"
    file = file_of(
        name, tmp_path, [Q.F16], left_out=bias, more=lambda out: out.add_tensor(bias, np.ones(256, np.float32))
    )
    assert "256 rows, other ones than it needs" in complaint(file)


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("deepseek2, softmax", "expert_gating_func", 3, "by other scores"),
        ("deepseek2", "attention.temperature_scale", 0.1, "queries grow with the position"),
        ("mistral4", "attention.temperature_length", 64, "queries grow by other steps"),
    ],
)  # fmt: skip
def test_what_deepseeks_layers_do_not_compute_is_one_line(name, key, value, said, tmp_path):
    def change(out):
        key_in_file = f"{CASES[name].name}.{key}"
        out.kv_data[0].pop(key_in_file, None)
        out.add_key_value(key_in_file, *typed(value))

    file = file_of(name, tmp_path, [Q.Q8_0], more=change)
    assert said in complaint(file)


@pytest.mark.parametrize("matrices", [0, 2, 4])
def test_a_stack_that_lacks_weights_or_has_too_many_is_one_line(matrices, tmp_path):
    def add(out):
        if matrices:
            out.add_tensor("altup_proj.weight", np.ones((matrices, 256, 256), np.float32))

    file = file_of("gemma3n", tmp_path, [Q.Q8_0], left_out="altup_proj.weight", more=add)
    expected = f"altup_proj.weight of {matrices} x 256 x 256 numbers" if matrices else "lacks model.altup_projections.0"
    assert expected in complaint(file)


@pytest.mark.parametrize("scales", [[0.5] * 3, [0.5] * 5, [0.5, math.nan, 0.5, 0.5], [0.5, math.inf, 0.5, 0.5]])
def test_activation_sparsity_that_no_model_has_is_one_line(scales, tmp_path):
    def spoil(out):
        del out.kv_data[0]["gemma3n.activation_sparsity_scale"]
        out.add_activation_sparsity_scale(scales)

    file = file_of("gemma3n", tmp_path, [Q.Q8_0], more=spoil)
    assert "activation_sparsity_scale" in complaint(file)


@pytest.mark.slow
@each_architecture
def test_wrong_settings_are_one_line_or_a_model(name, tmp_path):
    """Whatever is in place of a setting: what does not fit the tensors is refused before anything is computed."""
    values = [0, 1, 3, 7, 1 << 31, -1, 0.0, -2.5, 1e30, "x", [1, 2], [0.5] * 4, True]
    draws, refused, keys = random.Random(0), [], []
    for _ in range(3):
        chosen = draws.randrange(1 << 30)

        def spoil(out, chosen=chosen):
            settings = out.kv_data[0]
            own = sorted(key for key in settings if key.startswith(f"{CASES[name].name}."))
            key = own[chosen % len(own)]
            del settings[key]
            out.add_key_value(key, *typed(values[chosen // len(own) % len(values)]))
            keys.append(key)

        file = file_of(name, tmp_path, MIXED, more=spoil)
        try:
            network = load_checkpoint(str(file), "cpu").network
            network.forward([ForwardInputs(continuation([3, 4], 1), (), ())], [network.new_kv_cache()])
        except ValueError as error:
            refused.append(str(error))
    assert refused, keys
    assert not any("\n" in line for line in refused)


def typed(value):
    """A value with its type in GGUF."""
    kinds = gguf_models.gguf.GGUFValueType
    found = {bool: kinds.BOOL, int: kinds.INT64, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}
    return value, found[type(value)]
