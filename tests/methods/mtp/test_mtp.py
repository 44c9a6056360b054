"""Heads for multi-token prediction draft what their checkpoints' weights say, and change no text."""

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config

import saltus
from mtp_checkpoints import (
    FORMS,
    MIMO_V2,
    QWENS_NAMES,
    edit,
    edit_config,
    head_tensors,
    layers_like_a_head,
    write_checkpoint,
    write_speculators_head,
)
from quantised_models import CASES, floats8, modelopt_mxfp8, write_quantised
from saltus.core.canvas import continuation
from saltus.core.control.call_cost import CallCost
from saltus.core.forward import ForwardInputs
from saltus.engine.auto_method import resolve_method
from saltus.kernels.packed_weight import PackedWeight
from saltus.loading import stored_tensors
from saltus.loading.quantised import fp8
from saltus.methods.mtp.drafter import Mtp
from tiny_models import byte_tokenizer
from tiny_server import serving

every_form = pytest.mark.parametrize("form", FORMS)
PROMPTS = ["the cat", "a dog " * 30]
QWEN = "Qwen3.5"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(form, modules, dtype, **configuration): a folder that is written once."""
    made = {}

    def folder(form: str, modules: int = 1, dtype: torch.dtype = torch.float32, **changes):
        if (key := repr((form, modules, dtype, changes))) not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("mtp"), form, modules, dtype, **changes)
        return made[key]

    return folder


def loaded_heads(folder) -> tuple[Any, Any]:
    """The target's network and the heads of its checkpoint."""
    target = saltus.load(str(folder), "plain").network
    return target, Mtp().load_network(target, "tiny")


def target_states(target, tokens) -> torch.Tensor:
    """The last hidden states of all tokens."""
    inputs = ForwardInputs(continuation(tokens, 1), output_hidden_states=True)
    return target.forward([inputs], [target.new_kv_cache()])[0].hidden_states


def drafted(network, kv_cache, text, states, count):
    """The logits of a chain of likeliest drafts, given the states before the last tokens of the text."""
    logits, drafts = [], []
    for _ in range(count):
        canvas = continuation(np.array([*text, *drafts]), count + 1)
        inputs = ForwardInputs(canvas, network_name="mtp", hidden_states=None if drafts else states)
        logits.append(network.forward([inputs], [kv_cache])[0].logits[0])
        drafts.append(int(logits[-1].argmax()))
    return torch.stack(logits)


# --------------------------------------------------------------------------------------- what heads compute


