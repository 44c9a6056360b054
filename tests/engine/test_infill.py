"""Texts with holes: how they are read, filled by the engine and the command, and learned from."""

import json
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import saltus
from saltus.cli.app import app
from saltus.cli.shipped_infill_models import check_model
from saltus.core.canvas import HOLE, infilling
from saltus.core.forward import ForwardInputs
from saltus.engine.infill import InfillOutput
from saltus.engine.infill_template import InfillTemplate, parse_template, tokenize_template
from saltus.engine.scheduler import run_requests
from saltus.kernels.model_weights import describe_weights
from saltus.kernels.packed_weight import dequantize_blocks
from saltus.loading.gguf_storage import remove_gguf, require_packable, store_as_gguf
from saltus.loading.metadata import read_metadata
from saltus.loading.packing import PACKINGS, quantized_blocks
from saltus.methods.assd.network import AnySubsetNetwork, load_pairwise_correction, save_pairwise_correction
from saltus.methods.assd.training.any_subset import (
    AnySubsetTrainingTask,
    LeftToRightTrainingTask,
    XlnetTrainingTask,
    pack_holes,
)
from saltus.methods.assd.training.holes import HoleSettings, random_holes, span_holes
from saltus.methods.assd.training.infill_texts import read_programs
from saltus.methods.assd.training.objectives import OBJECTIVES
from saltus.methods.assd.training.pairwise_correction import PairwiseCorrectionTrainingTask, consecutive_holes
from saltus.methods.assd.xlnet import XlnetNetwork
from saltus.methods.shared.logit_correction import PairwiseCorrection, corrected_logits
from saltus.training.data.packed_forward import packed_logits, prepare_model
from saltus.training.data.seeded_generator import seeded_generator
from saltus.training.data.similar_lengths import sample_similar_lengths
from saltus.training.recipe import find_recipe, read_recipe
from tiny_models import byte_tokenizer, space_tokenizer, tiny_llama, tiny_xlnet
from tiny_server import serving

MASK, BLANK = 2, 3  # of the tiny tokenizer's special tokens


@pytest.fixture(scope="session")
def filler(tmp_path_factory) -> str:
    """A folder with a tiny any-subset model."""
    folder = tmp_path_factory.mktemp("filler")
    tiny_llama(any_subset={"mask": MASK, "blank": BLANK}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_marks_are_read():
    found = parse_template("The [[8]] sat on [[…]], [[ ... ]]")
    assert found.pieces == ("The ", " sat on ", ", ", "")
    assert found.hole_lengths == (8, None, None)


@pytest.mark.parametrize(
    ("text", "says"), [("no hole", "there is no hole"), ("a [[0]] b", "length 0"), ("", "no hole")]
)
def test_a_text_without_holes_is_refused(text: str, says: str):
    with pytest.raises(ValueError, match=says):
        parse_template(text)


def test_a_text_with_holes_keeps_its_pieces():
    tokenizer = byte_tokenizer()
    template = parse_template("the cat\n  [[2]]sat  [[3]] on a mat")
    layout = tokenize_template(template, tokenizer)
    assert [len(span) for span in layout.hole_spans] == [2, 3]
    assert layout.text(["x", "y"]) == "the cat\n  xsat  y on a mat"
    assert layout.canvas.tokens[-1] == tokenizer.eos_token_id
    holes = [place for span in layout.hole_spans for place in span]
    assert np.array_equal(np.flatnonzero(layout.canvas.tokens == HOLE), holes)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 6}, {"temperature": 0.7, "top_p": 0.8}])
def test_every_method_fills_the_same(filler: str, settings: dict):
    engine = saltus.load(filler, "plain")
    text = "the [[6]] sat on the [[…]] and the dog [[3]]."
    plain = engine.infill(text, open_tokens=7, logprobs=True, **settings)
    assert len(plain.tokens) == 16 == plain.statistics.calls
    assert plain.text.startswith("the")
    assert plain.text.endswith(".")
    assert [len(pieces) for pieces in plain.token_texts] == [6, 7, 3]
    for method, options in (("assd", {}), ("assd", {"assd": {"draft": "bigram"}}), ("lookup", {}), ("jacobi", {})):
        other = saltus.load(filler, method, options=options)
        found = other.infill(text, open_tokens=7, logprobs=True, **settings)
        assert found.tokens == plain.tokens, method
        assert found.text == plain.text
        assert found.logprobs == plain.logprobs
        assert found.statistics.calls <= 16


def test_special_tokens_are_never_said(filler: str):
    engine = saltus.load(filler, "assd")
    special = {token for token, kind in engine.tokenizer.added_tokens_decoder.items() if kind.special}
    assert MASK in special
    for seed in range(5):
        said_ = engine.infill("the [[20]] cat", temperature=3.0, seed=seed).tokens
        assert len(said_) == 20
        assert not special & set(said_)
        ended = engine.infill("the [[…]] cat", temperature=3.0, seed=seed).tokens
        assert not (special - {BLANK}) & set(ended)


