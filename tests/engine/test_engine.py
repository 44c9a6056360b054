"""Text in, text out: the same for every method, alone and in a batch, streamed or not, wherever it ends."""

import dataclasses
import itertools
import logging
import re
import shutil
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

import saltus
from architectures import tiny
from saltus.core.forward import ForwardOutputs
from saltus.core.sampling import Sampling
from saltus.engine import target_network
from saltus.engine.batch_controller import controller_in_batch
from saltus.engine.calibration import measure_call_seconds
from saltus.engine.checkpoints import require_same_vocabulary, resolve_device
from saltus.engine.request import Request
from saltus.engine.scheduler import Scheduler, run_requests
from saltus.engine.target_network import make_network
from saltus.engine.text_bounds import PromptTooLongError
from saltus.methods import available_methods, make_methods
from saltus.methods.jacobi.drafter import Jacobi
from saltus.models import causal
from saltus.models.cpu import chunked_prefill
from saltus.models.cpu.attention import install_attention
from tiny_models import TEMPLATE, space_tokenizer, tiny_llama

# `mtp` needs heads in the checkpoint, see tests/methods/mtp
METHODS = [*sorted(set(available_methods()) - {"mtp"}), "jacobi+lookup", "ptp+lookup", "mtpc+lookup"]
PROMPT = "the cat sat on the mat and the cat sat on the log and the"
GREEDY, SAMPLED = {}, {"temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> saltus.Engine:
    """It drafts on and on, even where it does not pay."""
    return saltus.load(str(tiny_folder()), options=partners, batch_size=2, adaptive=False)


@pytest.fixture(scope="module")
def plain_text(engine) -> Callable[..., saltus.Generation]:
    """What plain decoding writes after PROMPT, written once for the same settings."""

    @lru_cache
    def write(**settings) -> saltus.Generation:
        return engine.generate(PROMPT, method="plain", max_new_tokens=40, **settings)

    return write


def test_a_text_interrupted_while_its_prompt_is_read_has_statistics(tiny_folder, monkeypatch):
    engine = saltus.load(str(tiny_folder()), "plain")
    forward, calls = engine.network.forward, []

    def interrupted(batch, kv_caches):
        calls.append(batch)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return forward(batch, kv_caches)

    monkeypatch.setattr(engine.network, "forward", interrupted)
    stream = engine.stream(PROMPT, max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert (stream.generation.tokens, stream.generation.finish_reason) == ([], None)
    assert (stream.generation.statistics.calls, stream.generation.statistics.prefill_seconds) == (0, 0.0)
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, max_new_tokens=3)
    assert len(engine.generate(PROMPT, max_new_tokens=3).tokens) == 3


@pytest.mark.unchecked
def test_a_closed_engine_frees_its_memory_and_is_refused_in_one_line(tiny_folder):
    folder = str(tiny_folder())
    with saltus.load(folder, draft_model=folder) as engine:
        before = engine.generate(PROMPT, max_new_tokens=4).tokens
        engine.generate(PROMPT, method="lookup", max_new_tokens=4)
        held = [weakref.ref(each) for each in (engine.network, engine.model, next(engine.model.parameters()))]
        stream = engine.stream(PROMPT, max_new_tokens=8)
        next(stream)
    for use in (
        lambda: engine.generate(PROMPT),
        lambda: engine.generate([]),
        lambda: engine.infill("The [[2]]"),
        lambda: engine.stream(PROMPT),
        lambda: engine.encode(PROMPT),
        lambda: engine.model,
        lambda: engine.copy_with(),
        lambda: next(stream),
    ):
        with refused("is closed; load the model again"):
            use()
    assert folder in repr(engine)
    engine.close()  # the stream has ended
    assert [each() for each in held] == [None] * 3
    assert saltus.load(folder, "plain").generate(PROMPT, max_new_tokens=4).tokens == before


def test_a_copy_of_an_engine_decodes_on_when_the_engine_is_closed(tiny_folder):
    engine = saltus.load(str(tiny_folder()), "lookup")
    copy, before = engine.copy_with(), engine.generate(PROMPT, max_new_tokens=4).tokens
    engine.close()
    assert copy.generate(PROMPT, max_new_tokens=4).tokens == before


def ending_with(engine: saltus.Engine, *tokens: int) -> saltus.Engine:
    return dataclasses.replace(engine, target=dataclasses.replace(engine.target, end_tokens=frozenset(tokens)))


@contextmanager
def refused(cure: str):
    """A ValueError of one line that says what to do."""
    with pytest.raises(ValueError, match=re.escape(cure)) as error:
        yield error
    assert "\n" not in str(error.value)


def test_options_of_methods_that_auto_is_not_draw_a_line(tiny_folder, tiny_drafter, monkeypatch, caplog):
    folder = str(tiny_folder())
    engine = saltus.load(folder, options={"mtpc": {"top_k": 2}, "ptp": {"max_nodes": 64}, "mtp": {}, "lookup": {}})
    (line,) = caplog.messages
    assert "auto is lookup here: the options of mtpc and ptp have no effect on it" in line
    engine.copy_with().generate(PROMPT, method="auto", max_new_tokens=2)
    options = {"ptp": {"model": str(tiny_drafter())}, "lookup": {"max_ngram_size": 5}}
    saltus.load(folder, options=options)
    saltus.load(folder, "lookup", options=options)
    monkeypatch.setattr("saltus.engine.auto_method.find_shipped", lambda kind, target: "drafter")
    monkeypatch.setattr("saltus.engine.auto_method.call_seconds", lambda network: {1: 1.0, 8: 2.0})
    caplog.clear()
    saltus.load(folder, options={"ptp": {"max_nodes": 64}})
    (note,) = caplog.messages
    assert note.startswith("auto is lookup here: a call of 8 rows takes 2.0 times as long")
    saltus.load(folder)
    assert caplog.messages == [note], "without options of the drafter its absence is no surprise"


def test_auto_takes_the_drafter_that_fits_the_model_and_lookup_always(tiny_folder, tiny_drafter, monkeypatch):
    folder = str(tiny_folder())
    without = saltus.load(folder)
    assert (without.method, set(without.decoder.setups)) == ("lookup", {"lookup", "auto"})
    drafter = tiny_drafter()
    assert (
        saltus.load(folder, options={"ptp": {"model": str(drafter)}, "lookup": {"max_ngram_size": 5}}).method
        == "ptp+lookup"
    )
    monkeypatch.setattr("saltus.engine.auto_method.find_shipped", lambda kind, target: drafter)
    monkeypatch.setattr("saltus.engine.target_drafters.find_shipped", lambda kind, target: drafter)
    costs = {1: 1.0, 8: 2.0}
    monkeypatch.setattr("saltus.engine.auto_method.call_seconds", lambda network: costs)
    slow = saltus.load(folder)
    assert slow.method == "lookup", "further rows cost too much here"
    assert "2.0 times as long" in slow.decoder.auto_note
    for disturbed, method in (({1: 1.0, 8: 2.0}, "ptp+lookup"), ({1: 1.6, 8: 1.8}, "lookup")):
        own = {1: 1.0, 8: 1.3 if method == "ptp+lookup" else 2.0}
        measured = iter([disturbed, own])  # other work disturbed the first measurement
        with monkeypatch.context() as patch:
            patch.setattr("saltus.engine.auto_method.call_seconds", lambda network, measured=measured: next(measured))
            assert saltus.load(folder).method == method
    costs[8] = 1.2
    shipped = saltus.load(folder, "auto", adaptive=False)
    assert shipped.method == "ptp+lookup"
    plain = shipped.generate(PROMPT, method="plain", max_new_tokens=12)
    assert shipped.generate(PROMPT, method="auto", max_new_tokens=12).tokens == plain.tokens
    assert saltus.load(folder, rule="reject").method == "lookup", "else the text would depend on times"
    plain_engine = saltus.load(folder, "plain")
    first = plain_engine.decoder.setup("auto")
    plain_engine.decoder.call_cost.seconds[8] = 100.0  # another program starts
    assert plain_engine.decoder.setup("auto") is first
    with refused("options are given for 'lokup', which is no method; there are assd, "):
        saltus.load("no folder", options={"lokup": {"longest": 5}})
    with refused("ptp has no option num_draft_token; did you mean ptp.num_draft_tokens?"):
        saltus.load("no folder", "lookup", options={"ptp": {"num_draft_token": 5}})
    with refused("'eagle3' is a kind of draft model of the method ptp; take ptp with ptp.model=FOLDER"):
        saltus.load(folder, "eagle3")
    with refused("unknown method 'aut'; did you mean auto"):
        saltus.load(folder, "aut")
    with refused("auto+lookup: auto chooses all methods itself; name the methods to join"):
        saltus.load(folder, "auto+lookup")


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_the_text_of_plain_decoding(engine, plain_text, method, settings):
    openai = {"presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": ((5, 2.0), (9, -50.0))}
    for penalties in ({}, {"repetition_penalty": 1.3} if settings else openai):
        plain = plain_text(**penalties, **settings)
        other = engine.generate(PROMPT, method=method, max_new_tokens=40, **penalties, **settings)
        assert other.tokens == plain.tokens
        assert other.text == plain.text


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_drafter_that_is_the_target_is_always_right(engine, settings):
    drafter = {"small_model": {"model": engine.target.name, "num_draft_tokens": 3, "min_probability": 0.0}}
    sure = saltus.load(engine.target.name, "small_model", options=drafter, adaptive=False)
    answer = sure.generate(PROMPT, max_new_tokens=21, ignore_eos=True, **settings)
    assert answer.statistics.tokens_by_call == [4] * 5 + [1]


def test_drafts_save_calls_where_a_text_repeats_itself(engine):
    answer = engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True)
    assert answer.statistics.calls < 100
    assert max(answer.statistics.tokens_by_call) > 1


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_a_stream_says_what_generate_says(engine, method, settings):
    settings = {**settings, "max_new_tokens": 30, "method": method, "stop": ["zzz", "the m"]}
    whole, stream = engine.generate(PROMPT, **settings), engine.stream(PROMPT, **settings)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text == stream.generation.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert [chunk.call_index for chunk in chunks] == list(range(len(stream.generation.calls)))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]