def reference_layer(form, model, tensors, module):
    """The module's layer by Transformers' own class, as a function of all its inputs at once."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = config._experts_implementation = "eager"
    layer = layers_like_a_head(model, lambda layer, place: type(layer)(config, place))
    begin = {"ERNIE 4.5": f"model.mtp_block.{module}.", "MiMo": f"model.mtp_layers.{module}."}
    begin |= {"MiMo V2": f"model.mtp.layers.{module}.", "Nemotron 3 Super": "mtp.layers."}
    begin |= {each: f"mtp.layers.{module}." for each in FORMS if each.startswith(QWENS_NAMES)}
    at = begin.get(form, f"model.layers.{config.num_hidden_layers + module}.")
    own = {name.removeprefix(at): weight for name, weight in tensors.items() if name.startswith(at)}
    if form == "MiMo V2":
        own |= {ours: own.pop(theirs) for ours, theirs in MIMO_V2.items()}
    state = {}
    for name, weight in layer.state_dict().items():
        kinds = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}.get(
            name.rpartition(".")[2]
        )
        if ".experts." in name and kinds:
            path = name.rpartition(".")[0]
            state[name] = torch.stack(
                [torch.cat([own[f"{path}.{i}.{kind}_proj.weight"] for kind in kinds]) for i in range(len(weight))]
            )
        else:
            state[name] = own[name]
    layer.load_state_dict(state)

    def run(x):
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        if getattr(config, "layer_types", ["full_attention"])[-1] == "sliding_attention":
            mask += torch.full((len(x), len(x)), -torch.inf).tril(-config.sliding_window)
        places = torch.arange(len(x))[None]
        if form == "Nemotron 3 Super":
            for part in layer:
                x = part(x[None], attention_mask=mask)[0]
            return x
        kind = {"layer_type": "sliding_attention"} if form == "MiMo V2" else {}
        angles = model.model.rotary_emb(x[None], position_ids=places, **kind)
        return layer(x[None], position_embeddings=angles, attention_mask=mask, position_ids=places)[0]

    return run


def reference_drafts(form, model, states, tokens, count, modules=1):
    """The logits of the likeliest chain, every row computed anew for each draft, as DeepSeek-AI 2024 writes it."""
    epsilon, plus = getattr(model.config, "rms_norm_eps", 1e-5), float(form.startswith("Qwen"))
    embeddings, unembedding = model.get_input_embeddings().weight, model.get_output_embeddings().weight

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight + plus)

    def one_module(number):
        tensors = head_tensors(form, model, number)
        layer, weights = reference_layer(form, model, tensors, number), list(tensors.values())
        last_norm = model.model.norm.weight if form.startswith("ERNIE") else weights[3]

        def run(read, before):  # a row for each pair of a token and the state before it
            parts = [norm(embeddings[read], weights[1]), norm(before, weights[2])]
            x = torch.cat(parts[::-1] if form == "MiMo" else parts, 1)
            return norm(layer(x @ weights[0].T), last_norm)

        return run

    runs, texts, logits = [one_module(number) for number in range(modules)], list(tokens), []
    for draft in range(count):
        out = states
        for number, run in enumerate(runs[: draft + 1]):
            before, read = out, texts[number:]
            out = run(read[: len(before)], before)
            while number == modules - 1 and len(before) < len(read):  # the last module goes on with its own outputs
                before = torch.cat([before, out[-1:]])
                out = run(read[: len(before)], before)
        logits.append(unembedding @ out[-1])
        texts.append(int(logits[-1].argmax()))
    return torch.stack(logits)


@every_form
@torch.no_grad()
def test_heads_compute_what_their_weights_say(checkpoint, form):
    target, network = loaded_heads(checkpoint(form))
    text, kv_cache = np.random.default_rng(0).integers(5, 250, 20), network.new_kv_cache()
    states = target_states(target, text)[:-1]
    drafted(network, kv_cache, text[:9], states[:8], 3)  # drafts that were not accepted leave nothing behind
    found = drafted(network, kv_cache, text, states[8:], 4)
    expected = reference_drafts(form, target.model, states, text[1:].tolist(), 4)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert network.kv_bytes_per_token > 0


@pytest.mark.parametrize(("window", "sees_the_change"), [(4, False), (16, True)])
def test_a_head_has_the_window_that_the_configuration_gives_it(checkpoint, tmp_path, window, sees_the_change):
    """As K-EXAONE's says of each head; that of the layers is another one."""
    folder = shutil.copytree(checkpoint("K-EXAONE"), tmp_path / "windows")
    edit_config(folder, mtp_layer_types=["sliding_attention"], mtp_sliding_windows=[window])
    target, network = loaded_heads(folder)
    text, found = np.arange(5, 25), []
    states = torch.randn(len(text) - 1, target.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for given in (states, torch.cat([-states[:12], states[12:]])):
        found.append(drafted(network, network.new_kv_cache(), text, given, 1))
    assert torch.equal(*found) != sees_the_change


@pytest.mark.slow
@every_form
def test_a_text_is_that_of_plain_decoding(checkpoint, form):
    engine = saltus.load(str(checkpoint(form)), "mtp+lookup", adaptive=False, max_draft_tokens=8)
    for temperature in (0.0, 1.0):
        given = {"max_new_tokens": 12, "temperature": temperature, "ignore_eos": True}
        plain = [one.tokens for one in engine.generate(PROMPTS, method="plain", **given)]
        for method in ("mtp", "mtp+lookup"):
            found = engine.generate(PROMPTS, method=method, **given)
            assert [one.tokens for one in found] == plain
            assert all(one.statistics.draft_calls for one in found)
        assert engine.generate(PROMPTS[0], method="mtp", **given).tokens == plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", [QWEN, "DeepSeek V3"])
def test_the_server_writes_the_text_of_plain_decoding(checkpoint, form):
    """Texts beside each other, in chunks of their prompts, and after a prefix that was read before."""
    engine = saltus.load(str(checkpoint(form)), "mtp+lookup", adaptive=False, max_draft_tokens=8)
    prompts = ["the cat sat on the mat and the dog sat on the log " * 24 + end for end in ("", "the")]
    given = [{"prompt": prompt, "seed": 5, "temperature": t} for prompt in prompts for t in (0.0, 1.0)]
    expected = [
        engine.generate(each["prompt"], method="plain", raw=True, max_new_tokens=8, ignore_eos=True, seed=5,
                        temperature=each["temperature"]).text
        for each in given
    ]  # fmt: skip
    with serving(engine) as (_, url):
        client = openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0)

        def ask(settings):
            made = client.completions.create(model="tiny", max_tokens=8, extra_body={"ignore_eos": True}, **settings)
            return made.choices[0].text

        for _ in range(2):  # the second time the prefix tree has the prompts
            with ThreadPoolExecutor() as threads:
                assert list(threads.map(ask, given)) == expected


