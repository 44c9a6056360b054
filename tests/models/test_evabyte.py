"""EvaByte: the same numbers as its definition, the same bits in every call, and loading from a published folder."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import saltus
from architectures import random_tree, read
from reference_evabyte import CONFIG, random_weights, reference, write_folder
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs, NodeKind
from saltus.engine.checkpoints import load_checkpoint
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.scheduler import run_requests
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.kernels import native
from saltus.methods.mtpc.heads import HeadShape, new_head_model, own_heads
from saltus.methods.shared.query_chains import with_query_chains
from saltus.models.cpu.eva_kv_cache import EvaKVCache
from saltus.models.evabyte import EvaByteNetwork
from saltus.training.data.seeded_generator import seeded_generator

WINDOW, CHUNK = CONFIG["window_size"], CONFIG["chunk_size"]
LONG = 5 * WINDOW + 3
BORDERS = [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW - 2]  # lengths of decided texts
DTYPES = [torch.float32, torch.bfloat16]


def text(length: int = LONG, seed: int = 0) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(64, 320, length)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of a dtype: folder(dtype)."""
    made = {}

    def make(dtype: torch.dtype = torch.float32) -> Path:
        if dtype not in made:
            made[dtype] = write_folder(tmp_path_factory.mktemp("evabyte") / "model", dtype=dtype, shards=2)
        return made[dtype]

    return make


@pytest.fixture(params=["kernels", "torch"])
def network(request, folder, monkeypatch) -> EvaByteNetwork:
    """By compiled kernels, and without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "load_kernels", lambda: None)
    found = load_checkpoint(str(folder()), "cpu").network
    assert isinstance(found, EvaByteNetwork)
    assert found.compute_path == {"kernels": "native", "torch": "torch"}[request.param]
    return found


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """The definition's logits of the next byte, after each byte of the long text."""
    return reference(random_weights(CONFIG), text(), CONFIG)[0][:, 0]


def one_by_one(network, tokens) -> torch.Tensor:
    """The logits after each token as plain decoding gets them."""
    kv_cache = network.new_kv_cache()
    return torch.cat([read(network, tokens[: n + 1], kv_cache=kv_cache) for n in range(len(tokens))])


# The numbers


