"""Texts of a batch: they share the calls of the target, whatever their drafts take."""

import pytest

from saltus.core.batch import run_batch
from saltus.core.sampling import Sampling
from saltus.testing import toy_decoding, toy_drafter, toy_network


@pytest.mark.parametrize("method", ["small_model", "mtp"])
def test_texts_with_drafts_of_unlike_lengths_share_every_call_of_the_target(method):
    target = toy_network()
    draft_model = toy_drafter(target, name=method)
    texts = [
        toy_decoding(
            method, [1, 2], 30, target=target, seed=seed, sampling=Sampling(1.0), extra_networks={method: draft_model}
        )
        for seed in range(6)
    ]
    alone = [
        toy_decoding(method, [1, 2], 30, target=toy_network(), seed=seed, sampling=Sampling(1.0)).run()
        for seed in range(6)
    ]
    for _ in run_batch([text.sequence for text in texts], texts[0].networks):
        pass
    assert [text.tokens for text in texts] == [text.tokens for text in alone]
    steps = [len(text.steps) for text in texts]
    assert len(set(steps)) > 1
    assert target.calls <= max(steps) + 1  # the first round may end before a text has drafted


def test_a_network_that_gives_too_few_outputs_is_named():
    network = toy_drafter(target := toy_network())
    network.forward = lambda batch, kv_caches: []
    made = toy_decoding("small_model", [1, 2], 4, target=target, extra_networks={"small_model": network})
    with pytest.raises(ValueError, match="the network small_model returned 0 outputs for 1 texts; return one for each"):
        made.run()