def test_heads_are_packed_as_their_target_is(checkpoint):
    """Matrices whose rows are whole blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    engine = saltus.load(str(checkpoint(QWEN, **sizes, dtype=torch.bfloat16)), "mtp", weights="q8_0")
    network: Any = engine.decoder.setup("mtp").networks["mtp"]
    packed = [name for name, weight in network.modules[0].named_parameters() if isinstance(weight, PackedWeight)]
    assert {"projection.weight", "model.model.layers.0.self_attn.q_proj.weight"} <= set(packed)
    found, plain = (engine.generate("the cat", max_new_tokens=8, method=method) for method in ("mtp", "plain"))
    assert found.tokens == plain.tokens


QUANTISED_HEADS = [
    ("gptq", QWEN), ("gptq act order", QWEN), ("awq", "DeepSeek V3"), ("int4 with zeros", "GLM-4.5"),
    ("int8 of channels", QWEN), ("nvfp4", QWEN), ("modelopt fp8", QWEN), ("modelopt nvfp4", "MiMo"),
    ("fp8", "DeepSeek V3"), ("fp8", "Qwen3.5 with experts"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "form"), QUANTISED_HEADS)
def test_heads_of_quantised_checkpoints_are_the_numbers_that_their_tensors_stand_for(case, form, tmp_path):
    """Also heads that are not quantised, beside layers that are."""
    settings, writer, _ = CASES[case]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "eos_token_id": 0}

    def is_whole(name: str) -> bool:
        return (".mlp." in name and "proj" in name) or name.endswith((".eh_proj.weight", "mtp.fc.weight"))

    def is_of_the_target(name: str) -> bool:
        return is_whole(name) and name.startswith(("model.layers.0.", "model.layers.1."))

    for each, chosen in {"whole": is_whole, "target": is_of_the_target}.items():
        folder = write_checkpoint(tmp_path / each, form, 1, torch.bfloat16, **sizes)
        write_quantised(folder, settings, writer, tmp_path / f"{each} meant", chosen)
        engine = saltus.load(str(folder))
        assert engine.method == "mtp+lookup"
        network: Any = engine.decoder.setup("mtp").networks["mtp"]
        _, meant = loaded_heads(tmp_path / f"{each} meant")
        ours, theirs = (dict(one.modules[0].named_parameters()) for one in (network, meant))
        assert ours.keys() == theirs.keys()
        for name, weight in ours.items():
            if name.startswith(("projection", "model.model.layers")):
                expanded = weight.dequantize() if isinstance(weight, PackedWeight) else weight
                assert torch.equal(expanded, theirs[name]), name
        found, plain = (engine.generate("the cat", max_new_tokens=8, method=method) for method in ("mtp", "plain"))
        assert found.tokens == plain.tokens


@pytest.mark.parametrize("exponents", [False, True])
def test_modelopt_leaves_heads_as_their_source_has_them(exponents, tmp_path):
    """Layers in NVFP4, and the head in 8-bit floats whose scales are those of DeepSeek V3, or as in MXFP8."""

    def microscaled(draws, outs, ins):
        parts, weight = modelopt_mxfp8(draws, outs, ins)
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}, weight

    by_blocks = floats8("weight_scale_inv", "blocks", block=(128, 128))
    folder, source, of_head = tmp_path / "modelopt", tmp_path / "source", "model.layers.2."
    sizes = {"hidden_size": 160, "intermediate_size": 160, "moe_intermediate_size": 160, "eos_token_id": 0}
    write_checkpoint(folder, "DeepSeek V3", 1, torch.bfloat16, **sizes)
    settings, writer, _ = CASES["modelopt nvfp4"]
    chosen = {True: (microscaled, ".mlp."), False: (by_blocks, "proj")}[exponents]

    def is_of_head(name: str) -> bool:
        return name.startswith(of_head) and chosen[1] in name

    write_quantised(folder, settings, chosen[0], source, is_of_head)
    write_quantised(folder, settings, writer, tmp_path / "meant", lambda name: ".mlp." in name and of_head not in name)
    _, meant = loaded_heads(source)
    engine = saltus.load(str(folder))
    assert engine.method == "mtp+lookup"
    network: Any = engine.decoder.setup("mtp").networks["mtp"]
    ours, theirs = (one.modules[0].model.model.layers[0].state_dict() for one in (network, meant))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    found, plain = (engine.generate("the cat", max_new_tokens=8, method=method) for method in ("mtp", "plain"))
    assert found.tokens == plain.tokens


FP8_SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "eos_token_id": 0}


def fp8_checkpoint(folder, form: str, change=lambda tensors: tensors):
    """A checkpoint whose heads, and no other layers, are 8-bit floats."""
    settings, writer, _ = CASES["fp8"]
    write_checkpoint(folder, form, 1, torch.bfloat16, **FP8_SIZES)
    write_quantised(folder, settings, writer, folder.with_name("meant"), lambda name: "mtp.layers" in name)
    edit(folder, change)
    return folder


def test_quantised_heads_are_read_once(tmp_path, monkeypatch):
    folder, read, names = fp8_checkpoint(tmp_path / "fp8", "Qwen3.5 with experts"), fp8.read, []

    def counted(settings, name, parts):
        names.append(name)
        return read(settings, name, parts)

    monkeypatch.setattr(fp8, "read", counted)
    assert saltus.load(str(folder)).method == "mtp+lookup"
    of_heads = [name for name in names if name.startswith("mtp.")]
    assert len(of_heads) > 6
    assert len(of_heads) == len(set(of_heads))


@pytest.mark.parametrize("kind", ["experts.1.up_proj", "experts.1.down_proj", "self_attn.o_proj"])
def test_auto_goes_on_without_quantised_heads_of_other_sizes(kind, tmp_path, caplog):
    def cut(tensors):
        name = f"mtp.layers.0.{'' if kind.startswith('self') else 'mlp.'}{kind}.weight"
        return tensors | {name: tensors[name][:-2].clone()}

    folder = fp8_checkpoint(tmp_path / "fp8", "Qwen3.5 with experts", cut)
    assert saltus.load(str(folder)).method == "lookup"
    assert "without the model's own heads" in caplog.text
    with pytest.raises(ValueError, match=r"several sizes|but must be") as error:
        loaded_heads(folder)
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_several_heads_draft_in_turn(checkpoint):
    target, network = loaded_heads(checkpoint("DeepSeek V3", 3))
    assert len(network.modules) == 3
    text = np.random.default_rng(1).integers(5, 250, 60)
    states = target_states(target, text)[:-1]
    expected = reference_drafts("DeepSeek V3", target.model, states, text[1:].tolist(), 5, 3)
    for pieces in ([60], [9, 60], [2, 3, 40, 60]):  # also where the later heads have read nothing yet
        kv_cache, begin, found = network.new_kv_cache(), 0, torch.empty(0)
        for end in pieces:
            found = drafted(network, kv_cache, text[:end], states[begin : end - 1], 5)
            begin = end - 1
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("form", "modules"), [(QWEN, 1), ("DeepSeek V3", 2)])
def test_each_text_of_a_batch_has_the_bits_that_it_has_alone(checkpoint, form, modules):
    target, network = loaded_heads(checkpoint(form, modules, torch.bfloat16))
    texts = [np.random.default_rng(length).integers(5, 250, length) for length in (3, 40, 270, 17)]
    states = [target_states(target, text)[:-1] for text in texts]

    def inputs(drafts, only):
        return [
            ForwardInputs(
                continuation(np.append(text, drafts), 5), network_name="mtp", hidden_states=None if drafts else of
            )
            for number, (text, of) in enumerate(zip(texts, states, strict=True))
            if number in only
        ]

    together, apart = ([network.new_kv_cache() for _ in texts] for _ in range(2))
    everyone = range(len(texts))
    for drafts in ([], [7], [7, 9], [7, 9, 7]):
        found = network.forward(inputs(drafts, everyone), together)
        for number in everyone:
            (alone,) = network.forward(inputs(drafts, [number]), [apart[number]])
            assert torch.equal(found[number].logits, alone.logits)


def test_drafts_follow_the_random_numbers_of_the_text(tmp_path):
    """A head with the target's distribution is right when sampling, too; likeliest tokens would seldom be."""

    def only_the_last_token_counts(tensors):
        for name, weight in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.zero_()
        hidden = len(tensors["mtp.fc.weight"])
        tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
        tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
        tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
        return tensors

    folder = write_checkpoint(tmp_path, QWEN)
    edit(folder, only_the_last_token_counts)
    options = {"mtp": {"min_probability": 0.0, "top_k": 1}}
    engine = saltus.load(str(folder), "mtp", adaptive=False, max_draft_tokens=4, options=options)
    found = engine.generate("the cat", max_new_tokens=60, temperature=1.0, ignore_eos=True)
    assert found.statistics.tokens_per_call > 4
    logits = engine.model(torch.tensor([engine.encode("the cat") + found.tokens])).logits[0]
    likeliest = logits.argmax(-1)[-len(found.tokens) - 1 : -1]
    assert np.mean(likeliest.numpy() == found.tokens) < 0.5