@pytest.mark.slow
def test_a_hole_of_so_many_tokens_has_no_blanks(filler: str):
    engine = saltus.load(filler, "assd")
    found = [engine.infill("the [[8]] sat [[…]].", temperature=4.0, seed=seed).tokens for seed in range(20)]
    assert not any(BLANK in tokens[:8] for tokens in found)
    assert any(BLANK in tokens[8:] for tokens in found)


def test_words_of_any_tokenizer_keep_their_spaces():
    tokenizer = space_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("▁cat", "▁sat")]
    layout = tokenize_template(parse_template("the [[2]] on"), tokenizer)
    output = InfillOutput(layout, tokenizer)
    assert [output.add([one]) for one in ids] == ["the cat", " sat on"]
    assert output.token_texts == [[" cat", " sat"]]


def test_a_prefix_and_a_suffix(filler: str):
    engine = saltus.load(filler, "assd")
    found = engine.infill("the cat ", suffix=" on the mat [[3]]", open_tokens=5)
    assert found.text == "the cat " + found.fillings[0] + " on the mat [[3]]"


def test_a_text_longer_than_the_context_is_refused(filler: str):
    engine = saltus.load(filler, "assd")
    for text, says in (("the [[600]] cat", "make them shorter"), ("the cat " * 100 + "[[400]] cat", "shorten it")):
        with pytest.raises(ValueError, match=says):
            engine.infill(text)


def test_a_model_that_writes_from_left_to_right_is_refused(tiny_folder):
    with pytest.raises(ValueError, match="writes from left to right"):
        saltus.load(str(tiny_folder()), "plain").infill("the [[3]] cat")
    with pytest.raises(ValueError, match="writes from left to right"):
        saltus.load(str(tiny_folder()), "assd")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_xlnet_fills_holes(tmp_path, dtype: torch.dtype):
    tiny_xlnet().to(dtype).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = saltus.load(str(tmp_path), "assd")
    text = "the [[4]] sat on the [[3]]."
    found = engine.infill(text, temperature=1.0, seed=2)
    assert found.tokens == engine.infill(text, temperature=1.0, seed=2, method="plain").tokens
    assert len(found.tokens) == 7
    with pytest.raises(ValueError, match="cannot end a hole"):
        engine.infill("the [[…]] cat")


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["infill", *words])
    return result.exit_code, result.stdout, result.stderr


def test_many_texts_are_filled_as_each_alone(filler: str):
    engine = saltus.load(filler, "assd", tuned_settings=False)
    texts = ["a [[3]] b [[…]] c.", "[[2]] the rest", "so [[…]]"]
    together = engine.infill(texts, temperature=1.0, seed=3, logprobs=True)
    for text, found in zip(texts, together, strict=True):
        alone = engine.infill(text, temperature=1.0, seed=3, logprobs=True)
        assert (found.text, found.tokens, found.logprobs) == (alone.text, alone.tokens, alone.logprobs)
        assert len(found.logprobs) == len(found.tokens)
    with pytest.raises(ValueError, match="text 1: there is no hole"):
        engine.infill(["a [[3]] b", "none"])


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["match", "reject"])
def test_behind_a_blank_an_open_hole_is_empty(filler: str, rule: str):
    """Tokens, log-probabilities and counts are those of plain decoding, also where the blank was a draft."""
    engine = saltus.load(filler, "assd", tuned_settings=False, rule=rule, adaptive=False)
    engine.network.pairwise_correction = PairwiseCorrection(
        *(np.zeros(shape, np.float32) for shape in [(300, 2)] * 3 + [(32, 3)])
    )
    engine.network.pairwise_correction.left[:], engine.network.pairwise_correction.right[BLANK] = (
        1.0,
        2.0,
    )  # blanks are drafted often
    ended = drafted = 0
    for seed in range(20):
        settings = {"temperature": 1.5, "seed": seed, "open_tokens": 40, "logprobs": True}
        found = engine.infill("a [[…]] b", **settings)
        if BLANK in found.tokens:
            place = found.tokens.index(BLANK)
            assert set(found.tokens[place:]) == {BLANK}
            assert found.statistics.tokens == sum(found.statistics.tokens_by_call) == place + 1
            assert found.logprobs is not None
            assert found.logprobs[place + 1 :] == [0.0] * (39 - place)
            ended += 0 < place < 39
            last = found.calls[-1]
            drafted += len(last.tokens) - last.num_padding_tokens <= last.num_draft_tokens
        if rule == "match":
            plain = engine.infill("a [[…]] b", method="plain", **settings)
            assert (found.tokens, found.statistics.tokens) == (plain.tokens, plain.statistics.tokens)
            assert found.logprobs == plain.logprobs
    assert ended > 2
    assert drafted > 0


def test_the_command_fills_a_text(filler: str, tmp_path):
    code, out, _ = run("-m", filler, "--json", "the [[4]] cat")
    told = json.loads(out)
    assert code == 0
    assert len(told["tokens"]) == 4
    assert told["text"] == f"the{told['fillings'][0]} cat"
    file = tmp_path / "text.txt"
    file.write_text("the [[4]] cat")
    code, shown, cost = run("-m", filler, "--file", str(file))
    assert code == 0
    assert shown.rstrip("\n") == told["text"].rstrip("\n")
    assert "a call" in cost
    code, coloured, _ = run("-m", filler, "--steps", "the [[4]] cat")
    assert code == 0
    assert "\x1b[" in coloured