@pytest.mark.parametrize("method", METHODS)
def test_a_text_is_the_same_alone_and_in_a_batch(engine, method):
    prompts = [PROMPT, "a", [{"role": "user", "content": "the dog"}], PROMPT * 3, "the dog sat"]
    settings = {**SAMPLED, "method": method, "max_new_tokens": 20}
    together = engine.generate(prompts, **settings)
    alone = [engine.generate(prompt, **settings) for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({tuple(one.tokens) for one in together}) > 1


def test_others_take_the_seats_of_finished_texts(engine, monkeypatch):
    inputs = []
    forward = engine.network.forward
    monkeypatch.setattr(
        engine.network, "forward", lambda batch, kv_caches: inputs.append(len(batch)) or forward(batch, kv_caches)
    )
    engine.generate(["a", "b", "c"], method="plain", max_new_tokens=4)
    assert inputs == [2] * 4 + [1] * 4


@pytest.mark.parametrize("method", METHODS)
def test_an_end_token_ends_the_text_in_every_place(engine, method):
    plain = ending_with(engine).generate(PROMPT, method="plain", max_new_tokens=16, **SAMPLED).tokens
    for place in (0, 1, 2, 5, 11):
        token = plain[place]
        assert token not in plain[:place]
        answer = ending_with(engine, token).generate(PROMPT, method=method, max_new_tokens=16, **SAMPLED)
        assert (answer.tokens, answer.finish_reason) == (plain[: place + 1], "stop")
        assert sum(answer.statistics.tokens_by_call) == place + 1


def test_threads_that_share_an_engine_take_turns_step_by_step(engine, monkeypatch):
    inside, most, step = [], [], Scheduler.step

    def watched(scheduler):
        inside.append(scheduler)
        most.append(len(inside))
        time.sleep(0.002)
        try:
            return step(scheduler)
        finally:
            inside.remove(scheduler)

    monkeypatch.setattr(Scheduler, "step", watched)
    prompts = ["the cat", "the cat sat", "a log", "the log sat"]
    settings = {"max_new_tokens": 6, "temperature": 0.9, "seed": 1, "raw": True}
    alone = [engine.generate(prompt, **settings).text for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: engine.generate(prompt, **settings).text, prompts)) == alone
    assert max(most) == 1


def test_a_prompt_that_is_too_long_draws_no_line_of_the_tokenizer(tiny_folder, caplog):
    engine = saltus.load(str(tiny_folder()), "plain")
    engine.tokenizer.model_max_length = 16
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        for raw in (True, False):
            engine.encode("the cat sat " * 20, raw=raw)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records


def test_token_ids_in_an_array_are_refused_with_the_cure(engine):
    for tokens in (np.array([1, 2]), torch.tensor([1, 2])):
        with pytest.raises(ValueError, match=r"must be a str, .* give its tolist\(\)$"):
            engine.generate(tokens)


def test_end_tokens_are_the_configs_and_the_tokenizers(tiny_folder):
    assert saltus.load(str(tiny_folder(eos_token_id=[5, 7]))).target.end_tokens == {0, 5, 7}


