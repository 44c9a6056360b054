"""Every method inside Transformers' own `generate`: its arguments, its endings, its padding, its tokens."""

import re

import pytest
import torch
from transformers import TextStreamer
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, TopKLogitsWarper
from transformers.generation.stopping_criteria import (
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

import saltus
from architectures import tiny
from saltus.core.sampling import Sampling
from saltus.integrations import transformers_generate
from saltus.integrations.transformers_generate import _sampling
from saltus.methods import available_methods
from tiny_models import byte_tokenizer, tiny_llama

# `mtp` needs heads in the checkpoint
METHODS = [*sorted(set(available_methods()) - {"mtp"}), "jacobi+lookup", "auto"]
TEXT = torch.tensor([[5, 9, 30, 7, 5, 9, 30, 8, 5, 9]])
PADDED = torch.tensor([[1, 1, 1, 40, 41, 42], [5, 9, 30, 7, 5, 9], [1, 20, 21, 20, 21, 20]])
BIAS = [[[5], 2.0]]
MASK = (PADDED != 1).long()


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def writers(partners):
    return {method: saltus.custom_generate(method, options=partners, adaptive=False) for method in METHODS}


def test_a_mixture_of_experts_keeps_its_implementation():
    model = tiny("Mixtral")
    model.set_experts_implementation("grouped_mm")
    before = model.get_experts_implementation()
    model.generate(TEXT, custom_generate=saltus.custom_generate(), max_new_tokens=3, do_sample=False)
    assert model.get_experts_implementation() == before
    assert model.config._experts_implementation == "grouped_mm"


CASES = {
    "one text": (TEXT, {}),
    "penalty": (TEXT, {"repetition_penalty": 1.4, "suppress_tokens": [3, 90, 91]}),
    "no repeated n-grams": (PADDED, {"attention_mask": MASK, "no_repeat_ngram_size": 2}),
    "at least so many": (
        PADDED,
        {"attention_mask": MASK, "min_new_tokens": 5, "eos_token_id": list(range(2, 250)), "pad_token_id": 2},
    ),
    "min_length": (TEXT, {"min_length": 14, "eos_token_id": list(range(2, 250)), "pad_token_id": 2}),
    "warpers that do not matter": (TEXT, {"do_sample": False}),
    "padded batch": (PADDED, {"attention_mask": MASK}),
    "padded batch with a penalty": (PADDED, {"attention_mask": MASK, "repetition_penalty": 1.4}),
    "end tokens": (PADDED, {"attention_mask": MASK, "eos_token_id": list(range(40, 80)), "pad_token_id": 2}),
    "max_length": (TEXT, {"max_length": 25, "max_new_tokens": None}),
}


EVERY_METHOD = ("padded batch with a penalty", "end tokens", "no repeated n-grams", "at least so many")


@pytest.mark.parametrize(
    ("method", "case"),
    [
        *((method, case) for method in METHODS for case in EVERY_METHOD),
        *(("ptp", case) for case in CASES if case not in EVERY_METHOD),
    ],
)
def test_greedy_tokens_are_those_of_generate(model, writers, method, case):
    inputs, settings = CASES[case]
    settings = {"max_new_tokens": 30, "do_sample": False, **settings}
    expected = model.generate(inputs, **settings)
    found = model.generate(inputs, custom_generate=writers[method], **settings)
    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("end", [106, [106, 9]])
def test_without_a_pad_token_texts_that_ended_are_padded_as_generate_pads_them(model, writers, end):
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    settings = {
        "attention_mask": MASK,
        "max_new_tokens": 30,
        "do_sample": False,
        "eos_token_id": end,
    }
    expected = model.generate(PADDED, **settings)
    found = model.generate(PADDED, custom_generate=writers["lookup"], **settings)
    assert torch.equal(found, expected)
    assert (expected[:, -1] == 106).any()


def test_end_tokens_are_met_in_that_case(model, writers):
    inputs, settings = CASES["end tokens"]
    rows = model.generate(inputs, custom_generate=writers["lookup"], max_new_tokens=30, do_sample=False, **settings)
    assert {2, *range(40, 80)} >= set(rows[:, -1].tolist())
    assert (rows[:, inputs.shape[1] :] == 2).any()


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_are_those_of_the_engine(model, writers, tiny_folder, method):
    settings = {"temperature": 0.8, "top_p": 0.9}
    engine = saltus.load(str(tiny_folder()), "plain")
    text = engine.encode("the cat sat on the", raw=True)
    expected = engine.generate("the cat sat on the", raw=True, top_k=50, seed=4, max_new_tokens=24, **settings)
    found = model.generate(
        torch.tensor([text]), custom_generate=writers[method], do_sample=True, seed=4, max_new_tokens=24, **settings
    )
    assert found[0, len(text) :].tolist() == expected.tokens


def test_the_seed_can_be_given_once(model):
    settings = {"do_sample": True, "max_new_tokens": 12}
    once = model.generate(TEXT, custom_generate=saltus.custom_generate("plain", seed=7), **settings)
    each = model.generate(TEXT, custom_generate=saltus.custom_generate("plain"), seed=7, **settings)
    other = model.generate(TEXT, custom_generate=saltus.custom_generate("plain"), **settings)
    assert once.tolist() == each.tolist() != other.tolist()


def test_several_returns_differ_and_begin_with_the_seeds_own(model, writers):
    settings = {"do_sample": True, "max_new_tokens": 12, "custom_generate": writers["lookup"]}
    rows = model.generate(TEXT, num_return_sequences=3, seed=5, **settings)
    assert len({tuple(row) for row in rows.tolist()}) == 3
    assert rows[1:2].tolist() == model.generate(TEXT, seed=6, **settings).tolist()


class Until(StoppingCriteria):
    """Ends a text with its first token that can be divided by seven."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


@pytest.mark.parametrize("method", METHODS)
def test_stopping_criteria_are_asked_token_by_token(model, writers, method):
    settings = {"stopping_criteria": StoppingCriteriaList([Until()]), "max_new_tokens": 40, "do_sample": False}
    expected = model.generate(TEXT, **settings)
    assert TEXT.shape[1] < expected.shape[1] < TEXT.shape[1] + 40
    assert model.generate(TEXT, custom_generate=writers[method], **settings).tolist() == expected.tolist()


def test_stop_strings_are_a_stopping_criterion(model, writers):
    tokenizer = byte_tokenizer()
    whole = model.generate(TEXT, max_new_tokens=12, do_sample=False)
    stop = StopStringCriteria(tokenizer, [tokenizer.decode(whole[0, 12:14])])
    settings = {"max_new_tokens": 12, "do_sample": False, "stopping_criteria": StoppingCriteriaList([stop])}
    written = model.generate(TEXT, custom_generate=writers["lookup"], **settings)
    assert torch.equal(written, model.generate(TEXT, **settings))
    assert written.shape[1] < whole.shape[1]


def test_positions_are_those_of_the_mask_or_refused(model, writers):
    positions = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 1)
    settings = {"attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
    written = model.generate(PADDED, position_ids=positions, custom_generate=writers["plain"], **settings)
    assert torch.equal(written, model.generate(PADDED, **settings))
    for others in (positions + 3, positions * 2, positions.expand(3, 3, -1)):
        with pytest.raises(ValueError, match="leave position_ids out"):
            model.generate(PADDED, position_ids=others, custom_generate=writers["plain"], **settings)


def test_a_length_among_the_criteria_counts(model, writers):
    settings = {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(17)]), "do_sample": False}
    found = model.generate(TEXT, custom_generate=writers["lookup"], max_new_tokens=40, **settings)
    assert found.tolist() == model.generate(TEXT, max_new_tokens=40, **settings).tolist()
    assert found.shape[1] == 17


@pytest.mark.parametrize("method", METHODS)
def test_the_model_comes_back_as_it_was(model, writers, method):
    model.set_attn_implementation("eager")
    model.train()
    model.generate(TEXT, custom_generate=writers[method], max_new_tokens=4)
    assert model.config._attn_implementation == "eager"
    assert model.training
    with pytest.raises(ValueError, match="leave it out"):
        model.generate(TEXT, custom_generate=writers[method], max_new_tokens=4, sequence_bias=BIAS)
    assert model.config._attn_implementation == "eager"


REFUSED = {
    "num_beams": {"num_beams": 3},
    "SequenceBiasLogitsProcessor": {"sequence_bias": BIAS},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "before what follows": {"logits_processor": [TopKLogitsWarper(5)], "do_sample": True},
    "min_tokens_to_keep": {"logits_processor": [TopKLogitsWarper(5, min_tokens_to_keep=3)]},
    "has no tokens": {"attention_mask": torch.zeros(1, 10, dtype=torch.long)},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 10, 32)},
}


@pytest.mark.parametrize("max_draft_tokens", [-1, 385])
def test_more_draft_tokens_than_a_call_holds_are_refused_at_once(max_draft_tokens):
    with pytest.raises(ValueError, match=rf"max_draft_tokens is {max_draft_tokens}, but must lie in 0…384"):
        saltus.custom_generate("lookup", max_draft_tokens=max_draft_tokens)


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_pipeline_cannot_do_is_refused_in_a_line(model, writers, what):
    with pytest.raises(ValueError, match=re.escape(what)) as error:
        model.generate(TEXT, custom_generate=writers["lookup"], max_new_tokens=4, **REFUSED[what])
    assert "\n" not in str(error.value)


def test_a_filled_cache_is_refused(model, writers):
    cache = model(TEXT[:, :4], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="pass the whole text"):
        model.generate(TEXT, custom_generate=writers["lookup"], past_key_values=cache, max_new_tokens=4)


def test_processors_become_our_pipeline(model):
    config, _ = model._prepare_generation_config(
        None, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.1, repetition_penalty=1.2,
        suppress_tokens=[4, 5], renormalize_logits=True,
    )  # fmt: skip
    processors = model._get_logits_processor(config, input_ids_seq_length=10)
    assert len(processors) == 7
    assert _sampling(processors, True, 10) == Sampling(0.7, 20, 0.9, 0.1, 1.2, banned=(4, 5))
    assert _sampling(processors, False, 10) == Sampling(0.0, repetition_penalty=1.2, banned=(4, 5))
    with pytest.raises(ValueError, match="NoRepeatNGram"):  # after the warpers
        _sampling([*processors, NoRepeatNGramLogitsProcessor(2)], True, 10)


def test_of_two_least_lengths_the_longer_one_counts(model):
    config, _ = model._prepare_generation_config(None, min_length=14, min_new_tokens=3, no_repeat_ngram_size=2)
    config._eos_token_tensor = torch.tensor([3, 4])
    processors = model._get_logits_processor(config, input_ids_seq_length=10)
    expected = Sampling(no_repeat_ngram_size=2, min_new_tokens=4, end_tokens=(3, 4))
    assert _sampling(processors, False, 10) == expected


def test_a_dictionary_comes_where_it_is_wanted(model, writers):
    settings = {"custom_generate": writers["lookup"], "max_new_tokens": 5}
    out = model.generate(TEXT, return_dict_in_generate=True, **settings)
    assert out.sequences.tolist() == model.generate(TEXT, **settings).tolist()


class Heard(TextStreamer):
    def __init__(self) -> None:
        self.values, self.ended = [], False

    def put(self, value) -> None:
        self.values.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_hears_what_generate_tells_it(model):
    ours, theirs = Heard(), Heard()
    model.generate(TEXT, streamer=theirs, max_new_tokens=9, do_sample=False)
    model.generate(
        TEXT, custom_generate=saltus.custom_generate("lookup", streamer=ours), max_new_tokens=9, do_sample=False
    )
    assert ours.values == theirs.values
    assert ours.ended


def test_a_model_that_cannot_be_served_is_refused_and_comes_back(model, monkeypatch):
    monkeypatch.setattr("saltus.models.causal.CausalNetwork.forward", lambda self, batch, kv_caches: 1 / 0)
    with pytest.raises(ValueError, match="cannot be served: division by zero"):
        model.generate(TEXT, custom_generate=saltus.custom_generate("lookup"), max_new_tokens=4)
    assert model.config._attn_implementation == "sdpa"


def test_every_call_on_a_model_rounds_alike(model, monkeypatch):
    """A model that is known from an earlier call is not checked again, and served as before."""
    made, run = [], transformers_generate.run_requests
    monkeypatch.setattr(
        transformers_generate, "run_requests",
        lambda decoder, *given, **more: (made.append(decoder.target), run(decoder, *given, **more))[1],
    )  # fmt: skip
    generator = saltus.custom_generate("lookup")
    for _ in range(2):
        model.generate(TEXT, custom_generate=generator, max_new_tokens=4)
    assert [network.batch_invariant for network in made] == [True, True]
    assert made[0].compute_path == made[1].compute_path


def test_what_was_learned_of_a_model_is_kept(model, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "saltus.engine.decoding_setup.call_seconds", lambda network: measured.append(1) or {1: 1.0, 8: 1.1}
    )
    generator = saltus.custom_generate("lookup")
    for _ in range(3):
        model.generate(TEXT, custom_generate=generator, max_new_tokens=4)
    assert len(measured) == 1
