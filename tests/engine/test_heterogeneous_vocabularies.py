"""A draft model of another vocabulary: texts and drafts are translated as strings, and no text changes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM

import saltus
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs, ForwardOutputs
from saltus.core.tree import Branch
from saltus.engine.heterogeneous_vocabularies import VocabularyTranslation, translating_drafter
from tiny_models import byte_tokenizer

WORDS = "the cat sat on the mat and the dog ran after the caterpillar in the matinee"
OTHER = "an altogether other vocabulary is learned here: caterpillars and cathedrals sat altogether there"
PROMPT = "the cat sat on the mat and the"
LONG_PROMPT = PROMPT + " dog and the mat and the log" * 3


def translation(context_length: int | None = None) -> VocabularyTranslation:
    own, target = byte_tokenizer(OTHER), byte_tokenizer(WORDS)
    return VocabularyTranslation(own, target, len(target), context_length)


def ids(of: VocabularyTranslation, text: str) -> list[int]:
    """The ids of what the draft model writes."""
    by_own = {own: token for token, own in of.own.items()}
    return [by_own[token] for token in of.tokenizer(text, add_special_tokens=False).input_ids]


def test_tokens_of_both_have_the_targets_ids_and_others_ids_of_their_own():
    of = translation()
    assert (np.diff(of.token_ids) > 0).all()
    shared = [(token, own) for token, own in of.own.items() if token < of.num_target_ids]
    assert 256 <= len(shared) < len(of.own)
    for token, own in shared:
        assert of.target_tokenizer.decode([token]) == of.tokenizer.decode([own])
    logits = torch.arange(len(of.tokenizer)).float()[None]
    found = of.outputs(ForwardOutputs(logits))
    assert [of.own[token] for token in found.token_ids.tolist()] == found.logits[0].int().tolist()


@pytest.mark.parametrize("text", ["the caterpillar sat altogether", "naïve 日本 🐈 the\n\n  cat", " the", "  ", "\n"])
def test_a_text_is_read_as_the_draft_models_tokenizer_splits_it(text):
    of = translation()
    assert of.from_target(of.target_tokenizer(text).input_ids) == of.tokenizer(text).input_ids


def test_a_text_that_grows_is_read_as_if_it_were_new():
    """Split anew from one of the last words on, while the words before it are settled."""
    of, read = translation(), []
    text = of.target_tokenizer(
        "the caterpillar sat altogether on the matinee. " * 30 + "日本語" * 40 + " the mat" * 9
    ).input_ids

    def drafter(canvas, last, max_depth):
        outputs = yield ForwardInputs(canvas, network_name="small_model")
        assert outputs.token_ids is of.token_ids
        return []

    draft = translating_drafter(drafter, of)
    for length in range(1, len(text), 3):
        generator = draft(continuation(text[:length], 5), None, 4)
        read.append(next(generator).canvas.decided_prefix.tolist())
        with pytest.raises(StopIteration):
            generator.send(ForwardOutputs(torch.zeros(1, len(of.tokenizer))))
        whole = of.target_tokenizer.decode(text[:length]).rstrip("�")
        assert of.tokenizer.decode(read[-1]) == whole
        assert whole.isascii() is False or read[-1] == of.tokenizer(whole).input_ids


@pytest.mark.parametrize("text", [" caterpillar sat", " altogether the", "the mat\n\n and", "日本 cat"])
def test_a_branch_is_split_as_the_target_splits_it(text):
    of = translation()
    drafted = ids(of, text)
    branch = of.into_target(Branch(drafted, [0.5] * len(drafted), "it"), 99)
    assert list(branch.tokens) == of.target_tokenizer(text).input_ids
    assert np.prod(branch.acceptance_probabilities) == pytest.approx(0.5 ** len(drafted))
    assert len(of.into_target(Branch(drafted, [0.5] * len(drafted), "it"), 2).tokens) == 2


def test_half_a_character_and_what_follows_a_token_without_text_are_no_drafts():
    of = translation()
    cut = ids(of, "the 🐈")[:-1]
    assert of.target_tokenizer.decode(of.into_target(Branch(cut, [1.0] * len(cut), "it"), 99).tokens).strip() == "the"


def test_a_text_that_the_draft_model_cannot_hold_has_no_drafts():
    of = translation(context_length=4)

    def drafter(canvas, last, max_depth):
        outputs = yield ForwardInputs(canvas)
        assert not len(outputs.logits)
        return []

    generator = translating_drafter(drafter, of)(continuation([*range(9)], 5), None, 4)
    with pytest.raises(StopIteration):
        next(generator)


def test_a_text_that_is_nothing_in_the_draft_models_tokens_has_no_drafts(tiny_folder):
    options = {"small_model": {"model": str(tiny_folder(seed=1, words=OTHER))}}
    engine = saltus.load(str(tiny_folder()), "small_model", options=options, adaptive=False)
    half_a_character = engine.tokenizer("日", add_special_tokens=False).input_ids[:1]
    plain = engine.generate(half_a_character, method="plain", max_new_tokens=9)
    assert engine.generate(half_a_character, max_new_tokens=9).tokens == plain.tokens


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_a_token_that_is_forced_and_that_the_draft_model_lacks_ends_its_draft(tiny_folder, num_draft_tokens):
    small_model = {"model": str(tiny_folder(seed=1, words=OTHER)), "num_draft_tokens": num_draft_tokens}
    engine = saltus.load(str(tiny_folder()), "small_model", options={"small_model": small_model}, adaptive=False)
    settings = {"forced_at_index": [(1, engine.tokenizer("log").input_ids[0]), (2, 299)], "max_new_tokens": 9}
    plain = engine.generate(PROMPT, method="plain", **settings)
    assert engine.generate(PROMPT, **settings).tokens == plain.tokens


def test_a_call_that_would_not_pay_has_no_logits():
    def drafter(canvas, last, max_depth):
        outputs = yield ForwardInputs(canvas)
        assert not len(outputs.logits)
        return []

    generator = translating_drafter(drafter, translation())(continuation([*range(9)], 5), None, 4)
    next(generator)
    with pytest.raises(StopIteration):
        generator.send(ForwardOutputs(torch.empty(0, 0)))


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_prompt", [256, 5])
def test_the_text_is_that_of_plain_decoding(tiny_folder, max_prompt, temperature):
    draft_model = str(tiny_folder(seed=1, words=OTHER))
    engine = saltus.load(
        str(tiny_folder()), "small_model", draft_model=draft_model, adaptive=False, batch_size=3,
        options={"small_model": {"min_probability": 0.0, "max_prompt": max_prompt}},
    )  # fmt: skip
    prompts = [PROMPT, "a 日本 cat", "caterpillars"]
    settings = {"max_new_tokens": 30, "temperature": temperature, "seed": 4}
    plain = engine.generate(prompts, method="plain", **settings)
    drafted = engine.generate(prompts, **settings)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert all(each.statistics.draft_calls for each in drafted)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
def test_the_same_model_with_its_tokens_numbered_otherwise_drafts_them_all(tiny_folder, tmp_path, temperature):
    folder = tiny_folder(words=OTHER)
    draft_model = str(numbered_backwards(folder, tmp_path))
    engine = saltus.load(
        str(folder), "small_model", draft_model=draft_model, adaptive=False, max_draft_tokens=4,
        options={"small_model": {"min_probability": 0.0, "num_draft_tokens": 4}},
    )  # fmt: skip
    words = {token for word in (" the", " sat", " and", " her") for token in engine.encode(word, raw=True)}
    others = {token: -100.0 for token in range(engine.target.num_token_ids) if token not in words}
    settings = {"max_new_tokens": 60, "temperature": temperature, "seed": 2, "logit_bias": others}
    plain, drafted = (engine.generate(PROMPT, method=method, **settings) for method in ("plain", "small_model"))
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.tokens_per_call == 5


def numbered_backwards(folder: Path, place: Path) -> Path:
    """The model of a folder, whose tokens have other numbers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {word: size - 1 - token for word, token in tokenizer["model"]["vocab"].items()}
    for added in tokenizer["added_tokens"]:
        added["id"] = size - 1 - added["id"]
    for rows in (model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data):
        rows[:size] = rows[:size].flip(0).clone()
    model.save_pretrained(place)
    shutil.copy(folder / "tokenizer_config.json", place)
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    return place