def test_end_tokens_can_be_ignored(engine):
    token = engine.generate(PROMPT, max_new_tokens=8).tokens[3]
    answer = ending_with(engine, token).generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert (len(answer.tokens), answer.finish_reason) == (8, "length")


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_ends_the_text_in_every_place(engine, method):
    whole = engine.generate(PROMPT, method="plain", max_new_tokens=12, ignore_eos=True, **SAMPLED).text
    for begin, length in itertools.product(range(0, len(whole) - 4, 4), (1, 4)):
        stop = whole[begin : begin + length]
        answers = [
            engine.generate(PROMPT, method=one, max_new_tokens=16, ignore_eos=True, stop=stop, **SAMPLED)
            for one in ("plain", method)
        ]
        assert answers[0].text == answers[1].text == whole[: whole.index(stop)]
        assert answers[0].tokens == answers[1].tokens
        assert answers[1].finish_reason == "stop"


@pytest.mark.slow
def test_half_a_character_at_the_end_is_left_out(engine):
    answer = engine.generate(PROMPT, max_new_tokens=60, temperature=1.5, seed=5, ignore_eos=True)
    cut = [engine.generate(PROMPT, max_new_tokens=n, temperature=1.5, seed=5, ignore_eos=True) for n in range(1, 60, 7)]
    for one in cut:
        assert not one.text.endswith("\ufffd")
        assert answer.text.startswith(one.text)


@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_the_models_own(engine, method):
    answer = engine.generate(PROMPT, method=method, max_new_tokens=20, logprobs=True, **SAMPLED)
    plain = engine.generate(PROMPT, method="plain", max_new_tokens=20, logprobs=True, **SAMPLED)
    assert answer.logprobs == plain.logprobs
    text = engine.encode(PROMPT)
    model = AutoModelForCausalLM.from_pretrained(engine.target.name)
    logits = model(torch.tensor([text + answer.tokens])).logits[0, len(text) - 1 : -1]
    expected = logits.log_softmax(-1)[range(len(answer.tokens)), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, expected.detach(), atol=1e-4)


def test_log_probabilities_are_not_kept_unasked(engine):
    assert engine.generate(PROMPT, max_new_tokens=2).logprobs is None


def test_a_text_ends_where_the_context_does(tiny_folder):
    engine = saltus.load(str(tiny_folder(max_position_embeddings=32)))
    length = len(engine.encode("the cat", raw=True))
    for method in ("plain", "lookup", "jacobi"):
        answer = engine.generate("the cat", raw=True, method=method, ignore_eos=True)
        assert (len(answer.tokens), answer.finish_reason) == (32 - length, "length")
    assert len(engine.generate("a" * 31, raw=True, ignore_eos=True).tokens) == 1
    assert engine.generate("a" * 32, raw=True, max_new_tokens=0).tokens == []
    for text, settings in (("a" * 32, {}), ("a" * 30, {"min_new_tokens": 3})):
        with pytest.raises(PromptTooLongError, match=r"no room is left for (1|3) new ones; shorten it"):
            engine.generate(text, raw=True, **settings)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("yarn", {"original_max_position_embeddings": 64}), ("yarn", {}), ("dynamic", {}), ("linear", {})],
    ids=str,
)
def test_a_scaled_context_is_as_long_as_it_is_scaled_to(tiny_folder, kind, more):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}
    engine = saltus.load(str(tiny_folder(max_position_embeddings=64, rope_parameters=rope)), adaptive=False)
    assert engine.target.context_length == 256
    settings = {"max_new_tokens": 30, "ignore_eos": True, "method": "lookup"}
    prompt = list(range(20, 60)) * 2
    (text,) = engine.generate([prompt], **settings)
    assert text.tokens == engine.generate(prompt, **{**settings, "method": "plain"}).tokens
    assert text.tokens == engine.generate([prompt, prompt[:20]], **settings)[0].tokens
    with pytest.raises(ValueError, match="reads at most 256"):
        engine.generate([5] * 257, **settings)


def test_what_a_configuration_scales_already_is_not_scaled_again(tiny_folder):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    assert saltus.load(str(tiny_folder(max_position_embeddings=256, rope_parameters=rope))).target.context_length == 256


def test_a_drafter_rests_where_its_own_context_ends(engine, tiny_folder):
    short = {"small_model": {"model": str(tiny_folder(seed=2, max_position_embeddings=48))}}
    other = saltus.load(engine.target.name, "small_model", options=short, adaptive=False)
    answer = other.generate("the cat", raw=True, max_new_tokens=80, ignore_eos=True)
    assert answer.tokens == engine.generate("the cat", raw=True, max_new_tokens=80, ignore_eos=True).tokens
    assert answer.calls[0].num_draft_tokens
    assert not any(step.num_draft_tokens for step in answer.calls[-20:])


def test_texts_without_room_leave_their_seats_to_others(tiny_folder):
    engine = saltus.load(str(tiny_folder(max_position_embeddings=32)), batch_size=2)
    answers = engine.generate(["a" * 31, "b" * 31, "c"], raw=True, max_new_tokens=5, ignore_eos=True)
    assert [len(answer.tokens) for answer in answers] == [1, 1, 5]


def test_a_continuation_joins_its_prompt_and_an_answer_stands_alone(tmp_path):
    tokenizer = space_tokenizer()
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = saltus.load(str(tmp_path), "plain")
    the = tokenizer("the").input_ids
    engine.network.forward = lambda batch, kv_caches: [
        ForwardOutputs(_certain_of(the[0], len(tokenizer))) for _ in batch
    ]
    settings = {"max_new_tokens": 2}
    assert engine.generate("the cat", **settings).text == " the the"
    engine.tokenizer.chat_template = TEMPLATE
    assert engine.generate("the cat", **settings).text == "the the"
    assert engine.generate("the cat", raw=True, **settings).text == " the the"


def test_an_unfinished_answer_goes_on_with_its_own_space(tmp_path):
    tokenizer = space_tokenizer()
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    engine = saltus.load(str(tmp_path), "plain")
    the = tokenizer("the").input_ids
    engine.network.forward = lambda batch, kv_caches: [
        ForwardOutputs(_certain_of(the[0], len(tokenizer))) for _ in batch
    ]
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "the cat"}]
    assert engine.generate(said, max_new_tokens=2).text == " the the"
    assert engine.generate(said, max_new_tokens=2, continue_final_message=False).text == "the the"
    assert engine.encode(said, add_generation_prompt=True) == engine.encode(said, continue_final_message=False)
    with pytest.raises(ValueError, match="exclude each other"):
        engine.encode(said, add_generation_prompt=True, continue_final_message=True)


def _certain_of(token: int, vocab: int) -> torch.Tensor:
    return torch.eye(vocab)[token : token + 1]


def test_no_new_tokens_take_no_call(engine, monkeypatch):
    monkeypatch.setattr(engine.network, "forward", lambda *_: pytest.fail("a call was made"))
    answer = engine.generate(PROMPT, max_new_tokens=0)
    assert (answer.text, answer.tokens, answer.finish_reason, answer.statistics.calls) == ("", [], "length", 0)
    (chunk,) = engine.stream(PROMPT, max_new_tokens=0)
    assert (chunk.text, chunk.finish_reason) == ("", "length")


