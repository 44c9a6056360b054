"""Heads for multi-token prediction draft what their checkpoints' weights say, and change no text."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

import saltus
from mtp_checkpoints import FORMS, head_tensors, write_checkpoint
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.methods.mtp.drafter import Mtp

every_form = pytest.mark.parametrize("form", FORMS)
PROMPTS = ["the cat", "a dog " * 30]
QWEN = "Qwen3.5"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(form, modules, dtype): a folder that is written once."""
    made = {}

    def folder(form: str, modules: int = 1, dtype: torch.dtype = torch.float32):
        if (key := (form, modules, dtype)) not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp("mtp"), form, modules, dtype)
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
    like = next(i for i in reversed(range(config.num_hidden_layers)) if hasattr(model.model.layers[i], "self_attn"))
    layer = type(model.model.layers[like])(config, like)
    begin = {"Q": f"mtp.layers.{module}.", "E": f"model.mtp_block.{module}."}
    at = begin.get(form[0], f"model.layers.{config.num_hidden_layers + module}.")
    own = {name.removeprefix(at): weight for name, weight in tensors.items() if name.startswith(at)}
    state = {}
    for name, weight in layer.state_dict().items():
        kinds = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.get(name.rpartition(".")[2])
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
        places = torch.arange(len(x))[None]
        angles = model.model.rotary_emb(x[None], position_ids=places)
        return layer(x[None], position_embeddings=angles, attention_mask=mask, position_ids=places)[0]

    return run


def reference_drafts(form, model, states, tokens, count, modules=1):
    """The logits of the likeliest chain, every row computed anew for each draft, as DeepSeek-AI 2024 writes it."""
    epsilon, plus = model.config.rms_norm_eps, float(form.startswith("Qwen"))
    embeddings, unembedding = model.get_input_embeddings().weight, model.get_output_embeddings().weight

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * (weight + plus)

    def one_module(number):
        tensors = head_tensors(form, model, number)
        layer, weights = reference_layer(form, model, tensors, number), list(tensors.values())
        last_norm = model.model.norm.weight if form.startswith("ERNIE") else weights[3]

        def run(read, before):  # a row for each pair of a token and the state before it
            x = torch.cat([norm(embeddings[read], weights[1]), norm(before, weights[2])], 1)
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