@pytest.mark.parametrize("method", ["small_model", "small_model+lookup"])
def test_of_a_long_prompt_the_draft_model_reads_the_first_and_the_last_tokens(tiny_folder, tmp_path, method):
    folder, copy = str(tiny_folder()), shutil.copytree(tiny_folder(), tmp_path / "copy")
    engine = saltus.load(
        folder, method, draft_model=str(copy), adaptive=False, max_draft_tokens=4,
        options={"small_model": {"min_probability": 0.0, "num_draft_tokens": 4, "max_prompt": 8}},
    )  # fmt: skip
    read, forward = [], engine.decoder.setup(method).networks["small_model"].forward

    def recorded(batch, kv_caches):
        read.extend(inputs.canvas.decided_prefix.tolist() for inputs in batch)
        return forward(batch, kv_caches)

    engine.decoder.setup(method).networks["small_model"].forward = recorded
    try:
        plain = engine.generate(LONG_PROMPT, method="plain", max_new_tokens=20)
        assert engine.generate(LONG_PROMPT, max_new_tokens=20).tokens == plain.tokens
    finally:
        del engine.decoder.setup(method).networks["small_model"].forward
    prompt = engine.encode(LONG_PROMPT)
    assert read[0] == [*prompt[:4], *prompt[-8:]]
    assert read[1][:12] == read[0]
    assert len(read[-1]) == len(prompt[:4]) + 8 + 18


def test_a_tokenizer_whose_tokens_have_no_bytes_of_their_own_is_refused_with_the_cure():
    unknown = byte_tokenizer(OTHER)
    unknown.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"does not tell what its tokens stand for.*of the target's family"):
        VocabularyTranslation(unknown, byte_tokenizer(WORDS), 300, None)