BAD = [
    ("", {}, "empty; write"),
    ([{"role": "user"}], {}, "needs a role"),
    (PROMPT * 40, {}, "shorten it"),
    (PROMPT, {"max_new_tokens": -1}, "0 or more"),
    (PROMPT, {"temperature": -1.0}, "must be 0 (greedy)"),
    (PROMPT, {"top_p": 1.5}, "use 1 to switch"),
    (PROMPT, {"seed": -1}, "0 or more"),
    (PROMPT, {"top_k": 2.5}, "top_k is 2.5, but must be a whole number"),
    (PROMPT, {"temperature": "1"}, "temperature is '1', but must be a number"),
    (PROMPT, {"files": [("a.py", "b")]}, "give a suffix"),
    (PROMPT, {"stop": ""}, "remove it"),
    (PROMPT, {"method": "lokup"}, "did you mean lookup"),
    (PROMPT, {"method": "small_model+small_model"}, "give each method once"),
    (["fine", ""], {}, "prompt 1: the prompt is empty"),
]


@pytest.mark.parametrize(("prompt", "settings", "cure"), BAD, ids=[cure for _, _, cure in BAD])
def test_bad_input_is_refused_in_a_line_with_the_cure(engine, prompt, settings, cure):
    with refused(cure):
        engine.generate(prompt, **settings)
    if not isinstance(prompt, list) or isinstance(prompt[0], dict):
        with refused(cure):
            engine.stream(prompt, **settings)


WRONG_TYPES = {
    "a whole number": [
        {"max_new_tokens": None}, {"max_new_tokens": 4.5}, {"max_new_tokens": True}, {"seed": "a"}, {"top_k": True},
        {"top_logprobs": 2.5},
    ],
    "a number": [{"temperature": True}, {"temperature": "1"}, {"min_p": None}, {"temperature": 10**400}],
    "true or false": [{"raw": "no"}, {"ignore_eos": "no"}, {"logprobs": "x"}, {"skip_special_tokens": None}],
    "a text or none": [{"prediction": 5}, {"suffix": 5}, {"method": 5}],
    "a list, each a whole number": [
        {"stop_token_ids": 5}, {"stop_token_ids": "5"}, {"stop_token_ids": [5.5]}, {"shown_tokens": 5},
        {"banned": (5.5,)}, {"banned": 5},
    ],
    "numbers by token id, such as {5: -100}": [
        {"logit_bias": [(5.5, 1)]}, {"logit_bias": [(5,)]}, {"logit_bias": {"a": 1}}, {"logit_bias": {5: "1"}},
    ],
    "a list, each (a whole number, a whole number)": [{"forced_at_index": 5}, {"banned_at_index": [(0, "5")]}],
    "a text or a list, each a text or none": [{"stop": b"a"}, {"stop": [5]}],
    "a list, each a dict with texts as keys": [{"tools": "x"}, {"tools": [5]}, {"tools": [{1: "a"}]}],
    "a dict with texts as keys or none": [{"chat_template_kwargs": 5}, {"chat_template_kwargs": {1: 2.0}}],
    "a saltus.Grammar": [{"grammar": "a"}, {"grammar": {"type": "object"}}],
}  # fmt: skip


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("wanted", "setting"), [(wanted, each) for wanted in WRONG_TYPES for each in WRONG_TYPES[wanted]]
)
def test_settings_of_another_type_are_refused_in_a_line(engine, wanted, setting):
    (name,) = setting
    for write in (engine.generate, engine.stream):
        with refused(f", but must be {wanted}") as error:
            write(PROMPT, **setting)
        assert str(error.value).startswith(f"{name} is ")
    if name in ("banned", "seed", "logprobs", "logit_bias"):
        with refused(f", but must be {wanted}"):
            engine.infill("The [[3]]", **setting)


def test_numbers_of_numpy_and_biases_by_token_are_settings_too(engine):
    biases = {5: 3, 9: np.float32(-2.5)}
    expected = engine.generate(
        PROMPT, max_new_tokens=12, temperature=1.0, seed=3, stop_token_ids=(7,), logit_bias=((5, 3.0), (9, -2.5))
    )
    for given in (biases, {str(token): bias for token, bias in biases.items()}, [*biases.items()]):
        found = engine.generate(
            PROMPT, max_new_tokens=np.int64(12), temperature=1, seed=np.uint8(3), stop_token_ids={np.int32(7)},
            logit_bias=given,
        )  # fmt: skip
        assert found.tokens == expected.tokens


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"method": ""}, "unknown method ''"),
        ({"top_logprobs": -3}, "top_logprobs is -3, but must be 0 or more"),
        ({"logit_bias": {9999: 1}}, "token 9999 of logit_bias has no embedding"),
        ({"forced_at_index": ((0, 9999),)}, "token 9999 of forced_at_index has no embedding"),
        ({"banned_at_index": ((0, 9999),)}, "token 9999 of banned_at_index has no embedding"),
    ],
)
def test_settings_that_no_text_can_have_are_refused(engine, settings, cure):
    with refused(cure):
        engine.generate(PROMPT, **settings)


def test_what_is_no_prompt_is_refused(engine):
    with refused("prompt 1: a prompt is of type int, but must be a str"):
        engine.generate(["fine", 7])
    with refused("tools stand in the prompt"):
        engine.text_request([1, 2], tools=[{"type": "function", "function": {"name": "f"}}])
    assert engine.generate([]) == []


def test_a_gpu_that_there_is_not_is_refused_with_those_that_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device(name) for name in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    for name in ("cuda:2", "cuda:", "cuda:x"):
        with pytest.raises(ValueError, match="torch does not have that; use cuda:0, cuda:1"):
            resolve_device(name)


