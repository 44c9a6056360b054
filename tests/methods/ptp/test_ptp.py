"""The method ptp with a drafter: it reads the right states, tells the right uniforms, and knows its target."""

import json
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import set_seed

import saltus
from forked_python import FOR_COMMANDS, forked_python
from saltus.core.canvas import continuation
from saltus.core.distributions import Step, TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.rules import Rule, match, reject
from saltus.core.sampling import Sampling
from saltus.core.tree import each_branch
from saltus.engine.target_drafters import load_drafter_for_target
from saltus.loading.model_identity import model_fingerprint
from saltus.methods.ptp.drafter import Ptp
from saltus.methods.ptp.files import load_drafter
from saltus.methods.ptp.network import DrafterShape, DraftModel, DraftNetwork
from saltus.methods.shared import draft_tree, logit_correction, row_candidates
from saltus.methods.shared.context_rows import MAX_ROWS_PER_CALL
from saltus.methods.shared.draft_tree import (
    Likeliest,
    PositionPredictions,
    SharedNoise,
    chooser,
    grown_nodes,
    likely_paths,
    likely_tokens,
    position_predictions,
)
from saltus.methods.shared.drafter_files import METADATA_FILE, WEIGHTS_FILES, find_shipped
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD, HiddenStateDrafter
from saltus.methods.shared.logit_correction import NonlinearCorrection
from saltus.methods.shared.query_chains import SOURCE, with_query_chains
from saltus.methods.shared.row_candidates import rows_likely_tokens
from saltus.models.causal import CausalNetwork
from saltus.testing import random_adapter, toy_decoding, toy_network
from tiny_models import tiny_llama

PROMPT = [1, 2, 3, 4, 1, 2]
SAMPLED = Sampling(temperature=1.0, coupling="probability")
each_sampling = pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "T=1"])


@each_sampling
def test_a_perfect_drafter_is_always_right(sampling):
    made = toy_decoding(
        "ptp", PROMPT, 43, target=toy_network(), sampling=sampling, error=0.0, options={"ptp": {"num_draft_tokens": 6}}
    )
    made.run()
    assert [len(step.tokens) for step in made.steps] == [1, 7, 7, 7, 7, 7, 7]
    assert made.networks["ptp"].calls == 6


@pytest.mark.slow
def test_uniforms_are_worth_tokens():
    """The same student without uniforms says what is likeliest in itself."""
    told = toy_decoding("ptp", PROMPT, 200, target=toy_network(logit_scale=1.0), sampling=SAMPLED, error=0.1).run()
    ignorant = toy_decoding("ptp", PROMPT, 200, target=toy_network(logit_scale=1.0), sampling=SAMPLED, error=0.1)
    drafter = ignorant.networks["ptp"]
    knows = drafter.adapter
    drafter.adapter = lambda before, uniforms: knows(before, [0.5] * len(uniforms))
    assert len(told.steps) < 0.5 * len(ignorant.run().steps)
    assert told.tokens == ignorant.tokens


@each_sampling
def test_a_drafter_that_answers_nonsense_breaks_nothing(sampling):
    plain = toy_decoding("plain", PROMPT, 24, target=toy_network(), sampling=sampling).run()
    for answer in (
        random_adapter(toy_network()),
        lambda before, uniforms: torch.full((6,), math.nan, dtype=torch.float64),
    ):
        made = toy_decoding("ptp", PROMPT, 24, target=toy_network(), sampling=sampling)
        made.networks["ptp"].adapter = answer
        assert made.run().tokens == plain.tokens


def test_by_rejection_it_never_reads_the_uniforms_of_the_rule():
    made = toy_decoding(
        "ptp", PROMPT, 40, target=toy_network(logit_scale=1.0), sampling=SAMPLED, rule=reject, error=0.0
    ).run()
    plain = toy_decoding("plain", PROMPT, 40, target=toy_network(logit_scale=1.0), sampling=SAMPLED).run()
    assert made.tokens != plain.tokens
    assert len(made.steps) > 10  # a perfect drafter that read them would need 6


