"""Token recycling: what is kept after each token, how paths grow through it, and which texts share it."""

from dataclasses import replace

import numpy as np
import openai
import pytest
import torch

import saltus
from saltus.core.candidates import Candidates
from saltus.core.canvas import continuation
from saltus.core.distributions import Step, TargetDistributions
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.noise import Noise
from saltus.core.sampling import Sampling
from saltus.kernels import native
from saltus.methods.shared.candidate_table import CandidateTable
from saltus.methods.shared.draft_tree import Chooser, Likeliest, SharedNoise, likely_tokens
from saltus.methods.shared.row_candidates import likely_on_device
from saltus.methods.token_recycling import TokenRecycling, TokenRecyclingDrafter
from saltus.testing import toy_decoding, toy_network
from tiny_models import TEMPLATE
from tiny_server import MESSAGES, serving

VOCAB = 300


def step(text: list[int], drafts: list[int], parents: list[int], last_node: int, seed: int = 0) -> Step:
    """A call that read drafts after a text, with random logits."""
    logits = 3 * torch.randn(1 + len(drafts), VOCAB, generator=torch.Generator().manual_seed(seed))
    canvas = continuation(text, 20)
    inputs, outputs = ForwardInputs(canvas, tuple(drafts), tuple(parents)), ForwardOutputs(logits)
    distributions = TargetDistributions(inputs, outputs, Sampling(), Noise(0))
    return Step(canvas, inputs, outputs, distributions, np.array([0]), last_node)


def recorded(*steps: Step, max_tokens: int = 99) -> CandidateTable:
    table = CandidateTable(max_tokens)
    for each in steps:
        table.record(each)
    return table


def assert_after(table: CandidateTable, token: int, row: torch.Tensor) -> None:
    """What is kept after a token are the likely tokens of this row."""
    ids, logits, _ = table.after(token)
    expected = likely_tokens(row.float().numpy())
    assert ids.tolist() == expected.columns.tolist()
    assert logits == pytest.approx(expected.logits, abs=1e-5)


def test_each_token_that_a_call_read_has_the_predictions_after_it():
    made = step([7, 8, 9], [5, 6, 4], [-1, 0, -1], 1)
    table = recorded(made)
    for token, row in ((9, 0), (5, 1), (6, 2), (4, 3)):
        assert_after(table, token, made.outputs.logits[row])
    for unread in (7, 8, 299, 5000):
        assert not len(table.after(unread)[0])


def test_later_calls_and_the_texts_own_path_count():
    first, second = step([1], [5], [-1], 0, seed=1), step([1, 5, 2], [5, 5, 3], [-1, 0, -1], 0, seed=2)
    table = recorded(first, second)
    assert_after(table, 1, first.outputs.logits[0])
    assert_after(table, 5, second.outputs.logits[1])  # accepted; the node after it was not
    drafted = step([4], [6, 6], [-1, 0], -1, seed=3)
    assert_after(recorded(drafted), 6, drafted.outputs.logits[2])


def test_a_full_table_gives_up_its_oldest_rows():
    steps = [step([token], [], [], -1, seed=token) for token in range(12)]
    table = recorded(*steps, steps[2], max_tokens=5)
    for token in (0, 1, 3, 4, 5, 6, 7):
        assert not len(table.after(token)[0])
    for token in (2, 8, 9, 10, 11):
        assert_after(table, token, steps[token].outputs.logits[0])


def test_a_table_grows_without_losing_what_it_has():
    steps = [step([token], [], [], -1, seed=token) for token in range(290)]
    table = recorded(*steps, max_tokens=1000)
    for token in (0, 255, 256, 289):
        assert_after(table, token, steps[token].outputs.logits[0])
    assert len(table.candidates) == 512


CHOOSERS = {
    "likeliest": Likeliest(3),
    "shared noise": SharedNoise(3, Sampling(temperature=0.9), Noise(4), np.arange(20, 40)),
    "truncated, which no kernel knows": SharedNoise(3, Sampling(0.9, top_k=4), Noise(4), np.arange(20, 40)),
}


