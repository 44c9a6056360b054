"""Drafts of several texts in one pass of the drafter: each has the bits that it has alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from test_ptp import drafter, question, states

from saltus.kernels.packed_weight import PackedWeight
from saltus.loading.packing import PACKINGS, quantized_blocks
from saltus.methods.ptp.network import DraftNetwork
from saltus.methods.shared.context_rows import MAX_ROWS_PER_CALL, ContextRows, DraftRows
from saltus.methods.shared.draft_tree import PositionPredictions
from saltus.models.causal import CausalNetwork
from tiny_models import tiny_llama

Q8_0 = PACKINGS["q8_0"]
LENGTHS = (3, 40, MAX_ROWS_PER_CALL + 90, 17, 1, 150)


def batch_drafter(dtype: torch.dtype, kernels: bool = True) -> tuple[CausalNetwork, DraftNetwork]:
    target = CausalNetwork(tiny_llama().to(dtype))
    network = drafter(target, correction=6)
    network.model.to(dtype)
    network = DraftNetwork(network.model, target)
    if not kernels:
        network.context_layers.native_decoder = network.whole_pass = None
    return target, network


def counted_passes(network: DraftNetwork, monkeypatch) -> list[int]:
    """The rows of each pass from now on."""
    rows = []
    runner, name = (
        (network.context_layers, "_forward") if network.whole_pass is None else (network.whole_pass, "_evaluate")
    )
    run = getattr(runner, name)

    def counted(texts: Sequence[ContextRows | DraftRows], **settings: bool) -> list:
        rows.append(sum(text.num_rows for text in texts))
        return run(texts, **settings)

    monkeypatch.setattr(runner, name, counted)
    return rows


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "transformers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_text_of_a_batch_has_the_bits_that_it_has_alone(dtype, kernels):
    target, network = batch_drafter(dtype, kernels)
    random = np.random.default_rng(3)
    texts = [random.integers(5, 250, length + 5) for length in LENGTHS]
    hidden = [states(target, text) for text in texts]
    uniforms = [tuple(random.random(1 + number)) for number in range(len(texts))]
    together, apart = ([network.new_kv_cache() for _ in texts] for _ in range(2))
    for begin, end in ((1, -4), (-4, -3), (-3, 0)):  # hidden states of the prompts, then of new tokens
        questions = [
            question(text[: len(text) + end], of[begin - 1 : len(text) + end - 1], numbers)
            for text, of, numbers in zip(texts, hidden, uniforms, strict=True)
        ]
        expected = [network.forward([one], [cache])[0] for one, cache in zip(questions, apart, strict=True)]
        for found, alone in zip(network.forward(questions, together), expected, strict=True):
            assert torch.equal(found.logits, alone.logits)
            assert torch.equal(found.hidden_states, alone.hidden_states)
            assert found.context_tokens_read == alone.context_tokens_read
    for one, other in zip(together, apart, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize(
    ("dtype", "packed"),
    [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)],
)
def test_the_kernel_pass_predicts_what_torch_predicts(dtype, packed: bool):
    target, by_kernel = batch_drafter(dtype)
    if packed:
        model = by_kernel.model
        model.embeddings[0] = PackedWeight.from_blocks(quantized_blocks(model.embeddings[0], Q8_0), Q8_0)
        by_kernel = DraftNetwork(model, target)
    if by_kernel.whole_pass is None:
        pytest.skip("this machine has no kernels for this number format")
    by_torch = DraftNetwork(by_kernel.model, target)
    by_torch.whole_pass = by_torch.context_layers.native_decoder = None
    text, uniforms = np.random.default_rng(4).integers(5, 250, 40), (0.2, 0.7, 0.4)
    asked = question(text, states(target, text)[:-1], uniforms)
    found, expected = (one.forward([asked], [one.new_kv_cache()])[0] for one in (by_kernel, by_torch))
    bound = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(found.logits, expected.logits, rtol=bound, atol=bound)
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=bound, atol=bound)
    ours, theirs = found.predictions, expected.predictions
    assert isinstance(ours, PositionPredictions)
    assert isinstance(theirs, PositionPredictions)
    np.testing.assert_allclose(ours.position_inputs, theirs.position_inputs, rtol=bound, atol=bound)
    if dtype != torch.float32:
        return
    for position in range(len(uniforms)):
        (ids, logits, rest), others = (one.candidates(position, (7, 9)) for one in (ours, theirs))
        assert ids.tolist() == others[0].tolist()
        np.testing.assert_allclose(logits, others[1], atol=1e-3)
        assert rest == pytest.approx(others[2], rel=1e-3)


def test_few_rows_of_many_texts_are_one_pass(monkeypatch):
    target, network = batch_drafter(torch.float32)
    texts = [np.arange(5, 25) + number for number in range(5)]
    questions = [question(text, states(target, text)[:-1]) for text in texts]
    passes = counted_passes(network, monkeypatch)
    outputs = network.forward(questions, [network.new_kv_cache() for _ in texts])
    rows = 5 * (19 + 3)
    assert passes == [rows]
    assert [each.num_rows for each in outputs] == [rows] * 5


def test_a_pass_has_limited_rows(monkeypatch):
    target, network = batch_drafter(torch.float32)
    texts = [np.random.default_rng(number).integers(5, 250, length) for number, length in enumerate(LENGTHS)]
    texts = [text for text in texts if len(text) > 1]
    questions = [question(text, states(target, text)[:-1]) for text in texts]
    passes = counted_passes(network, monkeypatch)
    network.forward(questions, [network.new_kv_cache() for _ in texts])
    assert max(passes) <= MAX_ROWS_PER_CALL
    assert sum(passes) == sum(len(text) - 1 + 3 for text in texts)