def test_a_gpu_that_torch_cannot_use_is_told_with_a_cure(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors …")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "ones", fail)
    with refused(
        "torch cannot use the GPU cuda (CUDA error: no kernel image is available for execution on the device)"
    ):
        saltus.load("nowhere")


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"method": "jacoby"}, "did you mean jacobi"),
        ({"method": "small_model"}, "needs a draft model"),
        ({"dtype": "int8"}, "one of auto, float32"),
        ({"device": "tpu"}, "one of auto, cpu, cuda"),
        ({"device": "cpu:x"}, "torch does not have that; use cpu"),
        ({"rule": "typical"}, "one of match, reject"),
        ({"max_draft_tokens": -1}, "0…384"),
        ({"batch_size": 0}, "1 or more"),
        ({"batch_size": "2"}, "batch_size is '2', but must be a whole number"),
        ({"batch_size": 2.5}, "must be a whole number"),
        ({"max_draft_tokens": 5.5}, "must be a whole number or none"),
        ({"max_draft_tokens": "5"}, "must be a whole number or none"),
        ({"adaptive": "no"}, "adaptive is 'no', but must be true or false"),
        ({"exact": "no"}, "must be true or false"),
        ({"options": 5}, "options is 5, but must be a dict with texts as keys or none"),
        ({"options": {"lookup": 5}}, "the options of lookup are 5, but must be a dict"),
        ({"options": {"lookup": {"num_draft_tokens": True}}}, "lookup: num_draft_tokens is True, but must be a whole"),
        ({"options": {"lookup": {"num_draft_tokens": "5"}}}, "must be a whole number"),
        ({"options": {"lookup": {"max_matches": 2.5}}}, "lookup: max_matches is 2.5, but must be a whole number"),
        ({"options": {"lookup": {"max_ngram_size": 2.5}}}, "must be a whole number"),
        ({"options": {"jacobi": {"block_size": 2.5}}}, "jacobi: block_size is 2.5, but must be a whole number"),
        ({"options": {"jacobi": {"candidates": 1.5}}}, "must be a whole number"),
        ({"options": {"jacobi": {"sliding": "no"}}}, "jacobi: sliding is 'no', but must be true or false"),
        ({"options": {"jacobi": {"spawn_ratio": "1"}}}, "jacobi: spawn_ratio is '1', but must be a number"),
        ({"options": {"assd": {"num_draft_tokens": 1.5}}}, "assd: num_draft_tokens is 1.5, but must be a whole number"),
        ({"options": {"small_model": {"num_draft_tokens": 1.5}}}, "must be a whole number"),
        (
            {"draft_model": "a", "options": {"small_model": {"model": "b"}}},
            "draft_model (--draft-model) is a, but the option small_model.model is b; give one of them",
        ),
    ],
)
def test_bad_settings_are_refused_before_anything_is_loaded(settings, cure):
    with refused(cure):
        saltus.load("no such model", **settings)


def test_a_path_names_a_model_too(tiny_folder):
    assert saltus.load(tiny_folder(), "plain").target.name == str(tiny_folder())


def test_options_of_methods_may_be_numbers_of_numpy_and_whole_numbers_for_any():
    options = {"jacobi": {"block_size": np.int64(5), "spawn_ratio": 1, "sliding": np.True_}}
    (method,) = make_methods("jacobi", options)
    assert repr(method) == repr(Jacobi(block_size=5, spawn_ratio=1.0, sliding=True))


@pytest.mark.unchecked
def test_a_vocabulary_may_be_filled_up_to_the_rows_of_other_embeddings():
    words = {"a": 0, "b": 1}
    small, large, other = (
        SimpleNamespace(name=name, tokenizer=SimpleNamespace(get_vocab=lambda vocab=vocab: vocab))
        for name, vocab in (
            ("small", words), ("large", {**words, "[PAD2]": 2, "[PAD3]": 3}), ("other", {**words, "[PAD9]": 2})
        )
    )  # fmt: skip
    require_same_vocabulary(large, small)
    require_same_vocabulary(small, large)
    with pytest.raises(ValueError, match="another vocabulary"):
        require_same_vocabulary(large, other)


def test_a_drafter_with_another_vocabulary_is_refused_under_reject(engine, tiny_folder):
    other = {"small_model": {"model": str(tiny_folder(seed=1, words="an altogether other vocabulary is learned here"))}}
    with refused("same family"):
        saltus.load(engine.target.name, "small_model", options=other, rule="reject")


def overlook_the_tree(monkeypatch):
    part = chunked_prefill._sequence_rows

    def chain(*arguments, **settings):
        made = part(*arguments, **settings)
        made.tree_mask[:] = np.tri(len(made.tree_mask))
        return made

    monkeypatch.setattr(chunked_prefill, "_sequence_rows", chain)
    monkeypatch.setattr(causal.CausalNetwork, "_forward_prepared", lambda *_: None)


def test_attention_that_overlooks_the_tree_is_found_out(tiny_folder, monkeypatch):
    overlook_the_tree(monkeypatch)
    with refused("a tree of tokens gets other logits"):
        saltus.load(str(tiny_folder()))


def test_a_refusal_says_that_transformers_is_older_than_the_tested_release(tiny_folder, monkeypatch):
    overlook_the_tree(monkeypatch)
    with pytest.raises(ValueError, match="alone; take a model"):
        saltus.load(str(tiny_folder()))
    monkeypatch.setattr(target_network.transformers, "__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"alone; install Transformers .* or later \(this is 5.17.0\), or take"):
        saltus.load(str(tiny_folder()))


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_ends_while_a_model_is_checked_is_no_fault_of_its_attention(tiny_folder, monkeypatch, error):
    def fail(*_):
        raise error("Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(target_network, "_logits_in_a_tree", fail)
    with pytest.raises(error):
        saltus.load(str(tiny_folder()))


def test_a_router_that_takes_another_expert_by_rounding_is_no_wrong_attention(monkeypatch):
    """With these weights one of three rows has another expert in bfloat16, and half of its logits' spread is off."""
    asked, evaluate = [], target_network._logits_of_a_branch
    monkeypatch.setattr(
        target_network, "_logits_of_a_branch", lambda model, text: asked.append(text) or evaluate(model, text)
    )
    assert isinstance(make_network(tiny("Mixtral", 10).bfloat16(), "tiny"), causal.CausalNetwork)
    assert asked == [0, 0, 1], "the first text, once more by other rounding, and another one"
    monkeypatch.setattr(target_network, "MAX_OTHER_TEXTS", 0)
    with refused("a tree of tokens gets other logits"):
        make_network(tiny("Mixtral", 10).bfloat16(), "tiny")


@pytest.mark.parametrize("seed", [0, 10])
def test_attention_that_overlooks_the_tree_is_found_out_in_mixtures_of_experts(seed, monkeypatch):
    overlook_the_tree(monkeypatch)
    with refused("a tree of tokens gets other logits"):
        make_network(tiny("Mixtral", seed).bfloat16(), "tiny")


def model_that_amplifies_rounding() -> LlamaForCausalLM:
    """Saturated attention, large weights: another rounding of its embeddings moves logits by most of their spread."""
    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 40, **heads}
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.4)).bfloat16().eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(10)
    return model


def test_a_model_that_amplifies_rounding_has_no_wrong_attention(monkeypatch):
    """As Gemma 3 270M, whose logits in bfloat16 are off by a third after texts without `<bos>`."""
    assert isinstance(make_network(model_that_amplifies_rounding(), "tiny"), causal.CausalNetwork)
    monkeypatch.setattr(target_network, "ROUNDINGS", 0)
    with refused("a tree of tokens gets other logits"):
        make_network(model_that_amplifies_rounding(), "tiny")


def test_attention_that_overlooks_the_tree_is_found_out_where_rounding_is_amplified(monkeypatch):
    overlook_the_tree(monkeypatch)
    monkeypatch.setattr(target_network, "ROUNDINGS", 100)
    with refused("a tree of tokens gets other logits"):
        make_network(model_that_amplifies_rounding(), "tiny")


