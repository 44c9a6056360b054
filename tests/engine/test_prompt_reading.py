"""Prompts that are read in chunks leave their last tokens to the first call, whose hidden states drafters read."""

import pytest

import saltus
from saltus.engine.prefix_tree import PrefixTree
from saltus.engine.scheduled_request import ScheduledRequest
from saltus.engine.scheduler import Scheduler
from saltus.methods.shared.hidden_state_drafter import MAX_UNREAD


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("method", ["plain", "ptp"])
def test_a_drafter_gets_the_states_of_the_prompts_last_tokens(tiny_folder, partners, monkeypatch, method, chunk):
    engine = saltus.load(str(tiny_folder()), method, options=partners, adaptive=False)
    read, forward = [], engine.network.forward

    def counted(batch, kv_caches):
        outputs = forward(batch, kv_caches)
        read.append(outputs[0].context_tokens_read)
        return outputs

    monkeypatch.setattr(engine.network, "forward", counted)
    for length in (20, 33, 65, 66, 129, 130, 200):
        prompt = [40 + number % 30 for number in range(length)]
        request = engine.text_request(prompt, max_new_tokens=3, ignore_eos=True, temperature=0.0).request
        scheduler = Scheduler(engine.decoder, prefix_tree=PrefixTree(), prefill_chunk_tokens=chunk)
        scheduler.add(ScheduledRequest(request, method))
        read.clear()
        while scheduler.requests:
            scheduler.step()
        prefill = read[: next(place for place, _ in enumerate(read) if sum(read[: place + 1]) >= length) + 1]
        assert sum(prefill) == length
        assert max(prefill) <= max(chunk, 1 + MAX_UNREAD)
        if method == "ptp":
            assert prefill[-1] >= min(length, 1 + MAX_UNREAD)


def test_what_was_read_is_kept_chunk_by_chunk(tiny_folder, monkeypatch):
    """All texts wait while keys and values are copied."""
    engine = saltus.load(str(tiny_folder()), "plain")
    tree, put, copied = PrefixTree(), PrefixTree.put, []

    def counted(self, *given):
        before = self.num_bytes
        put(self, *given)
        copied.append((self.num_bytes - before) // engine.network.kv_bytes_per_token)

    monkeypatch.setattr(PrefixTree, "put", counted)
    prompt = [40 + number % 30 for number in range(200)]
    request = engine.text_request(prompt, max_new_tokens=3, ignore_eos=True).request
    scheduler = Scheduler(engine.decoder, prefix_tree=tree, prefill_chunk_tokens=16)
    scheduler.add(ScheduledRequest(request, "plain"))
    while scheduler.requests:
        scheduler.step()
    assert max(copied) == 16
    assert sum(copied) == 202


def test_a_known_prompt_is_copied_piece_by_piece(tiny_folder, monkeypatch):
    """All texts wait for a copy; none of the prompt is read again, and a text goes on with what the tree still has."""
    engine = saltus.load(str(tiny_folder()), "plain")
    prompt = [40 + number % 30 for number in range(200)]
    alone = engine.text_request(prompt, max_new_tokens=3, ignore_eos=True).request
    scheduler = Scheduler(engine.decoder, prefix_tree=PrefixTree(), prefill_chunk_tokens=16)
    scheduler.add(ScheduledRequest(alone, "plain"))
    while scheduler.requests:
        scheduler.step()
    for forgets in (False, True):
        request = engine.text_request(prompt, max_new_tokens=3, ignore_eos=True).request
        scheduled, cached = ScheduledRequest(request, "plain"), []
        scheduler.add(scheduled)
        while scheduler.requests:
            scheduler.step()
            cached.append(scheduled.cached_tokens)
            if forgets:
                scheduler.prefix_tree.clear()
        assert cached[:4] == ([64, 128, 192, 199] if not forgets else [64, 64, 64, 64])
        assert request.calls[0].context_tokens_read == (1 if not forgets else 200 - 64 - 8 * 16)
        assert request.tokens == alone.tokens