def test_second_choices_hang_beside_the_chain_and_without_a_correction_go_on_as_it_does():
    logits = torch.tensor([[3.0, 2.0, 0.0], [0.0, 4.0, 3.9], [9.0, 0.0, 0.0]])
    found = each_branch(likely_paths(predicted(logits), [], Likeliest(2), SOURCE))
    paths = {tuple(branch.tokens): branch.acceptance_probabilities for branch in found}
    assert set(paths) == {(0, 1, 0), (1, 1, 0), (0, 2, 0), (1, 2, 0)}
    assert all(branch.source == SOURCE for branch in found)
    probabilities = logits.softmax(-1)
    assert np.allclose(paths[0, 2, 0], [probabilities[0, 0], probabilities[1, 2], probabilities[2, 0]])


def test_rows_that_are_for_positions_give_paths_that_read_the_texts_noise_under_match_alone():
    logits = torch.tensor([[1.2, 1.1, 1.0], [0.0, 4.0, 3.9], [9.0, 0.0, 0.0]])
    predictions = position_predictions(ForwardOutputs(logits, token_ids=torch.tensor([11, 12, 15])), slice(2))

    def first_drafts(temperature: float, rule: Rule) -> list[int]:
        sampling, paths = Sampling(temperature=temperature), []
        for seed in range(20):
            choose = chooser(2, sampling, rule, Noise(seed), np.arange(7, 9))
            paths += likely_paths(predictions, [8], choose, SOURCE)
        assert max(len(branch.tokens) for branch in each_branch(paths)) == 2, "as many as rows were given"
        return [int(nodes.tokens[0]) for nodes in paths]

    assert set(first_drafts(0.0, match)) == set(first_drafts(0.0, reject)) == set(first_drafts(2.0, reject)) == {11}
    assert set(first_drafts(2.0, match)) == {11, 12, 15}


def predicted(logits: torch.Tensor) -> PositionPredictions:
    return PositionPredictions(rows_likely_tokens(logits))