def test_attention_that_is_not_ours_is_found_out(tiny_folder, monkeypatch):
    monkeypatch.setattr(causal, "supports_native_decoder", lambda model: False)
    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda self, name: None)
    with refused("does not go through Transformers' AttentionInterface"):
        saltus.load(str(tiny_folder()))


def test_missing_weights_are_not_made_up(tiny_folder, tmp_path):
    config = shutil.copytree(tiny_folder(), tmp_path / "model") / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with refused("weights or has them in other shapes, such as model.layers.2"):
        saltus.load(str(config.parent))
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 1'))
    assert saltus.load(str(config.parent)).network.num_layers == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "contents", "cure"),
    [
        ("config.json", '{"model_type": "t5"}', "choose one that does"),
        ("config.json", '{"model_type":', "is not JSON"),
        ("tokenizer.json", "{", "put its tokenizer files into"),
    ],
)
def test_a_folder_that_does_not_load_is_refused(tiny_folder, tmp_path, file, contents, cure):
    folder = shutil.copytree(tiny_folder(), tmp_path / "model")
    (folder / file).write_text(contents)
    with refused(cure):
        saltus.load(str(folder))


def test_loading_is_silent(tiny_folder, capfd):
    saltus.load(str(tiny_folder()))
    assert capfd.readouterr() == ("", "")


def test_a_model_with_states_of_another_kind_is_refused_with_the_reason_and_a_cure(engine, tmp_path):
    config = RecurrentGemmaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, lru_width=16
    )
    RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be served") as error:
        saltus.load(str(tmp_path))
    for part in ("RecurrentGemmaForCausalLM", "keeps a state in", "discard a rejected draft", "such as Llama"):
        assert part in str(error.value)


def test_nan_logits_are_named(tiny_folder, tmp_path):
    model = tiny_llama()
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(tmp_path)
    saltus.load(str(tiny_folder())).tokenizer.save_pretrained(tmp_path)
    with refused("weights that are NaN or infinite, such as model.norm.weight; fetch or train it again"):
        saltus.load(str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [(torch.float16, "load it in float32 or bfloat16"), (torch.float32, "its weights may be damaged")],
)
def test_nan_logits_are_named_with_a_cure_that_is_one(tiny_folder, monkeypatch, dtype, cure):
    engine = saltus.load(str(tiny_folder()), "plain")
    engine.network.forward = lambda batch, kv_caches: [
        ForwardOutputs(torch.full((1, 300), torch.nan, dtype=dtype)) for _ in batch
    ]
    for settings in (GREEDY, SAMPLED):
        with refused(cure):
            engine.generate(PROMPT, **settings)


def test_messages_without_a_template_are_refused(tiny_folder, engine):
    bare = saltus.load(engine.target.name)
    bare.tokenizer.chat_template = None
    with refused("give the prompt as one str"):
        bare.generate([{"role": "user", "content": "hi"}])
    assert bare.encode("hi") == engine.encode("hi", raw=True) != engine.encode("hi")


def test_token_ids_are_a_prompt(engine):
    tokens = engine.encode(PROMPT, raw=True)
    expected = engine.generate(PROMPT, raw=True, max_new_tokens=8).text
    assert engine.generate(tokens, max_new_tokens=8).text == expected
    assert [each.text for each in engine.generate([tokens, PROMPT], raw=True, max_new_tokens=8)] == [expected] * 2
    assert "".join(chunk.text for chunk in engine.stream(tokens, max_new_tokens=8)) == expected
    assert engine.encode(tokens) == tokens


@pytest.mark.parametrize(
    ("method", "rule"), [*((method, "match") for method in METHODS), ("jacobi", "reject"), ("small_model", "reject")]
)
def test_a_draft_that_no_token_may_follow_ends_no_text(engine, method, rule):
    """Drafters draft on after a token that ends the text, where bans may leave none."""
    options = {**engine.decoder.options}
    options["small_model"] = {**options["small_model"], "min_probability": 0.0}
    drafting = engine.copy_with(options=options, rule=rule)
    bans = tuple((token, float("-inf")) for token in range(300) if token not in (0, 5, 6, 7))
    for seed, size in [(0, 1), (2, 1), (4, 1), (4, 2)]:
        settings = {"temperature": 1.0, "seed": seed, "no_repeat_ngram_size": size, "logit_bias": bans, "raw": True}
        found = drafting.generate("the cat", method=method, max_new_tokens=20, **settings)
        assert (found.finish_reason, found.tokens[-1]) == ("stop", 0)
        plain = engine.generate("the cat", method="plain", max_new_tokens=20, **settings)
        assert found.tokens == plain.tokens or rule == "reject"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 9, "stop_token_ids": [*range(5, 290)], "ignore_eos": True},
        {"no_repeat_ngram_size": 2, "logit_bias": ((269, 9.0), (270, 9.0))},  # it would write little else
        {"no_repeat_ngram_size": 1, "min_new_tokens": 3, "temperature": 0.8},
    ],
    ids=str,
)
def test_ends_and_ngrams_that_may_not_come_are_the_same_by_every_method(engine, plain_text, method, settings):
    expected = engine.generate(PROMPT, method="plain", max_new_tokens=24, seed=5, **settings)
    found = engine.generate(PROMPT, method=method, max_new_tokens=24, seed=5, **settings)
    assert found.tokens == expected.tokens != plain_text(seed=5).tokens[:24]
    if stops := settings.get("stop_token_ids"):
        assert len(found.tokens) == 10  # 9 that are none of them, then one that is, and ends the text
        assert [token in stops for token in found.tokens] == [False] * 9 + [True]
        assert found.finish_reason == "stop"
    if size := settings.get("no_repeat_ngram_size"):
        text = [*engine.encode(PROMPT), *found.tokens]
        new = [tuple(text[at - size : at]) for at in range(len(text) - len(found.tokens) + 1, len(text) + 1)]
        before = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
        assert all(before.count(ngram) == 1 for ngram in new)


def test_special_tokens_are_shown_and_end_texts_where_that_is_asked_for(engine):
    user = engine.tokenizer.convert_tokens_to_ids("<|user|>")
    settings = {"max_new_tokens": 4, "logit_bias": ((user, 100.0),)}
    assert engine.generate(PROMPT, **settings).text == ""
    assert engine.generate(PROMPT, skip_special_tokens=False, **settings).text == "<|user|>" * 4
    stopped = engine.generate(PROMPT, stop=["<|user|>"], **settings)
    assert (stopped.text, stopped.tokens, stopped.finish_reason) == ("", [user], "stop")
    ended = engine.generate(PROMPT, stop_token_ids=[user], skip_special_tokens=False, **settings)
    assert (ended.text, ended.tokens, ended.finish_reason) == ("", [user], "stop")
    with pytest.raises(ValueError, match="stop_token_ids"):
        engine.generate(PROMPT, stop_token_ids=[10**6])


