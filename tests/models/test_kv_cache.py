"""A memory repairs itself: whatever becomes of a text, its logits are a fresh read's, and nothing is read twice."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from architectures import VOCAB, random_tree, read, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import ForwardInputs
from saltus.models.causal import CausalNetwork
from saltus.models.cpu.kv_cache import MIN_GROWTH, KVCache
from saltus.models.cpu.prepared_call import PreparedCall

TOKENS = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12)


@pytest.fixture(scope="module", params=[("Llama", torch.float32), ("Llama", torch.bfloat16), ("Gemma2", torch.float32)])
def network(request) -> CausalNetwork:
    name, dtype = request.param
    return CausalNetwork(tiny(name).to(dtype))


@pytest.fixture(scope="module")
def llama() -> CausalNetwork:
    return CausalNetwork(tiny("Llama"))


@pytest.fixture
def rows(llama, monkeypatch) -> list[int]:
    """The rows of every call."""
    seen = []

    def call(self, reads):
        seen.append(sum(read.rows.num_rows for read in reads))
        return original(self, reads)

    def prepared_call(self, kv_cache, past, tokens, *rest):
        seen.append(len(tokens))
        return prepared(self, kv_cache, past, tokens, *rest)

    original, prepared = CausalNetwork._run_model, PreparedCall.__call__
    monkeypatch.setattr(CausalNetwork, "_run_model", call)
    monkeypatch.setattr(PreparedCall, "__call__", prepared_call)
    return seen


@st.composite
def trees(draw):
    """No two siblings say the same."""
    nodes: dict[tuple[int, int], None] = {}
    for node in range(draw(st.integers(0, 9))):
        edge = draw(st.integers(-1, node - 1)), draw(st.integers(3, 9))
        nodes[(edge[0], 10 + node) if edge in nodes else edge] = None
    return tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)


@st.composite
def edits(draw):
    """What becomes of the text before the next call, and the tree that is asked then."""
    kind = draw(st.sampled_from(["accept", "reject", "jump", "shrink", "grow", "same"]))
    return kind, draw(st.integers(0, 40)), draw(TOKENS), draw(trees())


def edited(decided: list[int], tree: ForwardInputs, kind: str, place: int, tokens: list[int]) -> list[int]:
    if kind == "accept" and tree.tokens:  # a branch, and the token that the verifier adds
        return [*decided, *tree.path_tokens(place % len(tree.tokens)), tokens[0]]
    if kind == "jump":
        return [*decided[: place % len(decided)], *tokens]
    if kind == "shrink":
        return decided[: 1 + place % len(decided)]
    if kind == "same":
        return decided
    return [*decided, *tokens[: 1 if kind == "reject" else len(tokens)]]


def common(one, other) -> int:
    shared = min(len(one), len(other))
    differs = np.flatnonzero(np.asarray(one[:shared]) != np.asarray(other[:shared]))
    return int(differs[0]) if len(differs) else shared


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=TOKENS, history=st.lists(edits(), min_size=1, max_size=8))
def test_whatever_becomes_of_a_text_its_logits_are_those_of_a_fresh_read(network, start, history):
    decided, kv_cache, known = list(start), network.new_kv_cache(), [list(start)]
    tree = ForwardInputs(continuation(np.array(decided), 99))
    network.forward([tree], [kv_cache])
    for kind, place, tokens, (nodes, parents) in history:
        decided = edited(decided, tree, kind, place, tokens)
        tree = ForwardInputs(continuation(np.array(decided), 99), nodes, parents)
        outputs = network.forward([tree], [kv_cache])[0]
        assert torch.equal(outputs.logits, network.forward([tree], [network.new_kv_cache()])[0].logits)
        assert outputs.context_tokens_read == len(decided) - min(
            max(common(decided, text) for text in known), len(decided) - 1
        )
        known = [decided, *([*decided, *tree.path_tokens(node)] for node in range(len(nodes)))]


def test_nothing_is_read_twice(llama, rows):
    decided, kv_cache, tree = list(text(50)), llama.new_kv_cache(), random_tree(12)
    llama.forward([ForwardInputs(continuation(np.array(decided), 99))], [kv_cache])
    inputs = ForwardInputs(continuation(np.array(decided), 99), *tree)
    assert llama.forward([inputs], [kv_cache])[0].context_tokens_read == 1
    accepted = inputs.path_tokens(11)
    assert len(accepted) > 1
    grown = np.array([*decided, *accepted, 7])
    assert llama.forward([ForwardInputs(continuation(grown, 9), *tree)], [kv_cache])[0].context_tokens_read == 1
    assert rows == [50, 13, 13]


def test_an_accepted_branch_stays_where_its_text_ends(llama):
    """Keys and values of siblings are overwritten, and those of the branch move behind the text."""
    decided = text(20)
    inputs = ForwardInputs(continuation(decided, 9), (3, 4, 5, 6, 7), (-1, -1, 1, 1, 3))
    kv_cache, fresh = llama.new_kv_cache(), llama.new_kv_cache()
    llama.forward([inputs], [kv_cache])
    place = kv_cache.keys.data_ptr()
    grown = np.array([*decided, 4, 6, 7, 8])
    llama.forward([ForwardInputs(continuation(grown, 9))], [kv_cache])
    llama.forward([ForwardInputs(continuation(grown, 9))], [fresh])
    assert kv_cache.keys.data_ptr() == place
    assert torch.equal(kv_cache.keys[:, :, :24], fresh.keys[:, :, :24])
    assert torch.equal(kv_cache.values[:, :, :24], fresh.values[:, :, :24])


def test_the_decided_tokens_alone_make_memory_grow(llama):
    """Hundreds of rejected nodes leave nothing behind."""
    kv_cache, slack = llama.new_kv_cache(), 20
    for length in range(1, 300):
        read(llama, text(300)[:length], *random_tree(slack), kv_cache)
        capacity = kv_cache.keys.shape[2]
        assert capacity <= max(1.5 * (length + slack), length + slack + MIN_GROWTH)
    bytes_of_slot = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dim, bytes
    assert kv_cache.keys.nbytes + kv_cache.values.nbytes == capacity * bytes_of_slot


def test_a_grown_memory_keeps_what_it_knew(llama, rows):
    kv_cache, tokens = llama.new_kv_cache(), text(MIN_GROWTH + 40)
    before = read(llama, tokens[:-50], kv_cache=kv_cache)
    capacity = kv_cache.keys.shape[2]
    after = read(llama, tokens, kv_cache=kv_cache)
    assert kv_cache.keys.shape[2] > capacity
    assert rows == [len(tokens) - 50, 50]
    assert torch.equal(after, read(llama, tokens))
    assert torch.equal(before, read(llama, tokens[:-50]))


def test_a_failed_call_leaves_a_memory_that_still_tells_the_truth(llama, monkeypatch):
    kv_cache, decided = llama.new_kv_cache(), text(20)
    read(llama, decided, *random_tree(6), kv_cache)
    with monkeypatch.context() as patch:
        for owner, name in ((CausalNetwork, "_run_model"), (PreparedCall, "__call__")):
            patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            read(llama, [*decided[:9], 5, 6, 7], *random_tree(6), kv_cache)
    assert torch.equal(read(llama, decided, kv_cache=kv_cache), read(llama, decided))


def test_a_memory_keeps_the_branch_that_became_text():
    kv_cache = KVCache(
        tokens=np.array([5, 6]), pending_tree=ForwardInputs(continuation([5, 6, 7], 9), (8, 9, 9), (-1, -1, 0))
    )
    kv_cache.tokens = np.array([5, 6, 7])
    assert kv_cache.reuse_prefix(np.array([5, 6, 7, 8, 9, 4])) == 5
    assert kv_cache.reuse_prefix(np.array([5, 6, 7, 8, 9, 4])) == 5
    assert kv_cache.reuse_prefix(np.array([5, 6, 7, 8, 9])) == 4
    assert kv_cache.reuse_prefix(np.array([5, 1, 7, 8, 9])) == 1
    assert kv_cache.reuse_prefix(np.array([5])) == 0


@pytest.mark.parametrize("layers", [(), (1,)])
@pytest.mark.parametrize("states", [False, True])
def test_a_prepared_call_gives_what_others_give(llama, layers, states):
    """Logits, hidden states and what the cache then holds, over several calls of one text."""
    decoder, results = llama.native_decoder, []
    if decoder is None or decoder.prepared_call is None:
        pytest.skip("needs the compiled kernels")
    prepared, before = decoder.prepared_call, llama.hidden_state_layers
    try:
        llama.hidden_state_layers = layers
        for decoder.prepared_call in (prepared, None):
            decided, kv_cache, seen = list(text(50)), llama.new_kv_cache(), []
            for size in (0, 12, 3, 1):
                inputs = ForwardInputs(continuation(np.array(decided), 99), *random_tree(size), states)
                outputs = llama.forward([inputs], [kv_cache])[0]
                assert outputs.num_rows == outputs.context_tokens_read + size
                seen += [outputs.logits.float(), outputs.hidden_states]
                decided += [*inputs.path_tokens(size - 1), 7]
            results.append(seen)
    finally:
        decoder.prepared_call, llama.hidden_state_layers = prepared, before
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None) == (not states) or one is not None
        assert one is None or torch.equal(one, other)