# ------------------------------------------------------------------------------------------- what is found and refused


def test_auto_takes_whole_heads(checkpoint, tmp_path, tiny_folder):
    engine = saltus.load(str(checkpoint(QWEN)))
    assert engine.decoder.chosen_method("auto") == "mtp+lookup"
    folder = write_checkpoint(tmp_path, QWEN)
    edit(folder, lambda tensors: {name: weight for name, weight in tensors.items() if name != "mtp.fc.weight"})
    assert saltus.load(str(folder)).decoder.chosen_method("auto") == "lookup"
    assert saltus.load(str(tiny_folder())).decoder.chosen_method("auto") == "lookup"


def test_auto_takes_a_head_that_is_given(tiny_folder):
    target = saltus.load(str(tiny_folder()), "plain").target.network
    given = {"mtp": {"model": "head"}}
    assert resolve_method("auto", target, given, CallCost(), "match", lambda method: None) == ("mtp+lookup", None)


def test_other_methods_read_no_head(checkpoint, monkeypatch):
    def fail(*_):
        raise AssertionError("a head was read")

    monkeypatch.setattr(stored_tensors, "_read", fail)
    engine = saltus.load(str(checkpoint(QWEN)), "lookup")
    assert engine.generate("the cat", max_new_tokens=2).tokens
    with pytest.raises(AssertionError, match="was read"):
        engine.generate("the cat", max_new_tokens=2, method="mtp")