def test_the_command_says_in_a_line_what_is_wrong(filler: str, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"caf\xe9 [[3]]")
    for words, says in (
        (["-m", filler, "--file", str(file)], "not UTF-8"),
        (["-m", filler], "one text with holes"),
        (["-m", filler, "no hole"], "there is no hole"),
        (["-m", filler, "--option", "assd.draft=none", "a [[3]]"], "none of self, bigram"),
    ):
        code, _, told = run(*words)
        assert code
        assert says in told
        assert told.count("\n") == 1


def test_packed_rows_say_what_filling_hole_by_hole_says():
    """Two texts of different lengths, with different holes: each row is the network's law when its turn comes."""
    model = tiny_llama(any_subset={"mask": MASK})
    network, dice = AnySubsetNetwork(tiny_llama(any_subset={"mask": MASK})), np.random.default_rng(0)
    tokens = dice.integers(4, 300, size=(2, 20))
    ranks = np.zeros((2, 20), dtype=np.int64)
    for text, holes in enumerate(([3, 4, 9, 15], [1, 2, 7, 8, 10, 13])):
        ranks[text, holes] = 1 + dice.permutation(len(holes))
    ranks[0, 17:] = -1
    packed, keep, inputs = pack_holes(torch.from_numpy(tokens), torch.from_numpy(ranks), MASK)
    with torch.no_grad():
        rows = iter(packed_logits(prepare_model(model), packed, keep))
    targets = iter(inputs.tolist())
    for text in range(2):
        size = int((ranks[text] >= 0).sum())
        for hole in np.flatnonzero(ranks[text] > 0):
            blanked = np.where(ranks[text, :size] > 0, HOLE, tokens[text, :size])
            canvas = infilling(blanked)
            order = np.argsort(np.where(ranks[text, :size] > 0, ranks[text, :size], 99), kind="stable")
            canvas = type(canvas)(canvas.tokens, order[: len(canvas.order)])
            canvas = canvas.fill(tokens[text, order[: ranks[text, hole] - 1]])
            logits = network.forward([ForwardInputs(canvas)], [network.new_kv_cache()])[0].logits[0]
            torch.testing.assert_close(next(rows), logits, rtol=1e-3, atol=1e-3)
            assert next(targets) == tokens[text, hole]


@pytest.mark.parametrize("draw", [random_holes, span_holes])
def test_holes_are_as_many_as_asked_for(draw):
    generator = seeded_generator(0, "test")
    for share in (0.05, 0.4, 0.99, 1.0):
        for _ in range(20):
            found = draw(50, share, generator)
            assert found.sum() == min(max(round(share * 50), 1), 50)
            if draw is span_holes:
                assert (np.diff(np.flatnonzero(found)) > 1).sum() <= 3, "four spans at most"


def test_a_text_is_laid_out_with_blanks_behind_what_fills_its_holes():
    """Nothing is lost, blanks are holes behind other holes, and the first and last token are given."""
    generator, text, blank = seeded_generator(0, "test"), np.arange(10, 60), 2
    seen = 0
    for share in (0.05, 0.5, 0.99):
        for _ in range(20):
            laid, taken = HoleSettings(span_probability=1.0, blank_token=blank).place_holes(text, share, generator, 1.0)
            assert (laid[laid != blank] == text).all()
            assert taken[laid == blank].all()
            assert not taken[[0, -1]].any()
            behind = np.flatnonzero(laid == blank)
            assert taken[behind - 1].all()
            seen += len(behind)
            assert taken[laid != blank].sum() == max(round(share * 48), 1)
            filled, _ = HoleSettings(span_probability=1.0, blank_token=blank).place_holes(text, share, generator)
            assert (filled == text).all()
    assert seen > 100


def test_of_code_whole_lines_are_missing():
    generator, newline = seeded_generator(0, "test"), 9
    lines = [[20 + i] * (1 + i % 4) for i in range(12)]
    text = np.array([1, *(token for line in lines for token in (*line, newline)), 2])
    for share in (0.05, 0.5, 0.99):
        for _ in range(20):
            laid, taken = HoleSettings(span_probability=1.0, blank_token=None, newline_token=newline).place_holes(
                text, share, generator
            )
            assert (laid == text).all()
            edges = np.flatnonzero(np.diff(taken.astype(int)))
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                assert text[start] in (1, newline), "a hole begins a line"
                assert text[stop + 1] == newline, "and ends before the line's end"
            missing = sum(taken[text == line[0]].all() for line in lines)
            assert missing == max(round(share * 12), 1)