@pytest.mark.parametrize("more", [{}, {"stop": ["<|end|>\n<|user|>", "cat"]}])
def test_an_end_token_within_a_stop_string_does_not_show(engine, more):
    end = engine.tokenizer.eos_token_id
    settings = {"max_new_tokens": 4, "logit_bias": ((end, 100.0),), **more}
    found = engine.generate(PROMPT, **settings)
    assert (found.text, found.tokens, found.finish_reason) == ("", [end], "stop")
    assert "".join(chunk.text for chunk in engine.stream(PROMPT, **settings)) == ""


def test_stop_strings_are_looked_for_after_the_least_length(engine, plain_text):
    whole = plain_text()
    stop = whole.text[3:5]
    again = engine.generate(PROMPT, max_new_tokens=40, min_new_tokens=12, stop=stop)
    least = len(engine.generate(PROMPT, max_new_tokens=12).text)
    assert stop in again.text[:least]
    assert stop not in again.text[least:]
    stream = engine.stream(PROMPT, max_new_tokens=40, min_new_tokens=12, stop=stop)
    assert "".join(chunk.text for chunk in stream) == again.text


def test_a_str_is_a_users_message(engine):
    assert engine.encode("hi") == engine.encode([{"role": "user", "content": "hi"}])
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the"}]
    assert engine.encode(begun) == engine.encode("hi") + engine.encode("the", raw=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_engine_survives_an_interruption_in_the_middle_of_a_call(engine, monkeypatch, error):
    whole = engine.generate(PROMPT, max_new_tokens=12)
    forward, calls = engine.network.forward, itertools.count()

    def interrupted(batch, kv_caches):
        batch_outputs = forward(batch, kv_caches)
        if next(calls) == 3:
            raise error
        return batch_outputs

    with monkeypatch.context() as patch:
        patch.setattr(engine.network, "forward", interrupted)
        stream = engine.stream(PROMPT, max_new_tokens=12)
        shown = []
        with pytest.raises(error):
            shown.extend(chunk.text for chunk in stream)
    assert stream.generation.finish_reason is None
    assert whole.text.startswith(stream.generation.text)
    assert engine.generate(PROMPT, max_new_tokens=12).tokens == whole.tokens


def test_whether_a_text_is_finished_is_known_without_a_look_at_its_calls(engine, monkeypatch):
    """Else a text takes time by the square of its length: a server asks after each call."""
    request = engine.text_request(PROMPT, max_new_tokens=12).request
    reasons = []
    for _ in run_requests(engine.decoder, [request], "plain"):
        calls, request.calls = request.calls, None
        reasons.append((request.finished, request.finish_reason))
        request.calls = calls
    assert len(request.tokens) == request.num_decided == 12
    assert reasons == [*[(False, None)] * 11, (True, "length")]


def test_a_new_text_of_a_full_batch_goes_by_what_calls_of_the_batch_cost(tiny_folder):
    setup = saltus.load(str(tiny_folder()), "lookup").decoder.setup("lookup")
    setup.controller(1).call_cost.seconds, setup.controller(4).call_cost.seconds = {1: 1.0, 2: 1.0}, {1: 1.0, 2: 2.0}
    assert [controller_in_batch(setup, lambda n=n: n, None).can_pay() for n in (1, 3, 4)] == [True, False, False]


def test_a_batch_learns_what_its_calls_cost(tiny_folder, monkeypatch):
    engine = saltus.load(str(tiny_folder()), "lookup", batch_size=4)
    setup = engine.decoder.setup("lookup")
    before, alone = setup.controller(4).call_cost.seconds_for(1), dict(setup.call_cost.seconds)
    forward = engine.network.forward

    def slow(batch, kv_caches):
        return [dataclasses.replace(each, seconds=100 * before) for each in forward(batch, kv_caches)]

    monkeypatch.setattr(engine.network, "forward", slow)
    answer, *_ = engine.generate([PROMPT] * 4, max_new_tokens=40, ignore_eos=True)
    rise = setup.controller(4).call_cost.seconds_for(1) / before
    assert rise > 1.04**answer.statistics.calls > 1.2
    assert setup.call_cost.seconds == alone, "texts alone have costs of their own"


def test_costs_of_a_batch_are_by_the_rows_of_the_texts_that_run(tiny_folder, monkeypatch):
    """Three texts go by the costs of four; a call of a row each would seem to be one of three quarters of a row."""
    engine, rows = saltus.load(str(tiny_folder()), "lookup", batch_size=4), []
    costs = engine.decoder.setup("lookup").controller(4).call_cost
    monkeypatch.setattr(costs, "record", lambda number, seconds: rows.append(number))
    calls = max(answer.statistics.calls for answer in engine.generate([PROMPT] * 3, max_new_tokens=20, ignore_eos=True))
    assert min(rows) >= 1
    assert calls - 3 <= len(rows) <= calls, "once for each call after those that read the prompts"


def test_a_stream_can_be_left(engine):
    stream = engine.stream(PROMPT, max_new_tokens=30, ignore_eos=True)
    first = next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.generation.tokens == first.tokens
    assert stream.generation.finish_reason is None
    assert len(engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True).tokens) == 30


def test_a_conversation_goes_on_from_memory(engine):
    messages = [{"role": "user", "content": PROMPT}]
    first = engine.generate(messages, max_new_tokens=8, ignore_eos=True)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "why?"}]
    second = engine.generate(messages, max_new_tokens=8, method="lookup")
    assert second.calls[0].context_tokens_read < len(engine.encode(messages)) - len(engine.encode(PROMPT))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_next_turn_reads_only_what_is_new_and_changes_nothing(tiny_folder, dtype):
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    engine, fresh = (saltus.load(str(tiny_folder()), dtype=dtype, adaptive=False) for _ in range(2))
    first = engine.generate(PROMPT, **settings)
    text = [*engine.encode(PROMPT), *first.tokens, *engine.encode("and the dog?", raw=True)]
    second, again = (Request(text, 24, 0, Sampling(), logprobs=True) for _ in range(2))
    for one, inputs in ((engine, second), (fresh, again)):
        deque(run_requests(one.decoder, [inputs], "lookup"), maxlen=0)
    assert second.calls[0].context_tokens_read < len(text) - len(engine.encode(PROMPT))
    assert again.calls[0].context_tokens_read == len(text)
    assert second.tokens == again.tokens
    assert second.log_probabilities == again.log_probabilities


def test_the_same_prompt_again_is_not_read_again(engine):
    engine.decoder.prefix_tree.clear()
    settings = {"method": "lookup", "max_new_tokens": 8}
    reads = [engine.generate(PROMPT, **settings).calls[0].context_tokens_read for _ in range(2)]
    assert reads == [len(engine.encode(PROMPT)), 1]