def test_copies_of_the_embeddings_are_the_targets(checkpoint, tmp_path):
    target, network = loaded_heads(checkpoint("GLM-4.5"))
    model = network.modules[0].model
    assert model.get_output_embeddings() is target.model.get_output_embeddings()
    assert model.get_input_embeddings() is target.model.get_input_embeddings()
    folder = write_checkpoint(tmp_path, "GLM-4.5")
    changed = "model.layers.2.shared_head.head.weight"
    edit(folder, lambda tensors: tensors | {changed: tensors[changed] + 1})
    target, network = loaded_heads(folder)
    found, of_target = (one.get_output_embeddings().weight for one in (network.modules[0].model, target.model))
    torch.testing.assert_close(found, of_target + 1)


def without(name):
    return lambda tensors: {key: weight for key, weight in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("form", "change", "said"),
    [
        (QWEN, without("mtp.fc.weight"), "lack mtp.fc.weight"),
        (QWEN, without("mtp.layers.0.self_attn.q_proj.weight"), "lack mtp.layers.0.self_attn.q_proj.weight"),
        (QWEN, lambda tensors: tensors | {"mtp.norm.weight": torch.ones(47)}, r"mtp.norm.weight is \(47,\), but"),
        (QWEN, lambda tensors: tensors | {"mtp.layers.0.extra": torch.ones(4)}, "mtp.layers.0.extra, which Saltus"),
        (QWEN, lambda tensors: {key: each for key, each in tensors.items() if "mtp" not in key}, "has no heads"),
        ("DeepSeek V3", without("model.layers.2.enorm.weight"), "lack model.layers.2.enorm.weight"),
        (
            "DeepSeek V3", without("model.layers.2.mlp.experts.1.up_proj.weight"),
            r"model.layers.2.mlp.experts.gate_up_proj is",
        ),
        ("ERNIE 4.5", without("model.mtp_emb_norm.0.weight"), "lack model.mtp_emb_norm.0.weight"),
    ],
)  # fmt: skip
def test_heads_that_do_not_serve_are_refused_in_a_line(tmp_path, form, change, said):
    folder = write_checkpoint(tmp_path, form)
    edit(folder, change)
    with pytest.raises(ValueError, match=said) as error:
        loaded_heads(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", [QWEN, "Qwen3.5 with experts"])
def test_a_head_alone_by_speculators_is_that_of_the_checkpoint_it_is_from(form, checkpoint, tmp_path, caplog):
    folder = write_speculators_head(tmp_path / "head", checkpoint(form), "Qwen/Qwen3.5-4B")
    target, own = loaded_heads(checkpoint(form))
    alone = Mtp(str(folder)).load_network(target, "Qwen/Qwen3.5-9B")
    assert "was trained for Qwen/Qwen3.5-4B" in caplog.text
    text, found = np.arange(5, 25), []
    for network in (own, alone):
        found.append(drafted(network, network.new_kv_cache(), text, target_states(target, text)[:-1], 3))
    assert torch.equal(*found)
    edit(folder, without("mtp_layers.0.input_proj.weight"))
    with pytest.raises(ValueError, match=r"lack mtp_layers\.0\.input_proj\.weight"):
        Mtp(str(folder)).load_network(target, "tiny")


def test_heads_beside_a_text_part_are_found(checkpoint, tmp_path):
    """Names as in Qwen3.5 that reads pictures: of the text part with a prefix, of heads without."""
    of_text = json.loads((checkpoint(QWEN) / "config.json").read_text())
    Qwen3_5Config(text_config=of_text, vision_config={"depth": 1, "hidden_size": 16}).save_pretrained(tmp_path)
    weights = load_file(checkpoint(QWEN) / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): weight for name, weight in weights.items()}
    save_file(renamed | {"model.visual.patch.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(tmp_path)
    text, found = np.arange(5, 25), []
    for folder in (checkpoint(QWEN), tmp_path):
        target, network = loaded_heads(folder)
        found.append(drafted(network, network.new_kv_cache(), text, target_states(target, text)[:-1], 3))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["mtp.safetensors", "model_mtp.safetensors"])
@pytest.mark.parametrize("index", ["none", "of all", "without the heads"])
def test_heads_in_a_file_of_their_own_are_found(index, name, checkpoint, tmp_path):
    """As GLM-4.7 is published, and as ModelOpt copies the file without listing it."""
    folder = shutil.copytree(checkpoint("GLM-4.5"), tmp_path / "split")
    weights = load_file(folder / "model.safetensors")
    head = {key: weights.pop(key) for key in list(weights) if key.startswith("model.layers.2.")}
    save_file(head, folder / name, {"format": "pt"})
    file = "model.safetensors" if index == "none" else "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / file, {"format": "pt"})
    if index != "none":
        listed = dict.fromkeys(weights, file) | (dict.fromkeys(head, name) if index == "of all" else {})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    found = []
    for each in (checkpoint("GLM-4.5"), folder):
        _, network = loaded_heads(each)
        found.append(dict(network.modules[0].named_parameters()))
    assert all(torch.equal(weight, found[1][key]) for key, weight in found[0].items())