def test_a_batch_is_of_texts_of_one_length_and_no_text_is_left_out():
    generator, sizes = seeded_generator(0, "test"), seeded_generator(1, "test").integers(10, 200, size=60)
    counts = np.zeros(60)
    for _ in range(2000):
        chosen = sample_similar_lengths(sizes, 6, generator)
        assert len(set(chosen)) == 6
        counts[chosen] += 1
    assert counts.min() > 140  # 200 each are expected
    assert counts.max() < 260


def test_shares_cover_their_range_evenly():
    generator, holes = seeded_generator(0, "test"), HoleSettings(warm_up_fraction=0.5)
    assert holes.hole_fractions(8, 0.0, generator) == pytest.approx([0.15] * 8)
    shares = np.sort(holes.hole_fractions(8, 1.0, generator))
    assert shares.min() >= 0.05
    assert shares.max() <= 0.99
    assert np.diff(shares).max() < 2 * 0.94 / 8
    assert HoleSettings("narrow").hole_fractions(8, 1.0, generator).min() >= 0.9


@pytest.mark.parametrize(
    ("mask_ratio", "initial", "warm_up", "low", "high"),
    [
        ("paper", 0.15, 5 / 75, 0.9, 0.99),
        ("paper-wide", 0.15, 5 / 75, 0.15, 0.99),
        ("paper-code", 0.05, 20 / 75, 0.15, 0.99),
        ("paper-single-line", 0.01, 2500 / 468_750, 0.05, 0.25),
    ],
)
def test_the_mask_ratios_of_the_paper_grow_as_published(mask_ratio, initial, warm_up, low, high):
    """ASSD, D.3, D.7 and F.2: from one rate, linearly, to a range that is covered evenly."""
    generator, holes = seeded_generator(0, "test"), HoleSettings(mask_ratio)
    assert holes.hole_fractions(4, 0.0, generator) == pytest.approx([initial] * 4)
    for progress in (0.5 * warm_up, warm_up, 1.0):
        warm = min(progress / warm_up, 1)
        found = np.sort(holes.hole_fractions(1000, progress, generator))
        ends = [initial + warm * (end - initial) for end in (low, high)]
        assert found[[0, -1]] == pytest.approx(ends, abs=0.002)
        assert found.mean() == pytest.approx(np.mean(ends), abs=0.002)


def test_left_to_right_and_any_order():
    generator, taken = seeded_generator(0, "test"), np.array([False, True, True, False, True, True, True])
    assert HoleSettings().decoding_ranks(taken, generator).tolist() == [0, 1, 2, 0, 3, 4, 5]
    mixed = [HoleSettings(order="any").decoding_ranks(taken, generator).tolist() for _ in range(10)]
    assert any(ranks != [0, 1, 2, 0, 3, 4, 5] for ranks in mixed)
    assert all(sorted(ranks) == [0, 0, 1, 2, 3, 4, 5] for ranks in mixed)


def learn(course: AnySubsetTrainingTask | PairwiseCorrectionTrainingTask, steps: int, rate: float) -> None:
    optimiser = torch.optim.AdamW(course.module.parameters(), lr=rate)
    for step in range(steps):
        optimiser.zero_grad()
        course.loss(step).backward()
        optimiser.step()


def test_a_course_learns():
    texts = [np.arange(4, 24 if i % 2 else 19) for i in range(40)]
    model = tiny_llama(any_subset={"mask": MASK}, initializer_range=0.02)
    course = AnySubsetTrainingTask(
        model, texts[:30], texts[30:], num_steps=30, batch_size=6, hole_settings=HoleSettings(warm_up_fraction=0.0)
    )
    first = float(course.loss(0).detach())
    learn(course, 30, 1e-2)
    assert float(course.loss(0).detach()) < first / 2
    assert set(course.evaluate()) == {"20% holes", "95% holes"}


@pytest.mark.parametrize("task", [AnySubsetTrainingTask, LeftToRightTrainingTask])
def test_every_hole_counts_as_much_in_an_evaluation_whatever_its_batch(task):
    texts = [np.arange(4, end) for end in (60, 64, 20)]
    model = tiny_llama(any_subset={"mask": MASK}, initializer_range=0.5)
    once, twice = (task(model, texts, texts, 1, batch_size).evaluate() for batch_size in (3, 2))
    assert twice == pytest.approx(once, rel=1e-4)


