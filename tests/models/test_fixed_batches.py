"""Batches in fixed shapes: a text's rows have the bits that they have alone, whichever texts share its calls."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fixed_shapes import SMALL, each_dtype, fresh, small, watched, written

from architectures import VOCAB, random_tree, read, text, tiny
from saltus.core.canvas import Canvas, continuation
from saltus.core.forward import ForwardInputs
from saltus.models.causal import CausalNetwork
from saltus.models.cuda import fixed_shape_attention
from saltus.models.cuda.fixed_shape_calls import rows_of_texts, split_into_calls
from saltus.models.cuda.kv_pages import FixedShapeKVCache, KVPagePool

PROMPTS, NEW = (1, 16, 17, 31, 50, 100), 24


@dataclass
class Text:
    """A text that is decoded by trees which hold its next tokens among wrong ones."""

    tokens: np.ndarray
    prompt: int
    plain: torch.Tensor  # the logits after the prompt and after each token behind it, alone
    kv_cache: FixedShapeKVCache
    canvas: Canvas = field(init=False)

    def __post_init__(self) -> None:
        self.canvas = continuation(self.tokens[: self.prompt], len(self.tokens) - self.prompt + 1)

    def draft(self, draws: np.random.Generator) -> tuple[ForwardInputs, list[int]]:
        """A tree, and the nodes that say what follows, the last decided token first."""
        nodes, parents, trunk, left = [], [], [-1], len(self.tokens) - len(self.canvas.decided_prefix)
        for _ in range(draws.integers(0, draws.choice([1, 6, 45]))):  # some are wider than a call
            if draws.random() < 0.5 and len(trunk) <= min(left, 12):
                parents.append(trunk[-1])
                nodes.append(int(self.tokens[len(self.canvas.decided_prefix) + len(trunk) - 1]))
                trunk.append(len(nodes) - 1)
            else:
                parents.append(int(draws.choice([-1, *trunk])))
                nodes.append(int(draws.integers(3, VOCAB)))
        return ForwardInputs(self.canvas, tuple(nodes), tuple(parents)), trunk

    def check(self, logits: torch.Tensor, trunk: list[int], draws: np.random.Generator) -> None:
        done = self.canvas.num_decided
        assert torch.equal(logits[[node + 1 for node in trunk]], self.plain[done : done + len(trunk)])
        kept = int(draws.integers(1, len(trunk) + 1))
        self.canvas = self.canvas.fill(np.append(self.tokens, 3)[self.prompt + done :][:kept])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Llama", torch.bfloat16), ("Gemma2", torch.float32), ("GPT2", torch.bfloat16)],
)
def test_texts_that_join_and_leave_a_batch_have_the_bits_that_they_have_alone(name, dtype):
    """Over borders of pages and blocks, in pages of texts that are gone, and with trees that take several calls."""
    decode_texts_that_join_and_leave(small(name, dtype))


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GPT2"])
def test_on_a_gpu_texts_of_a_batch_have_the_bits_that_they_have_alone(name, dtype):
    network = CausalNetwork(tiny(name).to("cuda", dtype), fixed_shape_settings=SMALL)
    decode_texts_that_join_and_leave(network)
    assert network.fixed_shape_runner.use_cuda_graphs, "they were captured"


def decode_texts_that_join_and_leave(network: CausalNetwork) -> None:
    draws, running = np.random.default_rng(0), []
    waiting = [(text(prompt + NEW, seed=seed), prompt) for seed, prompt in enumerate(PROMPTS)]
    plain = [written(network, *each) for each in waiting]
    ended = 0
    while waiting or running:
        while waiting and (len(running) < 2 or draws.random() < 0.4):
            running.append(Text(*waiting.pop(), plain.pop(), fresh(network)))
        draws.shuffle(running)
        asked = [each.draft(draws) for each in running]
        outputs = network.forward([inputs for inputs, _ in asked], [each.kv_cache for each in running])
        for each, (_, trunk), one in zip(running, asked, outputs, strict=True):
            each.check(one.logits, trunk, draws)
        ended += sum(each.canvas.num_decided > NEW for each in running)
        running = [each for each in running if each.canvas.num_decided <= NEW]
    assert ended == len(PROMPTS)


@pytest.mark.slow
def test_rows_of_a_full_call_are_those_of_a_call_of_padding():
    """Every row of a call is used, and every text has each place of the call once."""
    network, batch = small("Llama", torch.bfloat16), [(text(9 + 7 * n, seed=n), *random_tree(3, n)) for n in range(8)]
    alone = [read(network, *each) for each in batch]
    for _ in range(8):
        batch, alone = batch[1:] + batch[:1], alone[1:] + alone[:1]
        inputs = [ForwardInputs(continuation(each[0], 9), *each[1:]) for each in batch]
        caches = [fresh(network) for _ in batch]
        for outputs, expected in zip(network.forward(inputs, caches), alone, strict=True):
            assert torch.equal(outputs.logits, expected)


@pytest.mark.slow
def test_a_batch_shares_decoding_calls(monkeypatch):
    network = small("Llama")
    seen = watched(network, monkeypatch)
    canvases, caches = [continuation(text(5 + n), 9) for n in range(19)], [network.new_kv_cache() for _ in range(19)]
    network.forward([ForwardInputs(canvas) for canvas in canvases], caches)
    seen.clear()
    grown = [canvas.fill(np.array([7])) for canvas in canvases]
    outputs = network.forward([ForwardInputs(canvas) for canvas in grown], caches)
    assert [rows for rows, *_ in seen] == [32] * 3, "eight groups in a call"
    assert {one.num_rows for one in outputs} == {19}
    seen.clear()
    network.forward([ForwardInputs(canvas, *random_tree(n)) for n, canvas in enumerate(grown[:8])], caches[:8])
    assert len(seen) == 2, "4 · 1 and 4 · 2 groups"


def test_a_failed_call_leaves_all_caches_usable(monkeypatch):
    """It fails in the second layer: those of its batch read their texts again, others go on."""
    network, attend = small("Llama"), fixed_shape_attention.FixedShapeAttention.attend
    texts, caches, tree = [text(20 + n, seed=n) for n in range(3)], [network.new_kv_cache() for _ in range(3)], (5,)
    for tokens, kv_cache in zip(texts, caches, strict=True):
        read(network, tokens, tree, (-1,), kv_cache)
    grown = [ForwardInputs(continuation(np.array([*tokens, 5, 7]), 20), *random_tree(9)) for tokens in texts]
    alone = [network.forward([inputs], [fresh(network)])[0].logits for inputs in grown]

    def failing(self, module, *args):
        if module.layer_idx:
            raise MemoryError("full")
        return attend(self, module, *args)

    with monkeypatch.context() as patch:
        patch.setattr(fixed_shape_attention.FixedShapeAttention, "attend", failing)
        with pytest.raises(MemoryError):
            network.forward(grown[:2], caches[:2])
    outputs = network.forward(grown, caches)
    assert all(torch.equal(one.logits, expected) for one, expected in zip(outputs, alone, strict=True))
    assert [one.context_tokens_read for one in outputs] == [22, 23, 1]


def test_a_batch_for_which_there_are_no_pages_can_be_asked_again(monkeypatch):
    """Caches, accepted nodes included, stay as they were."""
    network = small("Llama")
    tokens, kv_cache = text(20), network.new_kv_cache()
    read(network, tokens, *random_tree(6), kv_cache)
    path = ForwardInputs(continuation(tokens, 9), *random_tree(6)).path_tokens(5)
    inputs = ForwardInputs(continuation(np.array([*tokens, *path, 4]), 9))
    long = ForwardInputs(continuation(text(400), 900))

    def full(self, num_pages):
        raise MemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(KVPagePool, "_grow", full)
        network.fixed_shape_runner.pool.free_pages[20:] = []
        with pytest.raises(MemoryError):
            network.forward([inputs, long], [kv_cache, network.new_kv_cache()])
    outputs = network.forward([inputs], [kv_cache])[0]
    assert outputs.context_tokens_read == 1
    assert torch.equal(outputs.logits, read(network, inputs.canvas.decided_prefix))


def new_caches(lengths) -> list[FixedShapeKVCache]:
    """Caches of one pool with pages for so many entries."""
    pool, kv_caches = KVPagePool(1, SMALL.page_size), []
    for length in lengths:
        kv_caches.append(FixedShapeKVCache(pool))
        kv_caches[-1].reserve(length)
    return kv_caches


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=12), st.booleans())
def test_each_row_of_a_batch_is_in_one_call_after_those_before_it(sizes, varied_rows):
    batch = [ForwardInputs(continuation(text(length), 9), (5,) * nodes, (-1,) * nodes) for length, nodes in sizes]
    chosen = replace(SMALL, varied_rows=varied_rows)
    texts = rows_of_texts(batch, new_caches(map(sum, sizes)), [0] * len(sizes), chosen)
    found: list[list[int]] = [[] for _ in texts]
    calls = list(split_into_calls(texts, chosen))
    reading = [call for call in calls if call.shape.num_logits]
    assert all((part.output_rows < 0).all() for call in reading for part in call.parts)
    if varied_rows:
        groups = [-(-(length - 1) // chosen.rows_per_group) for length, _ in sizes]
        assert sum(groups) * chosen.rows_per_group > (len(reading) - 1) * chosen.prefill_chunk / 2
    for call in calls:
        end = 0
        for start, part in call.placed():
            assert end <= start <= start + part.num_rows <= call.shape.num_rows
            end = start + part.num_rows
            found[part.text] += part.entries.tolist()
            assert part.entries[-1] < call.shape.num_pages * SMALL.page_size
    assert found == [list(range(length + nodes)) for length, nodes in sizes]


def a_tree(seed: int, nodes: int) -> tuple[int, ...]:
    """Parents; of seed 0 a path."""
    random = np.random.default_rng(seed)
    return tuple(node - 1 if not seed else int(random.integers(max(-1, node - 4), node)) for node in range(nodes))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(2, 90), st.integers(0, 7), st.integers(0, 3), st.booleans()), min_size=1, max_size=5
    ),
    st.booleans(),
)
def test_rows_gather_their_own_text_and_ancestors(sizes, varied_rows):
    """By the definition, a column at a time."""
    batch = [ForwardInputs(continuation(text(length), 20), tuple(range(50, 50 + nodes)), a_tree(seed, nodes))
             for length, nodes, seed, _ in sizes]  # fmt: skip
    kv_caches = new_caches(length + nodes for length, nodes, *_ in sizes)
    past = [length - 1 if known else 0 for length, *_, known in sizes]
    depth = SMALL.max_tree_depth
    rows_by_text = rows_of_texts(batch, kv_caches, past, replace(SMALL, varied_rows=varied_rows))
    for inputs, kv_cache, rows in zip(batch, kv_caches, rows_by_text, strict=True):
        base, count = len(inputs.canvas.decided_prefix), len(inputs.tokens)
        assert rows.output_rows.tolist()[-count - 1 :] == list(range(count + 1))
        assert (rows.output_rows[: -count - 1] == -1).all()
        assert rows.tokens.tolist() == [*inputs.canvas.decided_prefix[rows.entries[0] :], *inputs.tokens]
        for row, (position, entry) in enumerate(zip(rows.positions.tolist(), rows.entries.tolist(), strict=True)):
            path = inputs.path(entry - base) if entry >= base else []
            assert position == (base + len(path) - 1 if path else entry)
            first = max(position // depth * depth - depth, 0)
            seen = [column if column < base else base + path[column - base] if column <= position else entry
                    for column in range(first, first + 2 * depth)]  # fmt: skip
            hidden = [entry] * (first + 2 * depth - 1 - position)
            seen[position + 1 - first :] = hidden
            assert rows.recent_slots[row].tolist() == kv_cache.slots(np.array(seen)).tolist()
        assert rows.slots.tolist() == kv_cache.slots(rows.entries).tolist()
