"""The tree of prefixes: what it returns is what was put, within its bounds, and texts share what they read."""

import queue

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saltus
from saltus.engine import prefix_tree
from saltus.engine.engine import Engine
from saltus.engine.prefix_tree import MAX_NODE_TOKENS, PrefixTree
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD
from saltus.models.cpu.kv_cache import KVCache
from saltus.server.engine_thread import EngineThread
from saltus.server.served_request import Limits, serve_text
from tiny_models import TEMPLATE

LAYERS, HEADS, DIM = 2, 1, 4
BYTES_PER_TOKEN = 2 * LAYERS * HEADS * DIM * 4


def cache_of(tokens: list[int]) -> KVCache:
    """A KV cache whose keys at a place are made of the tokens up to there, as a causal model's are."""
    keys = torch.zeros(LAYERS, HEADS, len(tokens) + 3, DIM)
    for at in range(len(tokens)):
        keys[:, :, at] = hash(tuple(tokens[: at + 1])) % 1_000_003
    return KVCache(np.array(tokens, dtype=np.int64), keys, -keys)


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(texts, st.lists(st.integers(0, 2), max_size=9), st.integers(0, 40), st.sampled_from([1, 3, 512]))
@settings(max_examples=300)
def test_what_is_taken_is_the_longest_known_prefix(put, asked, max_tokens, node_tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "MAX_NODE_TOKENS", node_tokens)
        check_what_is_taken(put, asked, max_tokens)


def check_what_is_taken(put, asked, max_tokens):
    tree = PrefixTree(max_tokens * BYTES_PER_TOKEN)
    whole = PrefixTree()
    for text in put:
        for each in (tree, whole):
            each.put(text, {"target": cache_of(text)})
        assert tree.num_bytes <= tree.max_bytes
    known = {tuple(text[:length]) for text in put for length in range(1, len(text) + 1)}
    assert whole.num_bytes == len(known) * BYTES_PER_TOKEN  # each prefix once
    longest = max((length for length in range(len(asked) + 1) if tuple(asked[:length]) in known), default=0)
    for each, exact in ((whole, True), (tree, False)):
        found = each.take(asked).get("target")
        length = 0 if found is None else len(found.tokens)
        assert length == longest if exact else length <= longest
        caches = each.take(asked, max_tokens=2)
        for _ in asked:
            each.extend(asked, caches, 2)
        for each_way in (found, caches.get("target")) if found is not None else ():
            expected = cache_of(asked[:length])
            assert each_way.tokens.tolist() == asked[:length]
            assert torch.equal(each_way.keys[:, :, :length], expected.keys[:, :, :length])
            assert torch.equal(each_way.values[:, :, :length], expected.values[:, :, :length])


def test_a_cache_whose_buffers_a_call_made_takes_more_of_a_known_prompt():
    text, tree = list(range(3, 43)), PrefixTree()
    tree.put(text, {"target": cache_of(text)})
    caches = tree.take(text, max_tokens=8)
    with torch.inference_mode():  # as calls are, which make buffers larger
        caches["target"].keys, caches["target"].values = (
            each.clone() for each in (caches["target"].keys, caches["target"].values)
        )
    tree.extend(text, caches, 8)
    assert caches["target"].tokens.tolist() == text[:16]


def test_of_a_text_too_long_for_the_tree_the_beginning_is_kept():
    text = [number % 90 for number in range(2000)]
    tree = PrefixTree(1200 * BYTES_PER_TOKEN)
    tree.put(text, {"target": cache_of(text)})
    assert len(tree.take(text)["target"].tokens) == 1200


def test_no_more_than_a_node_is_copied_where_a_text_leaves_another(monkeypatch):
    text, tree, copied = [number % 90 for number in range(2000)], PrefixTree(), []
    tree.put(text, {"target": cache_of(text)})
    split = prefix_tree.split
    monkeypatch.setattr(prefix_tree, "split", lambda node, at: copied.append(len(node.tokens)) or split(node, at))
    other = [*text[:700], 5]
    tree.put(other, {"target": cache_of(other)})
    assert copied == [MAX_NODE_TOKENS]
    assert tree.take(text)["target"].tokens.tolist() == text


def test_what_was_not_used_for_longest_is_dropped_first():
    tree = PrefixTree(6 * BYTES_PER_TOKEN)
    for text in ([1, 2, 3], [1, 2, 4], [5, 6]):
        tree.put(text, {"target": cache_of(text)})
    assert tree.num_bytes == 6 * BYTES_PER_TOKEN
    tree.take([1, 2, 3])
    tree.put([7, 8], {"target": cache_of([7, 8])})
    lengths = [len(tree.take(text)["target"].tokens) if tree.take(text) else 0 for text in ([1, 2, 3], [1, 2, 4], [5])]
    assert lengths == [3, 2, 0]


class _Untouched(dict):
    """The children of a node that nothing should look at."""

    def __bool__(self):
        raise AssertionError("an end was looked at that is not the oldest")

    __len__ = values = items = __iter__ = __bool__


def test_a_put_looks_at_the_ends_that_it_drops_and_at_no_other():
    tree = PrefixTree(300 * BYTES_PER_TOKEN)
    for number in range(300):
        tree.put([number], {"target": cache_of([number])})
    for number in range(2, 300):
        tree._roots["target"].children[number].children = _Untouched()
    tree.put([1000, 1001], {"target": cache_of([1000, 1001])})
    assert [bool(tree.take([number])) for number in range(4)] == [False, False, True, True]