@pytest.mark.parametrize("vocab", [5, 16, 1000, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_finds_the_likely_tokens_of_each_row(dtype, vocab):
    set_seed(3)
    logits = (4 * torch.randn(4, vocab)).to(dtype)
    logits[1, :3] = logits[1, 4]
    logits[2, vocab - 1] = torch.nan
    logits[3, 0] = torch.inf
    for row, found in zip(logits, rows_likely_tokens(logits), strict=True):
        expected = likely_tokens(row.float().numpy())
        assert found.columns.tolist() == expected.columns.tolist()
        np.testing.assert_array_equal(found.logits, expected.logits)
        assert found.rest == pytest.approx(expected.rest, rel=1e-4, abs=1e-4)


def test_drafts_of_untruncated_sampling_are_those_of_the_whole_search():
    """`SharedNoise` has a shortcut for them; a top-k that drops no likely token takes the long way."""
    set_seed(5)
    predictions, noise = predicted(3 * torch.randn(3, 60)), Noise(4)
    for temperature in (0.7, 1.0):
        short, long = (
            SharedNoise(3, Sampling(temperature=temperature, top_k=top_k), noise, np.arange(10, 13))
            for top_k in (0, 50)
        )
        for position in range(3):
            got, expected = short(predictions, position, []), long(predictions, position, [])
            assert [token for token, _ in got] == [token for token, _ in expected]
            assert [chance for _, chance in got] == pytest.approx([chance for _, chance in expected], abs=0.1)


def test_broken_predictions_draft_nothing():
    logits = np.array([[3.0, 2.0], [np.nan, 1.0]], dtype=np.float32)
    assert [
        list(one.tokens)
        for one in each_branch(likely_paths(predicted(torch.from_numpy(logits)), [4, 5], Likeliest(2), SOURCE))
    ] == [
        [0],
        [1],
    ]


def test_with_a_correction_each_path_has_the_predictions_after_its_own_tokens(monkeypatch):
    """As one forward of the trained module gives them for every path, whole vocabulary and all."""
    for module in (draft_tree, row_candidates):  # an untrained network finds all tokens likely
        monkeypatch.setattr(module, "MAX_CANDIDATES", 1000)
    target = CausalNetwork(tiny_llama())
    network, text = drafter(target, correction=6, window=3), np.arange(5, 25)
    for layer in network.model.correction.children():
        torch.nn.init.normal_(layer.weight, std=0.3)
    network = DraftNetwork(network.model, target)
    outputs = network.forward([question(text, states(target, text)[:-1])], [network.new_kv_cache()])[0]
    predictions = outputs.predictions
    branches = each_branch(likely_paths(predictions, text[-2:].tolist(), Likeliest(3), SOURCE))
    assert len(branches) > 3
    for branch in branches:
        path = [*text[-2:].tolist(), *branch.tokens]
        for depth, stated in enumerate(branch.acceptance_probabilities):
            hidden = outputs.hidden_states[1 + depth]
            before, model = (torch.tensor(path[depth + 1]), torch.tensor(path[depth])), network.model
            with torch.inference_mode():
                row = model.lm_head(model.correction.after_tokens(hidden, *before, model.embeddings[0]))
            expected = row.softmax(-1)[branch.tokens[depth] - 5]
            assert stated == pytest.approx(float(expected), rel=1e-4)
    plain = each_branch(likely_paths(replace(predictions, correction=None), text[-2:].tolist(), Likeliest(3), SOURCE))
    assert plain[0].acceptance_probabilities != branches[0].acceptance_probabilities


@pytest.mark.parametrize("choose", ["likeliest", "warmer", "shared noise"])
@pytest.mark.parametrize("length", [0, 1, 20])
def test_the_kernel_grows_the_paths_of_the_loop(choose, length):
    set_seed(8)
    target = CausalNetwork(tiny_llama())
    network, text = drafter(target, correction=16, window=4), np.arange(5, 25)
    network.model.llama.lm_head.weight.data.mul_(2)  # less flat predictions
    for layer in network.model.correction.children():
        torch.nn.init.normal_(layer.weight, std=0.3)
    network = DraftNetwork(network.model, target)
    outputs = network.forward([question(text, states(target, text)[:-1])], [network.new_kv_cache()])[0]
    predictions = outputs.predictions
    if predictions.grow is None:
        pytest.skip("no compiled kernels")

    def rounded(x: np.ndarray) -> np.ndarray:  # as the kernel's tables are
        return torch.from_numpy(x).bfloat16().float().numpy()

    correction = network.correction
    vectors = {token: tuple(map(rounded, correction.token_vectors_of(token))) for token in range(5, 256)}
    correction.token_vectors.update(vectors)
    predictions.correction = replace(correction, right=rounded(correction.right))
    chooser = {
        "likeliest": Likeliest(3),
        "warmer": Likeliest(2, 1.7),
        "shared noise": SharedNoise(3, Sampling(temperature=0.9), Noise(4), np.arange(20, 30)),
    }[choose]
    before = text[:length][-2:].tolist()
    expected, found = grown_nodes(predictions, before, chooser), predictions.grow(before, chooser)
    assert len(found) > 3
    assert [node[:2] for node in found] == [node[:2] for node in expected]
    assert [node[2] for node in found] == pytest.approx([node[2] for node in expected], rel=0.01)
    assert (
        predictions.grow(before, SharedNoise(3, Sampling(temperature=0.9, top_k=2), Noise(4), np.arange(20, 30)))
        is None
    )


def test_hidden_states_do_not_pile_up_while_nothing_is_drafted():
    """The last ones stay, after a long prompt and many tokens of plain decoding."""
    read: list[torch.Tensor] = []
    drafter = HiddenStateDrafter(4, lambda canvas, states, length: iter(read.append(states) or ()))
    for decided in range(100, 190):
        canvas = continuation(np.arange(decided), 200)
        rows = range(decided) if decided == 100 else range(decided - 1, decided)
        outputs = ForwardOutputs(torch.zeros(1, 5), torch.tensor([*rows])[:, None].float())
        inputs = ForwardInputs(canvas)
        distributions = TargetDistributions(inputs, outputs, Sampling(), Noise(0))
        step = Step(canvas, inputs, outputs, distributions, np.array([0]), -1)
        drafts = drafter(canvas.fill(np.array([0])), step, 4)
        assert sum(map(len, drafter.pending)) <= 2 * MAX_UNREAD
    list(drafts)
    assert read[0][:, 0].tolist() == [*range(189 - MAX_UNREAD, 189)]


def test_a_correction_keeps_the_vectors_of_some_tokens_only(monkeypatch):
    monkeypatch.setattr(logit_correction, "MAX_TOKEN_VECTORS", 3)
    left, second_left, state, right, embeddings = np.random.default_rng(0).normal(size=(5, 8, 8))
    correction = NonlinearCorrection(left, second_left, lambda h: h, right, lambda token: embeddings[token])
    for token in [*range(8), *range(8)]:
        fresh = replace(correction, token_vectors={})
        given = state[0], token, (token + 1) % 8
        np.testing.assert_array_equal(correction.vector(*given)[1], fresh.vector(*given)[1])
        assert len(correction.token_vectors) <= 3


@pytest.mark.parametrize("wrong", [{"num_draft_tokens": 0}, {"top_k": 0}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match="must be 1 or more"):
        Ptp(**wrong)


# The network.


def drafter(target: CausalNetwork, **changes) -> DraftNetwork:
    set_seed(7)
    shape = DrafterShape(
        **{"hidden": 32, "intermediate": 48, "hidden_state_layers": (1,), "heads": 4, "kv_heads": 2} | changes
    )
    weights = target.model.get_input_embeddings().weight.detach(), target.model.get_output_embeddings().weight.detach()
    model = DraftModel(shape, torch.arange(5, 250), *weights).eval()
    for weight in model.auxiliary.parameters():
        torch.nn.init.normal_(weight)
    target.add_hidden_state_layers(shape.hidden_state_layers)
    return DraftNetwork(model, target)


def states(target: CausalNetwork, text: np.ndarray) -> torch.Tensor:
    """Of every token."""
    return target.forward([ForwardInputs(continuation(text, 2), output_hidden_states=True)], [target.new_kv_cache()])[
        0
    ].hidden_states


def question(text: np.ndarray, hidden: torch.Tensor, uniforms=(0.2, 0.9, 0.5), temperature=0.7) -> ForwardInputs:
    inputs = ForwardInputs(continuation(text, len(uniforms) + 1), network_name="ptp", hidden_states=hidden)
    return with_query_chains(inputs, [(-1, uniforms)], temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_in_pieces_or_at_once_the_answer_is_the_same(dtype):
    target = CausalNetwork(tiny_llama().to(dtype))
    network = drafter(target)
    network.model.to(dtype)
    network = DraftNetwork(network.model, target)
    text = np.random.default_rng(0).integers(5, 250, MAX_ROWS_PER_CALL + 90)
    hidden = states(target, text)
    whole = network.forward([question(text, hidden[:-1])], [network.new_kv_cache()])[0]
    kv_cache = network.new_kv_cache()
    for begin, end in ((1, 4), (4, 5), (5, 40), (40, len(text))):
        outputs = network.forward([question(text[:end], hidden[begin - 1 : end - 1])], [kv_cache])[0]
        assert outputs.context_tokens_read == end - begin
    assert torch.equal(outputs.logits, whole.logits)
    assert outputs.token_ids.tolist() == list(range(5, 250))


def test_a_text_that_changed_is_read_again_from_where_it_did():
    target = CausalNetwork(tiny_llama())
    network, kv_cache = drafter(target), None
    kv_cache = network.new_kv_cache()
    one = np.random.default_rng(1).integers(5, 250, 40)
    other = one.copy()
    other[30:] = np.random.default_rng(2).integers(5, 250, 10)
    network.forward([question(one, states(target, one)[:-1])], [kv_cache])
    again = question(other, states(target, other)[19:-1])  # slots from 20 on are brought
    changed = network.forward([again], [kv_cache])[0]
    assert changed.context_tokens_read == 10
    afresh = network.forward([question(other, states(target, other)[:-1])], [network.new_kv_cache()])[0]
    assert torch.equal(changed.logits, afresh.logits)
    gap = question(other, states(target, other)[35:-1])
    lost = network.new_kv_cache()
    assert network.forward([gap], [lost])[0].context_tokens_read == 4
    assert lost.first_position == 36


def test_it_takes_its_own_states_where_the_target_gives_out_more():
    target = CausalNetwork(tiny_llama(num_hidden_layers=3))
    text = np.random.default_rng(3).integers(5, 250, 20)
    network = drafter(target, hidden_state_layers=(2,))
    alone = network.forward([question(text, states(target, text)[:-1])], [network.new_kv_cache()])[0]
    target.add_hidden_state_layers((1,))
    assert states(target, text).shape[-1] == 3 * 32
    among = network.forward([question(text, states(target, text)[:-1])], [network.new_kv_cache()])[0]
    assert torch.equal(alone.logits, among.logits)


def test_what_a_query_is_told_counts_and_later_queries_do_not():
    target = CausalNetwork(tiny_llama())
    network, text = drafter(target), np.arange(5, 25)
    hidden = states(target, text)[:-1]
    answers = [
        network.forward([question(text, hidden, told, temperature)], [network.new_kv_cache()])[0].logits[1:]
        for told, temperature in (((0.2, 0.9, 0.5), 0.7), ((0.2, 0.4, 0.5), 0.7), ((0.2, 0.9, 0.5), 1.0))
    ]
    assert torch.equal(answers[0][0], answers[1][0])
    assert not torch.equal(answers[0][1], answers[1][1])
    assert not torch.equal(answers[0][2], answers[1][2])
    assert not torch.equal(answers[0][0], answers[2][0])


def test_it_answers_as_many_queries_as_it_was_trained_with():
    target = CausalNetwork(tiny_llama())
    network, text = drafter(target, window=2), np.arange(5, 25)
    outputs = network.forward([question(text, states(target, text)[:-1])], [network.new_kv_cache()])[0]
    assert len(outputs.logits) == 1 + 2


# Files.


def test_a_folder_gives_back_what_was_kept(tiny_drafter):
    target = tiny_llama()
    folder = tiny_drafter(target, window=4)
    model = load_drafter(folder, target, "tiny")
    assert model.shape == DrafterShape(32, 48, (1,), heads=4, kv_heads=2, window=4)
    assert model.fuse.weight.dtype == target.dtype
    again = load_drafter(folder, tiny_llama().to(torch.bfloat16), "tiny")  # the same target in another dtype
    assert torch.equal(again.fuse.weight.float(), model.fuse.weight)
    assert set(model.tokens.tolist()) == set(range(2, 290))


def test_folders_that_do_not_serve_are_refused_in_a_line(tiny_drafter, tmp_path):
    target = tiny_llama()
    with pytest.raises(ValueError, match="holds no drafter"):
        load_drafter(tmp_path, target, "tiny")
    with pytest.raises(
        ValueError,
        match=r"was trained for tiny \(.*\), not other \(.*\); train it again with",
    ):
        load_drafter(tiny_drafter(target), tiny_llama(seed=1), "other")
    for file, content in ((WEIGHTS_FILES["drafter"], b"nothing"), (METADATA_FILE, b"{")):
        folder = tiny_drafter(target)
        (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match="is damaged"):
            load_drafter(folder, target, "tiny")
    folder = tiny_drafter(target)
    papers = json.loads((folder / METADATA_FILE).read_text())
    (folder / METADATA_FILE).write_text(json.dumps({"kind": "adapter"}))
    with pytest.raises(ValueError, match="holds no drafter"):
        load_drafter(folder, target, "tiny")
    papers["settings"]["layers"] = 3
    (folder / METADATA_FILE).write_text(json.dumps(papers))
    with pytest.raises(ValueError, match="lacks"):
        load_drafter(folder, target, "tiny")


def test_a_target_without_a_shipped_drafter_is_told_what_to_do(tiny_folder):
    assert find_shipped("drafter", tiny_llama()) is None
    with pytest.raises(ValueError, match="Saltus brings no trained drafter for") as error:
        saltus.load(str(tiny_folder()), "ptp")
    assert "\n" not in str(error.value)


def test_models_are_told_apart_in_any_dtype():
    one = tiny_llama()
    assert (
        model_fingerprint(one)
        == model_fingerprint(tiny_llama().to(torch.bfloat16))
        == model_fingerprint(tiny_llama().half())
    )
    assert model_fingerprint(one) != model_fingerprint(tiny_llama(seed=1))
    assert model_fingerprint(one) != model_fingerprint(tiny_llama(intermediate_size=64))


@pytest.mark.model
@pytest.mark.parametrize("method", ["ptp", "mtpc"])
def test_what_comes_with_the_package_drafts_for_the_default_model(method, model_folder):
    made = saltus.load(str(model_folder), method, adaptive=False, max_draft_tokens=4)
    given = {"max_new_tokens": 40, "seed": 1}
    for temperature in (0.0, 0.7):
        found = made.generate("Add 17 and 25, step by step.", temperature=temperature, **given)
        own = made.generate("Add 17 and 25, step by step.", temperature=temperature, method="plain", **given)
        assert found.tokens == own.tokens
        assert found.statistics.tokens_per_call > 1.3


def test_taps_of_several_drafters_join(tiny_drafter):
    network = CausalNetwork(tiny_llama(num_hidden_layers=4))
    for hidden_state_layers in ((2,), (1, 3)):
        load_drafter_for_target(
            f"drafter:{tiny_drafter(network.model, hidden_state_layers=hidden_state_layers)}", network, "tiny"
        )
    assert network.hidden_state_layers == (1, 2, 3)


def test_a_second_turn_writes_what_plain_decoding_writes(tiny_folder, tiny_drafter):
    """Its prompt is read but for what the first turn has read, so the target gives out fewer states."""
    options = {"ptp": {"model": str(tiny_drafter())}}
    engine = saltus.load(str(tiny_folder()), "ptp", options=options, adaptive=False)
    talk = [{"role": "user", "content": "the cat sat on the mat"}]
    first = engine.generate(talk, max_new_tokens=12, ignore_eos=True)
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and the dog"}]
    second = engine.generate(talk, max_new_tokens=12, ignore_eos=True)
    plain = engine.copy_with().generate(talk, method="plain", max_new_tokens=12, ignore_eos=True)
    assert second.tokens == plain.tokens


@pytest.mark.slow
def test_a_drafter_loads_without_a_word(tiny_folder, tiny_drafter):
    """In a process of its own: Transformers warns once."""
    options = {"ptp": {"model": str(tiny_drafter())}}
    program = f"import saltus; e = saltus.load({str(tiny_folder())!r}, 'plain', options={options!r});"
    program += "e.generate('the cat', method='ptp', max_new_tokens=4)"
    done = subprocess.run([*forked_python(*FOR_COMMANDS), "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