@pytest.mark.slow
def test_a_pairwise_correction_learns_what_stands_behind_what(tmp_path):
    """Texts of pairs: of two holes asked together, the second does not know how its pair began."""
    dice = seeded_generator(0, "pairs")
    texts = [np.append(1, np.stack([first, first + 20], -1)) for first in dice.integers(10, 30, size=(60, 12))]
    model = tiny_llama(any_subset={"mask": MASK}, initializer_range=0.1)
    taught = AnySubsetTrainingTask(
        model,
        texts,
        texts,
        num_steps=120,
        batch_size=6,
        hole_settings=HoleSettings(blank_token=BLANK, warm_up_fraction=0.0),
    )
    learn(taught, 120, 1e-2)
    course = PairwiseCorrectionTrainingTask(taught, rank=24)
    before = course.evaluate()
    assert before["corrected"] == pytest.approx(before["uncorrected"])
    learn(course, 50, 3e-2)
    after = course.evaluate()
    assert after["uncorrected"] == before["uncorrected"], "the model stays as it is"
    assert after["corrected"] > before["corrected"] + 0.1
    tokens, ranks = taught.make_batch(texts[:4], [0.5] * 4, dice)
    _own, (logits, states, *_tokens) = course._batch_logits(tokens, ranks, 3)
    torch.testing.assert_close(model.lm_head(states), logits, rtol=1e-4, atol=1e-4)
    correction = course.module.correction()
    logits, states = (torch.from_numpy(dice.normal(size=(3, size))).float() for size in (300, 32))
    rows = course.module(logits, states, torch.tensor([11, 12, 13]), torch.tensor([10, -1, 12]))
    weights = correction.position_inputs(states)
    for number, (left, two) in enumerate(((11, 10), (12, None), (13, 12))):
        row = corrected_logits(correction, logits[number].numpy(), weights[number], left, two)
        np.testing.assert_allclose(row, rows[number].detach().numpy(), rtol=1e-4, atol=1e-5)

    save_pairwise_correction(correction, tmp_path)
    again = load_pairwise_correction(tmp_path, 300, 32)
    assert np.allclose(again.left, correction.left, rtol=1e-2)
    with pytest.raises(ValueError, match="of another model; delete it"):
        load_pairwise_correction(tmp_path, 299, 32)
    with pytest.raises(ValueError, match="of another model; delete it"):
        load_pairwise_correction(tmp_path, 300, 64)
    (tmp_path / "pairwise.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="damaged"):
        load_pairwise_correction(tmp_path, 300, 32)


def test_the_model_that_comes_with_saltus_fills_holes_by_its_pairwise_correction():
    engine = saltus.load("stories", "assd", tuned_settings=False, rule="reject", adaptive=False)
    assert engine.network.pairwise_correction is not None
    text = "Once upon a time there was a [[8]] who lived in [[24]]."
    found = [engine.infill(text, temperature=1.0, seed=seed) for seed in range(4)]
    tokens, calls = (sum(getattr(one.statistics, name) for one in found) for name in ("tokens", "calls"))
    assert tokens == 4 * 32
    assert calls < 0.8 * tokens


@pytest.mark.parametrize(
    ("text", "model", "noted"),
    [
        ("Tom was sad because his dog had [[3]]. Then Tom found him in the garden and was happy.", "stories", False),
        ("def total(prices: list[float], rate: float) -> float:\n    [[3]]\n    return result", "code", False),
        (
            "for price in prices:\n[[…]]\n    total += price",
            "code",
            False,
        ),  # no whole Python, with any words in the hole
        ("function total(prices) {\n  let sum = [[3]];\n  return sum * 2;\n}\n", "code", True),
        ("Es war einmal ein kleiner Bär, der lebte im [[3]] und hatte einen Freund.", "stories", True),
        ("x = [[3]]", "code", False),
        ("Tom, [[3]]", "stories", False),  # too short to tell
    ],
)
def test_the_command_fills_a_text_by_the_shipped_model_that_knows_its_kind(text: str, model: str, noted: bool):
    result = CliRunner().invoke(app, ["infill", text, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["model"] == model
    assert ("expect noise" in result.stderr) == noted


@pytest.mark.parametrize(
    ("model", "text", "note"),
    [
        ("stories", "def total(prices):\n    [[3]]\n    return result", "this text is one for --model code"),
        ("code", "Tom was sad because his dog had [[3]]. Then he was happy.", "this text is one for --model stories"),
        ("stories", "Es war einmal ein kleiner Bär, der lebte im [[3]] und hatte einen Freund.", "unlike the tales"),
        ("code", "def total(prices):\n    [[3]]\n    return result", None),
    ],
)
def test_a_shipped_model_that_is_named_says_where_another_fits_the_text_better(model: str, text: str, note: str | None):
    said = check_model(parse_template(text), model)
    assert note in said if note else said is None


def test_other_models_say_nothing_of_a_text():
    assert check_model(parse_template("def total(prices):\n    [[3]]\n    return result"), "some/model") is None


def test_the_code_model_that_comes_with_saltus_fills_a_line_in_packed_weights():
    engine = saltus.load("code", "assd", tuned_settings=False)
    assert describe_weights(engine.network.model) == "Q8_0, int8 activations"
    assert engine.network.pairwise_correction is not None
    text = "def total(prices):\n    result = 0\n    for price in prices:\n[[…]]\n    return result\n"
    filled = engine.infill(text)
    assert "result" in filled.fillings[0]
    assert filled.text == engine.infill(text, method="plain").text


def test_neighbours_are_holes_that_are_decided_one_after_the_other():
    tokens = torch.arange(10, 19)[None]
    ranks = torch.tensor([[0, 1, 2, 3, 0, 4, 6, 5, -1]])
    for lag, unknown in ((1, [-1, -1]), (2, [-1, 11]), (8, [-1, 11])):
        behind, left, before = consecutive_holes(tokens, ranks, lag)
        assert behind.tolist() == [False, True, True, False, False, False]
        assert left.tolist() == [11, 12]
        assert before.tolist() == unknown, "a given token is known to every law"


def test_packed_rows_that_lag_do_not_know_the_last_holes():
    model = prepare_model(tiny_llama(any_subset={"mask": MASK}))
    dice = np.random.default_rng(0)
    tokens = torch.from_numpy(dice.integers(4, 300, size=(1, 12)))
    ranks = torch.tensor([[0, 0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 0]])
    lagging, keep, _ = pack_holes(tokens, ranks, MASK, num_unknown=2)
    with torch.no_grad():
        rows = packed_logits(model, lagging, keep)
    for number, hole in enumerate(np.flatnonzero(ranks[0] > 0).tolist()):
        other, another = tokens.clone(), tokens.clone()
        knew = (ranks[0] >= 0) & (ranks[0] < max(int(ranks[0, hole]) - 2, 1))
        other[0, ~knew] = 5
        packed, keep, _ = pack_holes(other, ranks, MASK, num_unknown=2)
        with torch.no_grad():
            assert torch.allclose(packed_logits(model, packed, keep)[number], rows[number], atol=1e-5)
        latest = max(np.flatnonzero(knew.numpy()), key=lambda place: int(ranks[0, place]))
        another[0, latest] = 299
        packed, keep, _ = pack_holes(another, ranks, MASK, num_unknown=2)
        with torch.no_grad():
            assert not torch.allclose(packed_logits(model, packed, keep)[number], rows[number], atol=1e-3), (
                "all else it knows"
            )


def test_an_xlnet_is_trained_as_it_is_asked():
    """Rows of its two streams, in one call, are what the network says hole by hole."""
    model = tiny_xlnet()
    network, dice = XlnetNetwork(model), seeded_generator(0, "test")
    text = dice.integers(4, 300, size=20)
    course = XlnetTrainingTask(
        model, [text], [text], num_steps=1, batch_size=1, hole_settings=HoleSettings(warm_up_fraction=0.0)
    )
    tokens, ranks = course.make_batch([text, text[:14]], [0.5, 0.3], dice)
    course.module.eval()
    with torch.no_grad():
        logits, wanted = course.hole_logits(tokens, ranks)
    rows, targets = iter(logits), iter(wanted.tolist())
    for said_, order in zip(tokens.numpy(), ranks.numpy(), strict=True):
        size = int((order >= 0).sum())
        holes = np.flatnonzero(order > 0)
        canvas = infilling(np.where(order[:size] > 0, HOLE, said_[:size]))
        for hole in holes:
            own = network.forward([ForwardInputs(canvas)], [network.new_kv_cache()])[0].logits[0]
            torch.testing.assert_close(next(rows), own, rtol=1e-3, atol=1e-3)
            assert next(targets) == said_[hole]
            canvas = canvas.fill(said_[[hole]])
    assert float(course.loss(0).detach()) > 0


SMALL = ("correction_steps=2", "batch_size=4", "max_length=48", "vocabulary=400", "hidden=64", "layers=1")


def train_any_subset(*arguments: object, code: int = 0) -> str:
    """Run `saltus train assd` for two steps of a tiny model; returns what it printed to stderr."""
    sizes = [word for each in SMALL for word in ("--set", each)]
    given = ["train", "assd", "--steps", 2, *sizes, *arguments]
    result = CliRunner().invoke(app, [str(each) for each in given])
    assert result.exit_code == code, result.output
    return result.stderr


@pytest.fixture(scope="session")
def stories(tmp_path_factory) -> Path:
    """A file of 240 stories."""
    file, dice = tmp_path_factory.mktemp("stories") / "stories.txt", np.random.default_rng(0)
    words = ["the", "old", "cat", "dog", "sat", "ran", "on", "a", "mat", "and", "then", "slept"]
    file.write_text("\n\n".join(" ".join(dice.choice(words, size=30)) + "." for _ in range(240)))
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["stories", "code", "xlnet", "left-to-right"],
)
def test_the_recipes_train_on_code_and_their_models_fill_lines(name: str, tmp_path):
    """A few steps on functions of this package: the tokens bring its files back, and holes are lines."""
    more = ["--set", f"architecture={name}"] if name == "left-to-right" else ["--recipe", name]
    folder = Path(saltus.__file__).parent / "engine"
    train_any_subset("--code", folder, *more, "--work", tmp_path, "--out", tmp_path / "model")
    engine = saltus.load(str(tmp_path / "model"), "plain", tuned_settings=False)
    for file in (folder / "engine.py", folder.parent / "core" / "canvas.py"):
        source = "\t" + file.read_text(encoding="utf-8")
        tokens = engine.tokenizer(source, add_special_tokens=False).input_ids
        assert engine.tokenizer.decode(tokens) == source
        assert tokens.count(engine.tokenizer.convert_tokens_to_ids("Ċ")) == source.count("\n")
    if name == "left-to-right":
        assert engine.generate("def f(x):\n", max_new_tokens=4, raw=True).tokens
        return
    if name == "xlnet":
        found = [engine.infill("def f(x):\n    y = [[6]]\n    return y\n", method=one) for one in ("plain", "assd")]
        assert len(found[0].tokens) == 6
        assert found[0].text == found[1].text
        return
    assert engine.network.pairwise_correction is not None
    assert ("Q8_0" in describe_weights(engine.network.model)) == (name == "code")
    before, behind = "def f(x):\n    y = 1\n", "\n    return x\n"
    found = engine.infill(before, suffix=behind, method="assd")
    assert found.text == before + found.fillings[0] + behind


@pytest.mark.slow
def test_a_run_that_is_interrupted_in_either_phase_ends_with_the_same_model(stories, tmp_path, monkeypatch):
    def run(name: str, code: int = 0) -> str:
        given = ["--set", "checkpoint_steps=1", "--work", tmp_path / name, "--out", tmp_path / name / "model"]
        return train_any_subset("--text", stories, *given, code=code)

    def interrupted_at(task: type, step: int):
        loss = task.loss

        def interrupted(self, at: int):
            if at == step:
                raise KeyboardInterrupt
            return loss(self, at)

        return task, "loss", interrupted

    said = run("whole")
    assert re.search(r"step 2 of 2: loss [\d.]+ · 20% holes [\d.]+ bits · 95% holes [\d.]+ bits, \d", said)
    assert re.search(r"held-out acceptance rate: uncorrected [\d.]+, corrected [\d.]+\n", said)
    assert "saltus infill" in said.splitlines()[-1]
    for task in (AnySubsetTrainingTask, PairwiseCorrectionTrainingTask):
        with monkeypatch.context() as patched:
            patched.setattr(*interrupted_at(task, 1))
            said = run("halved", code=130)
            assert said.endswith("saltus: interrupted at step 1; the same command goes on from step 1\n")
        assert not (tmp_path / "halved" / "model").exists()
    run("halved")
    for name in ("model.safetensors", "pairwise.safetensors", "tokenizer.json"):
        assert len({(tmp_path / work / "model" / name).read_bytes() for work in ("whole", "halved")}) == 1
    metadata = read_metadata(tmp_path / "whole" / "model", "model")
    assert metadata.training["recipe"]["any-subset"]["mask_ratio"] == "wide"
    assert "model" not in metadata.training["recipe"]
    assert (metadata.training["texts"], metadata.training["steps"]) == (240, 2)
    assert metadata.training["held_out_bits_per_hole"].keys() == {"20% holes", "95% holes"}
    saltus.load(str(tmp_path / "whole" / "model"), "assd")


@pytest.mark.slow
def test_training_starts_with_the_weights_of_a_folder_of_the_same_architecture(stories, tiny_folder, tmp_path):
    packed = tmp_path / "packed"
    train_any_subset("--text", stories, "--set", "weights=q8_0", "--work", tmp_path / "first", "--out", packed)
    further = ["--text", stories, "--set", "optimizer=adamw", "--work", tmp_path / "second"]
    train_any_subset(*further, "--from", packed, "--set", "hidden=128", "--set", "learning_rate=1e-9")
    second = tmp_path / "second" / "any-subset"
    assert read_metadata(second, "model").training["begun_with"] == str(packed)
    before, after = (saltus.load(str(folder), weights="bf16").network.model.state_dict() for folder in (packed, second))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert "other settings" in train_any_subset(*further, "--from", second, code=2)
    said = train_any_subset("-r", "xlnet", *further, "--from", packed, code=2)
    assert "packed holds a model of the architecture any-subset; set architecture=any-subset" in said
    assert "holds a causal model; start with" in train_any_subset(*further, "--from", tiny_folder(), code=2)


def test_a_model_with_packed_weights_fills_holes_as_its_expanded_numbers_do(tmp_path):
    folder = tmp_path / "packed"
    model = tiny_llama(any_subset={"mask": MASK, "blank": BLANK}, intermediate_size=64)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    store_as_gguf(folder, "q8_0")
    assert not (folder / "model.safetensors").exists()
    packed, expanded, integers = (
        saltus.load(str(folder), "assd", weights=weights, arithmetic=arithmetic)
        for weights, arithmetic in (("file", "bf16"), ("bf16", "auto"), ("file", "int8"))
    )
    original = model.state_dict()
    for name, weight in expanded.network.model.state_dict().items():
        expected, format = original[name], PACKINGS["q8_0"]
        expected = dequantize_blocks(quantized_blocks(expected, format), format) if weight.dim() == 2 else expected
        assert weight.equal(expected.to(weight.dtype)), name
    found = [
        engine.infill("the [[8]] sat [[…]] on [[3]].", temperature=1.0, seed=4, method=method).text
        for engine in (packed, expanded, integers)
        for method in ("assd", "plain")
    ]
    assert len(set(found[:4])) == len(set(found[4:])) == 1
    remove_gguf(folder)
    with pytest.raises(ValueError, match="no weights"):
        saltus.load(str(folder))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "xlnet"}, "weights of xlnet models stay as they are; store them as bf16"),
        (
            {"model_type": "llama", "hidden_size": 48, "intermediate_size": 64},
            "hidden_size is 48, but packed weights need",
        ),
    ],
)
def test_weights_that_cannot_be_packed_are_refused_before_training(config, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        require_packable(config)


def test_programs_come_from_lines_of_json(tmp_path):
    rows = [{"text": "Add.", "code": "def f(a, b):\r\n\treturn a + b\u2028"}, {"code": "x = 1"}]
    file = tmp_path / "programs.jsonl"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    assert list(read_programs(file)) == ['"""Add."""\ndef f(a, b):\n    return a + b\n', "x = 1\n"]
    for broken in ("{", '{"text": "none"}', "3"):
        file.write_text(broken)
        with pytest.raises(ValueError, match="holds no programs"):
            list(read_programs(file))


def test_no_function_is_a_text_of_its_own_and_a_part_of_another(tmp_path):
    inner = "def inner():\n    x = 1\n    return x\n"
    outer = f"def outer():\n{textwrap.indent(inner, '    ')}    return inner\n"
    other = "def other(self):\n    x = 2\n    return x\n"
    (tmp_path / "module.py").write_text(
        f"if True:\n{textwrap.indent(outer, '  ')}class A:\n{textwrap.indent(other, '  ')}"
    )
    assert list(read_programs(tmp_path)) == [outer, other]


def test_a_story_that_is_told_twice_is_one_text(stories, tmp_path):
    (tmp_path / "twice.txt").write_text(f"{stories.read_text()}\n\n{stories.read_text()}")
    recipe = read_recipe(find_recipe("stories"))
    found = OBJECTIVES["any-subset"].select_texts(recipe, [tmp_path / "twice.txt"])
    assert len(found) == len(set(found)) == 240


@pytest.mark.parametrize("method", ["plain", "assd"])
def test_a_stream_of_an_infilling_is_its_text(filler: str, method: str):
    engine = saltus.load(filler, method)
    whole = engine.infill("the [[8]] sat [[…]] on [[3]].", temperature=1.0, seed=4, open_tokens=6)
    stream = engine.stream_infill("the [[8]] sat [[…]] on [[3]].", temperature=1.0, seed=4, open_tokens=6)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text == stream.infilling.text
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert [chunk.call_index for chunk in chunks] == [call.index for call in stream.infilling.calls]
    left = engine.stream_infill("the [[8]] sat.")
    next(left)
    left.close()
    assert 0 < len(left.infilling.tokens) <= 8
    with pytest.raises(ValueError, match="lone surrogate"):
        engine.infill("the \udc00 [[2]]")


@pytest.fixture(scope="module")
def filler_server(filler):
    with serving(saltus.load(filler, "assd", adaptive=False, tuned_settings=False)) as (service, url):
        yield service.engine, url


PARTS = ["the cat ", " on the mat and ", " sat", " there"]
ASKED = {
    "parts": PARTS,
    "hole_lengths": [4, None, 3],
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "seed": 3,
}


@pytest.mark.parametrize("speculative", [True, False, {"method": "assd"}])
def test_a_server_fills_several_holes_as_the_engine_does(filler_server, speculative):
    engine, url = filler_server
    template = InfillTemplate(tuple(PARTS), (4, None, 3))
    request = engine.infill_request(template, verbatim=True, temperature=1.0, seed=3)
    for _ in run_requests(engine.decoder, [request.request], "plain"):
        pass
    expected = request.infilling()
    asked = {**ASKED, "speculative": speculative}
    answer = httpx.post(f"{url}/infill", json=asked).json()
    assert answer["fillings"] == expected.fillings
    assert PARTS[0] + answer["content"] + PARTS[-1] == expected.text
    lines = httpx.post(f"{url}/infill", json={**asked, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(chunk["content"] for chunk in chunks) == answer["content"]
    assert chunks[-1]["fillings"] == expected.fillings


def test_texts_with_holes_do_not_depend_on_what_runs_beside_them(filler_server):
    _, url = filler_server

    def ask(seed: int) -> str:
        return httpx.post(f"{url}/infill", json={**ASKED, "seed": seed}, timeout=60).json()["content"]

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"parts": ["a"]}, "parts"),
        ({"parts": ["a", "b"], "hole_lengths": [1, 2]}, "1 holes"),
        ({"parts": ["a", "b"], "hole_lengths": [0]}, "length 0"),
        ({"parts": ["a", "b"], "input_prefix": "c"}, "either"),
        ({"hole_lengths": [1]}, "parts"),
        ({"parts": ["a", "b"], "stop": "x"}, "stop"),
        ({"parts": ["a", "b"], "hole_lengths": [10**6]}, "holes have"),
        ({"parts": ["a", "b"], "presence_penalty": 1.0}, "presence_penalty"),
        ({"parts": ["a \ud800", "b"]}, "surrogate"),
    ],
)
def test_a_wrong_text_with_holes_is_refused(filler_server, fields, says):
    body = json.dumps(fields)
    answer = httpx.post(f"{filler_server[1]}/infill", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, says in answer.json()["error"]["message"]) == (400, True), answer.text