def test_caches_of_other_networks_are_not_copied():
    tree = PrefixTree()
    tree.put([1, 2], {"target": cache_of([1, 2]), "draft": cache_of([1, 2])})
    assert set(tree.take([1, 2], ["target", "other"])) == {"target"}
    assert set(tree.take([1, 2])) == {"target", "draft"}


def test_a_copy_is_taken_so_that_texts_do_not_write_into_each_other():
    tree = PrefixTree()
    tree.put([1, 2], {"target": cache_of([1, 2])})
    tree.take([1, 2])["target"].keys[:] = 0
    assert tree.take([1, 2])["target"].keys[:, :, :2].any()
    tree.clear()
    assert (tree.take([1, 2]), tree.num_bytes) == ({}, 0)


def whole(first: int) -> KVCache:
    """A cache with a layer of other sizes, which cannot be cut in pieces."""
    layers = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    return KVCache(np.array([first, 8, 9]), *layers, odd_layers={1: (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))})


def test_caches_that_cannot_be_cut_are_kept_whole_and_the_latest_four():
    tree = PrefixTree()
    for number in range(6):
        tree.put([number], {"target": whole(number)})
    assert [tree.take([number, 8, 9, 9]) != {} for number in range(6)] == [False, False, True, True, True, True]
    assert tree.num_bytes == 0
    tree.put([1], {"target": whole(1)}, ended=False)
    assert tree.take([1, 8, 9, 9]) == {}, "it belongs to a text that goes on"


def test_of_whole_caches_the_one_is_taken_whose_prompt_the_text_begins_with():
    tree = PrefixTree()
    for number in range(2):
        tree.put([number, 8], {"target": whole(number)})
    assert tree.take([1, 7, 9]) == {}, "another prompt"
    taken = tree.take([1, 8, 7, 9])["target"]
    assert taken.tokens.tolist() == [1, 8]
    assert tree.take([1, 8, 7, 9]) == {}, "one text has it"


def test_whole_caches_stay_within_the_bound():
    probe = PrefixTree()
    probe.put([0], {"target": whole(0)})
    for max_bytes, kept in ((2 * probe.num_bytes - 1, [False, True]), (probe.num_bytes - 1, [False, False])):
        small = PrefixTree(max_bytes)
        for number in range(2):
            small.put([number], {"target": whole(number)})
            assert small.num_bytes <= max_bytes
        assert [small.take([number, 8, 9]) != {} for number in range(2)] == kept


@pytest.fixture(scope="module")
def engine(tiny_folder, partners) -> Engine:
    made = saltus.load(str(tiny_folder()), "lookup", options=partners, adaptive=False)
    made.tokenizer.chat_template = TEMPLATE
    return made


def test_a_text_has_no_caches_of_draft_models_that_it_does_not_use(engine):
    parts: queue.SimpleQueue = queue.SimpleQueue()
    engine_thread, caches = EngineThread(engine, Limits()), []

    def deliver(part) -> None:
        parts.put(
            (
                set(engine_thread.scheduler.running[0].sequence.kv_caches) if engine_thread.scheduler.running else None,
                part,
            )
        )

    engine_thread.start()
    try:
        for method in ("small_model", "plain"):
            request = engine.text_request("the cat sat on the mat", raw=True, max_new_tokens=4, ignore_eos=True)
            engine_thread.submit(serve_text(request, method, deliver))
            caches.append(parts.get(timeout=30)[0])
            while parts.get(timeout=30)[1].finish_reason is None:
                pass
    finally:
        engine_thread.close()
    assert caches == [set(engine.decoder.setup("small_model").networks), {"target"}]


def test_several_texts_of_one_prompt_read_it_once(engine):
    prompt = "the cat sat on the mat and the cat sat on the log and the"
    length = len(engine.encode(prompt, raw=True))
    parts: queue.SimpleQueue = queue.SimpleQueue()
    jobs = [
        serve_text(
            engine.text_request(prompt, raw=True, seed=seed, max_new_tokens=8, temperature=1.0), "lookup", parts.put
        )
        for seed in range(4)
    ]
    engine_thread = EngineThread(engine, Limits())
    engine_thread.submit(*jobs)
    engine_thread.start()
    try:
        ended = 0
        while ended < 4:
            ended += parts.get(timeout=30).finish_reason is not None
    finally:
        engine_thread.close()
    assert [job.cached_tokens for job in jobs] == [0] + 3 * [length - 1]
    assert [job.request.calls[0].context_tokens_read for job in jobs] == [length] + 3 * [1]
    for seed, job in enumerate(jobs):
        alone = engine.generate(prompt, raw=True, method="plain", seed=seed, max_new_tokens=8, temperature=1.0)
        assert job.request.tokens == alone.tokens


def test_a_known_prompt_is_read_again_only_where_drafters_will_read_its_states(tiny_folder, partners):
    """A drafter reads the hidden states of a prompt's last tokens, which the tree does not keep."""
    engine = saltus.load(str(tiny_folder()), "ptp", options={"ptp": partners["ptp"]})
    prompt = "the cat sat on the mat and the cat sat on the log and the"
    length = len(engine.encode(prompt, raw=True))

    def tokens_read(drafts_rest: bool) -> int:
        switch = engine.decoder.setup("ptp").controller(1).drafting_switch
        switch.in_trial, switch.drafting, switch.steps_left = False, not drafts_rest, 200
        answer = engine.generate(prompt, raw=True, max_new_tokens=4)
        assert answer.tokens == engine.generate(prompt, raw=True, method="plain", max_new_tokens=4).tokens
        return answer.calls[0].context_tokens_read

    assert tokens_read(drafts_rest=False) == length
    assert tokens_read(drafts_rest=False) == min(length, MAX_UNREAD + 1)
    assert tokens_read(drafts_rest=True) == 1