def test_kept_texts_are_dropped_before_a_text_ends_without_memory(engine, monkeypatch):
    settings = {"method": "lookup", "max_new_tokens": 8}
    expected, forward = engine.generate(PROMPT, **settings).tokens, engine.network.forward
    tree, failed = engine.decoder.prefix_tree, []

    def while_none_are_kept(*given):
        if tree.num_bytes:
            failed.append(tree.num_bytes)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*given)

    monkeypatch.setattr(engine.network, "forward", while_none_are_kept)
    assert engine.generate(PROMPT, **settings).tokens == expected
    assert len(failed) == 2, "at first, and when the prompt was kept"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["small_model", "ptp", "mtpc"])
def test_by_rejection_a_text_depends_on_its_seed_alone(engine, method):
    one, two = (
        saltus.load(engine.target.name, method, rule="reject", options=engine.decoder.options, batch_size=3)
        for _ in range(2)
    )
    prompts = [PROMPT, "a", "the dog"]
    settings = {"temperature": 0.9, "max_new_tokens": 20}
    alone = [one.generate(prompt, seed=seed, **settings).tokens for seed in (0, 1) for prompt in prompts]
    batch = [answer.tokens for seed in (0, 1) for answer in two.generate(prompts, seed=seed, **settings)]
    assert alone == batch
    assert alone[:3] != alone[3:]


def test_costs_are_measured_once_and_only_for_drafts(engine, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "saltus.engine.decoding_setup.call_seconds",
        lambda network: measured.append(1) or measure_call_seconds(network),
    )
    fresh = saltus.load(engine.target.name)
    fresh.generate(PROMPT, method="plain", max_new_tokens=2)
    assert not measured
    fresh.generate(PROMPT, method="lookup", max_new_tokens=2)
    fresh.generate([PROMPT, PROMPT], method="jacobi", max_new_tokens=2)
    assert len(measured) == 1
    assert min(fresh.decoder.call_cost.seconds.values()) > 0


def test_statistics_add_up(engine):
    engine.decoder.prefix_tree.clear()
    answer = engine.generate(PROMPT, method="small_model", max_new_tokens=30, ignore_eos=True)
    found = answer.statistics
    assert sum(found.tokens_by_call) == found.tokens == len(answer.tokens) == 30
    assert found.calls == len(answer.calls) == len(found.tokens_by_call)
    assert found.tokens_per_call == 30 / found.calls
    assert found.seconds >= sum(step.seconds for step in answer.calls) >= found.prefill_seconds > 0
    assert found.draft_calls > 0
    assert answer.calls[0].context_tokens_read == len(engine.encode(PROMPT))
    assert str(found).startswith(f"30 tokens in {found.calls} calls · {30 / found.calls:.2f} tokens a call · ")
    assert "CallRecord" not in repr(answer), "one for each call: a screen full"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_still_works_as_one_of_transformers(tiny_folder, implementation):
    """In a padded batch, before and after texts were decoded."""
    folder = tiny_folder()
    own = LlamaForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    lent = LlamaForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    install_attention(lent)
    engine = saltus.load(str(folder), "lookup", device="cpu")
    tokens = engine.tokenizer(["the cat", "the dog sat on"], return_tensors="pt", padding=True, padding_side="left")
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = own.generate(**tokens, **settings)
    assert torch.equal(lent.generate(**tokens, **settings), expected)
    assert torch.equal(lent(**tokens).logits, own(**tokens).logits)
    assert torch.equal(engine.model.generate(**tokens, **settings), expected)
    before = engine.generate(PROMPT, max_new_tokens=8).tokens
    assert torch.equal(engine.model.generate(**tokens, **settings), expected)
    assert engine.generate(PROMPT, max_new_tokens=8).tokens == before


def test_a_draft_model_in_the_words_of_transformers(tiny_folder):
    target, draft = str(tiny_folder()), str(tiny_folder(seed=1))
    engine = saltus.load(target, draft_model=draft, num_draft_tokens=3)
    assert engine.method == "small_model+lookup"
    written = engine.generate(PROMPT, max_new_tokens=20)
    assert written.tokens == engine.generate(PROMPT, method="plain", max_new_tokens=20).tokens
    assert written.statistics.draft_calls > 0
    alone = engine.generate(PROMPT, method="small_model", max_new_tokens=20)
    assert max(call.num_draft_tokens for call in alone.calls) <= 3
    for rule in ("match", "reject"):
        assert saltus.load(target, "auto", draft_model=draft, rule=rule).method == "small_model+lookup"
    assert saltus.load(target, "small_model", draft_model=draft).method == "small_model"
    with refused("small_model needs a draft model; give --draft-model"):
        saltus.load(target, num_draft_tokens=3)
    with pytest.raises(ValueError, match=r"the method is ptp; leave the method out, or take small_model\+ptp"):
        saltus.load(target, "ptp", draft_model=draft)


def test_a_draft_model_drafts_for_an_any_subset_target(tiny_folder):
    target, small = str(tiny_folder(any_subset={"mask": 2})), str(tiny_folder(seed=1))
    engines = [saltus.load(target), saltus.load(target, draft_model=small)]
    assert [engine.method for engine in engines] == ["assd", "small_model+lookup"]
    texts = {engine.generate("5 6 5 6 5", max_new_tokens=24, temperature=0.8, seed=3).text for engine in engines}
    assert len(texts) == 1


@pytest.mark.parametrize("prompt", ["a \ud800", [{"role": "user", "content": "a \ud800"}]])
def test_a_lone_surrogate_is_named(engine, prompt):
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D800\) at character \d+, .*; give valid UTF-8"):
        engine.generate(prompt)


def test_public_names_are_there():
    assert {"load", "Engine", "Generation", "Infilling", "Settings", "Sampling", "custom_generate"} <= {*saltus.__all__}
    assert {"CallRecord", "InfillLayout", "InfillTemplate"} <= {*saltus.__all__}, "results hold them"
    for name in saltus.__all__:
        assert getattr(saltus, name).__name__ == name


def test_of_a_prediction_as_much_is_read_as_a_text_can_repeat_and_once(engine, monkeypatch):
    request = engine.text_request("the", raw=True, prediction="the cat sat on the mat " * 500).request
    assert len(request.prediction) == engine.target.context_length == 512
    setup, added = engine.decoder.setup("lookup"), []
    monkeypatch.setattr("saltus.methods.lookup.LookupDrafter.add_reference", lambda *given: added.append(given))
    assert setup.num_unread_states(request) == 0
    assert not added
    setup.new_drafters(request)
    assert len(added) == 1


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "said"),
    [((None,), "model is None, but must be a text or a Path"), (("x", 5), "method is 5, but must be a text or none")],
)
def test_a_model_or_method_of_another_type_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        saltus.load(*arguments)


@pytest.mark.unchecked
def test_a_model_that_is_loaded_already_is_no_name(engine):
    with pytest.raises(ValueError, match=r"model is LlamaForCausalLM\(.*…, but must be a text or a Path"):
        saltus.load(engine.model)