def test_the_logits_are_those_of_the_definition(network, expected):
    found = one_by_one(network, text())
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_definition_of_the_tests_tells_windows_and_chunks_apart(expected):
    """Else agreement would prove little."""
    for changes in ({"window_size": 2 * WINDOW}, {"chunk_size": CHUNK // 2}):
        other = reference(random_weights(CONFIG), text(2 * WINDOW + 1), CONFIG | changes)[0][:, 0]
        assert (other[:WINDOW] - expected[:WINDOW]).abs().max() < 1e-5
        assert (other[-1] - expected[2 * WINDOW]).norm() > 0.01 * expected[2 * WINDOW].norm()


@pytest.mark.parametrize(
    "changes", [{"norm_add_unit_offset": False}, {"num_pred_heads": 1}, {"window_size": 8, "chunk_size": 8},
                {"rope_scaling": {"type": "linear", "factor": 1.0}}]
)  # fmt: skip
def test_other_configurations_agree_with_the_definition(tmp_path, changes):
    network = load_checkpoint(str(write_folder(tmp_path, **changes)), "cpu").network
    config, tokens = CONFIG | changes, text(2 * WINDOW + 3)
    found, wanted = one_by_one(network, tokens), reference(random_weights(config), tokens, config)[0][:, 0]
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_hidden_states_and_the_heads_of_later_bytes_are_those_of_the_definition(network):
    tokens = text(2 * WINDOW + 5)
    logits, states = reference(random_weights(CONFIG), tokens, CONFIG)
    inputs = ForwardInputs(continuation(tokens, 1), output_hidden_states=True)
    found = network.forward([inputs], [network.new_kv_cache()])[0].hidden_states
    assert (found - states).abs().max() < 1e-4 * states.abs().max()
    heads = network.model.get_output_embeddings().weight
    ours = (found @ heads.T).unflatten(-1, (8, 320))
    assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()


# The bits


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_a_text_read_at_once_or_in_trees_has_the_bits_of_plain_decoding(folder, dtype):
    network, tokens = load_checkpoint(str(folder(dtype)), "cpu").network, text()
    wanted = one_by_one(network, tokens)
    assert torch.equal(read(network, tokens[:1], tokens[1:], range(-1, len(tokens) - 2)), wanted)
    for width in (3, 7, WINDOW):
        kv_cache, found = network.new_kv_cache(), [wanted[:1]]
        for start in range(1, len(tokens), width):
            nodes = tokens[start : start + width]
            found.append(read(network, tokens[:start], nodes, range(-1, len(nodes) - 1), kv_cache)[1:])
        assert torch.equal(torch.cat(found), wanted)


def test_the_bits_are_the_same_without_a_compiler(network):
    tokens = text(2 * WINDOW + 4)
    assert torch.equal(
        read(network, tokens[:3], tokens[3:], range(-1, len(tokens) - 4)), one_by_one(network, tokens)[2:]
    )


@pytest.mark.parametrize("length", BORDERS)
def test_every_node_of_a_tree_has_the_bits_of_its_path_alone(network, length):
    decided, (tokens, parents) = text(length), random_tree(18)
    inputs = ForwardInputs(continuation(decided, 19), tokens, parents)
    assert max(inputs.depths) > 2
    found = read(network, decided, tokens, parents)
    for node in range(len(tokens)):
        path = inputs.path_tokens(node)
        assert torch.equal(found[1 + node], read(network, [*decided, *path])[0])


@pytest.mark.parametrize("length", BORDERS)
def test_accepted_paths_are_kept_and_rejected_ones_leave_no_trace(network, length):
    decided, (tokens, parents) = text(length), random_tree(18)
    inputs = ForwardInputs(continuation(decided, 19), tokens, parents, output_hidden_states=True)
    for node in (-1, 5, 13, 17):
        kv_cache = network.new_kv_cache()
        network.forward([inputs], [kv_cache])
        longer = np.array([*decided, *inputs.path_tokens(node), 70, 71])
        found, fresh = (read(network, longer, tokens, parents, cache) for cache in (kv_cache, network.new_kv_cache()))
        assert torch.equal(found, fresh)


def test_hidden_states_of_a_tree_over_a_border_are_in_the_order_of_its_nodes(network):
    decided, (tokens, parents) = text(WINDOW - 2), random_tree(20)
    inputs = ForwardInputs(continuation(decided, 21), tokens, parents, output_hidden_states=True)
    outputs = network.forward([inputs], [network.new_kv_cache()])[0]
    assert (len(outputs.hidden_states), outputs.context_tokens_read) == (len(decided) + 20, len(decided))
    head = network.model.lm_head.weight
    assert torch.allclose(outputs.hidden_states[len(decided) - 1 :] @ head.T, outputs.logits, atol=1e-5)


@pytest.mark.parametrize("kept", [3, WINDOW - 1, WINDOW, WINDOW + 2, 2 * WINDOW, 3 * WINDOW + 1])
def test_a_cache_serves_a_text_that_differs_from_some_byte_on(network, kept):
    tokens, other = text(3 * WINDOW + 5), text(4 * WINDOW, seed=1)
    other[:kept] = tokens[:kept]
    kv_cache = network.new_kv_cache()
    read(network, tokens, kv_cache=kv_cache)
    found = network.forward([ForwardInputs(continuation(other, 1))], [kv_cache])[0]
    windows_kept = min(kept // WINDOW, 3)
    assert found.context_tokens_read == len(other) - (kept if windows_kept == 3 else windows_kept * WINDOW)
    assert torch.equal(found.logits, read(network, other))


def test_the_cache_grows_by_a_summary_for_each_chunk(network):
    kv_cache = network.new_kv_cache()
    read(network, text(12 * WINDOW + 1), kv_cache=kv_cache)
    assert isinstance(kv_cache, EvaKVCache)
    assert (kv_cache.num_windows, kv_cache.num_text_slots) == (12, 12 * WINDOW // CHUNK + 1)


def test_texts_of_a_batch_have_the_bits_that_they_have_alone(network):
    trees = [random_tree(9, seed) for seed in range(3)]
    batch = [
        ForwardInputs(continuation(text(length, length), 10), *tree)
        for length, tree in zip((5, WINDOW - 1, 2 * WINDOW), trees, strict=True)
    ]
    together = network.forward(batch, [network.new_kv_cache() for _ in batch])
    for inputs, outputs in zip(batch, together, strict=True):
        assert torch.equal(outputs.logits, network.forward([inputs], [network.new_kv_cache()])[0].logits)


# The text


@pytest.mark.parametrize(
    ("method", "dtype", "settings"),
    [
        ("jacobi+lookup", torch.float32, {"temperature": 0.0}),
        ("jacobi+lookup", torch.bfloat16, {"temperature": 0.9, "seed": 3}),
        ("lookup", torch.bfloat16, {"temperature": 0.0}),
        ("jacobi", torch.float32, {"temperature": 0.9, "seed": 3}),
    ],
)
def test_every_method_writes_the_text_of_plain_decoding(folder, method, dtype, settings):
    engine = saltus.load(str(folder(dtype)), adaptive=False, device="cpu")
    prompts = ["the cat sat on the mat and the cat sat", "a", "ab" * WINDOW]
    given = {"max_new_tokens": 2 * WINDOW + 3, "raw": True, "ignore_eos": True} | settings
    plain = engine.generate(prompts, method="plain", **given)
    found = engine.generate(prompts, method=method, **given)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert sum(len(one.calls) for one in found) <= sum(len(one.calls) for one in plain)


def test_drafts_are_accepted_across_the_borders_of_windows(folder):
    """With the text as a prediction nearly all of a call's drafts are accepted, over borders too."""
    engine = saltus.load(str(folder()), "lookup", adaptive=False, device="cpu")
    plain = engine.generate("xy", method="plain", max_new_tokens=4 * WINDOW, raw=True, ignore_eos=True)
    request = engine.text_request("xy", max_new_tokens=4 * WINDOW, raw=True, ignore_eos=True).request
    request.prediction = plain.tokens
    for _ in run_requests(engine.decoder, [request], "lookup"):
        pass
    assert request.tokens == plain.tokens
    ends = np.cumsum([len(call.tokens) for call in request.calls]) + 3  # <bos> and the prompt come before
    begins = [3, *ends[:-1]]
    assert any(begin // WINDOW < (end - 1) // WINDOW for begin, end in zip(begins, ends, strict=True))
    assert len(request.calls) < len(plain.calls) / 4


def test_the_next_turn_of_a_conversation_reads_what_is_new(folder):
    network = load_checkpoint(str(folder()), "cpu").network
    prompt, cache, kv_cache = text(2 * WINDOW + 3), PrefixTree(), network.new_kv_cache()
    read(network, prompt, kv_cache=kv_cache)
    cache.put(prompt[: WINDOW + 1].tolist(), {"target": kv_cache})  # the rest was its answer
    longer = np.append(prompt, text(9, seed=1))
    taken = cache.take(longer.tolist())["target"]
    found = network.forward([ForwardInputs(continuation(longer, 1))], [taken])[0]
    assert found.context_tokens_read == 9
    assert torch.equal(found.logits, read(network, longer))


def test_what_a_stream_that_is_left_has_read_is_not_read_again(folder):
    engine = saltus.load(str(folder()), "plain")
    settings = {"raw": True, "max_new_tokens": 8, "ignore_eos": True}
    stream = engine.stream("some words", **settings)
    next(stream)
    stream.close()
    longer = engine.generate("some words and more", **settings)
    assert longer.calls[0].context_tokens_read <= len(" and more")
    engine.decoder.prefix_tree.clear()
    assert engine.generate("some words and more", **settings).tokens == longer.tokens


# Its heads for the bytes after the next one


def test_its_own_heads_draft_what_the_definition_predicts(folder):
    network, tokens = load_checkpoint(str(folder()), "cpu").network, text(WINDOW + 4)
    heads = load_drafter_for_target("heads:auto", network, "evabyte")
    assert heads is not None
    states = network.forward(
        [ForwardInputs(continuation(tokens, 1), output_hidden_states=True)], [network.new_kv_cache()]
    )[0].hidden_states
    decided = np.append(tokens, 100)  # a byte that the call before has just decided
    inputs = with_query_chains(
        ForwardInputs(continuation(decided, 8), hidden_states=states), [(-1, [math.nan] * 8)], 0.0
    )
    found = heads.forward([inputs], [heads.new_kv_cache()])[0].predictions
    wanted = reference(random_weights(CONFIG), tokens, CONFIG)[0][-1].log_softmax(-1)
    assert found.num_positions == 7  # the first head's byte is known
    for position in range(7):
        likely, log_probabilities, rest = found.candidates(position, [200] * position)
        assert np.abs(log_probabilities - wanted[1 + position, likely].numpy()).max() < 1e-3
        assert rest < 1e-3


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["mtpc", "mtpc+lookup"])
def test_its_own_heads_draft_and_do_not_change_the_text(folder, method, settings):
    engine = saltus.load(str(folder(torch.bfloat16)), adaptive=False, device="cpu")
    given = {"max_new_tokens": 2 * WINDOW + 3, "raw": True, "ignore_eos": True} | settings
    prompts = ["the cat sat", "a" * (WINDOW - 2)]
    found = engine.generate(prompts, method=method, **given)
    assert [one.tokens for one in found] == [one.tokens for one in engine.generate(prompts, method="plain", **given)]
    assert all(np.mean([call.num_draft_tokens for call in one.calls]) > 2 for one in found)


def test_new_heads_that_read_the_state_start_as_its_own(folder):
    model = load_checkpoint(str(folder()), "cpu").network.model
    shape = HeadShape(
        CONFIG["hidden_size"], "cp", 4, 3, untied_unembedding=True, embeds_last_token=False, features="state"
    )
    new = new_head_model(shape, torch.arange(320), model, seeded_generator(0, "weights"))
    own, state = own_heads(model), torch.randn(CONFIG["hidden_size"])
    with torch.inference_mode():
        for position in range(4):
            found, wanted = (heads.log_probabilities(heads(state, torch.tensor(0)), position) for heads in (new, own))
            assert torch.allclose(found, wanted.expand(3, -1), atol=1e-5)
    for wrong in ({"embeds_last_token": True}, {"untied_unembedding": False}, {"features": "norm"}):
        with pytest.raises(ValueError, match=r"state itself|must be learned or state"):
            replace(shape, **wrong)


def test_a_model_without_such_heads_says_so(tmp_path):
    engine = saltus.load(str(write_folder(tmp_path, num_pred_heads=1)), device="cpu")
    with pytest.raises(ValueError, match="brings no trained heads"):
        engine.generate("a", method="mtpc", raw=True)


# The folder


def test_a_byte_is_the_token_64_places_behind_it_and_texts_begin_with_bos(folder):
    tokenizer = load_checkpoint(str(folder()), "cpu").tokenizer
    line = "Ünïcode läuft\t🙂\n"
    assert tokenizer(line).input_ids == [1, *(64 + byte for byte in line.encode())]
    assert tokenizer.decode(tokenizer(line).input_ids, skip_special_tokens=True) == line
    assert tokenizer("a<|eot_id|>b", add_special_tokens=False).input_ids == [161, 11, 162]
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (320, 1, 2, 0)


def test_messages_become_a_text_in_the_published_form(folder):
    tokenizer = load_checkpoint(str(folder()), "cpu").tokenizer

    def written(*messages: tuple[str, str]) -> str:
        listed = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True)

    def turn(role: str, content: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"

    begin, end = "<bos>", "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert written(("user", "Hi")) == begin + turn("system", "") + turn("user", "Hi") + end
    asked = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")
    assert written(*asked) == begin + "".join(turn(*one) for one in asked) + end


def test_end_tokens_and_names_of_special_tokens_are_read(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 11]}))
    names = {"added_tokens_decoder": {"11": {"content": "<end of turn>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    found = load_checkpoint(str(tmp_path), "cpu")
    assert found.end_tokens == {2, 11}
    assert found.context_length == CONFIG["max_position_embeddings"]
    assert found.tokenizer.convert_ids_to_tokens(11) == "<end of turn>"


def test_packed_weights_write_one_text_with_every_method(tmp_path):
    engine = saltus.load(str(write_folder(tmp_path, dtype=torch.bfloat16)), device="cpu", weights="q8_0")
    given = {"max_new_tokens": 2 * WINDOW, "raw": True}
    assert (
        engine.generate("abab", method="lookup", **given).tokens
        == engine.generate("abab", method="plain", **given).tokens
    )


def test_without_batch_invariance_there_are_the_same_numbers_up_to_rounding(folder, expected):
    network = load_checkpoint(str(folder()), "cpu", exact=False).network
    assert not network.batch_invariant
    found = read(network, text()[:1], text()[1:], range(-1, LONG - 2))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def break_folder(folder: Path, change: str) -> None:
    if change == "weights":
        write_folder(folder, num_hidden_layers=1)
    name, _, value = {"weights": "num_hidden_layers=2", "shape": "intermediate_size=64"}.get(change, change).partition(
        "="
    )
    (folder / "config.json").write_text("{" if not value else json.dumps(CONFIG | {name: json.loads(value)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("weights", r"lacks \d+ of EvaByte's weights, such as model\.layers\.1"),
        ("shape", r"mlp\.\w+_proj\.weight of shape \[.*\], but config.json says \[.*\]"),
        ("not JSON", "is not JSON"),
        ("window_size=null", "no whole number window_size"),
        ("window_size=10", "window_size 10 is no multiple of chunk_size 4"),
        ('hidden_act="gelu"', "hidden_act 'gelu' is not silu"),
        ('rope_scaling={"type": "dynamic", "factor": 2.0}', "rope_scaling is of type 'dynamic'"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_a_line(tmp_path, change, message):
    write_folder(tmp_path)
    break_folder(tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        saltus.load(str(tmp_path), device="cpu")
    assert "\n" not in str(caught.value)


def test_what_evabyte_does_not_do_is_said_in_a_line(folder):
    engine = saltus.load(str(folder()), device="cpu")
    with pytest.raises(ValueError, match=re.escape("EvaByte has no class in Transformers")):
        _ = engine.model
    with pytest.raises(ValueError, match="EvaByte carries no adapters"):
        engine.network.attach_adapter(object())
    query = ForwardInputs(continuation([64], 2), (70,), (-1,), kinds=(NodeKind.TOKEN_QUERY,), uniforms=(0.5,))
    with pytest.raises(ValueError, match="EvaByte carries no adapters"):
        engine.network.forward([query], [engine.network.new_kv_cache()])