@pytest.mark.parametrize("choose", CHOOSERS.values(), ids=CHOOSERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_keep_and_grow_what_numpy_does(choose: Chooser, dtype: torch.dtype, monkeypatch):
    steps = [step([token], [token + 20, token + 40], [-1, -1], 0, seed=token) for token in range(20)]
    for each in steps:
        peaked = each.outputs.logits.clone()
        peaked[:, 60:] -= 20  # so that paths stay among the tokens that are known
        object.__setattr__(each.outputs, "logits", peaked.to(dtype))
    paths = recorded(*steps).paths(7, choose, 24, 8, "here")
    monkeypatch.setattr(native, "load_kernels", lambda: None)
    (expected,) = recorded(*steps).paths(7, choose, 24, 8, "here")
    (found,) = paths
    assert len(expected.tokens) > 12
    assert expected.parents.max() > 3
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.parents.tolist() == expected.parents.tolist()
    assert found.acceptance_probabilities == pytest.approx(expected.acceptance_probabilities, rel=0.02)


def test_the_weight_of_unlikely_tokens_is_that_of_a_sample_of_them():
    logits = 2 * torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    logits[0, :3] = torch.tensor([12.0, 11.0, 10.0])
    made = step([1], [], [], -1)
    object.__setattr__(made.outputs, "logits", logits)
    _, _, rest = recorded(made).after(1)
    assert rest == pytest.approx(likely_tokens(logits[0].numpy()).rest, rel=0.1)


def test_a_device_finds_the_likely_tokens_that_the_host_does():
    logits = 3 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[3, 8] = torch.nan
    for found, row in zip(likely_on_device(logits), logits.numpy(), strict=True):
        expected = likely_tokens(row)
        assert found.columns.tolist() == expected.columns.tolist()
        assert found.logits == pytest.approx(expected.logits, abs=1e-5)
        assert found.rest == pytest.approx(expected.rest, rel=1e-4, abs=1e-6)


def test_candidates_that_a_device_found_are_kept_and_none_of_broken_logits():
    made, broken = step([1], [], [], -1), step([2], [], [], -1)
    (row,) = made.outputs.logits.numpy()
    tokens = np.argsort(-row)
    total = float(np.exp(row - row.max()).sum())
    for each, logits in ((made, row[tokens]), (broken, np.full(len(row), np.nan, np.float32))):
        object.__setattr__(each.inputs, "candidate_temperature", 1.0)
        object.__setattr__(each.outputs, "candidates", [Candidates(tokens, logits, total, len(row))])
    table, expected = recorded(made, broken), likely_tokens(row)
    columns, logits, rest = table.after(1)
    assert columns.tolist() == expected.columns.tolist()
    assert logits == pytest.approx(expected.logits, abs=1e-5)
    assert rest == pytest.approx(expected.rest, rel=1e-4, abs=1e-6)
    columns, _, rest = table.after(2)
    assert (len(columns), rest) == (0, 0.0)


def calls(text: str, *, seed: int = 0, **options) -> int:
    decoding = toy_decoding(text, [1, 2], 60, target=toy_network(logit_scale=2.5), seed=seed, **options)
    decoding.run()
    return decoding.networks["target"].calls


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_it_saves_calls(sampling: Sampling):
    assert calls("token_recycling", sampling=sampling) < 0.75 * calls("plain", sampling=sampling)


def test_options_out_of_range_are_refused():
    for wrong in ({"top_k": 0}, {"top_k": 17}, {"num_draft_tokens": 65}, {"max_depth": 0}):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"token_recycling: {name} is .*, but must be between 1 and"):
            TokenRecycling(**wrong)
    assert replace(TokenRecycling(), top_k=16).top_k == 16


# Which texts share it


@pytest.fixture
def engine(tiny_folder) -> saltus.Engine:
    return saltus.load(str(tiny_folder()), "token_recycling", adaptive=False)


def test_a_text_begins_with_what_earlier_ones_taught_unless_that_could_change_it(engine, tiny_folder):
    first, again = (engine.generate("abcabc", max_new_tokens=30) for _ in range(2))
    assert again.tokens == first.tokens
    assert again.statistics.calls < first.statistics.calls
    rejecting = saltus.load(str(tiny_folder()), "token_recycling", rule="reject")
    first, again = (rejecting.generate("abcabc", max_new_tokens=30, temperature=1.0, seed=3) for _ in range(2))
    assert again.tokens == first.tokens
    assert [call.tokens for call in again.calls] == [call.tokens for call in first.calls]


def test_setups_of_a_model_learn_together_and_copies_apart(engine):
    def learned(engine: saltus.Engine, method: str) -> CandidateTable:
        drafters = engine.decoder.setup(method).new_drafters(engine.text_request("abc").request)
        return next(each.learned for each in drafters if isinstance(each, TokenRecyclingDrafter))

    one, *others = (
        learned(engine, method) for method in ("token_recycling", "token_recycling+lookup", "lookup+token_recycling")
    )
    assert all(other is one for other in others)
    assert learned(engine.copy_with(), "token_recycling") is not one


def test_groups_learn_apart_and_the_oldest_is_forgotten(engine):
    setup = engine.decoder.setup("token_recycling")

    def learned(group: str) -> CandidateTable:
        request = engine.text_request("abc", max_new_tokens=4).request
        request.group = group
        (drafter,) = setup.new_drafters(request)
        return drafter.learned

    one = learned("one")
    assert learned("one") is one
    assert learned("other") is not one
    for number in range(15):
        assert learned("one") is one
        learned(str(number))
    for number in range(16):
        learned(str(number))
    assert learned("one") is not one


def test_the_keys_of_a_server_are_groups(engine):
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "extra_body": {"include_metrics": True}}
    engine.tokenizer.chat_template = TEMPLATE
    with serving(engine, api_keys=("one", "two")) as (_, url):
        lengths = {}
        for key, number in (("one", 0), ("one", 1), ("two", 0)):
            client = openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
            answer = client.chat.completions.create(**asked, seed=3)
            lengths[key, number] = answer.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"]
    assert lengths["one", 1] > lengths["one", 0] == lengths["two", 0]
