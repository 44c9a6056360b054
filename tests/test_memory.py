"""A memory repairs itself: whatever becomes of a text, its logits are a fresh read's, and nothing is read twice."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from architectures import VOCAB, random_tree, read, text, tiny
from saltus.core.canvas import continuation
from saltus.core.forward import Forward
from saltus.networks.causal import CausalNetwork
from saltus.networks.memory import GROWTH, Memory

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
        seen.append(sum(read.part.rows for read in reads))
        return original(self, reads)

    original = CausalNetwork._call
    monkeypatch.setattr(CausalNetwork, "_call", call)
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


def edited(decided: list[int], tree: Forward, kind: str, place: int, tokens: list[int]) -> list[int]:
    if kind == "accept" and tree.tokens:  # a branch, and the token that the verifier adds
        return [*decided, *tree.path(place % len(tree.tokens)), tokens[0]]
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=TOKENS, history=st.lists(edits(), min_size=1, max_size=8))
def test_whatever_becomes_of_a_text_its_logits_are_those_of_a_fresh_read(network, start, history):
    decided, memory, known = list(start), network.memory(), [list(start)]
    tree = Forward(continuation(np.array(decided), 99))
    network.forward([tree], [memory])
    for kind, place, tokens, (nodes, parents) in history:
        decided = edited(decided, tree, kind, place, tokens)
        tree = Forward(continuation(np.array(decided), 99), nodes, parents)
        reply = network.forward([tree], [memory])[0]
        assert torch.equal(reply.logits, network.forward([tree], [network.memory()])[0].logits)
        assert reply.read == len(decided) - min(max(common(decided, text) for text in known), len(decided) - 1)
        known = [decided, *([*decided, *tree.path(node)] for node in range(len(nodes)))]


def test_nothing_is_read_twice(llama, rows):
    decided, memory, tree = list(text(50)), llama.memory(), random_tree(12)
    llama.forward([Forward(continuation(np.array(decided), 99))], [memory])
    ask = Forward(continuation(np.array(decided), 99), *tree)
    assert llama.forward([ask], [memory])[0].read == 1
    accepted = ask.path(11)
    assert len(accepted) > 1
    grown = np.array([*decided, *accepted, 7])
    assert llama.forward([Forward(continuation(grown, 9), *tree)], [memory])[0].read == 1
    assert rows == [50, 13, 13]


def test_an_accepted_branch_stays_where_its_text_ends(llama):
    """Keys and values of siblings are overwritten, and those of the branch move behind the text."""
    decided = text(20)
    ask = Forward(continuation(decided, 9), (3, 4, 5, 6, 7), (-1, -1, 1, 1, 3))
    memory, fresh = llama.memory(), llama.memory()
    llama.forward([ask], [memory])
    place = memory.keys.data_ptr()
    grown = np.array([*decided, 4, 6, 7, 8])
    llama.forward([Forward(continuation(grown, 9))], [memory])
    llama.forward([Forward(continuation(grown, 9))], [fresh])
    assert memory.keys.data_ptr() == place
    assert torch.equal(memory.keys[:, :, :24], fresh.keys[:, :, :24])
    assert torch.equal(memory.values[:, :, :24], fresh.values[:, :, :24])


def test_the_decided_tokens_alone_make_memory_grow(llama):
    """Hundreds of rejected nodes leave nothing behind."""
    memory, slack = llama.memory(), 20
    for length in range(1, 300):
        read(llama, text(300)[:length], *random_tree(slack), memory)
        capacity = memory.keys.shape[2]
        assert capacity <= max(1.5 * (length + slack), length + slack + GROWTH)
    bytes_of_slot = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dim, bytes
    assert memory.keys.nbytes + memory.values.nbytes == capacity * bytes_of_slot


def test_a_grown_memory_keeps_what_it_knew(llama, rows):
    memory, tokens = llama.memory(), text(GROWTH + 40)
    before = read(llama, tokens[:-50], memory=memory)
    capacity = memory.keys.shape[2]
    after = read(llama, tokens, memory=memory)
    assert memory.keys.shape[2] > capacity
    assert rows == [len(tokens) - 50, 50]
    assert torch.equal(after, read(llama, tokens))
    assert torch.equal(before, read(llama, tokens[:-50]))


def test_a_failed_call_leaves_a_memory_that_still_tells_the_truth(llama, monkeypatch):
    memory, decided = llama.memory(), text(20)
    read(llama, decided, *random_tree(6), memory)
    with monkeypatch.context() as patch:
        patch.setattr(CausalNetwork, "_call", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            read(llama, [*decided[:9], 5, 6, 7], *random_tree(6), memory)
    assert torch.equal(read(llama, decided, memory=memory), read(llama, decided))


def test_a_memory_keeps_the_branch_that_became_text():
    memory = Memory(tokens=np.array([5, 6]), tree=Forward(continuation([5, 6, 7], 9), (8, 9, 9), (-1, -1, 0)))
    memory.tokens = np.array([5, 6, 7])
    assert memory.recall(np.array([5, 6, 7, 8, 9, 4])) == 5
    assert memory.recall(np.array([5, 6, 7, 8, 9, 4])) == 5
    assert memory.recall(np.array([5, 6, 7, 8, 9])) == 4
    assert memory.recall(np.array([5, 1, 7, 8, 9])) == 1
    assert memory.recall(np.array([5])) == 0
